"""What engines say of themselves, passed on: models, version, metrics, and counting of tokens.

These requests are answered by engines of one's own only, and are not metered: they cost no tokens.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec
from aiohttp import web

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.http.request import read_body
from bagent.backends.openai.models import fetch_model_entries
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.leases import EndpointLeaser
from bagent.proxy.auth import refusal
from bagent.text.json import decode_json
from bagent.types import Json

PROBE_SECONDS = 5.0
COUNTED = ("/tokenize", "/detokenize")
_ABSENT = (404, 405, 501)
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s.*)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count|total|created)$")


class EngineRoutes:
    """Answers clients with what the endpoints of a fleet tell.

    Args:
        lessor: has the endpoints.
        timeouts: limits of one request for the tokens of a text.
    """

    def __init__(self, transport: Transport, lessor: EndpointLeaser, timeouts: Timeouts) -> None:
        self._transport = transport
        self._lessor = lessor
        self._timeouts = timeouts

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        for path in COUNTED:
            app.router.add_post(path, self._count)

    async def _models(self, request: web.Request) -> web.Response:
        data = list((await self._listed()).values())
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        entry = (await self._listed()).get(name)
        if entry is None:
            return refusal(404, "not_found", f"no endpoint serves {name}")
        return web.json_response(entry)

    async def _listed(self) -> dict[str, dict[str, Json]]:
        """Each model as its engines list it, by name; see :func:`merged_models`."""
        asked = [
            fetch_model_entries(self._transport, endpoint, PROBE_SECONDS)
            for endpoint in self._serving()
        ]
        return merged_models(
            [entry for entries in await asyncio.gather(*asked) for entry in entries]
        )

    async def _version(self, request: web.Request) -> web.Response:
        found = []
        for _, raw in await self._told("/version"):
            body = _decoded(raw)
            if isinstance(body, dict) and isinstance(body.get("version"), str):
                found.append(body["version"])
        if not found:
            return refusal(404, "not_found", "no endpoint of this fleet tells its version")
        return web.json_response({"version": ", ".join(dict.fromkeys(found))})

    async def _metrics(self, request: web.Request) -> web.Response:
        told = await self._told("/metrics")
        if not told:
            return refusal(404, "not_found", "no endpoint of this fleet has metrics")
        texts = [(endpoint.name, raw.decode("utf-8", "replace")) for endpoint, raw in told]
        return web.Response(
            body=merged_metrics(texts).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _told(self, path: str) -> list[tuple[Endpoint, bytes]]:
        """The good answers of all own endpoints to a GET of ``path``."""
        own = self._own()
        asked = (
            self._transport.get(endpoint, endpoint.root + path, PROBE_SECONDS) for endpoint in own
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        good = []
        for endpoint, answer in zip(own, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, NETWORK_ERRORS):
                    raise answer
            elif answer[0] == 200:
                good.append((endpoint, answer[1]))
        return good

    async def _count(self, request: web.Request) -> web.Response:
        """Pass a text on to the first endpoint that has the route and the model."""
        body = await request.read()
        last = refusal(404, "not_found", f"no endpoint of this fleet serves {request.path}")
        for endpoint in self._own():
            root = msgspec.structs.replace(endpoint, url=endpoint.root)
            try:
                async with self._transport.post(root, request.path, body, self._timeouts) as answer:
                    raw = await read_body(answer)
            except NETWORK_ERRORS:
                last = refusal(502, "connect", f"{endpoint.name} did not answer")
                continue
            if answer.status < 500 and answer.status not in (401, 403, *_ABSENT):
                text = endpoint.without_secrets(raw.decode("utf-8", "replace"))
                return web.Response(
                    status=answer.status, text=text, content_type="application/json"
                )
        return last

    def _serving(self) -> list[Endpoint]:
        return [state.endpoint for state in self._lessor.states if serves(state)]

    def _own(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._serving() if endpoint.own]


def serves(state: EndpointState) -> bool:
    """Whether an endpoint is one of the fleet, and answers."""
    return state.up and not (state.unresponsive or state.leaving)


def merged_models(entries: Sequence[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """One entry for each model, by its name, with all that its first engine tells.

    The context length is the smallest that an engine has: a request may go to any of them. Where
    engines of different makes serve a model it is owned by the proxy, since clients take the owner
    for what they may ask for.
    """
    models: dict[str, dict[str, Json]] = {}
    for entry in entries:
        name = str(entry["id"])
        own = {"object": "model", "owned_by": "bagent", **entry}
        model = models.setdefault(name, own)
        if model["owned_by"] != own["owned_by"]:
            model["owned_by"] = "bagent"
        lengths = [one.get("max_model_len") for one in (model, own)]
        known = [length for length in lengths if isinstance(length, int)]
        if known:
            model["max_model_len"] = min(known)
    return models


def merged_metrics(texts: Sequence[tuple[str, str]]) -> str:
    """The expositions of several endpoints as one: each series has a label ``endpoint``.

    Args:
        texts: the name of each endpoint and what it tells.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for name, text in texts:
        label = 'endpoint="' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for line in text.splitlines():
            if line.startswith("#"):
                words = line.split(maxsplit=3)
                if len(words) > 2 and line not in heads.setdefault(words[2], []):
                    heads[words[2]].append(line)
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample is not None:
                labels = f"{label},{sample[2]}" if sample[2] else label
                family = sample[1] if sample[1] in heads else _SUFFIX.sub("", sample[1])
                series.setdefault(family, []).append(f"{sample[1]}{{{labels}}}{sample[3]}")
    lines = [line for family, own in series.items() for line in (*heads.get(family, ()), *own)]
    return "\n".join([*lines, ""])


def _decoded(raw: bytes) -> Json:
    try:
        return decode_json(raw)
    except ValueError:
        return None
