"""Limits on requests.

concurrency    requests in flight and their pace
account        requests and tokens a minute of a provider's account
load_feedback  whether an own engine can take more
"""
