"""How the servers of one provider are addressed: URL, headers, keys and Bedrock's settings.

:data:`bagent.backend_kinds.TRAITS` lists the providers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bagent.backend_kinds import TRAITS
from bagent.backends.endpoint import Endpoint
from bagent.backends.keys import key_from_env
from bagent.errors import JobError, UsageError

if TYPE_CHECKING:
    from bagent.backends.bedrock.backend import BedrockConfig
    from bagent.job.spec.backend import BackendRef
    from bagent.job.spec.job import Job

AUTO_THREADS = 256
"""Most concurrent calls to Bedrock by default; threads start as they are needed."""

MOST_THREADS = 1024
"""Most threads for Bedrock, one for each call in flight."""


def base_address(ref: BackendRef, env: Mapping[str, str]) -> str:
    """Return the address below which the API of the one server of ``ref`` is.

    Raises:
        UsageError: it has no address.
    """
    traits, base = TRAITS[ref.kind], ref.base
    if base is None and traits.address is not None:
        base = env.get(traits.address_variable or "", "").rstrip("/") or traits.address
    if base is None:
        raise UsageError(
            f"backend {ref.kind} needs an address",
            hint=f"write backend: {ref.kind}://HOST:PORT, or give a hostfile",
        )
    is_complete = base.endswith("/v1") if traits.gateways_versioned else _path(base)
    return base if is_complete else f"{base}/v1"


def request_headers(ref: BackendRef, env: Mapping[str, str], key: str | None) -> dict[str, str]:
    """Return the headers of every call, with the key in the form that the address takes.

    Args:
        key: the key that :func:`bagent.servers.resolve.api_key` returns.

    Raises:
        UsageError: there is no key for the provider's own address.
    """
    traits, job_headers = TRAITS[ref.kind], dict(ref.all_headers)
    names = {name.lower() for name in job_headers}
    headers = {"Content-Type": "application/json", **traits.headers}
    if traits.key_header is None:
        if key:
            headers["Authorization"] = f"Bearer {key}"
    elif not names & {traits.key_header, "authorization"}:
        headers |= _key_headers(ref, env, key)
    return {
        **{name: value for name, value in headers.items() if name.lower() not in names},
        **job_headers,
    }


def _key_headers(ref: BackendRef, env: Mapping[str, str], key: str | None) -> dict[str, str]:
    """Return the headers of the key of a provider that has a header of its own for it."""
    traits = TRAITS[ref.kind]
    (variable,), *token_variables = traits.keys
    env_key = key_from_env(env, variable)
    if key is None and env_key is None:
        for (name,) in token_variables:
            if token := key_from_env(env, name):
                return {"Authorization": f"Bearer {token}"}
    key = key or env_key
    if key:
        headers = {str(traits.key_header): key}
        if base_address(ref, env) != traits.address:
            # vLLM and gateways read the key where OpenAI's clients put it.
            headers["Authorization"] = f"Bearer {key}"
        return headers
    if ref.base is None and not ref.api_key_command:
        raise missing_key(variable)
    return {}


def missing_key(variable: str) -> UsageError:
    """Return the error of a provider's key that is not set."""
    return UsageError(f"{variable} is not set", hint=f"export {variable}=..., or name api_key_env")


def bedrock_endpoint(ref: BackendRef, env: Mapping[str, str], key: str | None) -> Endpoint:
    """Return Bedrock as an endpoint; its address is for messages, boto3 finds its own.

    Args:
        key: a Bedrock API key; None signs with AWS credentials.
    """
    region = bedrock_region(ref, env)
    name = f"bedrock/{region}" if region else "bedrock"
    headers = dict(ref.all_headers)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    url = ref.url.options.get("endpoint") if ref.url else None
    url = url or f"https://bedrock-runtime.{region or 'REGION'}.amazonaws.com"
    return Endpoint(name, url, headers=headers, account=name)


def bedrock_region(ref: BackendRef, env: Mapping[str, str]) -> str | None:
    """Return the region of the job or the environment; None leaves it to AWS's own files."""
    region = ref.url.region if ref.url else None
    return region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None


def bedrock_config(job: Job, ref: BackendRef, env: Mapping[str, str]) -> BedrockConfig:
    """Return how boto3 reaches Bedrock, with one thread for each call in flight."""
    from bagent.backends.bedrock.backend import BedrockConfig

    limits = job.limits
    limit = limits.concurrency if limits.per_endpoint == "auto" else limits.per_endpoint
    threads = AUTO_THREADS if limit == "auto" else min(int(limit), MOST_THREADS)
    options = ref.url.options if ref.url else {}
    return BedrockConfig(
        threads=threads,
        region=bedrock_region(ref, env),
        profile=options.get("profile"),
        endpoint_url=options.get("endpoint"),
        proxy=ref.proxy,
        ca_file=str(ref.ca_file.path) if ref.ca_file else None,
    )


def check_model(job: Job, ref: BackendRef) -> None:
    """Refuse ``model: auto`` at providers that serve many models.

    Lines of a batch file name their own, except in batches of the provider.

    Raises:
        JobError: the job names no model.
    """
    hosted = TRAITS[ref.kind].hosted and ref.base is None
    own_models = job.prompt is None and not job.batching.in_batches
    if hosted and job.model == "auto" and not job.stages and not own_models:
        raise JobError(
            f"backend {ref.kind} serves many models", hint="write model: NAME, or --model NAME"
        )


def host_and_port(base: str) -> str:
    """Return ``host[:port]`` of an address, without a password."""
    return urlsplit(base).netloc.rpartition("@")[2]


def _path(base: str) -> str:
    return urlsplit(base).path.strip("/")
