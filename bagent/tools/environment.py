"""What a tool's process sees of the environment: nothing secret unless the job names it."""

from __future__ import annotations

from collections.abc import Mapping

ORDINARY = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "TZ", "TMPDIR"}
    | {"LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"}
)
"""The variables that programs need to run and that hold no secrets, besides ``LC_*``."""


def tool_environment(env: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """The ordinary variables of ``env``, and what the job names for the tool.

    A list of what may pass, since no list of what may not would be whole: keys are kept under any
    name.
    """
    kept = {name: env[name] for name in env if name in ORDINARY or name.startswith("LC_")}
    return {**kept, **named}
