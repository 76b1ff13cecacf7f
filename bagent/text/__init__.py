"""Helpers for text that every package may use."""
