"""Metering of proxied requests, in a run directory like the rows of a run."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from bagent import __version__
from bagent.backends import anthropic
from bagent.backends.openai.chat import read_usage
from bagent.backends.openai.responses import response_usage
from bagent.clocks import unix
from bagent.errors import BagentError, WriteError
from bagent.store.journal.journal import Journal, Syncer
from bagent.store.journal.reader import JournalReader
from bagent.store.lock import LockRenewer, RunLock
from bagent.store.run_dir import RunDir, RunInfo, Start
from bagent.text.json import json_or_none
from bagent.types import Attempt, EndpointSample, Failure, Json, Outcome, Usage

HEAD_BYTES = 8192
"""Bytes kept of a stream's beginning: Anthropic's first event has the prompt tokens."""

TAIL_BYTES = 65536
"""Bytes kept of a stream's end, which has the token counts."""


_LONGEST_MARK = 64
_ENDS = re.compile(
    rb"^(?:data: ?\[DONE\]|event: ?(?:message_stop|response\.(?:completed|incomplete|failed))\b)",
    re.MULTILINE,
)


def stream_ended(tail: bytes, size: int) -> bool:
    """Return whether the last ``size`` bytes of a stream contain its API's end mark."""
    return _ENDS.search(tail, max(0, len(tail) - size - _LONGEST_MARK)) is not None


def usage_in(tail: bytes, head: bytes = b"") -> tuple[Usage, str | None]:
    """Return token counts and model of an answer, None for what it does not report.

    Args:
        tail: a whole JSON body, or the last events of a stream.
        head: the beginning of the stream.
    """
    if tail.lstrip()[:1] == b"{":
        body = json_or_none(tail)
        if isinstance(body, dict):
            return _read(body), _model(body)
        # The tail of a long stream may begin with a brace too.
    last = _event(tail.splitlines()[::-1])
    if last is None:
        return Usage(), None
    if last.get("type") == "message_delta":
        first = (_event(head.splitlines()) or {}).get("message")
        start = first if isinstance(first, dict) else {}
        reported = {name: value for name, value in last["usage"].items() if value is not None}
        return anthropic.read_usage({**(start.get("usage") or {}), **reported}), _model(start)
    inner = last.get("response")
    body = inner if isinstance(inner, dict) else last
    return _read(body), _model(body)


def _read(body: dict[str, Any]) -> Usage:
    usage = body.get("usage")
    if not isinstance(usage, dict) or "input_tokens" not in usage:
        return read_usage(usage)
    if body.get("object") != "response":
        return anthropic.read_usage(usage)
    return response_usage(usage)


def _event(lines: list[bytes]) -> dict[str, Any] | None:
    """Return the first event in ``lines`` that reports usage."""
    for line in lines:
        if line.startswith(b"data:") and b'"usage"' in line:
            body = json_or_none(line[5:])
            if isinstance(body, dict) and _has_usage(body):
                return body
    return None


def _has_usage(body: dict[str, Any]) -> bool:
    holders = (body, body.get("message"), body.get("response"))
    return any(isinstance(each, dict) and isinstance(each.get("usage"), dict) for each in holders)


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


PART = "all"
STAGE = "proxy"


class ProxyRecord(msgspec.Struct):
    """One request from a client; times in Unix seconds."""

    name: str  # what the client calls it
    path: str
    received: float
    endpoint: str = ""
    status: int | None = None
    attempts: int = 0
    first_byte: float | None = None
    head: bytes = b""  # beginning and end of the answer
    tail: bytes = b""
    failure: Failure | None = None
    row: int | None = None  # its number in the run directory
    complete: bool = False  # the whole answer was sent to the client
    refusal: bytes = b""  # body of the last refusal
    usage: Usage = Usage()
    model: str | None = None

    def start_attempt(self, endpoint: str) -> None:
        """Record an attempt at ``endpoint``, and drop what an earlier one answered."""
        self.attempts += 1
        self.endpoint, self.status, self.first_byte = endpoint, None, None
        self.head = self.tail = self.refusal = b""

    def read_usage(self) -> None:
        """Read the token counts and the model of the answer."""
        self.usage, self.model = usage_in(self.tail, self.head)

    def add_chunk(self, chunk: bytes) -> None:
        """Record a chunk of a stream."""
        if self.first_byte is None:
            self.first_byte = unix()
        if len(self.head) < HEAD_BYTES:
            self.head += chunk
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        self.complete = self.complete or stream_ended(self.tail, len(chunk))


class UsageMeter:
    """Writes one outcome for each request and one record for each attempt.

    Args:
        path: the run directory; created if needed.
        endpoints: names of the fleet, for run.json.
        report: receives messages for people.
        on_usage: receives the usage of each request and the name of its client.
        on_fault: receives, once, why nothing more is recorded: the disk refuses, or another
            process has taken the directory over. The proxy should stop then; no other method
            raises it.

    Raises:
        OwnedError: another process writes there.
        WriteError: the directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        endpoints: list[str],
        report: Callable[[str], None],
        on_usage: Callable[[str, Usage], None] = lambda name, usage: None,
        on_fault: Callable[[BagentError], None] = lambda fault: None,
    ) -> None:
        self._on_usage = on_usage
        self._on_fault = on_fault
        self._fault: BagentError | None = None
        self._directory = RunDir.create(path)
        self._lock = RunLock.acquire(path, PART)
        before = self._directory.load()
        starts = list(before.starts) if before else []
        start = Start(unix(), PART, platform.node(), os.getpid(), __version__)
        self._count = _rows_of(path, before)
        self._names = set(endpoints)
        names: list[Json] = [{"name": name} for name in endpoints]
        self._info = RunInfo(
            name=path.name,
            job={"proxy": True},
            versions={"bagent": __version__},
            endpoints=names,
            stages=[STAGE],
            keep_input=False,
            created_at=before.created_at if before else start.at,
            starts=[*starts, start],
        )
        self._directory.save(self._info, PART)
        self._journal = Journal.open(path, PART, clock=time.monotonic, report=report)
        self._syncer = Syncer(self._journal)
        self._syncer.start()
        self._renewer = LockRenewer(self._lock)
        self._renewer.start()

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._directory.path

    def assign_row(self, record: ProxyRecord) -> int:
        """Return the row number of a request, a new one if it has none."""
        if record.row is None:
            record.row = self._count
            self._count += 1
        return record.row

    def attempt(self, record: ProxyRecord, sent: float, failure: Failure | None) -> None:
        """Record an attempt and why it failed."""
        row, usage = self.assign_row(record), record.usage
        attempt = Attempt(
            key=_key(record),
            row=row,
            stage=STAGE,
            answer=0,
            turn=1,
            try_=record.attempts,
            endpoint=record.endpoint,
            group=f"{record.endpoint}/{row}.{record.attempts}",
            group_size=1,
            sent=sent,
            first_byte=record.first_byte,
            done=unix(),
            status_code=record.status,
            error_kind=failure.kind if failure else None,
            error=failure.message if failure else None,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            id=record.name,
        )
        self._write(lambda: self._journal.write_attempts([attempt]))

    def request(self, record: ProxyRecord) -> None:
        """Record the end of a request."""
        row = self.assign_row(record)
        usage = record.usage
        now = unix()
        failure = record.failure
        first = record.first_byte
        outcome = Outcome(
            key=_key(record),
            row=row,
            id=record.name,
            source=record.path,
            line=row + 1,
            stage=STAGE,
            status="ok" if failure is None else "failed",
            error_kind=failure.kind if failure else None,
            error=failure.message if failure else None,
            endpoint=record.endpoint or None,
            model=record.model,
            attempts=record.attempts,
            turns=1,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            started_at=round(record.received, 4),
            finished_at=round(now, 4),
            latency_ms=round((now - record.received) * 1000, 2),
            ttft_ms=None if first is None else round((first - record.received) * 1000, 2),
        )
        self._on_usage(record.name, usage)
        self._write(lambda: self._journal.write(outcome))

    def sample(self, sample: EndpointSample) -> None:
        """Record the state of an endpoint, and one that joined in run.json."""
        if sample.endpoint not in self._names:
            self._names.add(sample.endpoint)
            self._info.endpoints.append({"name": sample.endpoint})
            self._write(lambda: self._directory.save(self._info, PART))
        self._write(lambda: self._journal.write_sample(sample))

    def tick(self) -> None:
        """Write what is buffered; call it about every second."""
        if self._renewer.lost is not None:
            self._fail(self._renewer.lost)
        self._write(self._journal.tick)

    def close(self, code: int) -> None:
        """Sync and close the journal and release the directory.

        ``code`` is recorded as the exit code, unless there was a fault.
        """
        try:
            self._syncer.stop()
            try:
                self._journal.close()
            except WriteError as error:
                self._fail(error)
            self._renewer.stop()
            if self._renewer.lost is not None:
                self._fail(self._renewer.lost)
                return  # run.json is the other process's now
            self._info.total_rows = self._count
            self._info.starts[-1].ended_at = unix()
            self._info.starts[-1].exit_code = self._fault.exit_code if self._fault else code
            try:
                self._directory.save(self._info, PART)
            except WriteError as error:
                self._fail(error)
        finally:
            self._lock.release()

    def _write(self, write: Callable[[], object]) -> None:
        """Write, unless an earlier write failed."""
        if self._fault is None:
            try:
                write()
            except WriteError as error:
                self._fail(error)

    def _fail(self, fault: BagentError) -> None:
        if self._fault is None:
            self._fault = fault
            self._on_fault(fault)


def _rows_of(path: Path, before: RunInfo | None) -> int:
    """Return the rows of earlier starts; the journal counts those of a start that was killed."""
    if before is None:
        return 0
    total = int(before.total_rows or 0)
    if all(start.ended_at is not None for start in before.starts):
        return total
    with JournalReader(path, lambda _: None) as lines:  # opening the journal reports what is broken
        return max(total, 1 + max((line.row for line in lines.written()), default=-1))


def _key(record: ProxyRecord) -> str:
    text = f"{record.name} {record.received}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).hexdigest()
