"""A hostfile that changes while a run goes on: which endpoints joined, left or changed.

Whoever writes the file may be half way through when it is read, and shared file systems show an
empty or missing file for a moment. So a new content counts once it was seen twice, a while apart,
and only if it is a whole, right hostfile; anything else keeps the old list.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bagent.errors import HostfileError, Position, UsageError
from bagent.fleet.hostfile import Host, hosts_in

SETTLE_SECONDS = 1.0
"""So long a new content must stay as it is before it counts."""

_ONE_KEPT = "endpoint stays as it was"


class HostChanges(msgspec.Struct, frozen=True):
    """What a reload brought, by address: new hosts, gone hosts, hosts with other tags (as now)."""

    joined: tuple[Host, ...] = ()
    left: tuple[Host, ...] = ()
    changed: tuple[Host, ...] = ()

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
        hosts: Sequence[Host],
        clock: Callable[[], float],
        notice: Callable[[str], None] = lambda _: None,
        choose: Callable[[Sequence[Host]], list[Host]] = list,
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


def host_changes(before: Sequence[Host], after: Sequence[Host]) -> HostChanges:
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
