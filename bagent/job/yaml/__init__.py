"""YAML 1.2 with the line and column of every key and value.

parser   the reader
scalars  numbers, booleans and texts, with their spelling
"""
