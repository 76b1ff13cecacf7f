"""bagent: batches of LLM calls and LLM agents, rows in and validated rows out."""

__version__ = "0.1.0"
