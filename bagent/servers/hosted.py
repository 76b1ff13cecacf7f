"""Addresses, keys and settings of Anthropic and Bedrock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bagent.backends.endpoint import Endpoint
from bagent.backends.keys import key_from_env
from bagent.errors import JobError, UsageError

if TYPE_CHECKING:
    from bagent.backends.bedrock.backend import BedrockConfig
    from bagent.job.spec.backend import BackendRef
    from bagent.job.spec.job import Job

ANTHROPIC = "https://api.anthropic.com"
ANTHROPIC_VERSION = "2023-06-01"

AUTO_THREADS = 256
"""Most concurrent calls to Bedrock by default; threads start as they are needed."""

MOST_THREADS = 1024
"""Most threads for Bedrock, one for each call in flight."""


def anthropic_base(ref: BackendRef, env: Mapping[str, str]) -> str:
    """Return the address below which ``/messages`` is; it ends in ``/v1``."""
    base = ref.base or env.get("ANTHROPIC_BASE_URL", "").rstrip("/") or ANTHROPIC
    return base if base.endswith("/v1") else f"{base}/v1"


def anthropic_headers(ref: BackendRef, env: Mapping[str, str], key: str | None) -> dict[str, str]:
    """Return the headers of every call, with the key in the form that the address takes.

    Args:
        key: the key that the job names, if any.

    Raises:
        UsageError: there is no key for Anthropic's own address.
    """
    job_headers = dict(ref.all_headers)
    names = {name.lower() for name in job_headers}
    headers = {"Content-Type": "application/json", "anthropic-version": ANTHROPIC_VERSION}
    if not names & {"x-api-key", "authorization"}:
        token = key_from_env(env, "ANTHROPIC_AUTH_TOKEN") if key is None else None
        env_key = key_from_env(env, "ANTHROPIC_API_KEY")
        key = key or env_key
        if token and env_key is None:
            headers["Authorization"] = f"Bearer {token}"
        elif key:
            headers["x-api-key"] = key
            if anthropic_base(ref, env) != f"{ANTHROPIC}/v1":
                # vLLM and gateways read the key where OpenAI's clients put it.
                headers["Authorization"] = f"Bearer {key}"
        elif ref.base is None and not ref.api_key_command:
            raise UsageError(
                "ANTHROPIC_API_KEY is not set",
                hint="export ANTHROPIC_API_KEY=..., or name api_key_env",
            )
    return {
        **{name: value for name, value in headers.items() if name.lower() not in names},
        **job_headers,
    }


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

    Raises:
        JobError: the job names no model.
    """
    hosted = ref.kind == "bedrock" or (ref.kind in ("anthropic", "openai") and ref.base is None)
    if hosted and job.model == "auto" and not job.stages:
        raise JobError(f"backend {ref.kind} serves many models", hint="write model: NAME")


def host_and_port(base: str) -> str:
    """Return ``host[:port]`` of an address, without a password."""
    return urlsplit(base).netloc.rpartition("@")[2]
