"""Routes about the engines themselves: models, version, metrics and token counts.

They cost no tokens and are not metered.
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
from bagent.text.json import json_or_none
from bagent.types import Json

PROBE_SECONDS = 5.0
COUNTED = ("/tokenize", "/detokenize")
_ABSENT = (404, 405, 501)
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?(\s.*)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count|total|created)$")


class EngineRoutes:
    """Answers clients with what the endpoints of a fleet report.

    Args:
        transport: connects to the endpoints.
        lessor: knows the endpoints.
        timeouts: limits of one token count.
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
        data = list((await self._list_models()).values())
        return web.json_response({"object": "list", "data": data})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        entry = (await self._list_models()).get(name)
        if entry is None:
            return refusal(404, "not_found", f"no endpoint serves {name}")
        return web.json_response(entry)

    async def _list_models(self) -> dict[str, dict[str, Json]]:
        """Return each model as its engines list it, by name."""
        requests = [
            fetch_model_entries(self._transport, endpoint, PROBE_SECONDS)
            for endpoint in self._serving()
        ]
        return merged_models(
            [entry for entries in await asyncio.gather(*requests) for entry in entries]
        )

    async def _version(self, request: web.Request) -> web.Response:
        versions = []
        for _, raw in await self._get_all("/version"):
            body = json_or_none(raw)
            if isinstance(body, dict) and isinstance(body.get("version"), str):
                versions.append(body["version"])
        if not versions:
            return refusal(404, "not_found", "no endpoint of this fleet tells its version")
        return web.json_response({"version": ", ".join(dict.fromkeys(versions))})

    async def _metrics(self, request: web.Request) -> web.Response:
        answers = await self._get_all("/metrics")
        if not answers:
            return refusal(404, "not_found", "no endpoint of this fleet has metrics")
        texts = [(endpoint.name, raw.decode("utf-8", "replace")) for endpoint, raw in answers]
        return web.Response(
            body=merged_metrics(texts).encode(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _get_all(self, path: str) -> list[tuple[Endpoint, bytes]]:
        """Return the good answers of all own endpoints to a GET of ``path``."""
        own = self._own()
        requests = (
            self._transport.get(endpoint, endpoint.root + path, PROBE_SECONDS) for endpoint in own
        )
        answers = await asyncio.gather(*requests, return_exceptions=True)
        good = []
        for endpoint, answer in zip(own, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, NETWORK_ERRORS):
                    raise answer
            elif answer[0] == 200:
                good.append((endpoint, answer[1]))
        return good

    async def _count(self, request: web.Request) -> web.Response:
        """Forward a text to the first endpoint that has the route and the model."""
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
    """Return whether an endpoint answers and is not leaving."""
    return state.up and not (state.unresponsive or state.leaving)


def merged_models(entries: Sequence[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return one entry for each model by name, as its first engine reports it.

    The context length is the shortest of all engines: a request may go to any of them. If different
    engines serve a model its owner is the proxy, since clients infer features from the owner.
    """
    models: dict[str, dict[str, Json]] = {}
    for entry in entries:
        name = str(entry["id"])
        own = {"object": "model", "owned_by": "bagent", **entry}
        model = models.setdefault(name, own)
        if model["owned_by"] != own["owned_by"]:
            model["owned_by"] = "bagent"
        lengths = [entry.get("max_model_len") for entry in (model, own)]
        reported = [length for length in lengths if isinstance(length, int)]
        if reported:
            model["max_model_len"] = min(reported)
    return models


def merged_metrics(texts: Sequence[tuple[str, str]]) -> str:
    """Merge Prometheus expositions; each series gets a label ``endpoint``.

    Args:
        texts: the name and exposition of each endpoint.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for name, text in texts:
        label = 'endpoint="' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for line in text.splitlines():
            if line.startswith("#"):
                fields = line.split(maxsplit=3)
                if len(fields) > 2 and line not in heads.setdefault(fields[2], []):
                    heads[fields[2]].append(line)
                continue
            sample = _SAMPLE.fullmatch(line)
            if sample is not None:
                labels = f"{label},{sample[2]}" if sample[2] else label
                family = sample[1] if sample[1] in heads else _SUFFIX.sub("", sample[1])
                series.setdefault(family, []).append(f"{sample[1]}{{{labels}}}{sample[3]}")
    lines = [line for family, own in series.items() for line in (*heads.get(family, ()), *own)]
    return "\n".join([*lines, ""])
