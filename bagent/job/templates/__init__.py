"""Prompt templates: the sandbox, its limits, and the prompt of a row."""
