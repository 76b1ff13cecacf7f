"""Engines of the user's own.

metrics              its load, from Prometheus metrics
probe                which engine it is, its routes, a completion of one token
local, local_server  ``backend: local``, a model on this machine's CPU
"""
