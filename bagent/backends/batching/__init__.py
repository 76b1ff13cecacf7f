"""Requests that carry several calls: lists of prompts and batches of chats.

routes              which calls may share a request, and what each endpoint accepts
wire                replies to such requests
chat_template       chat templates out of a server's renderings
template_discovery  asking an endpoint for these renderings
"""
