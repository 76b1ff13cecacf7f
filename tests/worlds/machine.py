"""Disk and processes of a world: full disks, short writes, failing syncs, sudden deaths."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bagent.store import lock
from worlds.clock import Died, WorldClock

Call = Callable[..., Any]

_CHANGING = ("write", "ftruncate", "fdatasync", "fsync", "replace", "rename", "unlink", "mkdir")


TIGHT_ROOM = 1200
"""Bytes of a write for which a tight disk has room."""


class Process(NamedTuple):
    """The state of a process that is suspended."""

    pid: int
    calls: int
    die_at: int | None
    on_call: tuple[int, Callable[[], None]] | None
    faults: list[tuple[str, float, float]]


class Machine:
    """System calls of the processes of a world, those on files below ``folder`` alone.

    Args:
        folder: the files of the world.
    """

    def __init__(self, folder: Path, clock: WorldClock) -> None:
        self._clock = clock
        self._prefix = str(folder) + os.sep
        self._paths: dict[int, str] = {}
        self._owners: dict[int, int] = {}
        self._dead: set[int] = set()
        self._synced: dict[str, int] = {}
        self._refused: set[str] = set()
        """Files of which the disk refused a sync: the system has dropped the lines, and a later
        sync of the same process does not bring them to the disk."""
        self._sizes: dict[str, int] = {}
        self._new: set[str] = set()
        """Segments of the journal whose folder was not synced since they were made."""
        self._real: dict[str, Call] = {}
        self.calls = 0
        """System calls of the current process that change files."""
        self.die_at: int | None = None
        """The number of the call at which the process is killed."""
        self.cut = 0.5
        """The part of a write that is done before the process is killed."""
        self.on_call: tuple[int, Callable[[], None]] | None = None
        """Something that happens between two calls."""
        self.faults: list[tuple[str, float, float]] = []
        """Faults of the disk: ``full``, ``tight`` (no room for long writes), ``short`` (writes are
        short, but go on) or ``sync-fails``, with their begin and end."""
        self._filled = False
        """The last write has filled a tight disk, of which somebody frees a part."""
        self.dead = False
        self.pid = self._newest_pid = 4000
        self.alive: set[int] = set()
        self.host = "node1"
        self.graveyard: list[object] = []
        """What dead processes still hold, so that no finalizer of theirs runs in a later one."""

    def start_process(self) -> None:
        """Begin the next process."""
        self._newest_pid += 1
        self.pid = self._newest_pid
        self.alive.add(self.pid)
        self.calls, self.die_at, self.on_call, self.dead = 0, None, None, False
        self._refused.clear()

    def suspend(self) -> Process:
        """Return the state of the current process, for :meth:`wake`."""
        return Process(self.pid, self.calls, self.die_at, self.on_call, self.faults.copy())

    def wake(self, process: Process) -> None:
        """Make a process that was suspended the current one."""
        self.pid, self.calls, self.die_at, self.on_call, self.faults = process
        self.dead = False

    def kill(self) -> None:
        """Kill the current process: none of its system calls does anything from now on."""
        self.dead = True
        self.alive.discard(self.pid)
        self._dead |= {number for number, pid in self._owners.items() if pid == self.pid}

    def end_process(self) -> None:
        """End the current process in order."""
        self.alive.discard(self.pid)

    def has(self, fault: str) -> bool:
        """Return whether the disk has a fault now."""
        now = self._clock.now
        return any(kind == fault and begin <= now < end for kind, begin, end in self.faults)

    def unsynced(self) -> list[str]:
        """Return the segments of rows and turns that a loss of power would cut or remove."""
        paths = {*self._new, *self._cut()}
        return sorted(Path(path).name for path in paths if _is_synced(path))

    def _cut(self) -> Iterator[str]:
        """Yield the files of which a loss of power would cut a part."""
        for path, size in self._sizes.items():
            synced = self._synced.get(path, 0)
            if synced < size and Path(path).exists() and synced < Path(path).stat().st_size:
                yield path

    def lose_power(self) -> None:
        """Kill the process, and lose what was not synced."""
        self.kill()
        for path in self._cut():
            self._real["truncate"](path, self._synced.get(path, 0))
            now = int(self._clock.wall() * 1e9)
            os.utime(path, ns=(now, now))
        for path in self._new:
            self._real["unlink"](path)
        self._new.clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Put the simulated system calls in the place of the real ones."""
        names = ("open", "close", "truncate", *_CHANGING)
        self._real = {name: getattr(os, name) for name in names}
        with contextlib.ExitStack() as stack:
            for name in ("open", "close", *_CHANGING):
                stack.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
            stack.enter_context(mock.patch.object(os, "getpid", lambda: self.pid))
            stack.enter_context(mock.patch.object(socket, "gethostname", lambda: self.host))
            stack.enter_context(mock.patch.object(lock, "_start_time", self._start_time))
            try:
                yield
            finally:
                for descriptor in list(self._paths):
                    with contextlib.suppress(OSError):
                        self._real["close"](descriptor)

    def _start_time(self, pid: int) -> str | None:
        return str(pid) if pid in self.alive else None

    def _is_ours(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._prefix)

    def _enter(self, descriptor: int | None = None) -> bool:
        """Count a call; return whether the process is killed in it."""
        if self.dead or (descriptor is not None and descriptor in self._dead):
            raise Died
        self.calls += 1
        if self.on_call is not None and self.calls == self.on_call[0]:
            action, self.on_call = self.on_call[1], None
            action()
        return self.calls == self.die_at

    def _open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        real = self._real["open"]
        if not self._is_ours(path):
            return int(real(path, flags, *args, **options))
        if self.dead:
            raise Died
        if flags & os.O_CREAT:
            if self._enter():
                self.kill()
                raise Died
            if self.has("full") and not Path(path).exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            if _is_synced(os.fspath(path)) and not Path(path).exists():
                self._new.add(os.fspath(path))
        descriptor = int(real(path, flags, *args, **options))
        self._paths[descriptor] = os.fspath(path)
        self._owners[descriptor] = self.pid
        if flags & os.O_CREAT:
            self._date(descriptor)
        self._dead.discard(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        if descriptor in self._dead:
            return  # it stays open to the end of the world, so that its number is not used again
        self._paths.pop(descriptor, None)
        self._owners.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: Any) -> int:
        path = self._paths.get(descriptor)
        if path is None:
            return int(self._real["write"](descriptor, data))
        if self._enter(descriptor):
            self._real["write"](descriptor, bytes(data)[: int(len(data) * self.cut)])
            self._grow(descriptor, path)
            self.kill()
            raise Died
        if self.has("full"):
            part = bytes(data)[: len(data) // 3]
            if not part or self.calls % 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            data = part
        elif self.has("tight"):
            if self._filled:
                self._filled = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self._filled = len(data) > TIGHT_ROOM
            data = bytes(data)[:TIGHT_ROOM]
        elif self.has("short") and len(data) > 1:
            data = bytes(data)[: len(data) // 2]
        written = int(self._real["write"](descriptor, data))
        self._grow(descriptor, path)
        return written

    def _grow(self, descriptor: int, path: str) -> None:
        self._sizes[path] = os.fstat(descriptor).st_size
        self._date(descriptor)

    def _date(self, descriptor: int) -> None:
        """Give a file the time of the world."""
        now = int(self._clock.wall() * 1e9)
        os.utime(descriptor, ns=(now, now))

    def _ftruncate(self, descriptor: int, size: int) -> None:
        if descriptor in self._paths and self._enter(descriptor):
            self.kill()
            raise Died
        self._real["ftruncate"](descriptor, size)
        path = self._paths.get(descriptor)
        if path is not None:
            self._synced[path] = min(size, self._synced.get(path, 0))
            self._sizes[path] = size

    def _sync(self, descriptor: int) -> None:
        path = self._paths.get(descriptor)
        if path is None:
            return
        if self._enter(descriptor):
            self.kill()
            raise Died
        if self.has("sync-fails"):
            self._refused.add(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        self._new = {new for new in self._new if str(Path(new).parent) != path}
        if path not in self._refused:
            with contextlib.suppress(OSError):
                self._synced[path] = os.fstat(descriptor).st_size

    _fdatasync = _fsync = _sync

    def _path_call(self, name: str, path: Any, *args: Any, **options: Any) -> Any:
        if self._is_ours(path) and self._enter():
            self.kill()
            raise Died
        return self._real[name](path, *args, **options)

    def _replace(self, source: Any, target: Any, **options: Any) -> None:
        self._path_call("replace", source, target, **options)
        self._sizes.pop(os.fspath(target), None)

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        self._path_call("rename", source, target, **options)

    def _unlink(self, path: Any, **options: Any) -> None:
        self._path_call("unlink", path, **options)

    def _mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        self._path_call("mkdir", path, *args, **options)


def _is_synced(path: str) -> bool:
    """Return whether a file is one of those that the journal syncs."""
    return "/journal/rows-" in path or "/journal/turns-" in path
