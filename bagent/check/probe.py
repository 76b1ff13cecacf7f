"""Which endpoints would answer the job, and what they tell of themselves; nothing is generated."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType

import msgspec

from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.job.redaction import carried
from bagent.job.spec.backend import BackendRef
from bagent.job.spec.job import Job
from bagent.redaction import header_is_secret, looks_secret
from bagent.servers.resolve import Servers, open_servers
from bagent.text.json import decode_json
from bagent.types import Failure, Json

PROBES_AT_ONCE = 256
PROBE_SECONDS = 5.0

_CACHE_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\}\s", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_VERSION_ROUTES = (("/version", "version"), ("/server_info", "version"), ("/props", "build_info"))
"""Where vLLM, SGLang and llama.cpp's server tell their version, and under which name."""


class CheckTarget(msgspec.Struct, frozen=True):
    """What the job would talk to.

    ``planned`` says in words what a run would start by itself, None where servers are there
    already; ``model`` is then the model that it would have. ``withheld`` names the endpoints whose
    key, or other headers, are not sent; ``not_asked`` says by name why an endpoint is not asked.
    """

    servers: Servers
    planned: str | None = None
    model: str | None = None
    withheld: frozenset[str] = frozenset()
    not_asked: Mapping[str, str] = MappingProxyType({})


class Probed(msgspec.Struct, frozen=True):
    """What one endpoint told; ``failure`` is why it told nothing.

    ``version`` is the server's own word. ``kv_tokens`` is how many tokens its KV cache holds.
    ``not_asked`` says why it was not asked, or not with its key.
    """

    endpoint: Endpoint
    found: Capabilities | None = None
    failure: Failure | None = None
    version: str | None = None
    kv_tokens: int | None = None
    not_asked: str | None = None

    @property
    def alive(self) -> bool:
        """Whether somebody answers there, be it with an error."""
        return self.failure is None or self.failure.status is not None


async def find_target(
    job: Job, env: Mapping[str, str], stack: AsyncExitStack, *, keys: bool
) -> CheckTarget:
    """The endpoints that ``job`` names; servers that a run would start are not started.

    Without ``keys`` no ``api_key_command`` is run, and the endpoints have neither key nor headers
    of the job.

    Raises:
        UsageError: it names none, a key is missing, the hostfile or the address is wrong.
        MissingPackage: the embedded server's package is not installed.
    """
    ref = job.backend
    if job.hostfile is None and ref is not None and ref.base is None:
        if ref.kind == "local":
            return _local(ref)
        if ref.kind == "sim":
            return _simulated(ref)
    nowhere = Path(os.devnull)
    servers = await open_servers(
        job, env, stack, log_file=nowhere, notice=lambda _: None, run_commands=keys
    )
    if keys:
        return CheckTarget(servers)
    reasons = {one.name: reason_not_to_ask(one, servers.kind, job) for one in servers.endpoints}
    not_asked = {name: reason for name, reason in reasons.items() if reason is not None}
    bare = without_keys(servers, job)
    withheld = {
        one.name
        for one, other in zip(servers.endpoints, bare.endpoints, strict=True)
        if servers.keys or (one.headers, one.query) != (other.headers, other.query)
    }
    return CheckTarget(bare, withheld=frozenset(withheld), not_asked=not_asked)


def without_keys(servers: Servers, job: Job) -> Servers:
    """Return ``servers`` whose requests carry nothing that the job or the environment adds."""
    carried_values = carried(job.source.variables)

    def bare(endpoint: Endpoint) -> Endpoint:
        headers = {
            name: value
            for name, value in endpoint.headers.items()
            if not header_is_secret(name) and not _holds(value, carried_values)
        }
        query = {
            name: value
            for name, value in endpoint.query.items()
            if not looks_secret(name) and not _holds(value, carried_values)
        }
        return msgspec.structs.replace(endpoint, headers=headers, query=query)

    return msgspec.structs.replace(
        servers, endpoints=[bare(one) for one in servers.endpoints], keys=None
    )


def _holds(text: str, values: Iterable[str]) -> bool:
    return any(value in text for value in values)


def reason_not_to_ask(endpoint: Endpoint, kind: str, job: Job) -> str | None:
    """Return why an endpoint is not asked without ``--open``, None where it may be asked."""
    if kind == "bedrock":
        return "not asked: every request to it is signed with a key"
    address = {endpoint.url, endpoint.proxy or ""}
    if any(_holds(part, carried(job.source.variables)) for part in address):
        return "not asked: its address holds a variable of the environment"
    return None


def _simulated(ref: BackendRef) -> CheckTarget:
    from bagent.sim.config import parse_sim_url

    config = parse_sim_url(ref.url.text if ref.url else "sim")
    engines = "1 engine" if config.replicas == 1 else f"{config.replicas} engines"
    servers = Servers([], "sim", simulated=True, context=config.engine.max_model_len)
    return CheckTarget(servers, f"a run simulates {engines} in its own process", config.model)


def _local(ref: BackendRef) -> CheckTarget:
    from bagent.backends.engines.local import local_config, start_local

    file = ref.url.file.path if ref.url and ref.url.file else None
    options = dict(ref.url.options) if ref.url else {}
    # Not entered, so not started: it only reads the model's head.
    local = start_local(local_config(file, options, Path(os.devnull)))
    servers = Servers([], "local", context=local.context, slots=local.parallel)
    words = f"a run starts {local.model} on this machine, {local.parallel} rows at once"
    return CheckTarget(servers, words, local.model)


async def probe_all(backend: Backend, transport: Transport, target: CheckTarget) -> list[Probed]:
    """Ask all endpoints of ``target`` in parallel what they serve, in their order."""
    servers = target.servers
    gate = asyncio.Semaphore(PROBES_AT_ONCE)

    async def probe(endpoint: Endpoint) -> Probed:
        if endpoint.name in target.not_asked:
            return Probed(endpoint, not_asked=target.not_asked[endpoint.name])
        async with gate:
            result = await backend.probe(endpoint, PROBE_SECONDS)
            if isinstance(result, Failure):
                if endpoint.name in target.withheld and result.status in (401, 403):
                    return Probed(endpoint, not_asked="it wants a key, which was not sent")
                return Probed(endpoint, failure=result)
            if not servers.own:
                return Probed(endpoint, result)
            version = await _version(transport, endpoint)
            return Probed(
                endpoint, result, version=version, kv_tokens=await _kv(transport, endpoint)
            )

    return list(await asyncio.gather(*(probe(endpoint) for endpoint in servers.endpoints)))


def known_of(probed: Sequence[Probed]) -> dict[str, Capabilities]:
    """What the endpoints that answer serve, by name, as a run knows it."""
    return {one.endpoint.name: one.found or Capabilities() for one in probed if one.alive}


def kv_tokens(metrics: str) -> int | None:
    """How many tokens the KV cache holds by vLLM's ``/metrics`` text, over all its engines.

    Source: the info gauge ``vllm:cache_config_info``, whose labels ``block_size`` and
    ``num_gpu_blocks`` are the numbers.
    """
    total = 0
    for labels in _CACHE_LINE.findall(metrics):
        found = dict(_LABEL.findall(labels))
        size, blocks = found.get("block_size", ""), found.get("num_gpu_blocks", "")
        if size.isdecimal() and blocks.isdecimal():
            total += int(size) * int(blocks)
    return total or None


async def _version(transport: Transport, endpoint: Endpoint) -> str | None:
    for route, name in _VERSION_ROUTES:
        raw = await _get(transport, endpoint, route)
        try:
            body: Json = decode_json(raw) if raw else None
        except ValueError:
            continue
        version = body.get(name) if isinstance(body, dict) else None
        if isinstance(version, str) and version:
            return version
    return None


async def _kv(transport: Transport, endpoint: Endpoint) -> int | None:
    raw = await _get(transport, endpoint, "/metrics")
    return kv_tokens(raw.decode("utf-8", "replace")) if raw else None


async def _get(transport: Transport, endpoint: Endpoint, route: str) -> bytes | None:
    try:
        status, raw, _ = await transport.get(endpoint, endpoint.root + route, PROBE_SECONDS)
    except NETWORK_ERRORS:
        return None
    return raw if status == 200 else None
