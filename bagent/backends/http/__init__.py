"""HTTP clients: pooled HTTP/1.1, aiohttp, server-sent events, rate-limit headers."""
