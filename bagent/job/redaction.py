"""A job as JSON values with every secret masked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bagent.job.env_substitution import VariableUse
from bagent.redaction import (
    MASK,
    SHORTEST_SECRET,
    header_is_secret,
    looks_like_address,
    looks_secret,
    mask_secrets,
)
from bagent.types import Json

if TYPE_CHECKING:
    from bagent.job.spec.job import Job

CARRIERS = frozenset(
    {"env", "headers", "query", "command", "mcp", "api_key_command", "url", "proxy", "engine"}
    | {"sql", "where", "extra"}
)
"""Keys of a job whose values go to servers and programs. What a variable puts there is masked
whatever the variable's name is: no list of names is whole."""

_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
_SECRET_PARAMETERS = frozenset({"code", "sig", "signature"})
# Keys that name where a secret is, not the secret.
_POINTERS = ("_env", "_command", "_file")
_USERINFO = re.compile(r"(?<=://)[^/@\s\"']+@")
_SECRET_QUERY = re.compile(r"([?&])([^=&#\s]+)=([^&#\s]+)")
_TOKENS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})"
)
# With a digit or sign in it: "Basic English" is no password.
_BEARER = re.compile(r"\b(Bearer|Basic)\s+(?=\S*[0-9+/=._~])[A-Za-z0-9+/=._~-]{6,}")


def secrets_of(uses: Iterable[VariableUse]) -> frozenset[str]:
    """Return the values to be masked everywhere: those of variables with a secret-looking name."""
    return frozenset(use.value for use in uses if looks_secret(use.name))


def carried(uses: Iterable[VariableUse]) -> frozenset[str]:
    """Return the values that variables put into :data:`CARRIERS`, but for hosts and ports."""
    return frozenset(
        use.value for use in uses if is_carrier(use.path) and not looks_like_address(use.name)
    )


def is_carrier(path: Iterable[str | int]) -> bool:
    """Return whether the value at ``path`` of a job goes to a server or a program as it is."""
    first, *remaining = path
    return (first == "backend" and not remaining) or not CARRIERS.isdisjoint((first, *remaining))


def written_secrets(uses: Iterable[VariableUse]) -> frozenset[str]:
    """Return the values to be masked in what is written about a run, such as errors.

    Paths are not among them: they say more in an error than they give away.
    """
    uses = tuple(uses)
    long = {
        value
        for value in carried(uses)
        if len(value) >= SHORTEST_SECRET and not value.startswith(("/", "~", "."))
    }
    return secrets_of(uses) | long


def masked(job: Job) -> dict[str, Json]:
    """Return the resolved job with its defaults as JSON values, secrets masked.

    Masks all header values but harmless ones, values of keys with the name of a secret,
    ``user:password@`` and secret parameters in URLs, well-known token forms, whatever ``${VAR}``
    put into :data:`CARRIERS`, and the values of ``${VAR}`` with the name of a secret wherever
    they appear. Without secrets, loading the result again gives an equal job.
    """
    dumped = job.model_dump(mode="json", by_alias=True)
    secrets = secrets_of(job.source.variables)
    inside = secrets | carried(job.source.variables)
    values = _masked(dumped, secrets, inside, "")
    return {key: value for key, value in values.items() if value is not None}


def mask_text(text: str, secrets: frozenset[str] = frozenset()) -> str:
    """Return ``text`` with ``secrets`` and everything that has the form of a secret masked."""
    text = mask_secrets(text, secrets)
    text = _USERINFO.sub(f"{MASK}@", text)
    text = _SECRET_QUERY.sub(_query, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _TOKENS.sub(MASK, text)


def mask_command(argv: Sequence[str]) -> str:
    """Return a command line for people with the secrets in its arguments masked."""
    return shlex.join(mask_words(argv))


def mask_words(argv: Sequence[str]) -> list[str]:
    """Mask the secrets in the arguments of a command: in URLs and in ``--set KEY=VALUE``."""
    masked_argv = []
    for word in argv:
        option = "--set=" if word.startswith("--set=") else ""
        key, _, value = word.removeprefix(option).partition("=")
        if value and "." in key and "/" not in key and _sets_secret(key.split(".")):
            masked_argv.append(f"{option}{key}={MASK}")
        else:
            masked_argv.append(mask_text(word))
    return masked_argv


def _sets_secret(path: Sequence[str]) -> bool:
    """Return whether ``--set`` sets a secret, which the shell may have expanded from a variable."""
    if "headers" in path[:-1]:
        return header_is_secret(path[-1])
    return "env" in path[:-1] or _names_secret(path[-1]) or _is_code(path[-1])


def _masked(value: Json, secrets: frozenset[str], inside: frozenset[str], key: str) -> Json:
    """Return ``value`` of ``key``, less ``secrets``; in carriers less ``inside``."""
    if key in CARRIERS:
        secrets = inside
    if isinstance(value, dict):
        return {
            name: MASK
            if isinstance(item, str) and item and _is_secret_item(key, name)
            else _masked(item, secrets, inside, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_masked(item, secrets, inside, key) for item in value]
    if not isinstance(value, str):
        return value
    if value and _names_secret(key):
        return MASK
    return mask_text(value, secrets)


def _is_secret_item(section: str, name: str) -> bool:
    if section == "headers":
        return header_is_secret(name)
    return section == "query" and _is_secret_parameter(name)


def _names_secret(key: str) -> bool:
    if key.lower().endswith(_POINTERS):
        return False
    return key.lower() in _SECRET_HEADERS or looks_secret(key)


def _query(match: re.Match[str]) -> str:
    start, name, value = match.groups()
    return f"{start}{name}={MASK if _is_secret_parameter(name) else value}"


def _is_secret_parameter(name: str) -> bool:
    return looks_secret(name) or _is_code(name)


def _is_code(name: str) -> bool:
    return name.lower() in _SECRET_PARAMETERS
