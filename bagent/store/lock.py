"""The lock of one part of a run: a small file that is created with O_EXCL and renewed.

It works on file systems without locks. An owner that has not renewed its file for 60 s, or whose
process on this host is gone, is replaced; if it wakes up later, it finds another token in the
file and stops.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bagent.errors import OwnedError, StoppedEarly
from bagent.files import read_regular, write_atomic
from bagent.store.journal.segments import check_part, part_order, write_error

RENEW_SECONDS = 15.0
"""How often an owner renews its file."""

STALE_SECONDS = 60.0
"""How long after the last renewal an owner counts as dead."""

_FILE_BYTES = 512
_SKEW_SECONDS = 60.0
_GONE_STATES = frozenset("ZXx")


class LockRecord(msgspec.Struct, omit_defaults=True):
    """The content of an owner file. ``time`` is in Unix seconds.

    ``started`` is the kernel's start time of the process in clock ticks, ``space`` its pid
    namespace; both are empty if unknown. ``parent`` is the process without which it ends by itself.
    """

    host: str
    pid: int
    time: float
    started: str = ""
    space: str = ""
    token: str = ""
    parent: int = 0

    @property
    def process(self) -> str:
        """The process to stop, in words: that of ``--workers`` for one of its workers."""
        if not self.host:
            return "another process"
        return f"process {self.parent or self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process: its host, pid, start time and pid namespace."""

    host: str
    pid: int
    started: str
    space: str
    parent: int = 0

    @classmethod
    def this(cls, *, ends_with_parent: bool = False) -> Process:
        """Return the current process."""
        pid, parent = os.getpid(), os.getppid() if ends_with_parent else 0
        return cls(socket.gethostname(), pid, _start_time(pid) or "", _pid_space(), parent)


def owner_path(run_dir: Path, part: str) -> Path:
    """Return ``owner.json``, or ``owner-1-of-4.json`` for a part."""
    return run_dir / ("owner.json" if part == "all" else f"owner-{part}.json")


class RunLock:
    """The right to write one part of a run; made by :meth:`acquire`."""

    def __init__(self, path: Path, record: LockRecord, clock: Callable[[], float]) -> None:
        self.path = path
        self.took_over = False
        self._record = record
        self._clock = clock
        self._renewed = record.time

    @classmethod
    def acquire(
        cls,
        run_dir: Path,
        part: str,
        *,
        clock: Callable[[], float] = time.time,
        process: Process | None = None,
    ) -> RunLock:
        """Become the owner of a part.

        ``took_over`` is set if a dead owner was replaced; its process might wake up again, so the
        journal should begin a new segment.

        Args:
            run_dir: the run directory, which exists.
            part: ``all``, or like ``1-of-4``.
            clock: Unix seconds.
            process: the new owner; None means this process.

        Raises:
            OwnedError: a live process owns it; names its host and pid.
            WriteError: the file cannot be written.
        """
        path = owner_path(run_dir, check_part(part))
        me = process or Process.this()
        record = LockRecord(
            me.host, me.pid, clock(), me.started, me.space, uuid.uuid4().hex, me.parent
        )
        owner = cls(path, record, clock)
        try:
            while not _create(path, record):
                before = read_owner(path)
                if before is None:
                    continue
                if is_live(before, clock(), me):
                    raise _owned(before, path)
                if owner._take_over(before, me):
                    owner.took_over = True
                    break
        except OSError as error:
            raise write_error(path, error) from error
        return owner

    def _take_over(self, before: LockRecord, me: Process) -> bool:
        """Replace a dead owner's file; return whether this process won.

        The process that creates the claim file named after the dead owner's token may replace the
        owner file, after checking that the dead owner is still in it.
        """
        token = before.token or "unnamed"
        claim = self.path.with_name(f"{self.path.name}.{token}.claim")
        if not _create(claim, self._record):
            rival = read_owner(claim)
            if rival is not None and is_live(rival, self._clock(), me):
                raise _owned(rival, self.path)
            claim.unlink(missing_ok=True)
            return False
        try:
            now = read_owner(self.path)
            if now is None or (now.token, now.time) != (before.token, before.time):
                return False
            write_atomic(self.path, _encode(self._record))
            return True
        finally:
            claim.unlink(missing_ok=True)

    def tick(self) -> None:
        """Renew the time if 15 s have passed; call this often.

        Raises:
            StoppedEarly: another process has taken the run over.
        """
        if self._clock() - self._renewed >= RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Renew the time now.

        The time is written into the open file: if another process replaces the file at the same
        moment, the write goes to the old one. Write errors do not stop the owner.

        Raises:
            StoppedEarly: another process has taken the run over.
        """
        now = self._clock()
        idle = now - self._renewed
        try:
            with self.path.open("r+b", buffering=0) as handle:
                record = _decode(handle.read(65536))
                if record is None or record.token != self._record.token:
                    raise self._lost(record)
                self._record.time = now
                handle.seek(0)
                handle.write(_encode(self._record))
        except FileNotFoundError:
            if idle >= STALE_SECONDS:
                raise self._lost(None) from None
            self._record.time = now
            with contextlib.suppress(OSError):
                _create(self.path, self._record)
        except OSError:
            return
        self._renewed = now

    def _lost(self, record: LockRecord | None) -> StoppedEarly:
        owner = record.process if record else "another process"
        return StoppedEarly(
            f"{owner} has taken this run over, since its owner file was not renewed in time",
            hint="let that process work; bagent status shows how far it is",
        )

    def is_held(self) -> bool:
        """Return whether no other process has taken the run over."""
        with contextlib.suppress(OSError):
            record = read_owner(self.path)
            return record is not None and record.token == self._record.token
        return True

    def release(self) -> None:
        """Remove the owner file, unless it is another's."""
        with contextlib.suppress(OSError):
            if self.is_held():
                self.path.unlink()


class LockRenewer(threading.Thread):
    """A thread that renews a lock; ``lost`` is set once another process has taken it over."""

    def __init__(self, owner: RunLock, interval: float = 5.0) -> None:
        super().__init__(name="owner-renew", daemon=True)
        self.lost: StoppedEarly | None = None
        self._owner = owner
        self._interval = interval
        self._stopping = threading.Event()

    def run(self) -> None:
        """Renew until stopped or taken over."""
        while self.lost is None and not self._stopping.wait(self._interval):
            self.step()

    def step(self) -> None:
        """Renew the lock if that is due."""
        try:
            self._owner.tick()
        except StoppedEarly as error:
            self.lost = error

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self.ident is not None:  # it was started
            self.join()


def read_owner(path: Path) -> LockRecord | None:
    """Return the content of an owner file; None if there is none.

    A damaged file counts as written by an unknown process at its modification time, which also
    replaces a time in the future, since that host's clock is wrong.
    """
    try:
        record = _decode(read_regular(path))
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return None
    if record is None:
        return LockRecord(host="", pid=0, time=changed)
    if record.time > changed + _SKEW_SECONDS:
        record.time = changed
    return record


def owners(run_dir: Path) -> dict[str, LockRecord]:
    """Return the owner records in a run directory, by part."""
    records = {}
    for path in run_dir.glob("owner*.json"):
        part = path.stem.removeprefix("owner").removeprefix("-") or "all"
        with contextlib.suppress(OSError):  # a link
            record = read_owner(path)
            if record is not None:
                records[part] = record
    return dict(sorted(records.items(), key=lambda item: part_order(item[0])))


def is_live(record: LockRecord, now: float, me: Process | None = None) -> bool:
    """Return whether an owner renewed within 60 s and is not known to be gone on this host.

    Args:
        record: the owner.
        now: Unix seconds.
        me: the current process; None to look it up.
    """
    if now - record.time >= STALE_SECONDS:
        return False
    me = me or Process.this()
    if not record.pid or record.host != me.host or (record.space and record.space != me.space):
        return True
    started = _start_time(record.pid)
    return started is not None and (not started or record.started in ("", started))


ORPHANS_SECONDS = 15.0
"""How long workers whose parent was killed may take to end."""


def wait_for_orphans(
    run_dir: Path,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait some seconds for owners on this host whose parent was killed: they end by themselves."""
    until = clock() + ORPHANS_SECONDS
    while clock() < until and any(
        _is_orphan(record, clock()) for record in owners(run_dir).values()
    ):
        sleep(0.1)


def _is_orphan(record: LockRecord, now: float) -> bool:
    """Return whether an owner is live and the process that started it is gone."""
    me = Process.this()
    is_local = record.host == me.host and record.space in ("", me.space)
    return (
        bool(record.parent)
        and is_local
        and is_live(record, now, me)
        and _start_time(record.parent) is None
    )


def _owned(record: LockRecord, path: Path) -> OwnedError:
    return OwnedError(
        f"{record.process} is working on this run ({path})",
        hint=f"wait for it, stop it, or give another --name; a dead owner is replaced"
        f" {STALE_SECONDS:.0f} s after its last sign of life",
    )


def _create(path: Path, record: LockRecord) -> bool:
    """Create the file with its content; return False if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, _encode(record))
    finally:
        os.close(descriptor)
    return True


def _decode(content: bytes) -> LockRecord | None:
    try:
        return msgspec.json.decode(content, type=LockRecord)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _encode(record: LockRecord) -> bytes:
    """Return JSON padded with blanks, so that the file can be overwritten in place."""
    return msgspec.json.encode(record).ljust(_FILE_BYTES - 1) + b"\n"


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks (proc(5), field 22); None if it is gone.

    A zombie counts as gone. Empty if the process exists and /proc does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "" if _exists(pid) else None
    if len(fields) < 20 or fields[0].decode() in _GONE_STATES:
        return None
    return fields[19].decode()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _pid_space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
