"""Comparison of runs, and accuracy against a gold file.

compare   two runs row by row
accuracy  a run against expected answers
"""
