"""Engines: detection, load, a test completion, and the local engine."""
