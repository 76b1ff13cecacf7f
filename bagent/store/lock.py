"""One owner per part of a run, kept by a small file that is made with O_EXCL and renewed.

No lock is used, so it works on file systems without any. An owner that has not renewed its file
for 60 s, or whose process is gone on this host, is replaced; when it wakes up it finds another's
token in the file and stops.
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
"""How often a live owner renews its time."""

STALE_SECONDS = 60.0
"""After so long without renewal an owner counts as gone."""

_FILE_BYTES = 512
_SKEW_SECONDS = 60.0
_GONE_STATES = frozenset("ZXx")


class LockRecord(msgspec.Struct, omit_defaults=True):
    """What an owner file says. ``time`` is in Unix seconds.

    ``started`` is the kernel's start time of the process in clock ticks, ``space`` names its pid
    namespace; both empty where the system does not tell.
    """

    host: str
    pid: int
    time: float
    started: str = ""
    space: str = ""
    token: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """The process that asks: its host, pid, start time and pid namespace."""

    host: str
    pid: int
    started: str
    space: str

    @classmethod
    def this(cls) -> Process:
        """The process that runs this code."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_time(pid) or "", _pid_space())


def owner_path(run_dir: Path, part: str) -> Path:
    """``owner.json``, or ``owner-1-of-4.json`` for a part."""
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

        ``took_over`` tells afterwards whether a dead owner's file was there; its process might
        yet wake up, so the journal should begin a new segment.

        Args:
            run_dir: the run directory, which exists.
            part: ``all``, or like ``1-of-4``.
            clock: Unix seconds.
            process: who asks; None means this process.

        Raises:
            OwnedError: a live process owns it; names its host and pid.
            WriteError: the file cannot be written.
        """
        path = owner_path(run_dir, check_part(part))
        me = process or Process.this()
        record = LockRecord(me.host, me.pid, clock(), me.started, me.space, uuid.uuid4().hex)
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
        """Replace a dead owner's file; only one of several processes can win.

        The one that makes the file named after the dead owner's token may rename its own file
        over; it looks once more whether that owner is still the one in the file.
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
        """Renew the time when 15 s have passed; call it often.

        Raises:
            StoppedEarly: another process has taken the run over.
        """
        if self._clock() - self._renewed >= RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Renew the time now.

        The time is written into the open file: had another process put its own file in this
        place in the same moment, the write would go to the old one and harm nobody. A disk that
        refuses does not stop the owner.

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
        owner = f"process {record.pid} on {record.host}" if record else "another process"
        return StoppedEarly(
            f"{owner} has taken this run over, since its owner file was not renewed in time",
            hint="leave it to that process",
        )

    def release(self) -> None:
        """Give the run back; another's file is left alone."""
        with contextlib.suppress(OSError):
            record = read_owner(self.path)
            if record is not None and record.token == self._record.token:
                self.path.unlink()


class LockRenewer(threading.Thread):
    """Keeps an owner's time fresh, whatever the rest of the process waits for.

    ``lost`` is the reason to stop once another process has taken the run over.
    """

    def __init__(self, owner: RunLock, interval: float = 5.0) -> None:
        super().__init__(name="owner-renew", daemon=True)
        self.lost: StoppedEarly | None = None
        self._owner = owner
        self._interval = interval
        self._stopping = threading.Event()

    def run(self) -> None:
        """Renew in time until stopped or taken over."""
        while not self._stopping.wait(self._interval):
            try:
                self._owner.tick()
            except StoppedEarly as error:
                self.lost = error
                return

    def stop(self) -> None:
        """Renew no more."""
        self._stopping.set()
        self.join()


def read_owner(path: Path) -> LockRecord | None:
    """What an owner file says; None where there is none.

    A file that is only half written counts as written at its modification time by nobody known.
    So does a time that the file system has not reached yet: that host's clock is wrong.
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
    """The owner records in a run directory, by part."""
    records = {}
    for path in run_dir.glob("owner*.json"):
        part = path.stem.removeprefix("owner").removeprefix("-") or "all"
        with contextlib.suppress(OSError):  # a link
            record = read_owner(path)
            if record is not None:
                records[part] = record
    return dict(sorted(records.items(), key=lambda item: part_order(item[0])))


def is_live(record: LockRecord, now: float, me: Process | None = None) -> bool:
    """Whether an owner is at work: renewed within 60 s, and not known to be gone on this host.

    Args:
        record: what the file says.
        now: Unix seconds.
        me: the process that asks; None means this one.
    """
    if now - record.time >= STALE_SECONDS:
        return False
    me = me or Process.this()
    if not record.pid or record.host != me.host or (record.space and record.space != me.space):
        return True
    started = _start_time(record.pid)
    return started is not None and (not started or record.started in ("", started))


def _owned(record: LockRecord, path: Path) -> OwnedError:
    owner = f"process {record.pid} on {record.host}" if record.host else "another process"
    return OwnedError(
        f"{owner} is working on this run ({path})",
        hint=f"wait for it, stop it, or give another --name; a dead owner is replaced"
        f" {STALE_SECONDS:.0f} s after its last sign of life",
    )


def _create(path: Path, record: LockRecord) -> bool:
    """Make the file with its content; False where there is one already."""
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
    """JSON with blanks behind it, so that a file can be renewed in its place."""
    return msgspec.json.encode(record).ljust(_FILE_BYTES - 1) + b"\n"


def _start_time(pid: int) -> str | None:
    """The start time of a process in clock ticks (proc(5), field 22); None where it is gone.

    A zombie counts as gone. Empty where the process is there and /proc does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "" if _answers(pid) else None
    if len(fields) < 20 or fields[0].decode() in _GONE_STATES:
        return None
    return fields[19].decode()


def _answers(pid: int) -> bool:
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
