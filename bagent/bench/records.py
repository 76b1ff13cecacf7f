"""Raw rows of a load test, in memory, in DuckDB, and exported as Parquet and CSV.

All times are seconds since its start on the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from bagent.duck import Access, connect, file_source, literal
from bagent.errors import WriteError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Way = Literal["chat", "completions", "list", "chat-batch", "job"]
"""How calls travel: one chat or text each, lists of texts, batches of chats, or rows of a job."""

Routing = Literal["balanced", "least-inflight", "affinity", "as-run", "isolated"]
"""Which endpoint gets a request: all equally, the one with the fewest in flight, that of the
prompt's group or conversation, the one that a run would choose, or one endpoint after the
other."""

T = TypeVar("T")

DEFINITIONS: dict[str, str] = {
    "TTFT": "first token, be it thinking, minus sent",
    "TTFOT": "first token of the answer itself, minus sent",
    "TPOT": "(last token - first token) / (output tokens - 1); none below two tokens, nor where "
    "they all came at once",
    "NTPOT": "E2E from sent / output tokens",
    "pace": "NTPOT that also counts unfinished requests, by the tokens that they had got",
    "ITL": "gaps between tokens as a reader sees them, where the server counts tokens chunk by "
    "chunk: of m tokens that come together, the gap before them and m - 1 gaps of 0",
    "ICL": "the same gaps between pieces of the stream, where it does not; not comparable with ITL",
    "E2E": "done minus scheduled; scheduled is when the load's clock said to send, so waiting in "
    "the client counts. In a closed loop it is when it was sent",
    "E2E sent": "done minus sent",
    "lag": "sent minus scheduled, in open loops",
    "censored": "requests that timed out or were given up: in TTFT and E2E they count with the "
    "time that they had waited, which is a lower bound",
    "window": "from a tenth of the stage's time after its start until feeding ended; where a "
    "number of requests bounds it, from a tenth of them in an open loop and from the start in a "
    "closed one, and the whole stage where feeding took less than half of it or a closed loop sent "
    "less than twice what it has in flight. Latencies: "
    "requests scheduled in it. Requests a second: those that ended in it. Tokens a second: those "
    "that came in it, spread evenly from first to last token of each request",
    "goodput": "requests that ended in the window and kept every limit of the SLO, per second of "
    "it, so never more than requests a second; failed, timed-out and unfinished ones did not keep "
    "them. Good share: of those scheduled in the window",
    "conversation": "from the first turn's schedule to the last turn's end, thinking included; of "
    "those that began in the window and whose turns all ended well. A second: whole ones, each "
    "with the part of its time that lay in the window. Turns beyond the first are scheduled one "
    "thinking time after the answer before. Cached: the share of their prompt tokens that the "
    "server's usage says it had in its cache",
    "slow": "an endpoint below 0.7 times the median of the others, in tokens a second (closed "
    "loops) or in the time for a token, the median over all loads; not where the spread of the "
    "requests' times explains it: of 100 fleets of like endpoints at most one is to have one named",
    "percentiles": "of the raw requests of all endpoints and repeats together (linear "
    "interpolation), never averaged; p99 is hidden below 100 requests, p99.9 below 1,000",
}
"""Definitions of the report's terms."""

_SQL_TYPES: dict[Any, str] = {
    int: "BIGINT",
    float: "DOUBLE",
    str: "VARCHAR",
    bool: "BOOLEAN",
    list[int]: "INTEGER[]",
}


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


def _columns(row_type: type[msgspec.Struct]) -> dict[str, str]:
    """Return the columns of a kind of raw rows with their SQL types."""
    return {field.name: _sql_type(field.type) for field in msgspec.structs.fields(row_type)}


def _sql_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "VARCHAR"
    if isinstance(annotation, UnionType):
        annotation = get_args(annotation)[0]
    return _SQL_TYPES[annotation]


def _defaults(row_type: type[msgspec.Struct]) -> dict[str, str]:
    """Return the SQL literals of the values that raw rows omit."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(row_type)}
    return {
        name: literal(value) if isinstance(value, str) else str(value).lower()
        for name, value in defaults.items()
        if isinstance(value, str | int | float)
    }


TIMED = """
create view timed as
select r.*, s.load, s.repeat, s.routing, s.window_from, s.window_to,
    r.scheduled >= s.window_from and r.scheduled < s.window_to as counted,
    r.done >= s.window_from and r.done < s.window_to as ended_inside,
    r.status = 'unfinished' or coalesce(r.error_kind = 'timeout', false) as censored,
    1000 * (coalesce(r.first_token,
        case when r.status = 'unfinished' or r.error_kind = 'timeout' then r.done end) - r.sent)
        * case when r.status = 'failed' and r.error_kind <> 'timeout' then null else 1 end
        as ttft_ms,
    case when r.status = 'ok' then 1000 * (r.first_answer - r.sent) end as ttfot_ms,
    case when r.status = 'ok' and r.completion_tokens >= 2 and r.size = 1
            and coalesce(len(r.chunk_at), 0) <> 1
        then 1000 * (r.last_token - r.first_token) / (r.completion_tokens - 1) end as tpot_ms,
    case when r.status = 'ok' and r.completion_tokens >= 1
        then 1000 * (r.done - r.sent) / r.completion_tokens end as ntpot_ms,
    case when r.status <> 'failed' and r.completion_tokens >= 1
        then 1000 * (r.done - r.sent) / r.completion_tokens end as pace_ms,
    case when r.status <> 'failed' or r.error_kind = 'timeout'
        then 1000 * (r.done - r.scheduled) end as e2e_ms,
    case when r.status <> 'failed' or r.error_kind = 'timeout'
        then 1000 * (r.done - r.sent) end as e2e_sent_ms,
    case when s.rate is not null then 1000 * (r.sent - r.scheduled) end as lag_ms,
    coalesce(r.first_token, r.sent) as tokens_from,
    coalesce(r.last_token, r.done) as tokens_to
from requests r join stages s using (stage)
where not r.warmup
"""

SPREAD_TOKENS = """
create view spread_tokens as
select *, completion_tokens * case
    when tokens_to > tokens_from then
        greatest(0, least(tokens_to, window_to) - greatest(tokens_from, window_from))
        / (tokens_to - tokens_from)
    when tokens_from >= window_from and tokens_from < window_to then 1 else 0 end as tokens_inside,
    case when coalesce(first_token, done) >= window_from and coalesce(first_token, done) < window_to
        then prompt_tokens end as prompt_inside
from timed
"""

GAPS = """
create view gaps as
with pieces as (
    select load, stage, repeat, endpoint, number, worker,
        turn, unnest(chunk_at) as at_us, unnest(chunk_count) as pieces,
        unnest(chunk_tokens) as total,
        generate_subscripts(chunk_at, 1) as place
    from timed where counted and chunk_at is not null and len(chunk_at) > 0
), steps as (
    select *, at_us - lag(at_us) over w as gap_us, total - coalesce(lag(total) over w, 0) as tokens
    from pieces window w as (partition by stage, worker, number, turn order by place)
), counted_steps as (
    select *, coalesce(tokens, pieces) as count from steps
)
select load, stage, repeat, endpoint, total is not null as by_token, gap_us / 1000 as gap_ms
from counted_steps where gap_us is not null and count > 0
union all
select load, stage, repeat, endpoint, total is not null, 0
from counted_steps, range(greatest(count - 1, 0))
"""

DATABASE = "bench.duckdb"
MEMORY_LIMIT = "1GB"

_SOURCES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "requests": (RequestRow, "requests-*.jsonl"),
    "stages": (LoadStageRow, "stages.jsonl"),
    "client": (ClientRow, "client-*.jsonl"),
    "servers": (ServerRow, "servers.jsonl"),
}


class BenchTables:
    """The tables of one load test, in ``bench.duckdb`` of its folder; a context manager.

    Args:
        folder: the folder of the raw rows, where the database is rebuilt.
    """

    def __init__(self, folder: Path) -> None:
        import duckdb

        self._folder = folder
        path = folder / DATABASE
        try:
            path.unlink(missing_ok=True)
            self.connection: DuckDBPyConnection = connect(
                Access(folders=[folder]),
                database=path,
                read_only=False,
                settings={"threads": 2, "memory_limit": MEMORY_LIMIT},
            )
        except (OSError, duckdb.Error) as error:
            raise WriteError(f"cannot write {path}: {error}") from None
        for name, (row_type, pattern) in _SOURCES.items():
            self._load(name, row_type, pattern)
        for view in (TIMED, SPREAD_TOKENS, GAPS):
            self.connection.execute(view)

    def _load(self, name: str, row_type: type[msgspec.Struct], pattern: str) -> None:
        columns, defaults = _columns(row_type), _defaults(row_type)
        listed = ", ".join(f'"{column}" {type_}' for column, type_ in columns.items())
        self.connection.execute(f"create table {name} ({listed})")
        files = [path for path in sorted(self._folder.glob(pattern)) if path.stat().st_size]
        if not files:
            return
        selected = ", ".join(
            f'coalesce("{column}", {defaults[column]})' if column in defaults else f'"{column}"'
            for column in columns
        )
        self.connection.execute(
            f"insert into {name} select {selected} from read_json({file_source(*files)},"
            f" format='newline_delimited', columns={columns!r}, maximum_object_size=67108864)"
        )

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Return the rows of a query by column name."""
        result = self.connection.execute(query, list(values))
        names = [column[0] for column in result.description or ()]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def write_parquet(self) -> list[Path]:
        """Write every table as a Parquet file beside the database."""
        paths = []
        for name in _SOURCES:
            path = self._folder / f"{name}.parquet"
            self.connection.execute(
                f"copy {name} to {literal(str(path))} (format parquet, compression zstd)"
            )
            paths.append(path)
        return paths

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def __enter__(self) -> BenchTables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with equal keys as a CSV file with a header.

    Raises:
        WriteError: it cannot be written.
    """
    import csv

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from None
