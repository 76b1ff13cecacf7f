"""HTTP clients.

client                           the client that backends use, with timeouts and failures
pool, connection                 HTTP/1.1 for plain ``http://`` addresses
aiohttp_client                   TLS and proxies
request                          one request: sent, read whole or streamed
sse                              server-sent events
errors                           errors of both clients
retry_after, rate_limit_headers  when to retry, and the account's limits
proxies                          the proxy for an address
resolver                         DNS lookups
"""
