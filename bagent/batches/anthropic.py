"""Anthropic's Message Batches.

Source: Anthropic's API reference and the types of its Python SDK (``messages/batches``). All
requests go in one body; answers are one file of lines in any order, once the batch has ended. A
batch has no name: one whose creation was not confirmed is searched by its size and identified by
the names in its answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from bagent.backends.anthropic import IGNORED_SAMPLING, AnthropicWriter, reply_from_message
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status, find_error
from bagent.backends.keys import KeySource
from bagent.backends.openai.raw_request import ChatRequests
from bagent.backends.prefix_cache import SharedPrefix
from bagent.backends.profile import Form
from bagent.backends.request import CallSettings, Request
from bagent.batches.http import PIECE, fetch_all
from bagent.batches.record import BatchRecord, BatchStatus, ServiceLimits
from bagent.batches.service import Answer, HttpBatches, created_id, not_a_batch, request_number
from bagent.text.json import decode_json, encode_json
from bagent.types import Failure, Json, Reply

LIMITS = ServiceLimits(rows=100_000, bytes=250_000_000)
CLOCK_SKEW = 600.0
LIST_SIZE = 100
_PATH = "/messages/batches"
_HEAD, _TAIL = b'{"requests":[', b"]}"
_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


class AnthropicBatches(HttpBatches):
    """See :class:`bagent.batches.service.BatchService`.

    Args:
        enforce: whether the schema is asked for by the API; see the Anthropic backend.
        notice: gets a line for people when something is learned or left out.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keys: KeySource | None,
        *,
        enforce: str,
        notice: Callable[[str], None],
    ) -> None:
        super().__init__(endpoint, keys, LIMITS, enforce, notice)
        self._chats = ChatRequests("Anthropic's API", IGNORED_SAMPLING, notice)
        self._writers: dict[tuple[str, Form, int], tuple[CallSettings, AnthropicWriter]] = {}

    # --- requests ---------------------------------------------------------------------------------

    def group(self, request: Request) -> str:
        """Return route and model."""
        body = request.body or {}
        return f"/v1/messages {request.settings.model or body.get('model') or ''}"

    def line(self, request: Request, form: Form, name: str) -> bytes:
        """Return ``{"custom_id", "params"}``."""
        request = self._chats.unpack(request)
        settings = request.settings
        key = (settings.model or "", form, id(settings))
        cached = self._writers.get(key)
        if cached is None:
            if len(self._writers) >= 64:
                self._writers.clear()
            writer = AnthropicWriter(key[0], form, SharedPrefix())
            cached = self._writers[key] = settings, writer
        body = cached[1].body(request, stream=False)
        return b'{"custom_id":"%s","params":' % name.encode() + body + b"}"

    # --- batches ----------------------------------------------------------------------------------

    async def find(self, record: BatchRecord) -> str | Failure | None:
        """Search the batches created since for one of the same size.

        A batch that has ended is identified by the names in its answers. One in progress may be
        ours and is waited for.
        """
        after = ""
        oldest = (record.sent_at or 0.0) - CLOCK_SKEW
        while True:
            page = await self._web.get(f"{_PATH}?limit={LIST_SIZE}{after}")
            if isinstance(page, Failure):
                return page
            entries = page.get("data") if isinstance(page, dict) else None
            for entry in entries or []:
                if (_seconds(entry.get("created_at")) or 0.0) < oldest:
                    return None
                if (
                    sum(_counts(entry).values()) != record.rows
                    or entry["id"] in record.rejected_ids
                ):
                    continue
                ours = True
                if entry.get("processing_status") == "ended":
                    ours_or_failure = await self._is_ours(str(entry["id"]), record)
                    if isinstance(ours_or_failure, Failure):
                        return ours_or_failure
                    ours = ours_or_failure
                else:
                    record.unconfirmed = True
                if ours:
                    return str(entry["id"])
            if not entries or not page.get("has_more"):
                return None
            after = f"&after_id={entries[-1]['id']}"

    async def _is_ours(self, batch_id: str, record: BatchRecord) -> bool | Failure:
        line = await self._web.first_line(f"{_PATH}/{batch_id}/results")
        if isinstance(line, Failure):
            return line
        try:
            name, _ = read_line(line)
        except ValueError:
            return False
        return request_number(name, record.label) is not None

    async def upload(self, record: BatchRecord, requests: Path) -> str | Failure:
        """Return an empty id: the API has no upload."""
        return ""

    async def create(self, record: BatchRecord, requests: Path) -> str | Failure:
        """POST all requests in one body, streamed from the file."""
        size = record.bytes - 1 + len(_HEAD) + len(_TAIL)
        created = await self._web.post_pieces(_PATH, lambda: _body(requests, record.bytes), size)
        return created_id(created, "a batch")

    async def poll(self, record: BatchRecord) -> BatchStatus | Failure:
        """GET the batch. Its counts do not change until it has ended."""
        batch = await self._web.get(f"{_PATH}/{record.batch_id}")
        if isinstance(batch, Failure):
            return batch
        if not isinstance(batch, dict) or not isinstance(batch.get("processing_status"), str):
            return not_a_batch(batch)
        counts = _counts(batch)
        ended = sum(counts.values()) - counts.get("processing", 0)
        status = BatchStatus(
            word=batch["processing_status"],
            over=batch["processing_status"] == "ended",
            ended=ended,
            failed=ended - counts.get("succeeded", 0),
            outputs=("results",),
            ended_at=_seconds(batch.get("ended_at")),
        )
        if status.over and record.unconfirmed:
            ours = await self._is_ours(str(record.batch_id), record)
            if isinstance(ours, Failure):
                return ours
            if not ours:
                record.rejected_ids = (*record.rejected_ids, str(record.batch_id))
            record.unconfirmed = False
        return status

    async def cancel(self, record: BatchRecord) -> Failure | None:
        """Cancel the batch."""
        result = await self._web.post(f"{_PATH}/{record.batch_id}/cancel", {})
        return result if isinstance(result, Failure) else None

    async def fetch(self, record: BatchRecord, into: Path) -> Failure | None:
        """GET the answers, always below the endpoint's own address."""
        return await fetch_all(self._web, [f"{_PATH}/{record.batch_id}/results"], into)

    def read(self, line: bytes, record: BatchRecord) -> Answer:
        """Parse one line of the answers."""
        return read_line(line)


def read_line(line: bytes) -> Answer:
    """Parse one answer: ``succeeded``, ``errored``, ``canceled`` or ``expired``."""
    value = decode_json(line)
    result = value.get("result") if isinstance(value, dict) else None
    if not isinstance(result, dict) or not isinstance(value.get("custom_id"), str):
        raise ValueError("no result")
    return value["custom_id"], _result(result)


def _result(result: dict[str, Any]) -> Reply | Failure:
    kind, message = result.get("type"), result.get("message")
    if kind == "succeeded":
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            return reply_from_message(message)
        return Failure("bad_response", "a success without a message", True, 200)
    if kind in ("canceled", "expired"):
        reason = "was cancelled" if kind == "canceled" else "expired after 24 hours"
        return Failure("timeout", f"the batch {reason}", True)
    error: Json = result.get("error") or {}
    is_whole = isinstance(error, dict) and "error" in error
    details = find_error(error if is_whole else {"error": error})
    status = _STATUS.get(details[2] if details else "", 502)
    return failure_from_status(status, encode_json(error), {})


async def _body(requests: Path, size: int) -> AsyncIterator[bytes]:
    """Yield the lines of the file as a JSON list; line breaks become commas."""
    yield _HEAD
    remaining = size - 1  # without the last line break
    with requests.open("rb") as handle:
        while remaining > 0:
            piece = handle.read(min(PIECE, remaining))
            if not piece:
                break
            remaining -= len(piece)
            yield piece.replace(b"\n", b",")
    yield _TAIL


def _counts(batch: dict[str, Any]) -> dict[str, int]:
    counts = batch.get("request_counts")
    if not isinstance(counts, dict):
        return {}
    return {name: value for name, value in counts.items() if isinstance(value, int)}


def _seconds(timestamp: Json) -> float | None:
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except (TypeError, ValueError):
        return None
