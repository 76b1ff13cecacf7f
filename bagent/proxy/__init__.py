"""One OpenAI-compatible local address in front of a fleet.

Requests go through as they are, to the endpoint with the most room; a request that met a dead or
full endpoint before a byte of its answer came goes to another one. Streams pass through piece by
piece. What each request took is kept in a run directory.
"""
