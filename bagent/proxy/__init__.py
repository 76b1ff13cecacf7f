"""One OpenAI-compatible local address in front of a fleet.

- :mod:`~bagent.proxy.server`: the web server and its routes, with those about the engines: models,
  version, metrics and token counts.
- :mod:`~bagent.proxy.auth`: token, ``Host`` and ``Origin``.
- :mod:`~bagent.proxy.forward`: forwarding and retries, as long as no byte of an answer came.
- :mod:`~bagent.proxy.translate`: chats answered by responses, and responses by chats; chat
  completions as the proxy writes them.
- :mod:`~bagent.proxy.metering`: usage records in a run directory.
- :mod:`~bagent.proxy.chat_bridge`: the same protocol for providers that have none like it.
"""
