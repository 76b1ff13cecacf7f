"""The hostfile: one endpoint a line, with tags.

``host`` · ``host:port`` · ``host port`` · ``[v6]:port`` · ``http(s)://host:port/base``, then
``key=value`` tags, parted by tabs or blanks; ``#`` begins a comment. ``node[001-004]:8000-8003``
are sixteen endpoints, also in a URL. A PBS node file is a hostfile. MPI's ``slots=`` and ``cpus=``
are ignored. A port below 1024 needs a URL: ``host:4`` (MPICH) and ``host 4`` (LSF) are slots.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bagent.errors import HostfileError, Position, UsageError, WriteError
from bagent.files import write_atomic

DEFAULT_PORT = 8000
FIRST_FREE_PORT = 1024
"""The first port without a URL: smaller numbers are counts of slots."""

MOST_EXPANDED = 100_000
_IGNORED_TAGS = frozenset({"slots", "cpus", "max_slots", "max-slots"})
_NUMBER_TAGS: Mapping[str, type] = {"weight": float, "gpus": int, "max_concurrency": int}
_TAGS = ("model", "role", "node", "weight", "gpus", "max_concurrency", "api_key_env")
"""The tags that bagent knows."""
_NUMBERS = (1e-6, 1e6)
"""Bounds of weights and GPUs."""
_NAMING_TAGS = frozenset({"model", "api_key_env"})
_RANGE = re.compile(r"\[([0-9,-]+)\]")
_LABEL = r"\w(?:[\w-]*\w)?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_LONGEST_LABEL = 63
_URL = re.compile(r"(https?)://([^/?#]*)([^?#]*)(.*)", re.IGNORECASE)
_USUAL_PORTS = {"http": "80", "https": "443"}
_TAG = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)=(.*)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_WHOLE = re.compile(r"[0-9]{1,9}")
_PORT_WORD = re.compile(r"[0-9]+(-[0-9]*)?")


class HostEntry(msgspec.Struct, frozen=True):
    """One endpoint of a hostfile: ``name`` is ``host:port``, ``url`` the base with ``/v1``."""

    name: str
    url: str
    tags: Mapping[str, str]
    line: int


def read_hostfile(path: Path) -> list[HostEntry]:
    """Read the endpoints of a hostfile in order, without repetitions.

    Raises:
        HostfileError: it cannot be read, is empty, or a line is wrong; with file and line.
    """
    try:
        about = path.stat()
        if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
            content = path.read_bytes()
        else:
            content = _read_pipe(path, about.st_dev, about.st_ino)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise HostfileError(f"the hostfile cannot be read: {reason}", at=Position(path)) from None
    return hosts_in(content, path)


@lru_cache(maxsize=1)
def _read_pipe(path: Path, device: int, inode: int) -> bytes:
    """Return the content of a pipe, which can be read only once."""
    return path.read_bytes()


def hosts_in(content: bytes, path: Path | str) -> list[HostEntry]:
    """Return the endpoints in the bytes of a hostfile; raises as :func:`read_hostfile`."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HostfileError(
            "not UTF-8 text", at=Position(path), hint="save the file as UTF-8"
        ) from None
    hosts = parse_hostfile(text, path)
    if not hosts:
        raise HostfileError(
            "no endpoint in it", hint="write host:port, one a line", at=Position(path)
        )
    return hosts


def parse_hostfile(
    text: str, path: Path | str = "hostfile", repeated: list[tuple[int, int]] | None = None
) -> list[HostEntry]:
    """Return the endpoints in the text of a hostfile; errors name ``path``.

    ``repeated`` receives the line of each repetition, and the line that it repeats.
    """
    hosts: dict[str, HostEntry] = {}
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = _COMMENT.sub("", line).split()
        if not fields:
            continue
        at = Position(path, number)
        for host in _line(fields, number, at):
            address = _normalized(host.url)
            other = hosts.get(names.setdefault(host.name, address)) or hosts.get(address)
            same = other is not None and _normalized(other.url) == address
            if other is not None and not (same and other.tags == host.tags):
                raise HostfileError(
                    f"{host.name} stands in line {other.line}"
                    f" {'with other tags' if same else f'as {other.url}'}",
                    hint="keep one of the two lines",
                    at=at,
                )
            if other is not None and repeated is not None:
                repeated.append((number, other.line))
            hosts.setdefault(address, host)
            if len(hosts) > MOST_EXPANDED:
                raise HostfileError(
                    f"more than {MOST_EXPANDED} endpoints",
                    at=at,
                    hint="write fewer or shorter ranges",
                )
    return list(hosts.values())


def hostfile_notes(text: str) -> list[str]:
    """Return what may be a mistake in the text of a hostfile: repeated lines, misspelled tags."""
    repeated: list[tuple[int, int]] = []
    hosts = parse_hostfile(text, repeated=repeated)
    notes = []
    if repeated:
        line, other = repeated[0]
        more = f", and {len(repeated) - 1:,} more are repeated" if len(repeated) > 1 else ""
        notes.append(f"line {line} repeats line {other}{more}; each endpoint counts once")
    lines = {tag: host.line for host in reversed(hosts) for tag in host.tags if tag not in _TAGS}
    for tag, line in lines.items():
        near = get_close_matches(tag, _TAGS, n=1, cutoff=0.8)
        if near:
            notes.append(f"line {line}: {tag} is a tag of your own (did you mean {near[0]}?)")
    return notes


def _line(fields: list[str], number: int, at: Position) -> Iterator[HostEntry]:
    address, tag_fields = fields[0], fields[1:]
    port = None
    if tag_fields and _PORT_WORD.fullmatch(tag_fields[0]):
        port, tag_fields = tag_fields[0], tag_fields[1:]
    elif tag_fields and "=" not in tag_fields[0]:
        raise HostfileError(
            f"{tag_fields[0]!r} is neither a port nor a key=value tag",
            hint="write host port key=value",
            at=at,
        )
    tags = _tags(tag_fields, at)
    url = _URL.fullmatch(address)
    if url is not None:
        if port is not None:
            raise HostfileError("a URL names its port itself", hint="write http://HOST:PORT", at=at)
        yield from _from_url(url, tags, number, at)
        return
    if "=" in address or "://" in address:
        raise HostfileError(f"{address!r} is no host", hint="write host:port key=value", at=at)
    if "/" in address:
        raise HostfileError(
            f"{address!r} is no host",
            hint="write http://HOST:PORT/PATH for an address with a path",
            at=at,
        )
    host, inner_port = _split_port(address, at)
    if port is not None and inner_port is not None:
        raise HostfileError(f"two ports: {inner_port} and {port}", at=at, hint="write one of them")
    ports = list(_ports(port or inner_port, at))
    if ports[0] < FIRST_FREE_PORT:
        raise HostfileError(
            f"{' '.join(fields[: 2 if port else 1])}: {ports[0]} is a number of slots, not a port",
            hint=f"{host} slots={ports[0]}; a port below {FIRST_FREE_PORT} needs a URL:"
            f" http://{host}:{ports[0]}",
            at=at,
        )
    for name in _expand(host, at):
        checked = _check_host(name, at)
        for each in ports:
            yield HostEntry(f"{checked}:{each}", f"http://{checked}:{each}/v1", tags, number)


def _tags(fields: list[str], at: Position) -> dict[str, str]:
    tags: dict[str, str] = {}
    for field in fields:
        match = _TAG.fullmatch(field)
        if match is None:
            raise HostfileError(
                f"{field!r} is no key=value tag", at=at, hint="write key=value, such as weight=2"
            )
        key, value = match.groups()
        if key in _IGNORED_TAGS:
            continue
        if key in tags:
            raise HostfileError(f"the tag {key} stands twice", at=at, hint="write it once")
        kind = _NUMBER_TAGS.get(key)
        if kind is not None:
            try:
                good = 0 < kind(value) < math.inf
            except ValueError:
                good = False
            if not good:
                raise HostfileError(
                    f"{key}={value}: not a number above 0",
                    at=at,
                    hint=f"write a number above 0, such as {key}=2",
                )
            low, high = _NUMBERS
            if key != "max_concurrency" and not low <= float(value) <= high:
                raise HostfileError(
                    f"{key}={value}: not between {low:g} and {high:g}",
                    at=at,
                    hint="write a number in that range",
                )
        elif key in _NAMING_TAGS and not value:
            raise HostfileError(
                f"{key}= names nothing", at=at, hint=f"write {key}=NAME, or leave the tag out"
            )
        tags[key] = value
    return tags


def _from_url(
    url: re.Match[str], tags: dict[str, str], number: int, at: Position
) -> Iterator[HostEntry]:
    scheme, authority, base, suffix = url.groups()
    if "@" in authority:
        raise HostfileError(
            f"a login in the address of {authority.rpartition('@')[2]}",
            hint="put the key into a variable and write api_key_env=NAME",
            at=at,
        )
    host, port = _split_port(authority.lower(), at)
    if not host:
        raise HostfileError(f"{url[0]} names no host", at=at, hint="write http://HOST:PORT")
    if suffix:
        raise HostfileError(
            f"the address of {host} has more after its path",
            at=at,
            hint="end it after the path; keys go into api_key_env=NAME",
        )
    base = base.rstrip("/")
    base_name = base if base not in ("", "/v1") else ""
    ports = [""] if port is None else [f":{each}" for each in _ports(port, at)]
    for name in _expand(host, at):
        checked = _check_host(name, at)
        for each in ports:
            address = f"{scheme.lower()}://{checked}{each}{base or '/v1'}"
            yield HostEntry(f"{checked}{each}{base_name}", address, tags, number)


def _normalized(url: str) -> str:
    """Return the same text for all spellings of an address."""
    scheme, _, address = url.partition("://")
    authority, _, base = address.partition("/")
    host, _, port = authority.rpartition(":")
    if not port.isdigit():  # there is none, or this is the end of an address in brackets
        host, port = authority, _USUAL_PORTS[scheme]
    host = host.lower().removesuffix(".")
    if host.startswith("["):
        host = ipaddress.IPv6Address(host[1:-1]).compressed
    return f"{scheme}://{host}:{port}/{base}"


def _split_port(address: str, at: Position) -> tuple[str, str | None]:
    if address.startswith("[") and "]" in address:
        inner, _, tail = address[1:].partition("]")
        if _is_v6(inner):
            if tail and not tail.startswith(":"):
                raise HostfileError(
                    f"{address!r} is no host", at=at, hint="write host:port, such as node01:8000"
                )
            return f"[{inner}]", tail[1:] or None
    if _is_v6(address):
        return f"[{address}]", None
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else (address, None)


def _is_v6(text: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(text).scope_id
    except ValueError:
        return False
    return zone is None or _HOST.fullmatch(zone) is not None


def _ports(text: str | None, at: Position) -> Iterator[int]:
    if text is None:
        yield DEFAULT_PORT
        return
    first, dash, last = text.partition("-")
    if not _WHOLE.fullmatch(first) or (dash and not _WHOLE.fullmatch(last)):
        raise HostfileError(
            f"port {text or '(empty)'} is no number",
            at=at,
            hint="write host:port, such as node01:8000",
        )
    low, high = int(first), int(last) if dash else int(first)
    for port in (low, high):
        if not 1 <= port <= 65535:
            raise HostfileError(
                f"port {port} is not between 1 and 65535",
                at=at,
                hint="write host:port, such as node01:8000",
            )
    if high < low:
        raise HostfileError(
            f"port range {text} runs backwards", at=at, hint="write the lower port first"
        )
    yield from range(low, high + 1)


def _expand(host: str, at: Position) -> Iterator[str]:
    """Yield the names of ``node[001-003,7]``; an IPv6 address in brackets is one name."""
    if host.startswith("["):
        yield host
        return
    pieces: list[list[str]] = []
    last = 0
    for match in _RANGE.finditer(host):
        pieces.append([host[last : match.start()]])
        pieces.append(list(_numbers(match.group(1), at)))
        last = match.end()
    pieces.append([host[last:]])
    for parts in itertools.product(*pieces):
        yield "".join(parts)


def _numbers(text: str, at: Position) -> Iterator[str]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not _WHOLE.fullmatch(first) or (dash and not _WHOLE.fullmatch(last)):
            raise HostfileError(
                f"[{text}] is no range", hint="write a range such as node[001-004]", at=at
            )
        if not dash:
            yield first
            continue
        if int(last) < int(first):
            raise HostfileError(
                f"the range [{part}] runs backwards", at=at, hint="write the lower number first"
            )
        if int(last) - int(first) >= MOST_EXPANDED:
            raise HostfileError(
                f"the range [{part}] is too long", at=at, hint="write several shorter ranges"
            )
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _check_host(name: str, at: Position) -> str:
    if name.startswith("[") and name.endswith("]") and _is_v6(name[1:-1]):
        return name
    if not _HOST.fullmatch(name) or max(map(len, name.split("."))) > _LONGEST_LABEL:
        raise HostfileError(
            f"{name!r} is no host name", at=at, hint="write host:port, such as node01:8000"
        )
    return name


def host_line(host: HostEntry) -> str:
    """Return a line of a hostfile that is read as ``host``."""
    # The default port of a URL differs from that of a bare name; small ports need a URL.
    port = urlsplit(host.url).port or 0
    plain = f"http://{host.name}/v1" == host.url and port >= FIRST_FREE_PORT
    return " ".join([host.name if plain else host.url, *(f"{k}={v}" for k, v in host.tags.items())])


def hostfile_text(hosts: Sequence[HostEntry], urls: Collection[str], source: str) -> str:
    """Return a hostfile of the ``hosts`` whose address is in ``urls``.

    A line of ``source``, which ``hosts`` was read from, stays as it is if all its endpoints do.
    Otherwise each of them gets a line.
    """
    lines = source.splitlines()
    groups: dict[int, list[HostEntry]] = {}
    for host in hosts:
        groups.setdefault(host.line, []).append(host)
    out: list[str] = []
    for number, group in groups.items():
        staying = [host for host in group if host.url in urls]
        if len(staying) == len(group) and 0 < number <= len(lines):
            out.append(lines[number - 1].strip().removeprefix("\ufeff"))
        else:
            out += map(host_line, staying)
    return "".join(f"{line}\n" for line in out)


def write_hostfile(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all: readers may be waiting for the file.

    Raises:
        WriteError: it cannot be written.
    """
    try:
        write_atomic(path, text, sync=True)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None


SETTLE_SECONDS = 1.0
"""For so long new content must not change before it takes effect."""


class HostChanges(msgspec.Struct, frozen=True):
    """Differences between two readings of a hostfile."""

    joined: tuple[HostEntry, ...] = ()
    removed: tuple[HostEntry, ...] = ()
    changed: tuple[HostEntry, ...] = ()  # with other tags; these are the new entries

    def __bool__(self) -> bool:
        return bool(self.joined or self.removed or self.changed)


class HostfileWatch:
    """Decides which content of a changing hostfile takes effect; does no I/O itself.

    Pass each reading to :meth:`on_content`.

    Args:
        path: named in notices.
        hosts: the endpoints in use, as read at the start.
        clock: monotonic seconds.
        notice: called once for each content that cannot be used, with a message for people.
        choose: selects endpoints of a list; its UsageError makes a content unusable.
    """

    def __init__(
        self,
        path: Path,
        hosts: Sequence[HostEntry],
        clock: Callable[[], float],
        notice: Callable[[str], None] = lambda _: None,
        choose: Callable[[Sequence[HostEntry]], list[HostEntry]] = list,
    ) -> None:
        self.hosts = list(hosts)
        self._path = path
        self._clock = clock
        self._notice = notice
        self._choose = choose
        self._content: bytes | str | None = None
        self._since = 0.0
        self._done = False

    def on_content(self, content: bytes | OSError) -> HostChanges | None:
        """Return the changes if new content takes effect, and update ``hosts``.

        Return None for content that is old, not settled yet, or not usable.
        """
        raw = content if isinstance(content, bytes) else (content.strerror or str(content))
        now = self._clock()
        if raw != self._content:
            self._content, self._since, self._done = raw, now, False
            return None
        if self._done or now - self._since < SETTLE_SECONDS:
            return None
        self._done = True
        try:
            if isinstance(raw, str):
                message = f"the hostfile cannot be read: {raw.lower()}"
                raise HostfileError(message, at=Position(self._path))
            hosts = self._choose(hosts_in(raw, self._path))
        except UsageError as error:
            self._notice_unusable(error)
            return None
        old = {host.url: host for host in self.hosts}
        new = {host.url: host for host in hosts}
        self.hosts = hosts
        changes = HostChanges(
            joined=tuple(host for url, host in new.items() if url not in old),
            removed=tuple(host for url, host in old.items() if url not in new),
            changed=tuple(
                host for url, host in new.items() if url in old and old[url].tags != host.tags
            ),
        )
        return changes or None

    def _notice_unusable(self, error: UsageError) -> None:
        count = len(self.hosts)
        old = "endpoint stays as it was" if count == 1 else f"{count} endpoints stay as they were"
        where = "" if isinstance(error, HostfileError) else f"{self._path}: "
        self._notice(f"{where}{error}; the {old}")


def read_content(path: Path) -> bytes | OSError | None:
    """Return the content of the file, or the error of reading it; None for a pipe.

    A pipe yields its content only once; to read it again may block.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return None
        return path.read_bytes()
    except OSError as error:
        return error
