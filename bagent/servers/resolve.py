"""Resolution of a job's ``backend`` or hostfile to endpoints with keys and proxies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from bagent.backend_kinds import TRAITS, BackendKind
from bagent.backends.base import Backend
from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.probe import CompletionProbe, ProbeResult, detect_capabilities
from bagent.backends.http.client import Transport
from bagent.backends.http.proxies import proxy_for
from bagent.backends.keys import KeySource, key_from_env, run_key_command
from bagent.backends.registry import BackendConfig, make_backend
from bagent.errors import HostfileError, Position, UsageError
from bagent.fleet.health_check import DETECT_SECONDS, HealthResult, not_ready
from bagent.fleet.hostfile import HostEntry, read_hostfile
from bagent.job.load import JobRequest, load_job
from bagent.servers.hosted import (
    base_address,
    bedrock_config,
    bedrock_endpoint,
    check_model,
    host_and_port,
    missing_key,
    request_headers,
)
from bagent.types import Failure, Json

if TYPE_CHECKING:
    from bagent.backends.bedrock.backend import BedrockConfig
    from bagent.job.spec.backend import BackendRef
    from bagent.job.spec.job import Job


class Servers(msgspec.Struct, frozen=True):
    """The endpoints that a run calls, all of one kind."""

    endpoints: list[Endpoint]
    kind: BackendKind
    simulated: bool = False
    context: int | None = None
    """Context length of an embedded server."""
    slots: int | None = None
    """Concurrent requests of an embedded server."""
    keys: KeySource | None = None
    """Source of newer keys; None where the key does not change."""
    bedrock: BedrockConfig | None = None
    select: Mapping[str, Json] | None = None
    """Which endpoints of a hostfile these are; None for all."""
    api: str = "auto"
    """The API that carries calls; see :class:`bagent.job.spec.backend.BackendRef`."""

    @property
    def own(self) -> bool:
        """Whether these are the user's own engines, or may be."""
        return not TRAITS[self.kind].hosted

    def make_backend(
        self,
        transport: Transport,
        notice: Callable[[str], None] = lambda _: None,
        *,
        enforce: str = "auto",
        batching: str = "auto",
    ) -> Backend:
        """Return the backend that speaks to these servers."""
        config = BackendConfig(enforce, batching, self.api, self.keys, self.bedrock)
        return make_backend(self.kind, transport, config, notice)


async def open_servers(
    job: Job,
    env: Mapping[str, str],
    stack: AsyncExitStack,
    *,
    log_file: Path,
    notice: Callable[[str], None],
    run_commands: bool = True,
) -> Servers:
    """Return the servers that ``job`` names; start embedded ones until ``stack`` closes.

    Args:
        run_commands: run the ``api_key_command``, if any.

    Raises:
        UsageError: a key is missing, or the backend cannot be called.
        MissingPackage: the embedded server's package is not installed.
        HostfileError: a line of the hostfile is wrong.
    """
    ref = job.backend
    if job.hostfile is not None:
        return hostfile_servers(job.hostfile.path, ref, env, notice, run_commands=run_commands)
    if ref is None:
        raise UsageError(
            "no backend is named",
            hint="give --backend vllm://HOST:PORT, or write backend: in the job",
        )
    if ref.kind == "local":
        return await _start_local(ref, stack, log_file, notice)
    if ref.kind == "sim" and ref.base is None:
        return await _start_sim(ref, stack, notice)
    return single_server(job, ref, env, notice, run_commands=run_commands)


def single_server(
    job: Job,
    ref: BackendRef,
    env: Mapping[str, str],
    notice: Callable[[str], None] = lambda _: None,
    *,
    run_commands: bool = True,
) -> Servers:
    """Return the one server at the address of ``ref``.

    Raises:
        UsageError: a key, the model or the address is missing.
    """
    check_model(job, ref)
    key = api_key(ref, env, run_commands=run_commands)
    if ref.kind == "bedrock":
        return Servers(
            [bedrock_endpoint(ref, env, key)],
            ref.kind,
            keys=_key_source(ref, key, notice),
            bedrock=bedrock_config(job, ref, env),
        )
    return Servers(
        [make_endpoint(ref, env, key)],
        ref.kind,
        simulated=ref.kind == "sim",
        keys=_key_source(ref, key, notice),
        api=ref.api,
    )


def _key_source(
    ref: BackendRef | None, key: str | None, notice: Callable[[str], None]
) -> KeySource | None:
    """Return the source of a newer key once this one is refused."""
    if ref is None or not ref.api_key_command or not key:
        return None
    command = ref.api_key_command
    return KeySource(key, lambda: run_key_command(command), notice)


def hostfile_servers(
    path: Path,
    ref: BackendRef | None,
    env: Mapping[str, str],
    notice: Callable[[str], None] = lambda _: None,
    *,
    run_commands: bool = True,
) -> Servers:
    """Return the endpoints of a hostfile: the user's own engines, called without a proxy.

    Headers and key of ``ref`` apply to all; a line's ``api_key_env`` takes precedence.
    """
    key = _fleet_key(ref, env, run_commands=run_commands)
    endpoints = host_endpoints(read_hostfile(path), path, ref, env, key, run_commands=run_commands)
    kind = ref.kind if ref and TRAITS[ref.kind].own else "vllm"
    api = ref.api if ref else "auto"
    return Servers(endpoints, kind, keys=_key_source(ref, key, notice), api=api)


def _fleet_key(ref: BackendRef | None, env: Mapping[str, str], *, run_commands: bool) -> str | None:
    if ref is None:
        return key_from_env(env, "VLLM_API_KEY")
    return api_key(ref, env, run_commands=run_commands)


def host_endpoints(
    hosts: Sequence[HostEntry],
    path: Path,
    ref: BackendRef | None,
    env: Mapping[str, str],
    key: str | None = None,
    *,
    run_commands: bool = True,
) -> list[Endpoint]:
    """Return the endpoints of ``hosts``, read from ``path``; see :func:`hostfile_servers`.

    Args:
        key: the fleet's key, where it is known already.
    """
    key = key or _fleet_key(ref, env, run_commands=run_commands)
    endpoints = []
    for host in hosts:
        headers = {"Content-Type": "application/json", **(ref.all_headers if ref else {})}
        variable = host.tags.get("api_key_env")
        host_key = None if variable is None else key_from_env(env, variable)
        if variable is not None and host_key is None:
            raise HostfileError(
                f"the environment variable {variable} is not set",
                at=Position(path, host.line),
                hint="export it, with the API key",
            )
        if host_key or key:
            headers.setdefault("Authorization", f"Bearer {host_key or key}")
        endpoints.append(
            Endpoint(
                host.name,
                host.url,
                headers=headers,
                query=dict(ref.all_query) if ref else {},
                ca_file=str(ref.ca_file.path) if ref and ref.ca_file else None,
                account=host.name,
                own=True,
                tags=host.tags,
            )
        )
    return endpoints


def make_endpoint(ref: BackendRef, env: Mapping[str, str], key: str | None) -> Endpoint:
    """Return the endpoint of ``ref``, with its ``key`` and its proxy."""
    base, own = base_address(ref, env), TRAITS[ref.kind].own
    if ref.proxy is not None:
        proxy = None if ref.proxy == "none" else ref.proxy
    else:
        proxy = None if own else proxy_for(base, env)
    return Endpoint(
        name=host_and_port(base),
        url=base,
        headers=request_headers(ref, env, key),
        query=dict(ref.all_query),
        proxy=proxy,
        ca_file=str(ref.ca_file.path) if ref.ca_file else None,
        account=urlsplit(base).netloc,
        own=own,
    )


def key_variables(ref: BackendRef | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that hold the keys for the servers of ``ref``.

    Args:
        ref: None stands for a hostfile alone.
    """
    if ref is not None and ref.api_key_env:
        return (ref.api_key_env,)
    if ref is not None and ref.api_key_command:
        return ()
    for names in TRAITS[ref.kind if ref is not None else "vllm"].keys:
        if any(env.get(name) for name in names):
            return names
    return ()


def server_address(ref: BackendRef, env: Mapping[str, str]) -> str:
    """Return ``host[:port]`` of the one server of ``ref``, or a name for one that bagent starts.

    Raises:
        UsageError: it has no address.
    """
    if ref.base is None and ref.kind in ("local", "sim"):
        return f"the {ref.kind} server of the run"
    if ref.kind == "bedrock":
        return host_and_port(bedrock_endpoint(ref, env, None).url)
    return host_and_port(base_address(ref, env))


def api_key(ref: BackendRef, env: Mapping[str, str], *, run_commands: bool = True) -> str | None:
    """Return the key that ``ref`` names, or the usual one of its kind; None where none is needed.

    A key is never sent to an address that it was not named for.

    Args:
        run_commands: run the ``api_key_command``; else its key is None.
    """
    if ref.api_key_env:
        value = key_from_env(env, ref.api_key_env)
        if value is None:
            raise UsageError(
                f"the environment variable {ref.api_key_env} is not set",
                hint=f"export {ref.api_key_env}=..., it holds the API key",
            )
        return value
    if ref.api_key_command:
        return run_key_command(ref.api_key_command) if run_commands else None
    traits = TRAITS[ref.kind]
    if not traits.keys or traits.signs_requests or traits.key_header is not None:
        return None  # boto3 or request_headers finds it
    ((variable,),) = traits.keys
    value = key_from_env(env, variable)
    names = {name.lower() for name in ref.all_headers}
    if value is None and traits.key_required and "authorization" not in names:
        raise missing_key(variable)
    return value


async def _start_local(
    ref: BackendRef, stack: AsyncExitStack, log_file: Path, notice: Callable[[str], None]
) -> Servers:
    from bagent.backends.engines.local import local_config, start_local

    file = ref.url.file.path if ref.url and ref.url.file else None
    config = local_config(file, dict(ref.url.options) if ref.url else {}, log_file)
    local = await stack.enter_async_context(start_local(config))
    notice(f"started a local model: {local.model}, {local.parallel} at once")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {local.api_key}"}
    endpoint = Endpoint("local", local.url, headers=headers, account="local", own=True)
    return Servers([endpoint], "local", context=local.context, slots=local.parallel, api=ref.api)


async def _start_sim(
    ref: BackendRef, stack: AsyncExitStack, notice: Callable[[str], None]
) -> Servers:
    from bagent.sim import parse_sim_url, start_sim

    url = ref.url.text if ref.url else "sim"
    sim = await stack.enter_async_context(start_sim(parse_sim_url(url)))
    notice(f"simulated engines answer, not a model: {len(sim.urls)} started in this process")
    headers = {"Content-Type": "application/json"}
    endpoints = [
        Endpoint(urlsplit(url).netloc, url, headers=headers, account="sim", own=True)
        for url in (f"{u}/v1" if not u.endswith("/v1") else u for u in sim.urls)
    ]
    return Servers(endpoints, "sim", simulated=True, api=ref.api)


def resolve_backend(
    backend: str,
    model: str | None,
    env: Mapping[str, str],
    notice: Callable[[str], None] = lambda _: None,
) -> Servers:
    """Return the server that ``--backend`` names.

    Args:
        model: the value of ``--model``; hosted backends need one.
        env: the environment, which holds keys.

    Raises:
        UsageError: the name is wrong, a key or the model is missing, or the backend runs inside
            ``bagent run``.
    """
    options = {"backend": backend, "model": model}
    request = JobRequest(
        text="prompt: none", options=options, env=env, cwd=Path.cwd(), needs_input=False
    )
    job = load_job(request)
    ref = job.backend
    if ref is None or (ref.kind in ("local", "sim") and ref.base is None):
        raise UsageError(
            f"--backend {backend}: it runs inside bagent run, there is nothing to reach",
            hint="name a server, such as openai, anthropic or vllm://HOST:PORT",
        )
    return single_server(job, ref, env, notice)


async def check_server(servers: Servers, model: str | None, seconds: float) -> HealthResult:
    """Check the one server by a request of one token, within ``seconds``.

    Args:
        model: the model to request; None takes the one that the server serves.
    """
    (endpoint,) = servers.endpoints
    end = time.monotonic() + seconds
    transport = Transport()
    backend = servers.make_backend(transport)
    try:
        capabilities = await backend.probe(endpoint, seconds)
        if isinstance(capabilities, Failure):
            return not_ready(endpoint, capabilities)
        load = None
        # Hosted APIs are behind TLS, and have no other routes to detect.
        if servers.bedrock is None and (endpoint.own or endpoint.url.startswith("http://")):
            remaining = min(DETECT_SECONDS, end - time.monotonic())
            detected = await detect_capabilities(transport, endpoint, capabilities, remaining)
            capabilities, load = detected.capabilities, detected.load
        if not capabilities.engine or capabilities.engine == "unknown":
            capabilities = msgspec.structs.replace(capabilities, engine=servers.kind)
        models = capabilities.models
        model = model or (models[0] if len(models) == 1 else None)
        proof = await CompletionProbe(backend).prove(endpoint, model, end - time.monotonic())
        if isinstance(proof, ProbeResult):
            return HealthResult(
                endpoint, "ready", model=model, capabilities=capabilities, load=load, proof=proof
            )
        return msgspec.structs.replace(not_ready(endpoint, proof, capabilities), model=model)
    finally:
        await backend.close()
