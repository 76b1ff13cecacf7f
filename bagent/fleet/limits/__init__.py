"""Limits on requests: concurrency, pace, account quotas, reported load."""
