"""Comparison of runs, and accuracy against a gold file."""
