"""URLs of remote files: their schemes, patterns over them, and checks."""

from __future__ import annotations

import re
from glob import has_magic
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("s3", "gs", "az", "hf", "http", "https")
"""Schemes of remote files. Other names that a driver accepts, such as ``gcs``, are not read."""

_REMOTE = re.compile(rf"(?:{'|'.join(SCHEMES)})://", re.IGNORECASE)
_SECRET = re.compile(
    r"(?i:.*(?:signature|token|secret|password|passwd|pwd|credentials?|authorization))"
    r"|(?i:(?:.*[^a-z]|api|auth|access|private)?key|sig|auth|code)"
    r"|.*[a-z]Key"
)
"""Names of a URL's parameters whose values are secrets."""


def is_remote(text: str) -> bool:
    """Return whether ``text`` is a URL of a remote file."""
    return _REMOTE.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the scheme in lower case."""
    return url.partition("://")[0].lower()


def with_lower_scheme(url: str) -> str:
    """Return the URL as stores list it: with its scheme in lower case."""
    return f"{scheme_of(url)}://{url.partition('://')[2]}"


def is_web(url: str) -> bool:
    """Return whether the URL is one of a web server, which cannot list its files."""
    return scheme_of(url) in ("http", "https")


def in_bucket(url: str) -> bool:
    """Return whether the URL is one of a file in a bucket."""
    return is_remote(url) and not is_web(url)


def bucket_folder(url: str) -> str:
    """Return the URL up to its last slash; empty where it names no folder of a bucket."""
    folder = url.partition("://")[2].rpartition("/")[0]
    return f"{scheme_of(url)}://{folder}/" if folder and in_bucket(url) else ""


def is_pattern(url: str) -> bool:
    """Return whether the URL stands for the files that it matches."""
    return not is_web(url) and has_magic(url)


def check_url(url: str) -> str | None:
    """Return what is wrong with the URL of a file; None if nothing is."""
    bucket = url.partition("://")[2].partition("/")[0]
    if not bucket:
        return "the URL names no bucket or host"
    if "@" in bucket and scheme_of(url) != "az":
        return "a URL may not hold a user or a password, since a run stores its input's name"
    if is_web(url):
        return _check_web_url(url)
    if has_magic(bucket):
        return "the name of a bucket cannot be a pattern"
    try:
        pattern_matches(url)
    except re.error as error:
        return f"the pattern is wrong: {error.msg}"
    return None


def _check_web_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        valid = bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        return "the host or the port of the URL is wrong"
    if "*" in parts.netloc + parts.path:
        return "a web server does not list its files: name each file"
    parameters = parse_qsl(parts.query) + parse_qsl(parts.fragment)
    if any(_SECRET.fullmatch(name) for name, _ in parameters):
        return (
            "the URL holds a key or a signature, which the run would store: name the bucket"
            " (s3://...), whose keys come from the environment"
        )
    return None


def publish_problem(target: str) -> str | None:
    """Return why results cannot be published to a URL or the path of a folder; None if they can."""
    if "://" not in target:
        return None
    if not is_remote(target) or is_web(target):
        return "results are published to s3://, gs://, az://, hf:// or a folder"
    if is_pattern(target):
        return "name one folder, no pattern"
    return check_url(target)


def plain_url(url: str) -> str:
    """Return the URL for messages and results; one of a web server loses its user and query."""
    if not is_web(url):
        return url
    host, slash, path = re.split("[?#]", url.partition("://")[2], maxsplit=1)[0].partition("/")
    return f"{scheme_of(url)}://{host.rpartition('@')[2]}{slash}{path}"


def fixed_prefix(pattern: str) -> str:
    """Return the part of a pattern before its first wildcard."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0]


def pattern_matches(pattern: str) -> re.Pattern[str]:
    """Return an expression for the URLs that a pattern matches, as the shell does.

    ``*`` and ``?`` stay inside one folder, ``**`` is any depth. Names that begin with a dot are
    matched only where the pattern names the dot.
    """
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        begins = position == 0 or pattern[position - 1] == "/"
        if begins and pattern[position:] == "**":
            parts.append(r"(?:(?!\.)[^/]+/)*(?!\.)[^/]+")
            break
        if begins and pattern.startswith("**/", position):
            parts.append(r"(?:(?!\.)[^/]+/)*")
            position += 3
        elif pattern[position] in "*?":
            parts.append(r"(?!\.)" if begins else "")
            parts.append("[^/]*" if pattern[position] == "*" else "[^/]")
            position += 1
        elif pattern[position] == "[" and (end := pattern.find("]", position + 2)) > 0:
            characters = pattern[position + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            negated = characters.startswith("!")
            parts.append(f"[^/{characters[1:]}]" if negated else f"[{characters}]")
            position = end + 1
        else:
            parts.append(re.escape(pattern[position]))
            position += 1
    return re.compile("".join(parts))
