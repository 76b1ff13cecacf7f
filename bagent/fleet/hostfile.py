"""The hostfile: one endpoint a line, with tags.

``host`` · ``host:port`` · ``host port`` · ``[v6]:port`` · ``http(s)://host:port/base``, then
``key=value`` tags, parted by tabs or blanks; ``#`` begins a comment. ``node[001-004]:8000-8003``
stands for sixteen endpoints, also in a URL. A PBS node file is a hostfile. MPI's ``slots=`` and
``cpus=`` are passed over. A port below 1024 is taken in a URL only: ``host:4`` (MPICH) and
``host 4`` (LSF) are slots, not ports.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from bagent.errors import HostfileError, Position, UsageError, WriteError
from bagent.files import write_atomic

DEFAULT_PORT = 8000
FIRST_FREE_PORT = 1024
"""The first port that a server may have without a URL: smaller numbers are counts of slots."""

MOST_EXPANDED = 100_000
_IGNORED_TAGS = frozenset({"slots", "cpus", "max_slots", "max-slots"})
_NUMBER_TAGS: Mapping[str, type] = {"weight": float, "gpus": int, "max_concurrency": int}
_NUMBERS = (1e-6, 1e6)
"""Bounds of weights and GPUs: beyond them shares are nobody's wish, and sums overflow."""
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
    """The endpoints of a hostfile, in its order, exact repeats once.

    Raises:
        HostfileError: it cannot be read, is empty, or a line is wrong; with file and line.
    """
    try:
        about = path.stat()
        if stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode):
            content = path.read_bytes()
        else:
            content = _given_once(path, about.st_dev, about.st_ino)
    except OSError as error:
        words = (error.strerror or str(error)).lower()
        raise HostfileError(f"the hostfile cannot be read: {words}", at=Position(path)) from None
    return hosts_in(content, path)


@lru_cache(maxsize=1)
def _given_once(path: Path, device: int, inode: int) -> bytes:
    """What a pipe gave, which gives it to its first reader only."""
    return path.read_bytes()


def hosts_in(content: bytes, path: Path | str) -> list[HostEntry]:
    """The endpoints of a hostfile's ``content``; as :func:`read_hostfile`, but for the reading."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise HostfileError("not UTF-8 text", at=Position(path)) from None
    hosts = parse_hostfile(text, path)
    if not hosts:
        raise HostfileError("no endpoint in it", hint="one host:port a line", at=Position(path))
    return hosts


def parse_hostfile(text: str, path: Path | str = "hostfile") -> list[HostEntry]:
    """The endpoints of a hostfile's ``text``; ``path`` is named in errors."""
    found: dict[str, HostEntry] = {}
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        at = Position(path, number)
        for host in _line(words, number, at):
            place = _place(host.url)
            known = found.get(names.setdefault(host.name, place)) or found.get(place)
            if known is not None and (known.tags != host.tags or _place(known.url) != place):
                other = "with other tags" if _place(known.url) == place else f"as {known.url}"
                raise HostfileError(
                    f"{host.name} stands in line {known.line} {other}",
                    hint="keep one of the two lines",
                    at=at,
                )
            found.setdefault(place, host)
            if len(found) > MOST_EXPANDED:
                raise HostfileError(f"more than {MOST_EXPANDED} endpoints", at=at)
    return list(found.values())


def _line(words: list[str], number: int, at: Position) -> Iterator[HostEntry]:
    address, rest = words[0], words[1:]
    port = None
    if rest and _PORT_WORD.fullmatch(rest[0]):
        port, rest = rest[0], rest[1:]
    elif rest and "=" not in rest[0]:
        raise HostfileError(
            f"{rest[0]!r} is neither a port nor a key=value tag", hint="host port key=value", at=at
        )
    tags = _tags(rest, at)
    url = _URL.fullmatch(address)
    if url is not None:
        if port is not None:
            raise HostfileError("a URL names its port itself", hint="http://host:port", at=at)
        yield from _from_url(url, tags, number, at)
        return
    if "=" in address or "://" in address:
        raise HostfileError(f"{address!r} is no host", hint="host:port key=value", at=at)
    if "/" in address:
        raise HostfileError(f"{address!r} is no host", hint="http:// goes before a path", at=at)
    host, inner_port = _split_port(address, at)
    if port is not None and inner_port is not None:
        raise HostfileError(f"two ports: {inner_port} and {port}", at=at)
    ports = list(_ports(port or inner_port, at))
    if ports[0] < FIRST_FREE_PORT:
        raise HostfileError(
            f"{' '.join(words[: 2 if port else 1])}: {ports[0]} is a number of slots, not a port",
            hint=f"{host} slots={ports[0]}; a port below {FIRST_FREE_PORT} needs a URL:"
            f" http://{host}:{ports[0]}",
            at=at,
        )
    for name in _expand(host, at):
        shown = _check_host(name, at)
        for one in ports:
            yield HostEntry(f"{shown}:{one}", f"http://{shown}:{one}/v1", tags, number)


def _tags(words: list[str], at: Position) -> dict[str, str]:
    tags: dict[str, str] = {}
    for word in words:
        match = _TAG.fullmatch(word)
        if match is None:
            raise HostfileError(f"{word!r} is no key=value tag", at=at)
        key, value = match.groups()
        if key in _IGNORED_TAGS:
            continue
        if key in tags:
            raise HostfileError(f"the tag {key} stands twice", at=at)
        kind = _NUMBER_TAGS.get(key)
        if kind is not None:
            try:
                good = 0 < kind(value) < math.inf
            except ValueError:
                good = False
            if not good:
                raise HostfileError(f"{key}={value}: not a number above 0", at=at)
            least, most = _NUMBERS
            if key != "max_concurrency" and not least <= float(value) <= most:
                raise HostfileError(f"{key}={value}: not between {least:g} and {most:g}", at=at)
        elif key in _NAMING_TAGS and not value:
            raise HostfileError(f"{key}= names nothing", at=at)
        tags[key] = value
    return tags


def _from_url(
    url: re.Match[str], tags: dict[str, str], number: int, at: Position
) -> Iterator[HostEntry]:
    scheme, place, base, rest = url.groups()
    if "@" in place:
        raise HostfileError(
            f"a login in the address of {place.rpartition('@')[2]}",
            hint="api_key_env=NAME names a key",
            at=at,
        )
    host, port = _split_port(place.lower(), at)
    if not host:
        raise HostfileError(f"{url[0]} names no host", at=at)
    if rest:
        raise HostfileError(f"the address of {host} goes on after its path", at=at)
    base = base.rstrip("/")
    shown_base = base if base not in ("", "/v1") else ""
    ports = [""] if port is None else [f":{one}" for one in _ports(port, at)]
    for name in _expand(host, at):
        shown = _check_host(name, at)
        for one in ports:
            address = f"{scheme.lower()}://{shown}{one}{base or '/v1'}"
            yield HostEntry(f"{shown}{one}{shown_base}", address, tags, number)


def _place(url: str) -> str:
    """What all ways to write one address have in common."""
    scheme, _, rest = url.partition("://")
    place, _, base = rest.partition("/")
    host, _, port = place.rpartition(":")
    if not port.isdigit():  # none is named, or this is the end of an address in brackets
        host, port = place, _USUAL_PORTS[scheme]
    host = host.lower().removesuffix(".")
    if host.startswith("["):
        host = ipaddress.IPv6Address(host[1:-1]).compressed
    return f"{scheme}://{host}:{port}/{base}"


def _split_port(address: str, at: Position) -> tuple[str, str | None]:
    if address.startswith("[") and "]" in address:
        inner, _, tail = address[1:].partition("]")
        if _is_v6(inner):
            if tail and not tail.startswith(":"):
                raise HostfileError(f"{address!r} is no host", at=at)
            return f"[{inner}]", tail[1:] or None
    if _is_v6(address):
        return f"[{address}]", None
    host, colon, port = address.rpartition(":")
    return (host, port) if colon else (address, None)


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _ports(text: str | None, at: Position) -> Iterator[int]:
    if text is None:
        yield DEFAULT_PORT
        return
    first, dash, last = text.partition("-")
    if not _WHOLE.fullmatch(first) or (dash and not _WHOLE.fullmatch(last)):
        raise HostfileError(f"port {text or '(empty)'} is no number", at=at)
    low, high = int(first), int(last) if dash else int(first)
    for port in (low, high):
        if not 1 <= port <= 65535:
            raise HostfileError(f"port {port} is not between 1 and 65535", at=at)
    if high < low:
        raise HostfileError(f"port range {text} runs backwards", at=at)
    yield from range(low, high + 1)


def _expand(host: str, at: Position) -> Iterator[str]:
    """``node[001-003,7]`` as its names; an address in brackets stays as it is."""
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
            raise HostfileError(f"[{text}] is no range", hint="node[001-004]", at=at)
        if not dash:
            yield first
            continue
        if int(last) < int(first):
            raise HostfileError(f"the range [{part}] runs backwards", at=at)
        if int(last) - int(first) >= MOST_EXPANDED:
            raise HostfileError(f"the range [{part}] is too long", at=at)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _check_host(name: str, at: Position) -> str:
    if name.startswith("[") and name.endswith("]") and _is_v6(name[1:-1]):
        return name
    if not _HOST.fullmatch(name) or max(map(len, name.split("."))) > _LONGEST_LABEL:
        raise HostfileError(f"{name!r} is no host name", at=at)
    return name


def host_line(host: HostEntry) -> str:
    """The line of a hostfile that stands for ``host``: read again, it is the same endpoint."""
    # Without a port a URL means port 80, a bare name another; small ports need a URL.
    port = urlsplit(host.url).port or 0
    plain = f"http://{host.name}/v1" == host.url and port >= FIRST_FREE_PORT
    return " ".join([host.name if plain else host.url, *(f"{k}={v}" for k, v in host.tags.items())])


def hostfile_text(hosts: Sequence[HostEntry], kept: Collection[str], source: str) -> str:
    """A hostfile of those ``hosts`` whose address (``url``) is in ``kept``.

    A line of ``source``, the text that ``hosts`` was read from, stays as it was written where all
    its endpoints are kept; where some are gone, each other one gets a line of its own.
    """
    lines = source.splitlines()
    groups: dict[int, list[HostEntry]] = {}
    for host in hosts:
        groups.setdefault(host.line, []).append(host)
    out: list[str] = []
    for number, group in groups.items():
        staying = [host for host in group if host.url in kept]
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
"""So long a new content must stay as it is before it counts."""

_ONE_KEPT = "endpoint stays as it was"


class HostChanges(msgspec.Struct, frozen=True):
    """What a reload brought, by address: new hosts, gone hosts, hosts with other tags (as now)."""

    joined: tuple[HostEntry, ...] = ()
    left: tuple[HostEntry, ...] = ()
    changed: tuple[HostEntry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.changed)


class HostfileWatch:
    """Decides what each reading of a hostfile means; it reads nothing and waits for nothing.

    Give :meth:`saw` each reading, from once a second to whenever it suits.

    Args:
        path: named in notices.
        hosts: the endpoints in use, as read at the start.
        clock: seconds, never running backwards.
        notice: called once, with a line for people, for each content that cannot be used.
        choose: which endpoints of a list count; a UsageError of it makes a content unusable.
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
        self._seen: bytes | str | None = None
        self._since = 0.0
        self._done = False

    def saw(self, content: bytes | OSError) -> HostChanges | None:
        """What the file's ``content``, or the error of reading it, means now.

        Returns the changes when a new content takes effect, else None: nothing new, not settled
        yet, or not usable. ``hosts`` is then the new list already.
        """
        seen = content if isinstance(content, bytes) else (content.strerror or str(content))
        now = self._clock()
        if seen != self._seen:
            self._seen, self._since, self._done = seen, now, False
            return None
        if self._done or now - self._since < SETTLE_SECONDS:
            return None
        self._done = True
        return self._take(seen)

    def _take(self, seen: bytes | str) -> HostChanges | None:
        try:
            if isinstance(seen, str):
                words = f"the hostfile cannot be read: {seen.lower()}"
                raise HostfileError(words, at=Position(self._path))
            hosts = self._choose(hosts_in(seen, self._path))
        except UsageError as error:
            many = len(self.hosts) != 1
            kept = f"{len(self.hosts)} endpoints stay as they were" if many else _ONE_KEPT
            where = "" if isinstance(error, HostfileError) else f"{self._path}: "
            self._notice(f"{where}{error}; the {kept}")
            return None
        changes = host_changes(self.hosts, hosts)
        self.hosts = hosts
        return changes or None


def host_changes(before: Sequence[HostEntry], after: Sequence[HostEntry]) -> HostChanges:
    """What is different between two lists of endpoints, each known by its address."""
    old = {host.url: host for host in before}
    new = {host.url: host for host in after}
    return HostChanges(
        joined=tuple(host for url, host in new.items() if url not in old),
        left=tuple(host for url, host in old.items() if url not in new),
        changed=tuple(
            host for url, host in new.items() if url in old and old[url].tags != host.tags
        ),
    )


def read_content(path: Path) -> bytes | OSError | None:
    """One reading of the file, for :meth:`HostfileWatch.saw`.

    None for a pipe or the like, which gives what it has only once: to read it again may take until
    somebody writes to it.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return None
        return path.read_bytes()
    except OSError as error:
        return error
