"""Readers for each input format."""
