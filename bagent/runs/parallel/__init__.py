"""Runs of several processes: workers of one host, and Parsl."""
