"""Which endpoints would answer the job, and their properties; nothing is generated."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType

import msgspec

from bagent.backend_kinds import TRAITS, BackendKind
from bagent.backends.base import Backend
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.http.client import NETWORK_ERRORS, Transport
from bagent.backends.keys import key_from_env
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
"""Routes and keys of the version in vLLM, SGLang and llama.cpp's server."""


class CheckTarget(msgspec.Struct, frozen=True):
    """The endpoints that the job would use."""

    servers: Servers
    planned: str | None = None
    """What a run would start by itself, in words; None where servers exist."""
    model: str | None = None
    """The model that such a server would have."""
    withheld: frozenset[str] = frozenset()
    """Endpoints whose key or other headers are not sent."""
    not_asked: Mapping[str, str] = MappingProxyType({})
    """Why an endpoint is not asked, by name."""
    missing_key: str | None = None
    """The variable of a key that a run needs and that is not set."""


class Probed(msgspec.Struct, frozen=True):
    """The result of probing one endpoint."""

    endpoint: Endpoint
    capabilities: Capabilities | None = None
    failure: Failure | None = None
    """Why it reported nothing."""
    version: str | None = None
    """As the server reports it."""
    kv_tokens: int | None = None
    """Tokens that its KV cache holds."""
    not_asked: str | None = None
    """Why it was not asked, or not with its key."""

    @property
    def alive(self) -> bool:
        """Return whether the address answers, even with an error."""
        return self.failure is None or self.failure.status is not None


async def find_target(
    job: Job, env: Mapping[str, str], stack: AsyncExitStack, *, keys: bool
) -> CheckTarget:
    """Return the endpoints that ``job`` names; servers that a run would start are not started.

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
    missing_key = None if keys or ref is None else _missing_key(ref, env)
    if missing_key is not None:
        env = {**env, missing_key: "not set"}  # it is sent nowhere
    no_log = Path(os.devnull)
    servers = await open_servers(
        job, env, stack, log_file=no_log, notice=lambda _: None, run_commands=keys
    )
    if keys:
        return CheckTarget(servers)
    reasons = {
        endpoint.name: skip_reason(endpoint, servers.kind, job) for endpoint in servers.endpoints
    }
    not_asked = {name: reason for name, reason in reasons.items() if reason is not None}
    bare = without_keys(servers, job)
    withheld = {
        endpoint.name
        for endpoint, bare_endpoint in zip(servers.endpoints, bare.endpoints, strict=True)
        if servers.keys
        or (endpoint.headers, endpoint.query) != (bare_endpoint.headers, bare_endpoint.query)
    }
    return CheckTarget(
        bare, withheld=frozenset(withheld), not_asked=not_asked, missing_key=missing_key
    )


def _missing_key(ref: BackendRef, env: Mapping[str, str]) -> str | None:
    """Return the variable of the key of a hosted API, where it is needed and not set."""
    traits = TRAITS[ref.kind]
    names = {name.lower() for name in ref.all_headers}
    if ref.base is not None or ref.api_key_command or traits.signs_requests:
        return None
    if ref.api_key_env is not None:
        return ref.api_key_env if key_from_env(env, ref.api_key_env) is None else None
    variables = [variable for group in traits.keys for variable in group]
    needed = traits.hosted and not names & {"authorization", traits.key_header}
    if not needed or any(key_from_env(env, variable) is not None for variable in variables):
        return None
    return variables[0] if variables else None


def without_keys(servers: Servers, job: Job) -> Servers:
    """Return ``servers`` whose requests carry nothing that the job or the environment adds."""
    carried_values = carried(job.source.variables)

    def bare(endpoint: Endpoint) -> Endpoint:
        headers = {
            name: value
            for name, value in endpoint.headers.items()
            if not header_is_secret(name) and not _contains_any(value, carried_values)
        }
        query = {
            name: value
            for name, value in endpoint.query.items()
            if not looks_secret(name) and not _contains_any(value, carried_values)
        }
        return msgspec.structs.replace(endpoint, headers=headers, query=query)

    return msgspec.structs.replace(
        servers, endpoints=[bare(endpoint) for endpoint in servers.endpoints], keys=None
    )


def _contains_any(text: str, values: Iterable[str]) -> bool:
    return any(value in text for value in values)


def skip_reason(endpoint: Endpoint, kind: BackendKind, job: Job) -> str | None:
    """Return why an endpoint is not asked without ``--open``, None where it may be asked."""
    if TRAITS[kind].signs_requests:
        return "not asked: every request to it is signed with a key"
    address = {endpoint.url, endpoint.proxy or ""}
    if any(_contains_any(part, carried(job.source.variables)) for part in address):
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
    # Not entered, so not started: only the model's header is read.
    local = start_local(local_config(file, options, Path(os.devnull)))
    servers = Servers([], "local", context=local.context, slots=local.parallel)
    plan = f"a run starts {local.model} on this machine, {local.parallel} rows at once"
    return CheckTarget(servers, plan, local.model)


async def probe_all(backend: Backend, transport: Transport, target: CheckTarget) -> list[Probed]:
    """Probe all endpoints of ``target`` in parallel; return the results in their order."""
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


def capabilities_by_name(probed: Sequence[Probed]) -> dict[str, Capabilities]:
    """Return the capabilities of the endpoints that answer, by name, as a run has them."""
    return {
        result.endpoint.name: result.capabilities or Capabilities()
        for result in probed
        if result.alive
    }


def kv_tokens(metrics: str) -> int | None:
    """Return how many tokens the KV cache of all engines holds, by vLLM's ``/metrics`` text.

    Source: the info gauge ``vllm:cache_config_info`` with the labels ``block_size`` and
    ``num_gpu_blocks``.
    """
    total = 0
    for labels in _CACHE_LINE.findall(metrics):
        values = dict(_LABEL.findall(labels))
        size, blocks = values.get("block_size", ""), values.get("num_gpu_blocks", "")
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
