"""The raw rows of a load test. All times are seconds since its start, on the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from bagent.errors import WriteError

Way = Literal["chat", "completions", "list", "chat-batch", "job"]
"""How calls travel: a chat or a text each, lists of texts, batches of chats, rows of a job."""

Routing = Literal["balanced", "least-inflight", "affinity", "as-run", "isolated"]
"""Which endpoint gets a request: each as many, the one with the fewest in flight, the one that the
prompt's group or the conversation belongs to, the one that a run would choose, or one endpoint
after the other while the rest are idle."""

T = TypeVar("T")


class RequestRow(msgspec.Struct, omit_defaults=True):
    """One HTTP request."""

    stage: int
    """Number of the stage; ``warmup`` rows count nowhere."""
    worker: int
    number: int
    """Place in the stage's schedule, over all workers; the turns of a conversation share it."""
    endpoint: str
    way: str
    scheduled: float
    """When it was to be sent; in a closed loop that is when it was sent."""
    sent: float = 0.0
    done: float = 0.0
    """When the answer was whole, or the request failed or was given up."""
    status: Literal["ok", "failed", "unfinished"] = "unfinished"
    """``unfinished`` was still going on when the stage's time was over: its times up to ``done``
    are lower bounds, as those of a timeout are."""
    size: int = 1
    """Calls in the request; tokens are sums over them."""
    warmup: bool = False
    turn: int = 1
    """Which turn of its conversation it is, from 1."""
    group: int | None = None
    """Number of the shared prefix."""
    first_byte: float | None = None
    first_token: float | None = None
    """First piece of an answer, be it thinking; ``first_answer`` the first that is none. Both
    None where nothing streamed."""
    first_answer: float | None = None
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
    """The server told no token count; pieces are counted in its place."""
    opened: bool = False
    """A connection had to be opened, which is part of the times."""
    in_flight: int = 0
    """Requests of this worker in flight to the endpoint when it was sent, with it."""
    chunk_at: list[int] = []
    """Microseconds from ``sent`` to each read that held pieces of an answer, ``chunk_count`` how
    many, ``chunk_tokens`` the tokens so far where the server tells."""
    chunk_count: list[int] = []
    chunk_tokens: list[int] = []


class LoadStageRow(msgspec.Struct):
    """One stage as it went.

    ``load`` names what all repeats of it share; ``feeding_ended`` is when the last request was
    sent. ``window_from`` and ``window_to`` bound the steady window.
    """

    stage: int
    load: str
    repeat: int
    way: str
    routing: str
    endpoints: int
    began: float
    feeding_ended: float
    ended: float
    window_from: float
    window_to: float
    only: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrival: str | None = None
    cut: bool = False


class ClientRow(msgspec.Struct):
    """What a stage cost one worker: ``lags_us`` are how late its event loop was, sampled."""

    stage: int
    worker: int
    seconds: float
    cpu_seconds: float
    lags_us: list[int]


class ServerRow(msgspec.Struct):
    """One reading of an endpoint's own counters; see bagent.backends.engines.metrics.EngineLoad."""

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
    """Appends raw rows to a JSONL file; rows are written out at :meth:`flush` and :meth:`close`.

    Every method raises WriteError where the disk is full, or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            self._file = path.open("ab", buffering=1 << 20)
        self._encode = msgspec.json.Encoder().encode

    def write(self, row: msgspec.Struct) -> None:
        """Add one row."""
        try:  # without the price of what the others use: there is a row for each request
            self._file.write(self._encode(row) + b"\n")
        except OSError as error:
            raise self._failure(error) from None

    def flush(self) -> None:
        """Hand everything to the system, for other readers."""
        with self._told():
            self._file.flush()

    def close(self) -> None:
        """Write all and close."""
        with self._told():
            self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failure(error) from None

    def _failure(self, error: OSError) -> WriteError:
        return WriteError(f"cannot write {self._path}: {error.strerror or error}")
