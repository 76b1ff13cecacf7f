"""What a tool's process sees of the environment: nothing secret unless the job names it."""

from __future__ import annotations

from collections.abc import Mapping

from bagent.process_privacy import is_ordinary


def tool_environment(env: Mapping[str, str], named: Mapping[str, str]) -> dict[str, str]:
    """The ordinary variables of ``env``, and what the job names for the tool.

    A list of what may pass, since no list of what may not would be whole: keys are kept under any
    name.
    """
    return {**{name: env[name] for name in env if is_ordinary(name)}, **named}
