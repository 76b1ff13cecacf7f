"""Provider batch APIs: rows sent as files, answered within a day at half the price.

A batch is written to disk and its id is recorded before anything can be lost. Batches at the
provider survive the end of this process.
"""
