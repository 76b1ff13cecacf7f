"""Model lists from ``/v1/models``."""

from __future__ import annotations

import asyncio
import itertools
import math

import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import NETWORK_ERRORS, Transport, network_failure
from bagent.text.json import decode_json
from bagent.types import Failure, Json

CONNECT_SECONDS = 10.0
"""A reachable machine accepts a connection within this time."""

FIRST_PAUSE = 0.5
"""Seconds until a busy provider that named no time is asked again; doubles."""

ROUNDING = 0.02
"""Seconds added to a time that the server named."""

MIN_SECONDS = 0.5
"""The list is not requested again with less time than this."""


async def fetch_models(
    transport: Transport, endpoint: Endpoint, seconds: float
) -> Capabilities | Failure:
    """GET ``/models``; a missing route is not a failure.

    A busy provider is retried within ``seconds``, never earlier than it asked: all who share its
    account load the list, and a run needs it once.
    """
    pauses = (FIRST_PAUSE * 2**n for n in itertools.count())
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        result = await _ask(transport, endpoint, end - loop.time())
        if endpoint.own or not (isinstance(result, Failure) and result.busy):
            return result
        pause = result.retry_after
        pause = next(pauses) if pause is None else pause + ROUNDING
        if loop.time() + pause + MIN_SECONDS > end:
            return result
        await asyncio.sleep(pause)


async def _ask(transport: Transport, endpoint: Endpoint, seconds: float) -> Capabilities | Failure:
    """Request the list once."""
    limits = timeouts_within(seconds)
    try:
        status, raw, headers = await transport.get(
            endpoint, f"{endpoint.url}/models", limits.total or seconds, limits.connect
        )
    except NETWORK_ERRORS as error:
        return network_failure(error, endpoint, limits)
    if status in (404, 405, 501):
        return Capabilities(models_route=False)
    if status != 200:
        failure = failure_from_status(status, raw.decode("utf-8", "replace"), headers)
        message = endpoint.without_secrets(failure.message)
        return msgspec.structs.replace(failure, message=message)
    try:
        body = decode_json(raw)
    except ValueError:
        return Capabilities(models_route=False)
    listed = isinstance(body, dict) and isinstance(body.get("data"), list)
    capabilities = read_models(body)
    names = tuple(map(endpoint.without_secrets, capabilities.models))
    return msgspec.structs.replace(capabilities, models=names, models_route=listed)


async def fetch_model_entries(
    transport: Transport, endpoint: Endpoint, seconds: float
) -> list[dict[str, Json]]:
    """Return the entries of an endpoint's ``/models``; none if it does not answer."""
    try:
        status, raw, _ = await transport.get(endpoint, f"{endpoint.url}/models", seconds)
        body = decode_json(raw) if status == 200 else None
    except (*NETWORK_ERRORS, ValueError):
        return []
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict) and entry.get("id")]


def timeouts_within(seconds: float) -> Timeouts:
    """Return the timeouts of a small request that ends within ``seconds``, as readable numbers."""
    total = max(0.01, math.floor(seconds * 100) / 100)
    return Timeouts(connect=round(min(CONNECT_SECONDS, 0.9 * total), 2), total=total)


def read_models(body: Json) -> Capabilities:
    """Parse the body of ``/v1/models``; ``max_model_len`` is vLLM's, ``meta.n_ctx`` llama.cpp's."""
    entries = body.get("data") if isinstance(body, dict) else None
    names: list[str] = []
    context: int | None = None
    engine: str | None = None
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not entry.get("id"):
            continue
        names.append(str(entry["id"]))
        meta = entry.get("meta")
        length = entry.get("max_model_len") or entry.get("context_window")
        if length is None and isinstance(meta, dict):
            length = meta.get("n_ctx")
        if context is None and isinstance(length, int) and length > 0:
            context = length
        engine = engine or (str(entry["owned_by"]) if entry.get("owned_by") else None)
    return Capabilities(models=tuple(names), context=context, engine=engine)
