"""A simulated provider of batches, which outlives the processes of a world."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from bagent.backends.failures import failure_from_status
from bagent.backends.profile import Form
from bagent.backends.request import Request
from bagent.batches.http import fetch_all
from bagent.batches.record import BatchError, BatchRecord, BatchStatus, ServiceLimits
from bagent.batches.service import Answer, LearnedForms
from bagent.types import Failure, Reply, Usage
from worlds.network import MARK, Network, Sent
from worlds.replies import MODEL, answer_text, base_kind

Json = Any

SIZE = 4
"""Rows in a batch."""

REPLY_SECONDS = 0.5
"""How long the provider takes for each of its replies."""


def backend_keys() -> dict[str, Json]:
    """Return the keys of a job whose one server is that of a provider."""
    url = "openai+http://server0:8000/v1"
    return {"hostfile": None, "backend": {"url": url, "api_key_env": "WORLD_KEY"}}


def job_keys(by: float | None = None) -> dict[str, Json]:
    """Return the keys of a job whose rows go in batches.

    Args:
        by: seconds in which all are to be done, if need be by single calls.
    """
    late = {"mode": "cheapest", "by": f"{by:g}s"} if by is not None else {}
    return {
        **backend_keys(),
        "batching": {"mode": "provider", "size": SIZE, **late},
    }


@dataclass
class Batch:
    """A batch at the provider."""

    id: str
    label: str
    file: str
    rows: int
    created: float
    course: str
    start: int
    """The start that made it."""
    answers: bytes = b""
    """Empty until they were fetched first."""
    cancelled: float | None = None
    """When the client cancelled it."""
    refused: bool = False
    """The provider refused it as a whole."""


@dataclass
class Provider:
    """The files and batches of an account."""

    network: Network
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)

    def course(self) -> str:
        """Return the course of the next batch."""
        courses = self.network.world.batches
        number = len(self.batches) + self.refused.total()
        return courses[number] if number < len(courses) else "ok"

    def answer(self, batch: Batch) -> bytes:
        """Return the answers to the rows of a batch, in another order than they were sent."""
        if not batch.answers:
            lines = self.files[batch.file].splitlines()
            answers = [self._answer(batch, number, line) for number, line in enumerate(lines)]
            batch.answers = b"".join(answer for answer in reversed(answers) if answer)
        return batch.answers

    def faults(self, batch: Batch) -> tuple[BatchError, ...]:
        """Return why a batch is refused as a whole: its size, or rows that every server refuses."""
        if batch.course == "full":
            return (BatchError("Enqueued token limit reached", "token_limit_exceeded"),)
        if batch.course != "faults":
            return ()
        faults = []
        for number, line in enumerate(self.files[batch.file].splitlines(), 1):
            match = MARK.search(line)
            assert match is not None
            if self.network.world.units[int(match[1])].replies in (("400",), ("422",)):
                faults.append(BatchError("it cannot be read", "invalid", number))
        return tuple(faults)

    def _answer(self, batch: Batch, number: int, line: bytes) -> bytes:
        network = self.network
        name = msgspec.json.decode(line)["name"]
        match = MARK.search(line)
        assert match is not None
        row, version = int(match[1]), int(match[2])
        expired = number % 2 and (batch.course == "expired" or batch.cancelled is not None)
        lost = batch.course == "lost-line" and number == 0
        if expired or lost:
            status: Json = "expired"
        else:
            replies = network.world.units[row].replies
            status = base_kind(replies[min(network.asked[row], len(replies) - 1)])
            network.asked[row] += 1
        now = network.clock.now
        sent = Sent(batch.start, 0, batch.created, (row,), (version,), status, (status,))
        sent.status, sent.done, sent.arrived = 200, now, True
        network.sent.append(sent)
        if lost:
            return b""
        text = answer_text(row, version)
        return msgspec.json.encode({"name": name, "status": status, "text": text}) + b"\n"


class WorldBatches(LearnedForms):
    """See :class:`bagent.batches.service.BatchService`."""

    def __init__(self, provider: Provider, endpoint: Any, notice: Callable[[str], None]) -> None:
        super().__init__(endpoint, ServiceLimits(rows=1000, bytes=10_000_000), "auto", notice)
        self._provider = provider

    def group(self, request: Request) -> str:
        """Return route and model."""
        return f"/v1/chat/completions {MODEL}"

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """Return the line of a request."""
        return msgspec.json.encode({"name": name, "messages": request.messages})

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """Look for a batch by its label."""
        failure = await self._reply()
        if failure is not None:
            return failure
        for batch in self._provider.batches.values():
            if batch.label == record.label and not batch.refused:
                return batch.id
        return None

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Keep the file."""
        name = f"file-{len(self._provider.files)}"
        self._provider.files[name] = requests.read_bytes()
        return await self._reply() or name

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Make the batch, unless the provider refuses all requests; the reply may be lost."""
        provider, course = self._provider, self._provider.course()
        refusal = self._failure()
        if _is_refusal(refusal):
            await asyncio.sleep(REPLY_SECONDS)
            return refusal
        if course == "quota":
            await asyncio.sleep(REPLY_SECONDS)
            provider.refused[course] += 1
            return failure_from_status(400, "Enqueued token limit reached for the model", {})
        if course in ("429", "500", "503"):
            await asyncio.sleep(REPLY_SECONDS)
            provider.refused[course] += 1
            return failure_from_status(int(course), "try again later", {})
        name = f"batch-{len(provider.batches)}"
        now = provider.network.clock.now
        provider.batches[name] = Batch(
            name,
            record.label,
            record.file_id or "",
            record.rows,
            now,
            course,
            provider.network.start,
        )
        failure = await self._reply()
        if course == "lost-reply":
            return Failure("connect", "the connection was lost", passing=True)
        return name if failure is None or _is_refusal(failure) else failure

    async def poll(self, record: BatchRecord) -> BatchStatus | Failure:
        """Return how far the batch is."""
        failure = await self._reply()
        if failure is not None:
            return failure
        batch = self._provider.batches[str(record.batch_id)]
        course, _, seconds = batch.course.partition(":")
        age = self._provider.network.clock.now - batch.created
        if age < float(seconds or 5.0) and batch.cancelled is None:
            return BatchStatus("in_progress")
        if not batch.answers and (faults := self._provider.faults(batch)):
            batch.refused = True
            return BatchStatus("failed", over=True, faults=faults)
        if course == "failed" and not batch.answers:
            batch.course = "ok"
            return failure_from_status(500, "no status", {})
        return BatchStatus("completed", over=True, ended=batch.rows, outputs=("answers",))

    async def cancel(self, record: BatchRecord) -> Failure | None:
        """End a batch; each second row of it was not answered."""
        failure = await self._reply()
        if failure is None:
            batch = self._provider.batches[str(record.batch_id)]
            batch.cancelled = self._provider.network.clock.now
        return failure

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """Download the answers; the first download may break off."""
        failure = await self._reply()
        return failure or await fetch_all(_Download(self._provider), [str(record.batch_id)], into)

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """Parse one answer."""
        value = msgspec.json.decode(line)
        return value["name"], _result(value["status"], value["text"])

    async def close(self) -> None:
        """Close nothing."""

    async def _reply(self) -> Failure | None:
        await asyncio.sleep(REPLY_SECONDS)
        return self._failure()

    def _failure(self) -> Failure | None:
        state = self._provider.network.state(0)
        if state is None:
            return None
        if state.partition("+")[0].isdigit() and state[0] in "45" and state[:3] not in _REFUSALS:
            return failure_from_status(int(state[:3]), "not now", {})
        return Failure("connect", "no connection", passing=True)


_REFUSALS = ("401", "403")


def _is_refusal(failure: Failure | None) -> TypeGuard[Failure]:
    """Return whether a failure says that nothing was made."""
    return failure is not None and failure.status is not None and failure.status < 500


class _Download:
    """See :class:`bagent.batches.http.FileDownloader`; the first download may break off."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def fetch(self, path: str, into: Path) -> Failure | None:
        """Append the answers of a batch to a file."""
        provider = self._provider
        batch = provider.batches[path]
        content = provider.answer(batch)
        provider.fetched[path] += 1
        await asyncio.sleep(REPLY_SECONDS)
        broken = batch.course == "cut" and provider.fetched[path] == 1
        with into.open("ab") as file:
            file.write(content[: len(content) // 2] if broken else content)
        return Failure("connect", "the connection was lost", passing=True) if broken else None


def _result(status: str, text: str) -> Reply | Failure:
    usage = Usage(prompt=10, completion=5)
    if status in ("ok", "usage", "slow", "length", "filter", "blank"):
        finish = {"length": "length", "filter": "content_filter"}.get(status, "stop")
        return Reply("" if status == "blank" else text, finish, MODEL, usage=usage)
    if status == "expired":
        return Failure("timeout", "the batch expired", passing=True)
    if status == "overflow":
        return failure_from_status(400, "This model's maximum context length is 4096 tokens.", {})
    code = int(status) if status.isdigit() else 500
    return failure_from_status(code, "try again later", {})
