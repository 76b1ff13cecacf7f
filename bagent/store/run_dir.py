"""The run directory: ``run.json``, its seal, the files beside it, and finding runs."""

from __future__ import annotations

import contextlib
import difflib
import hmac
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from bagent.errors import ChangedError, OwnedError, UsageError
from bagent.files import PRIVATE, make_private_folder, read_regular, write_atomic
from bagent.store.journal.segments import Report, part_order, write_error
from bagent.store.lock import is_live, owners
from bagent.types import Json

_KEY_BYTES = 32


def sign(run_dir: Path, content: bytes) -> str:
    """Return the seal of content in a run directory; empty if no key can be stored."""
    key = _read_key() or _make_key()
    return _digest(key, run_dir, content) if key else ""


def is_signed(run_dir: Path, content: bytes, signature: str) -> bool:
    """Return whether ``signature`` is this user's seal of the content in this directory."""
    key = _read_key()
    return bool(key) and hmac.compare_digest(_digest(key, run_dir, content), signature)


def _digest(key: bytes, run_dir: Path, content: bytes) -> str:
    location = os.fsencode(run_dir.resolve())
    return hmac.digest(key, len(location).to_bytes(4, "big") + location + content, "sha256").hex()


def _key_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "bagent" / "run.key"


def _read_key() -> bytes:
    with suppress(OSError, RuntimeError):
        key = read_regular(_key_path())
        return key if len(key) == _KEY_BYTES else b""
    return b""


def _make_key() -> bytes:
    """Create the key atomically, since other processes may do so at the same time."""
    with suppress(OSError, RuntimeError):
        path = _key_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f"run.key.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):
                path.hardlink_to(temporary)
        finally:
            os.close(descriptor)
            temporary.unlink()
    return _read_key()


OnChange = Literal["refuse", "continue", "fresh"]
"""What to do when the job changed: the values of ``--on-change``."""

_TABLES = ("results", "answers", "attempts", "tool_calls", "endpoints")
_OWN_NAMES = frozenset(
    {"run.json", "journal", "run.duckdb", "run.new.duckdb", "failed.jsonl", "bad_lines.txt"}
    | {"run.log", "input.jsonl", "stop", "tables.json", "report.html", "batches"}
    | {f"{table}.parquet" for table in _TABLES}
)
_OWN_PATTERNS = ("run-*-of-*.json", "owner*.json*", "progress*.json", ".tables-*", "run.duckdb.*")


class Start(msgspec.Struct, omit_defaults=True):
    """One start of a run. Times are Unix seconds; ``exit_code`` is None while it runs.

    ``command`` resumes the run; ``reason`` and ``action`` say why it stopped early and what a
    person must do first. ``resent`` are the kinds of failure that the same command sends again
    once the run has ended, ``dropped`` the failed rows that stages left out, ``copied`` the rows
    that took the answer of an equal request. ``absent`` are results of earlier starts whose rows
    are no longer in the input, which was completely read. ``compared`` says whether edited rows
    were looked for, which takes an input whose rows were all read and have ended. An ``idle`` start
    has ended without a line in the journal. ``cut_at`` are the fewest and the most tokens of its
    truncated answers; None where unknown.
    """

    at: float
    part: str = "all"
    host: str = ""
    pid: int = 0
    version: str = ""
    ended_at: float | None = None
    exit_code: int | None = None
    command: list[str] = msgspec.field(default_factory=list)
    reason: str = ""
    action: str = ""
    resent: list[str] = msgspec.field(default_factory=list)
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    copied: int = 0
    absent: int = 0
    compared: bool = False
    idle: bool = False
    cut_at: tuple[int, int] | None = None


def working_seconds(starts: Sequence[Start], now: float | None = None) -> float | None:
    """Return how long a run worked, without the pauses between its starts and idle starts.

    None if a start has no end, unless it runs until ``now``.
    """
    starts = [start for start in starts if not start.idle]
    ends = [now if start.ended_at is None else start.ended_at for start in starts]
    if None in ends:
        return None
    seconds, until = 0.0, 0.0
    for begin, end in sorted((s.at, e or 0.0) for s, e in zip(starts, ends, strict=True)):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


def with_ends(starts: Sequence[Start], last_at: float) -> list[Start]:
    """Return earlier starts; one that was killed ended with its last row."""
    ends = [*(start.at for start in starts[1:]), float("inf")]
    return [
        start
        if start.ended_at is not None
        else msgspec.structs.replace(start, ended_at=max(start.at, min(last_at, end)))
        for start, end in zip(starts, ends, strict=True)
    ]


class JobChange(msgspec.Struct, omit_defaults=True):
    """A change of the job between two starts, which kept what was finished."""

    at: float
    """When the start with the new job began, in Unix seconds."""
    part: str
    changed: list[str]
    """What changed: ``prompt``, ``schema`` ..."""
    job: dict[str, Json]
    """The resolved job before it, with secrets masked."""
    finished: int = 0
    """Rows that were finished before it."""


def merge_changes(changes: Iterable[JobChange]) -> list[JobChange]:
    """Return the changes of a run, oldest first; the same change of several parts is one."""
    merged: list[JobChange] = []
    for change in changes:
        for other in merged:
            if (other.changed, other.job) == (change.changed, change.job):
                other.finished += change.finished
                break
        else:
            merged.append(msgspec.structs.replace(change))
    return merged


class RunInfo(msgspec.Struct, omit_defaults=True):
    """The content of ``run.json``.

    ``job`` is the resolved job with secrets masked. ``fingerprints`` are hashes of what must not
    change between two starts (``prompt``, ``schema``, ``model`` ...). ``rows`` is the JSON of the
    rows configuration, to read the input again. ``answer_columns`` are the typed columns of
    ``answers``: pairs of property name (None: the complete answer) and DuckDB type. ``prices`` are
    those of each stage at its last start. ``stages`` are those of the results, in order;
    ``query_last``: the last one is a query, which may select no rows. ``changes`` are those of the
    job that kept finished rows (``--on-change continue``).
    """

    name: str
    job: dict[str, Json] = msgspec.field(default_factory=dict)
    fingerprints: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    endpoints: list[Json] = msgspec.field(default_factory=list)
    rows: Json = None
    prices: list[Json] = msgspec.field(default_factory=list)
    stages: list[str] = msgspec.field(default_factory=list)
    query_last: bool = False
    answer_columns: list[tuple[str | None, str]] = msgspec.field(default_factory=list)
    keep_input: bool = True
    parquet: bool = True
    duckdb: bool = True
    total_rows: int | None = None
    created_at: float | None = None
    starts: list[Start] = msgspec.field(default_factory=list)
    changes: list[JobChange] = msgspec.field(default_factory=list)
    seal: str = ""

    def sealed_content(self) -> bytes:
        """Return what the seal covers: the files that the run read, and their use."""
        content = (self.rows, self.job, self.keep_input)
        return msgspec.json.encode(content, order="sorted")

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run: the highest of the parts that it was last started in.

        None while a part runs, has not started, or was killed.
        """
        if not self.starts:
            return None
        count = part_order(self.starts[-1].part)[0]
        codes = {s.part: s.exit_code for s in self.starts if part_order(s.part)[0] == count}
        ended = [code for code in codes.values() if code is not None]
        return max(ended) if len(ended) == max(count, 1) else None

    @property
    def unit(self) -> str:
        """What its totals count: ``row``, or ``answer`` where a row has several."""
        several = len(self.stages) < 2 and self.job.get("answers", 1) != 1
        return "answer" if several else "row"

    @property
    def parts(self) -> list[str]:
        """The parts that it was last started in."""
        if not self.starts:
            return []
        count = part_order(self.starts[-1].part)[0]
        if count < 2:
            return [self.starts[-1].part]
        return [f"{number}-of-{count}" for number in range(1, count + 1)]

    @property
    def ended_at(self) -> float | None:
        """When the last start ended, Unix seconds."""
        times = [start.ended_at for start in self.starts if start.ended_at is not None]
        return max(times, default=None)


CHANGED_HINT = (
    "--on-change continue keeps the finished rows, --fresh moves the old run aside,"
    " --name NAME begins another run"
)
"""What to do where the job differs from the one of the run directory."""


class RunDir:
    """A run directory, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.aside: Path | None = None
        """Where :meth:`move_aside` moved the run that was here."""

    @classmethod
    def create(cls, path: Path, mode: int | None = None) -> RunDir:
        """Make the directory, or use the existing one.

        Args:
            path: the directory.
            mode: its mode, as for ``chmod``; None: 0700 if it is new.

        Raises:
            WriteError: it cannot be made.
        """
        try:
            make_private_folder(path)
            if mode is not None:
                path.chmod(path.stat().st_mode & ~0o777 | mode)
        except OSError as error:
            raise write_error(path, error) from error
        return cls(path)

    @property
    def journal(self) -> Path:
        """The folder of the journal."""
        return self.path / "journal"

    @property
    def failed(self) -> Path:
        """The file of input rows that are not ok."""
        return self.path / "failed.jsonl"

    @property
    def bad_lines(self) -> Path:
        """The file of input lines that could not be read."""
        return self.path / "bad_lines.txt"

    @property
    def log(self) -> Path:
        """The log of the run."""
        return self.path / "run.log"

    @cached_property
    def stop_file(self) -> Path:
        """A file of this name stops the run."""
        return self.path / "stop"

    def stop_requested(self) -> bool:
        """Return whether the file ``stop`` is in the directory."""
        return self.stop_file.exists()

    def clear_stop(self) -> None:
        """Remove the file ``stop``, which is older than this start."""
        with contextlib.suppress(OSError):
            self.stop_file.unlink()

    def is_run(self) -> bool:
        """Return whether there is a run in the directory."""
        return (self.path / "run.json").is_file() or self.journal.is_dir()

    def load(self, part: str | None = None) -> RunInfo | None:
        """Read ``run.json`` and the files of the parts; None if there is none.

        The result has the starts and changes of all parts, and the job of the newest start.

        Args:
            part: take the job of this part's own starts, if it has any.

        Raises:
            UsageError: ``run.json`` is damaged.
        """
        paths = [self.path / "run.json", *sorted(self.path.glob("run-*-of-*.json"))]
        infos = [info for path in paths if (info := self._read(path)) is not None]
        if not infos:
            return None
        starts = [start for info in infos for start in info.starts]
        own = [info for info in infos if any(start.part == part for start in info.starts)]
        newest = max(own or infos, key=lambda i: max((s.at for s in i.starts), default=0.0))
        changes = {(change.at, change.part): change for info in infos for change in info.changes}
        newest.starts = sorted(starts, key=lambda s: (s.at, part_order(s.part)))
        newest.changes = [changes[key] for key in sorted(changes)]
        return newest

    def load_or_report(self, report: Report) -> RunInfo | None:
        """Return the result of :meth:`load`; a damaged file is reported and gives None."""
        try:
            return self.load()
        except UsageError as error:
            report(f"{error.message}; what only it says is left out")
        return None

    def is_own(self, info: RunInfo) -> bool:
        """Return whether this user wrote the input and job in ``run.json``."""
        return is_signed(self.path, info.sealed_content(), info.seal)

    def _read(self, path: Path) -> RunInfo | None:
        try:
            return msgspec.json.decode(read_regular(path), type=RunInfo)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {path}: {error}",
                hint="move it aside to keep the journal, or begin again with --fresh",
            ) from error

    def save(self, info: RunInfo, part: str = "all") -> None:
        """Write ``run.json``, or the file of a part, since parts start and end on their own.

        Raises:
            WriteError: it cannot be written.
        """
        info.seal = sign(self.path, info.sealed_content())
        own = RunInfo(**msgspec.structs.asdict(info))
        own.starts = [start for start in info.starts if start.part == part]
        if part == "all":
            _write_info(self.path / "run.json", own)
            return
        _write_info(self.path / f"run-{part}.json", own)
        if not (self.path / "run.json").exists():
            own.starts = []
            _write_info(self.path / "run.json", own)

    def record_end(self, code: int, reason: str, action: str) -> None:
        """Set how the last start of each part ended, once the parts are known to be one run.

        Raises:
            WriteError: it cannot be written.
        """
        run = self.load()
        for part in run.parts if run else ():
            path = self.path / ("run.json" if part == "all" else f"run-{part}.json")
            info = self._read(path)
            if info is not None and info.starts:
                start = info.starts[-1]
                start.exit_code, start.reason, start.action = code, reason, action
                _write_info(path, info)

    def check_fingerprint(
        self, now: Mapping[str, str], on_change: OnChange, part: str = "all"
    ) -> list[str]:
        """Return what changed since the last start; empty if nothing did.

        Args:
            now: the current fingerprints. Model, input and id are compared only where both
                starts have them: ``auto`` is not known before a server has told the model.
            on_change: ``refuse`` raises if something changed; the caller handles the others.
            part: the part that starts. It compares with its own last start, if it has any.

        Raises:
            ChangedError: something changed and ``on_change`` is ``refuse``.
        """
        info = self.load(part)
        before = info.fingerprints if info else {}
        if not before:
            return []
        # A named run has no input among them, and a run of an older version no id.
        optional = {key for key in ("id", "input", "model") if key not in before or key not in now}
        compared = {*before, *now} - optional
        changed = sorted(key for key in compared if before.get(key) != now.get(key))
        if changed and on_change == "refuse":
            effect = ", so each row counts as a new one" if "id" in changed else ""
            if "input" in changed:
                effect += f", of {before['input']}"
            raise ChangedError(
                f"{', '.join(changed)} changed since {self.path} was begun{effect}",
                hint=CHANGED_HINT,
            )
        return changed

    def move_aside(self, clock: Callable[[], float] = time.time) -> Path:
        """Move the run to ``NAME.YYYYMMDD-HHMMSS`` beside it, and return that path.

        Other files in the directory stay.

        Raises:
            OwnedError: a live process owns it.
            UsageError: it cannot be moved.
        """
        for record in owners(self.path).values():
            if is_live(record, clock()):
                raise OwnedError(
                    f"{record.process} is working on {self.path}",
                    hint="stop it first, or give another --name",
                )
        path = self.path.absolute()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
        try:
            entries = list(path.iterdir())
            own = [entry for entry in entries if _is_own(entry)]
            target = _new_directory(path.with_name(f"{path.name}.{stamp}"))
            if len(own) == len(entries):
                path.rename(target)
            else:
                for entry in own:
                    entry.rename(target / entry.name)
        except OSError as error:
            raise UsageError(
                f"cannot move {self.path} aside: {error.strerror}",
                hint="move it by hand, or give another --name",
            ) from error
        self.aside = target
        return target

    def put_back(self) -> None:
        """Replace the run by the one that was moved aside; other files in the directory stay.

        Raises:
            OSError: it cannot be moved.
        """
        if self.aside is None:
            return
        for entry in filter(_is_own, list(self.path.iterdir())):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        for entry in list(self.aside.iterdir()):
            entry.rename(self.path / entry.name)
        self.aside.rmdir()
        self.aside = None


def _is_own(entry: Path) -> bool:
    return entry.name in _OWN_NAMES or any(entry.match(p) for p in _OWN_PATTERNS)


def _new_directory(path: Path) -> Path:
    """Make ``path``, or ``path-2`` and so on if it exists."""
    number = 1
    while True:
        target = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            target.mkdir(PRIVATE)
        except FileExistsError:
            number += 1
            continue
        return target


def _write_info(path: Path, info: RunInfo) -> None:
    """Write ``run.json`` or the file of a part atomically."""
    text = msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n"
    try:
        write_atomic(path, text, sync=True)
    except OSError as error:
        raise write_error(path, error) from error


def list_runs(runs_dir: Path) -> list[RunDir]:
    """Return the runs directly under a folder, latest start first."""
    try:
        runs = [RunDir(path) for path in runs_dir.iterdir() if RunDir(path).is_run()]
    except OSError:
        return []
    return sorted(runs, key=_latest, reverse=True)


def _latest(run: RunDir) -> float:
    with contextlib.suppress(UsageError):
        info = run.load()
        if info is not None and info.starts:
            return info.starts[-1].at
    with contextlib.suppress(OSError):
        return (run.path / "run.json").stat().st_mtime
    with contextlib.suppress(OSError):
        return run.journal.stat().st_mtime
    return 0.0


MOST_NAMES = 8
"""Names of runs in a message."""


def find_run(name: str | Path | None, runs_dir: Path = Path("runs")) -> RunDir:
    """Return a run by its directory or its name under ``runs_dir``; None: the latest.

    Raises:
        UsageError: there is none; the hint suggests similar names.
    """
    if name is None:
        runs = list_runs(runs_dir)
        if not runs:
            raise UsageError(
                f"there is no run under {runs_dir}", hint="name a run directory: bagent COMMAND RUN"
            )
        return runs[0]
    for path in (Path(name), runs_dir / name):
        if RunDir(path).is_run():
            return RunDir(path)
    names = [run.path.name for run in list_runs(runs_dir)]
    near = difflib.get_close_matches(str(name), names, 3, 0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        hint = f"in {runs_dir}: {', '.join(names[:MOST_NAMES])}{more}"
    else:
        hint = f"there is no run under {runs_dir}"
    what = "is no run directory" if Path(name).is_dir() else "no such run"
    raise UsageError(f"{name}: {what}", hint=hint)
