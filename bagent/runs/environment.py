"""Settings of every run in the ``BAGENT_*`` environment variables.

The Aurora-Swarm names, ``AURORA_SWARM_*``, are read too, with a notice; the new name takes
precedence. An empty variable counts as not set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

PREFIX = "BAGENT_"
OLD_PREFIX = "AURORA_SWARM_"


class Environment(msgspec.Struct, frozen=True):
    """Presets from the environment; jobs and options take precedence."""

    hostfile: str | None = None
    max_tokens: int | None = None
    """Most tokens of an answer."""
    model_max_context: int | None = None
    """Most tokens of prompt and answer together."""
    timeout_per_sequence: float | None = None
    """Seconds for each row that a request carries."""
    proxy_url: str | None = None
    """Address in front of the endpoints."""


def read_environment(
    env: Mapping[str, str], notice: Callable[[str], None] = lambda _: None
) -> Environment:
    """Read the presets from ``env``.

    Args:
        notice: called with a message for each old name that was read.

    Raises:
        UsageError: a value has the wrong type.
    """

    def text(name: str) -> tuple[str, str] | None:
        for variable in (PREFIX + name, OLD_PREFIX + name):
            value = env.get(variable, "").strip()
            if not value:
                continue
            if variable.startswith(OLD_PREFIX):
                notice(f"{variable} is read; its name is {PREFIX}{name} now")
            return variable, value
        return None

    hostfile = text("HOSTFILE")
    return Environment(
        hostfile=hostfile[1] if hostfile else None,
        max_tokens=_integer(text("MAX_TOKENS")),
        model_max_context=_integer(text("MODEL_MAX_CONTEXT")),
        timeout_per_sequence=_seconds(text("TIMEOUT_PER_SEQUENCE")),
        proxy_url=_address(text("PROXY_URL")),
    )


def _integer(setting: tuple[str, str] | None) -> int | None:
    if setting is None:
        return None
    variable, value = setting
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise UsageError(
            f"{variable}: expected a whole number, got {value!r}",
            hint="export it as a number, or unset it",
        )
    return int(value)


def _seconds(setting: tuple[str, str] | None) -> float | None:
    if setting is None:
        return None
    variable, value = setting
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(
            f"{variable}: expected seconds, got {value!r}",
            hint="export it as a number, or unset it",
        )
    return seconds


def _address(setting: tuple[str, str] | None) -> str | None:
    if setting is None:
        return None
    variable, value = setting
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:  # the value is not repeated: it may hold a login
        raise UsageError(f"{variable}: not an address", hint="http://HOST:PORT")
    return value.rstrip("/")


def rename_old_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with old variables copied to their new names, where those are not set."""
    renamed = dict(env)
    for name, value in env.items():
        new = PREFIX + name.removeprefix(OLD_PREFIX)
        if name.startswith(OLD_PREFIX) and not renamed.get(new, "").strip():
            renamed[new] = value
    return renamed


def apply_presets(job: Job, presets: Environment) -> Job:
    """Return ``job`` with the presets for what it does not set; a preset of 0 is none."""
    changes: dict[str, object] = {}
    if presets.max_tokens and job.sampling.max_tokens is None:
        changes["sampling"] = job.sampling.model_copy(update={"max_tokens": presets.max_tokens})
    seconds = presets.timeout_per_sequence
    timeout = job.limits.timeout
    if seconds and "total" not in timeout.model_fields_set and seconds > (timeout.total or 0):
        longer = timeout.model_copy(update={"total": seconds})
        changes["limits"] = job.limits.model_copy(update={"timeout": longer})
    return job.model_copy(update=changes).with_source(job.source) if changes else job
