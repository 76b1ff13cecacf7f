"""A job as JSON values that may be written down: every secret is ``***``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from bagent.job.spec import Job
from bagent.job.variables import looks_secret
from bagent.types import Json

MASK = "***"

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
# A shorter secret would also be found inside harmless words; it is masked where it stands alone.
_SHORT = 6


def masked(job: Job) -> dict[str, Json]:
    """The resolved job with its defaults as JSON values, secrets masked.

    Masked are: values of header, environment and other keys whose name tells of a secret,
    ``user:password@`` and secret parameters in URLs, well-known token forms, and the values of
    ``${VAR}`` whose name tells of a secret wherever they appear. Without secrets, loading the
    result again gives an equal job.
    """
    dumped = job.model_dump(mode="json", by_alias=True)
    values = _masked(dumped, job.source.secrets, "")
    return {key: value for key, value in values.items() if value is not None}


def mask_text(text: str, secrets: frozenset[str] = frozenset()) -> str:
    """``text`` with ``secrets`` and everything that has the form of a secret masked."""
    for secret in secrets:
        for form in (secret, quote(secret, safe="")):
            if text == form:
                return MASK
            if len(form) >= _SHORT:
                text = text.replace(form, MASK)
    text = _USERINFO.sub(f"{MASK}@", text)
    text = _SECRET_QUERY.sub(_query, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _TOKENS.sub(MASK, text)


def mask_command(words: Sequence[str]) -> str:
    """A command line as it may be shown or written down, its secrets masked: those of URLs and of
    ``--set KEY=VALUE``."""
    shown = []
    for word in words:
        option = "--set=" if word.startswith("--set=") else ""
        key, _, value = word.removeprefix(option).partition("=")
        name = key.rpartition(".")[2]
        if value and "." in key and "/" not in key and (_names_secret(name) or _is_code(name)):
            shown.append(f"{option}{key}={MASK}")
        else:
            shown.append(mask_text(word))
    return shlex.join(shown)


def _masked(value: Json, secrets: frozenset[str], key: str) -> Json:
    if isinstance(value, dict):
        of_urls = key == "query"
        return {
            name: MASK
            if of_urls and isinstance(item, str) and item and _is_secret_parameter(name)
            else _masked(item, secrets, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_masked(item, secrets, key) for item in value]
    if not isinstance(value, str):
        return value
    if value and _names_secret(key):
        return MASK
    return mask_text(value, secrets)


def _names_secret(key: str) -> bool:
    if key.lower().endswith(_POINTERS):
        return False
    return key.lower() in _SECRET_HEADERS or looks_secret(key)


def _query(found: re.Match[str]) -> str:
    start, name, value = found.groups()
    return f"{start}{name}={MASK if _is_secret_parameter(name) else value}"


def _is_secret_parameter(name: str) -> bool:
    return looks_secret(name) or _is_code(name)


def _is_code(name: str) -> bool:
    return name.lower() in _SECRET_PARAMETERS
