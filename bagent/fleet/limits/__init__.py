"""Limits on requests.

concurrency    requests in flight of an endpoint
pacing         when an account's requests start
account        requests and tokens a minute of a provider's account
load_feedback  whether an own engine can take more
"""
