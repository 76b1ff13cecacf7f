"""API keys from the environment and from key commands.

:class:`~bagent.backends.wrappers.KeyRotatingBackend` renews a key after a 401.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bagent.backends.endpoint import Endpoint
from bagent.errors import UsageError

COMMAND_SECONDS = 60.0
"""Limit of a key command."""


def key_from_env(env: Mapping[str, str], name: str) -> str | None:
    """Return the key in the variable ``name``, stripped; None if it is unset or blank.

    Raises:
        UsageError: it holds something that no header can carry.
    """
    key = env.get(name, "").strip("\ufeff \t\r\n\v\f\0")
    if not key:
        return None
    if not key.isascii() or not key.isprintable():
        raise UsageError(
            f"the key in {name} holds a line break or another sign that no header can carry",
            hint=f"export {name} again, as one line of plain letters and digits",
        )
    return key


def run_key_command(command: Sequence[str]) -> str:
    """Return the output of ``command``, stripped. A single word is run by a shell.

    Raises:
        UsageError: it failed, took too long or printed nothing. Its output is not repeated.
    """
    argv = ["/bin/sh", "-c", command[0]] if len(command) == 1 else list(command)
    command_text = command[0] if len(command) == 1 else shlex.join(command)
    try:
        process = subprocess.run(
            argv, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"api_key_command failed: {command_text}: {error}") from None
    if process.returncode or not process.stdout.strip():
        last_line = process.stderr.strip().splitlines()[-1:] or ["it printed no key"]
        raise UsageError(
            f"api_key_command failed ({process.returncode}): {command_text}: {last_line[0]}"
        )
    return process.stdout.strip()


class KeySource:
    """A renewable API key, shared by all calls that use it.

    Args:
        first: the key to begin with.
        ask: gets a newer key; called in a thread. Raises UsageError.
        notice: called with a line for people at each renewal, and where one fails.
    """

    def __init__(
        self, first: str, ask: Callable[[], str], notice: Callable[[str], None] = lambda _: None
    ) -> None:
        self.key = first
        self._first = first
        self._endpoints: dict[str, tuple[str, Endpoint]] = {}
        self._ask = ask
        self._notice = notice
        self._lock = asyncio.Lock()
        self._refused: str | None = None

    async def renew(self, refused: str) -> bool:
        """Get a new key after ``refused`` failed; return whether there is one.

        Of many calls with one expired key the first renews it. A command that prints the refused
        key again is run only once.
        """
        async with self._lock:
            if self.key != refused:
                return True
            if self._refused == refused:
                return False
            self._refused = refused
            try:
                key = await asyncio.to_thread(self._ask)
            except UsageError as error:
                self._notice(f"the key was refused and there is no other: {error}")
                return False
            if key == refused:
                self._notice("the key was refused, and api_key_command prints the same one")
                return False
            self.key = key
            self._notice("the key was refused; api_key_command gave another one")
            return True

    def is_used_by(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint has this key; a line of a hostfile may name another."""
        return any(self._first in value for value in endpoint.headers.values())

    def apply(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with the current key; the same object while the key holds."""
        key = self.key
        if key == self._first:
            return endpoint
        cached = self._endpoints.get(endpoint.name)
        if cached is None or cached[0] != key:
            headers = endpoint.headers.items()
            replaced = {k: v.replace(self._first, key) if self._first else v for k, v in headers}
            cached = key, msgspec.structs.replace(endpoint, headers=replaced)
            self._endpoints[endpoint.name] = cached
        return cached[1]
