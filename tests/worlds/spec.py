"""The script of a world: plain values whose ``repr`` can be pasted as a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class RowSpec:
    """One row of the input."""

    id: Any
    text: str = "stone"
    replies: tuple[str, ...] = ("ok",)
    """What healthy servers answer to its requests, one after the other; the last one stays."""
    seconds: float = 1.0
    """How long an answer takes."""
    stage: str = ""
    """The stage that its replies are for; its requests of others are answered well."""
    calls: tuple[tuple[str, ...], ...] = ()
    """The tool calls of each turn of an agent before its answer: ``act:slow``, ``look:fail``."""
    same: int | None = None
    """The number of the first row with the same prompt; its replies and seconds count."""


@dataclass(frozen=True)
class Window:
    """A time in which an endpoint is not well."""

    begin: float
    end: float
    kind: str
    """A reply (``500``, ``503+5``, ``hang``), or ``down``, ``silent``, ``lost-model``."""


@dataclass(frozen=True)
class EndpointSpec:
    """One server."""

    speed: float = 1.0
    """Its answers take this many times as long."""
    windows: tuple[Window, ...] = ()
    capacity: int | None = None
    """Requests in flight above this are refused with 503."""
    most: int | None = None
    """The tag ``max_concurrency`` of its line in the hostfile."""
    context: int = 4096
    """Tokens of a prompt and its answer."""
    tokenizes: bool = False
    """It counts tokens for others."""
    pace: int | None = None
    """Requests a minute that it takes, from a bucket of so many; others get a 429."""
    tells: Literal["", "after", "limits"] = ""
    """What a server with a pace says: when to ask again, or its limits in each answer."""
    refuses: str = ""
    """A parameter of requests that it no longer takes: ``max_tokens`` or ``temperature``."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a start."""

    start: int
    """The number of the start."""
    kind: Literal[
        "term", "int", "kill", "kill-at-call", "power", "power-at-call", "full", "short",
        "tight", "sync-fails", "hosts", "stop-file", "rival", "edit", "edit-back", "suspend",
        "reader-gone", "look",
    ]  # fmt: skip
    at: float
    """Seconds after the start began; for ``-at-call`` and ``rival`` the number of the system call;
    for ``edit`` and ``edit-back`` the number of the row that gets a new text, or the one before it,
    before the start; for ``reader-gone`` the number of lines after which stdout is closed."""
    until: float = 0.0
    """When a fault of the disk ends (``tight``: it has room for short writes only), or when the
    same command is given again while the process is suspended, which wakes up at its end. For
    ``-at-call`` the second of the start from which on calls are counted."""
    hosts: tuple[int, ...] = ()
    """Numbers of the endpoints that a rewritten hostfile lists; with none it is empty."""
    weight: float = 1.0
    """The tag ``weight`` of all its lines."""


@dataclass(frozen=True)
class JobSpec:
    """The job."""

    kind: Literal[
        "single", "schema", "lists", "agents", "stages", "batches", "shards", "copies"
    ] = "single"
    """``single``: one chat a row; ``schema``: the same with a schema, and answers that are not
    valid are asked again; ``lists``: raw prompts, several in a request; ``agents``: chats
    with tools; ``stages``: several stages; ``batches``: batches of a provider;
    ``shards``: starts take turns with the shards of the rows; ``copies``: a single chat for
    all rows with one prompt."""
    topology: str = ""
    """The topology of a job with stages."""
    shards: int = 1
    answers: int = 1
    """Answers of each row."""
    retries: int = 2
    concurrency: int | str = 8
    per_endpoint: int | str = "auto"
    timeout: float = 20.0
    """Longest time of one request."""
    first_token: float | None = None
    """Longest time to the first piece of a streamed answer."""
    idle: float | None = None
    """Longest time between two pieces of it."""
    temperature: float = 0.0
    hedge: float | str = "off"
    truncated: Literal["fail", "accept"] = "fail"
    grow: float | None = None
    """How many times as long a truncated answer may be when it is asked for again."""
    allow_failures: int = 0
    segment_bytes: int | None = None
    """Size of a segment of the journal; None: the usual one, which no world fills."""
    deadline: float | None = None
    """Seconds that each start has."""
    budget: float | None = None
    """Dollars that each start may spend; a token of an answer costs one."""
    priced: bool = False
    """The tokens have their price without a budget too."""
    alike: int = 50
    """Rows in a row that fail alike before a start stops."""
    row_seconds: float | None = None
    """Longest time of one row."""
    rpm: int | None = None
    """Requests a minute."""
    tpm: int | None = None
    """Tokens a minute."""
    system: int = 0
    """Bytes of a system prompt, which all rows share."""
    stream: bool | None = None
    """Whether answers are streamed; None: where that helps."""
    by: float | None = None
    """Seconds until when all rows of a job with batches are to be done."""
    stop_after: int | None = None
    """Failed rows after which a start stops."""
    on_failure: str = ""
    """What a stage of a pipeline does about rows that failed before it."""
    hosted: bool = False
    """Its one server is that of a provider, which may limit requests."""
    tool_rate: float | None = None
    """Runs a second of the tool ``act``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``bagent run``."""


@dataclass(frozen=True)
class World:
    """Everything that happens."""

    seed: int
    job: JobSpec
    rows: tuple[RowSpec, ...]
    endpoints: tuple[EndpointSpec, ...]
    events: tuple[Event, ...] = ()
    pause: float = 5.0
    """Seconds between two starts."""
    limit: int | None = None
    """Rows that the first command takes, with ``--limit``; the later ones take all."""
    rerun: bool = False
    """The same command is given once more after the end."""
    rerun_options: dict[str, Any] = field(default_factory=dict)
    """More options of that command."""
    batches: tuple[str, ...] = ()
    """How batches go, in the order of their creation: ``slow:600``, ``expired``, ``lost-line``,
    ``lost-reply`` of the creation, ``failed`` poll, ``cut`` download, or a status that refuses."""

    @cached_property
    def units(self) -> tuple[RowSpec, ...]:
        """What is asked for: each row, as often as it has answers."""
        return tuple(row for row in self.rows for _ in range(self.job.answers))

    @cached_property
    def leads(self) -> tuple[int, ...]:
        """For each unit the one whose number its prompt has."""
        return tuple(
            self.unit(number if row.same is None else row.same, answer)
            for number, row in enumerate(self.rows)
            for answer in range(self.job.answers)
        )

    def unit(self, row: int, answer: int) -> int:
        """Return the number of one answer of a row among all units."""
        return row * self.job.answers + answer
