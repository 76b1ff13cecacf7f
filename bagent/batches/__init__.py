"""A provider's batch service: rows sent as files, answered within a day at half the price.

A batch is written to disk, its id is noted before anything can be lost, and its answers are judged
as any other. What is with the provider survives the end of this process, whatever ends it.
"""
