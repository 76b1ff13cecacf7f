"""One server that was named, whatever it speaks: is it there, and does it answer?"""

from __future__ import annotations

import time

import msgspec

from bagent.backends.choose import BackendConfig, make_backend
from bagent.backends.knowledge import learn_more
from bagent.backends.proof import Proof, Prover
from bagent.backends.transport import Transport
from bagent.fleet.called import Called, not_ready
from bagent.fleet.roll_call import LEARN_SECONDS
from bagent.runs.endpoints import Servers
from bagent.types import Failure


async def call_one(servers: Servers, model: str | None, seconds: float) -> Called:
    """What is known of the server, proven by a request of one token, within ``seconds``.

    Args:
        model: what to ask for; None: what the server serves.
    """
    (endpoint,) = servers.endpoints
    end = time.monotonic() + seconds
    config = BackendConfig(keys=servers.keys, bedrock=servers.bedrock)
    transport = Transport()
    backend = make_backend(servers.kind, transport, config)
    try:
        known = await backend.probe(endpoint, seconds)
        if isinstance(known, Failure):
            return not_ready(endpoint, known)
        load = None
        # Hosted APIs are behind TLS, and tell nothing at other routes.
        if servers.bedrock is None and (endpoint.own or endpoint.url.startswith("http://")):
            seconds_left = min(LEARN_SECONDS, end - time.monotonic())
            more = await learn_more(transport, endpoint, known, seconds_left)
            known, load = more.capabilities, more.load
        if not known.engine or known.engine == "unknown":
            known = msgspec.structs.replace(known, engine=servers.kind)
        wanted = model or (known.models[0] if len(known.models) == 1 else None)
        proof = await Prover(backend).prove(endpoint, wanted, end - time.monotonic())
        if isinstance(proof, Proof):
            return Called(endpoint, "ready", model=wanted, known=known, load=load, proof=proof)
        return msgspec.structs.replace(not_ready(endpoint, proof, known), model=wanted)
    finally:
        await backend.close()
