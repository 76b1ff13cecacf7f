"""Addresses and keys of hosted models that do not speak OpenAI's protocol."""

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
"""Calls at once to Bedrock where the user names no number; threads start as they are needed."""

MOST_THREADS = 1024
"""A thread and a connection for each call: more would only crowd this machine."""


def anthropic_base(ref: BackendRef, env: Mapping[str, str]) -> str:
    """The address below which ``/messages`` is: it ends in ``/v1``, as Anthropic's SDK has it."""
    base = ref.base or env.get("ANTHROPIC_BASE_URL", "").rstrip("/") or ANTHROPIC
    return base if base.endswith("/v1") else f"{base}/v1"


def anthropic_headers(ref: BackendRef, env: Mapping[str, str], key: str | None) -> dict[str, str]:
    """The headers of every call, with the key in the form that the address takes.

    Args:
        key: what the job names, None where it names none.

    Raises:
        UsageError: there is no key for Anthropic's own address.
    """
    given = dict(ref.all_headers)
    names = {name.lower() for name in given}
    headers = {"Content-Type": "application/json", "anthropic-version": ANTHROPIC_VERSION}
    if not names & {"x-api-key", "authorization"}:
        token = key_from_env(env, "ANTHROPIC_AUTH_TOKEN") if key is None else None
        usual = key_from_env(env, "ANTHROPIC_API_KEY")
        key = key or usual
        if token and usual is None:
            headers["Authorization"] = f"Bearer {token}"
        elif key:
            headers["x-api-key"] = key
            if anthropic_base(ref, env) != f"{ANTHROPIC}/v1":
                # vLLM and gateways want the key where OpenAI's clients have it.
                headers["Authorization"] = f"Bearer {key}"
        elif ref.base is None and not ref.api_key_command:
            raise UsageError(
                "ANTHROPIC_API_KEY is not set",
                hint="export ANTHROPIC_API_KEY=..., or name api_key_env",
            )
    return {
        **{name: value for name, value in headers.items() if name.lower() not in names},
        **given,
    }


def bedrock_endpoint(ref: BackendRef, env: Mapping[str, str], key: str | None) -> Endpoint:
    """Bedrock as an endpoint; its address is for people, boto3 finds it by itself.

    Args:
        key: a Bedrock API key; None signs with AWS credentials.
    """
    region = bedrock_region(ref, env)
    name = f"bedrock/{region}" if region else "bedrock"
    headers = dict(ref.all_headers)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    given = ref.url.options.get("endpoint") if ref.url else None
    url = given or f"https://bedrock-runtime.{region or 'REGION'}.amazonaws.com"
    return Endpoint(name, url, headers=headers, account=name)


def bedrock_region(ref: BackendRef, env: Mapping[str, str]) -> str | None:
    """The region of the job or the environment; None: AWS's own files may tell."""
    given = ref.url.region if ref.url else None
    return given or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None


def bedrock_config(job: Job, ref: BackendRef, env: Mapping[str, str]) -> BedrockConfig:
    """How boto3 is to reach Bedrock, with as many threads as calls may be in flight."""
    from bagent.backends.bedrock.backend import BedrockConfig

    limits = job.limits
    wanted = limits.concurrency if limits.per_endpoint == "auto" else limits.per_endpoint
    threads = AUTO_THREADS if wanted == "auto" else min(int(wanted), MOST_THREADS)
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
    """Refuse ``model: auto`` where an account has many models to choose from.

    Raises:
        JobError: the job names no model.
    """
    hosted = ref.kind == "bedrock" or (ref.kind in ("anthropic", "openai") and ref.base is None)
    if hosted and job.model == "auto" and not job.stages:
        raise JobError(f"backend {ref.kind} serves many models", hint="write model: NAME")


def host_and_port(base: str) -> str:
    """``host[:port]`` of an address, without a password."""
    return urlsplit(base).netloc.rpartition("@")[2]
