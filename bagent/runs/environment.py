"""What the environment says about every run, in one place: the ``BAGENT_*`` variables.

The same settings are read under the names of Aurora-Swarm, ``AURORA_SWARM_*``, with a notice; the
new name goes before the old one. A variable that is set to 0 is set; an empty one is not.
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
    """Presets from the environment; None where nothing is said. A job or an option goes before.

    ``hostfile`` is the default path of the endpoints. ``max_tokens`` bounds an answer and
    ``model_max_context`` prompt and answer together, in tokens. ``timeout_per_sequence`` is in
    seconds, for each row of a request. ``proxy_url`` is the address in front of the endpoints.
    """

    hostfile: str | None = None
    max_tokens: int | None = None
    model_max_context: int | None = None
    timeout_per_sequence: float | None = None
    proxy_url: str | None = None


def read_environment(
    env: Mapping[str, str], notice: Callable[[str], None] = lambda _: None
) -> Environment:
    """What ``env`` says.

    Args:
        notice: called with a line for people for each old name that was read.

    Raises:
        UsageError: a value is not what its variable wants; the variable is named.
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
        max_tokens=_whole(text("MAX_TOKENS")),
        model_max_context=_whole(text("MODEL_MAX_CONTEXT")),
        timeout_per_sequence=_seconds(text("TIMEOUT_PER_SEQUENCE")),
        proxy_url=_address(text("PROXY_URL")),
    )


def _whole(given: tuple[str, str] | None) -> int | None:
    if given is None:
        return None
    variable, value = given
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise UsageError(f"{variable}: expected a whole number, got {value!r}")
    return int(value)


def _seconds(given: tuple[str, str] | None) -> float | None:
    if given is None:
        return None
    variable, value = given
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{variable}: expected seconds, got {value!r}")
    return seconds


def _address(given: tuple[str, str] | None) -> str | None:
    if given is None:
        return None
    variable, value = given
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:  # the value is not repeated: it may hold a login
        raise UsageError(f"{variable}: not an address", hint="http://HOST:PORT")
    return value.rstrip("/")


def rename_old_variables(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the old names' values under the new names, where those are not set."""
    found = dict(env)
    for name, value in env.items():
        new = PREFIX + name.removeprefix(OLD_PREFIX)
        if name.startswith(OLD_PREFIX) and not found.get(new, "").strip():
            found[new] = value
    return found


def apply_presets(job: Job, presets: Environment) -> Job:
    """``job`` with what the environment presets where it says nothing itself.

    0 tokens, or 0 seconds, is no preset of their own.
    """
    changes: dict[str, object] = {}
    if presets.max_tokens and job.sampling.max_tokens is None:
        changes["sampling"] = job.sampling.model_copy(update={"max_tokens": presets.max_tokens})
    seconds = presets.timeout_per_sequence
    timeout = job.limits.timeout
    if seconds and "total" not in timeout.model_fields_set and seconds > (timeout.total or 0):
        longer = timeout.model_copy(update={"total": seconds})
        changes["limits"] = job.limits.model_copy(update={"timeout": longer})
    return job.model_copy(update=changes).with_source(job.source) if changes else job
