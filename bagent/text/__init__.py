"""Helpers for text: valid UTF-8, JSON, terminal output, suggestions for misspelled names."""
