"""How fast is this fleet, and which endpoint is bad? Load shapes, metrics and their report.

A load is sent by one process or several; every request leaves one raw row. All numbers are made
from the raw rows by SQL afterwards: percentiles are never averaged.
"""
