"""Raw rows of a load test; all times are seconds since its start on the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from bagent.errors import WriteError

Way = Literal["chat", "completions", "list", "chat-batch", "job"]
"""How calls travel: one chat or text each, lists of texts, batches of chats, or rows of a job."""

Routing = Literal["balanced", "least-inflight", "affinity", "as-run", "isolated"]
"""Which endpoint gets a request: all equally, the one with the fewest in flight, that of the
prompt's group or conversation, the one that a run would choose, or one endpoint after the
other."""

T = TypeVar("T")


class RequestRow(msgspec.Struct, omit_defaults=True):
    """One HTTP request."""

    stage: int
    """Number of the stage; ``warmup`` rows count nowhere."""
    worker: int
    number: int
    """Index in the stage's schedule, over all workers; shared by the turns of a conversation."""
    endpoint: str
    way: str
    scheduled: float
    """When it was due; in a closed loop, when it was sent."""
    sent: float = 0.0
    done: float = 0.0
    """When the answer was complete, or the request failed or was given up."""
    status: Literal["ok", "failed", "unfinished"] = "unfinished"
    """``unfinished``: still running when the stage ended; its times up to ``done`` are lower
    bounds, as those of a timeout are."""
    size: int = 1
    """Calls in the request; tokens are sums over them."""
    warmup: bool = False
    turn: int = 1
    """Turn of its conversation, from 1."""
    group: int | None = None
    """Number of the shared prefix."""
    first_byte: float | None = None
    first_token: float | None = None
    """First piece of the answer or its reasoning; None where nothing streamed."""
    first_answer: float | None = None
    """First piece of the answer itself; None where nothing streamed."""
    last_token: float | None = None
    code: int | None = None
    error_kind: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    estimated: bool = False
    """The server reported no token count; pieces are counted instead."""
    opened: bool = False
    """A connection was opened, which is part of the times."""
    in_flight: int = 0
    """Requests of this worker at the endpoint when it was sent, itself included."""
    chunk_at: list[int] = []
    """Microseconds from ``sent`` to each read that held pieces of the answer."""
    chunk_count: list[int] = []
    """Pieces in each of these reads."""
    chunk_tokens: list[int] = []
    """Tokens so far at each of these reads, where the server reports them."""


class LoadStageRow(msgspec.Struct):
    """One stage as it was sent."""

    stage: int
    load: str
    """Name that all repeats share."""
    repeat: int
    way: str
    routing: str
    endpoints: int
    began: float
    feeding_ended: float
    """When the last request was sent."""
    ended: float
    window_from: float
    window_to: float
    """``window_from``, ``window_to``: the steady window."""
    only: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrival: str | None = None
    cut: bool = False


class ClientRow(msgspec.Struct):
    """What a stage cost one worker."""

    stage: int
    worker: int
    seconds: float
    cpu_seconds: float
    lags_us: list[int]
    """Samples of how late its event loop was."""


class ServerRow(msgspec.Struct):
    """One reading of an endpoint's counters; see
    :class:`bagent.backends.engines.metrics.EngineLoad`."""

    stage: int
    endpoint: str
    at: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    preemptions: int | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


class RowFile:
    """Appends raw rows to a JSONL file.

    Every method raises WriteError where the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._convert_errors():
            self._file = path.open("ab", buffering=1 << 20)
        self._encode = msgspec.json.Encoder().encode

    def write(self, row: msgspec.Struct) -> None:
        """Add one row; it is written at the next :meth:`flush` or :meth:`close`."""
        try:  # called per request: cheaper than the context manager
            self._file.write(self._encode(row) + b"\n")
        except OSError as error:
            raise self._failure(error) from None

    def flush(self) -> None:
        """Write everything, so that others can read it."""
        with self._convert_errors():
            self._file.flush()

    def close(self) -> None:
        """Write everything and close the file."""
        with self._convert_errors():
            self._file.close()

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write {self._path}: {error.strerror or error}")
