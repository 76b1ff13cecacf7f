"""How clients get into ``bagent proxy``: its token, and what is printed about it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.backends.endpoint import Endpoint
    from bagent.fleet.endpoint_state import EndpointState
    from bagent.proxy.serve import ProxyConfig

TOKEN_FILE = "token"


def choose_token(
    variable: str | None, endpoints: Sequence[Endpoint], unix: Path | None
) -> str | None:
    """Return the token that clients have to send, None where they need none.

    A Unix socket lets in only this user, who has the keys anyway.

    Raises:
        UsageError: ``variable`` is named and not set.
    """
    from bagent.proxy.guarding import holds_key, new_token

    if variable is not None:
        token = os.environ.get(variable, "").strip()
        if not token:
            raise UsageError(f"the environment variable {variable} is not set")
        return token
    return new_token() if unix is None and any(map(holds_key, endpoints)) else None


@contextmanager
def token_file(run: Path, config: ProxyConfig, variable: str | None) -> Iterator[Path | None]:
    """Keep a random token in a file that only this user may read, while the proxy serves.

    Terminals and logs of batch jobs are read by others, so it is printed nowhere.
    """
    if config.token is None or variable is not None:
        yield None
        return
    path = run / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{config.token}\n")
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def announce(
    url: str, count: int, config: ProxyConfig, access: tuple[str | None, Path | None]
) -> None:
    """Print the address on stdout, and how a client gets in on stderr.

    Args:
        url: the base address.
        count: how many endpoints there are.
        config: where the proxy listens.
        access: the variable that holds the token, and the file that holds it.
    """
    variable, file = access
    socket_path = shlex.quote(str(config.unix))
    sys.stdout.write(f"{url}\n" if config.unix is None else f"unix:{config.unix}\n")
    sys.stdout.flush()
    _notice(f"a proxy in front of {count} endpoint{'' if count == 1 else 's'}; Ctrl-C ends")
    key = ""
    if config.token is not None:
        key = f"${variable}" if file is None else f"$(cat {shlex.quote(str(file.absolute()))})"
        _notice("clients send the token as their API key (Authorization: Bearer, or x-api-key)")
    if config.unix is not None:
        bearer = f' -H "Authorization: Bearer {key}"' if key else ""
        _notice(f"next: curl --unix-socket {socket_path}{bearer} {url}/models")
        return
    _notice(f"next: export OPENAI_BASE_URL={url}" + (f' OPENAI_API_KEY="{key}"' if key else ""))


def keyless_only(
    states: Callable[[Sequence[Endpoint]], list[EndpointState]], config: ProxyConfig
) -> Callable[[Sequence[Endpoint]], list[EndpointState]]:
    """Return ``states`` without endpoints that need a key, where no client needs a token."""
    from bagent.proxy.guarding import holds_key

    if config.token is not None or config.unix is not None:
        return states

    def without_keys(endpoints: Sequence[Endpoint]) -> list[EndpointState]:
        for endpoint in filter(holds_key, endpoints):
            _notice(
                f"{endpoint.name} needs a key and does not join: this proxy was started without"
                " a token (start it again)"
            )
        return states([endpoint for endpoint in endpoints if not holds_key(endpoint)])

    return without_keys


def _notice(text: str) -> None:
    sys.stderr.write(f"{text}\n")
