"""Anthropic's Messages API.

backend  sending and errors
wire     request bodies and replies
"""
