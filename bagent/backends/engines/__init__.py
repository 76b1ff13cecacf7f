"""Engines of the user's own.

detect               which engine it is, and its routes
metrics              its load, from Prometheus metrics
probe                a completion of one token
local, local_server  ``backend: local``, a model on this machine's CPU
"""
