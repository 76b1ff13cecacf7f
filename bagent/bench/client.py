"""One request with its timings, and the calibration of prompt lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.batching.wire import read_group
from bagent.backends.endpoint import Endpoint
from bagent.backends.failures import failure_from_status
from bagent.backends.http.client import (
    NETWORK_ERRORS,
    StreamTimeout,
    Transport,
    connection_idle,
    network_failure,
)
from bagent.backends.http.connection import PlainResponse
from bagent.backends.http.request import read_body
from bagent.backends.openai.chat import read_reply, read_usage
from bagent.backends.openai.stream import StreamReader
from bagent.bench.plan import AnswerPlan, BenchTarget, Lengths
from bagent.bench.records import RequestRow
from bagent.bench.workload import LoadRequest, PromptMaker, fixed_fields, request_body
from bagent.text.json import decode_json
from bagent.types import Failure, Reply, Usage

TIMER_SECONDS = 0.1
"""How often the idle timer is moved; the idle limit may strike earlier by as much."""

_MAX_ERROR_CHARS = 200


async def send_request(
    transport: Transport,
    endpoint: Endpoint,
    request: LoadRequest,
    row: RequestRow,
    timeouts: Timeouts,
    clock: Callable[[], float],
) -> Reply | None:
    """Send ``request`` once and fill ``row``; return the answer of a single call that succeeded.

    What the server or the network does wrong becomes the row's ``error_kind``. A cancelled request
    stays ``unfinished``, with the time at which it was given up.

    Args:
        row: a negative ``scheduled`` means now.
        clock: the clock of the row's times.
    """
    row.size = request.size
    row.sent = clock()
    if row.scheduled < 0:
        row.scheduled = row.sent
    reader = StreamReader(row.sent, clock) if request.stream else None
    try:
        result = await _exchange(transport, endpoint, request, row, reader, timeouts, clock)
    except NETWORK_ERRORS as error:
        if reader is not None and reader.whole:
            result = reader.result()
        else:
            result = network_failure(error, endpoint, timeouts)
    except asyncio.CancelledError:
        row.done = clock()
        _note_stream(row, reader)
        raise
    row.done = clock()
    row.opened = connection_idle() is None
    _note_stream(row, reader)
    if isinstance(result, Reply) and not _has_answer(result):
        result = Failure("empty", "an answer without content", status=row.code)
    if isinstance(result, Failure):
        row.status, row.error_kind = "failed", result.kind
        row.error = endpoint.without_secrets(result.message)[:_MAX_ERROR_CHARS]
        return None
    row.status = "ok"
    if result is not None:
        row.finish_reason = result.finish_reason
        _note_usage(row, result.usage)
    return result


async def _exchange(
    transport: Transport,
    endpoint: Endpoint,
    request: LoadRequest,
    row: RequestRow,
    reader: StreamReader | None,
    timeouts: Timeouts,
    clock: Callable[[], float],
) -> Reply | Failure | None:
    """Return the answer; None after a good answer to several calls, whose usage is in ``row``."""
    first, idle = (timeouts.first_token, timeouts.idle) if reader else (None, None)
    async with (
        StreamTimeout(first, idle) as patience,
        transport.post(endpoint, request.path, request.body, timeouts) as response,
    ):
        row.code = response.status
        if not 200 <= response.status < 300:
            patience.disable()
            text = (await read_body(response)).decode("utf-8", "replace")
            return failure_from_status(response.status, text, response.headers)
        if reader is not None and response.content_type == "text/event-stream":
            await _read_stream(response, reader, patience, row, clock)
            return reader.result()
        patience.disable()
        raw = await read_body(response)
        row.first_byte = clock()
        if request.size == 1:
            return read_reply(raw, response.content_type, response.headers)
        return _read_group(raw, response.headers, request.size, row)


async def _read_stream(
    response: aiohttp.ClientResponse | PlainResponse,
    reader: StreamReader,
    patience: StreamTimeout,
    row: RequestRow,
    clock: Callable[[], float],
) -> None:
    deltas, sent_at, timer_due = 0, row.sent, 0.0
    row.chunk_at, row.chunk_count, row.chunk_tokens = at, count, tokens = [], [], []
    async for data in response.content.iter_any():
        now = clock()
        if row.first_byte is None:
            row.first_byte = now
        reader.feed(data)
        if reader.deltas > deltas:
            at.append(int(1e6 * (now - sent_at)))
            count.append(reader.deltas - deltas)
            if reader.usage.completion is not None:
                tokens.append(reader.usage.completion)
            deltas = reader.deltas
            row.last_token = now
            if now >= timer_due:  # moving a timer costs as much as reading a piece
                patience.on_chunk()
                timer_due = now + TIMER_SECONDS
        if reader.error is not None or reader.done:
            break


def _read_group(
    raw: bytes, headers: Mapping[str, str], size: int, row: RequestRow
) -> Failure | None:
    group = read_group(raw, headers, size)
    if isinstance(group, Failure):
        return group
    for result in group.results:
        if isinstance(result, Failure):
            return result
        if not _has_answer(result):
            return Failure("empty", "one of the answers has no content")
    _note_usage(row, group.total)
    return None


def _has_answer(reply: Reply) -> bool:
    return bool(reply.text or reply.reasoning or reply.refusal or reply.tool_calls)


def _note_stream(row: RequestRow, reader: StreamReader | None) -> None:
    """Copy what a stream delivered, complete or not."""
    if reader is None or not reader.pieces:
        return
    row.first_token, row.first_answer = reader.first_token, reader.first_answer
    _note_usage(row, reader.usage)
    if len(row.chunk_tokens) != len(row.chunk_at):
        row.chunk_tokens = []  # only the closing chunk had a count
    if not row.completion_tokens and reader.deltas:  # some servers report 0 for every answer
        row.completion_tokens, row.estimated = reader.deltas, True


def _note_usage(row: RequestRow, usage: Usage) -> None:
    row.prompt_tokens = usage.prompt if usage.prompt is not None else row.prompt_tokens
    row.cached_tokens = usage.cached if usage.cached is not None else row.cached_tokens
    row.reasoning_tokens = usage.reasoning if usage.reasoning is not None else row.reasoning_tokens
    if usage.completion or (usage.completion is not None and not row.completion_tokens):
        row.completion_tokens, row.estimated = usage.completion, False


class _Count(msgspec.Struct):
    count: int | None = None


async def count_tokens(
    transport: Transport, endpoint: Endpoint, body: dict[str, Any], seconds: float
) -> int | None:
    """Return the tokens of a prompt by the server's ``/tokenize``; None where it fails."""
    root = msgspec.structs.replace(endpoint, url=endpoint.root)
    limits = Timeouts(total=seconds, connect=seconds)
    try:
        async with transport.post(root, "/tokenize", msgspec.json.encode(body), limits) as response:
            raw = await read_body(response)
            if response.status != 200:
                return None
        return msgspec.json.decode(raw, type=_Count).count
    except (*NETWORK_ERRORS, msgspec.DecodeError):
        return None


async def prompt_tokens_by_usage(
    transport: Transport, endpoint: Endpoint, request: LoadRequest, timeouts: Timeouts
) -> int | Failure:
    """Return the prompt tokens that the usage of a real, unstreamed request reports."""
    try:
        async with transport.post(endpoint, request.path, request.body, timeouts) as response:
            raw = await read_body(response)
    except NETWORK_ERRORS as error:
        return network_failure(error, endpoint, timeouts)
    if not 200 <= response.status < 300:
        return failure_from_status(
            response.status, raw.decode("utf-8", "replace"), response.headers
        )
    try:
        body = decode_json(raw)
    except ValueError:
        body = None
    tokens = read_usage(body.get("usage") if isinstance(body, dict) else None).prompt
    return (
        tokens if tokens is not None else Failure("bad_response", "no token counts in the answer")
    )


MAX_CORRECTIONS = 4
"""Corrections of the word count."""

_PROBE_COUNTS = (64, 320)
_SECONDS = 60.0


class PromptSizes(msgspec.Struct, frozen=True):
    """Prompt sizes in tokens."""

    total: int
    prefix: int = 0
    """Tokens that a group shares, part of ``total``."""
    chat: bool = True
    """Whether prompts are chats, not texts."""


async def calibrate(
    transport: Transport, targets: Sequence[BenchTarget], sizes: PromptSizes, salt: str
) -> dict[str, Lengths]:
    """Return the sizes in words for each model of ``targets``, measured on its first endpoint."""
    by_model: dict[str, Lengths] = {}
    for target in targets:
        model = target.model or ""
        if model in by_model and by_model[model].tokens is not None:
            continue
        by_model[model] = await _Calibration(transport, target, sizes, salt).lengths()
    return by_model


class _Calibration:
    """Measures prompts of one endpoint."""

    def __init__(
        self, transport: Transport, target: BenchTarget, sizes: PromptSizes, salt: str
    ) -> None:
        self._transport = transport
        self._target = target
        self._sizes = sizes
        self._text = PromptMaker(salt)
        self._measured = 0
        self._method = "/tokenize"

    async def lengths(self) -> Lengths:
        """Return the sizes, exact to a token or two where the server counts quickly."""
        sizes = self._sizes
        small, large = [await self._measure(count) for count in _PROBE_COUNTS]
        if small is None or large is None:
            return self._lengths(1.0, 0.0, sizes.total, None)
        per_word = max(0.05, (large - small) / (_PROBE_COUNTS[1] - _PROBE_COUNTS[0]))
        extra = small - per_word * _PROBE_COUNTS[0]
        count = max(1, round((sizes.total - extra) / per_word))
        tokens: int | None = round(extra + per_word * count)
        for _ in range(MAX_CORRECTIONS if self._method == "/tokenize" else 0):
            tokens = await self._measure(count)
            if tokens is None or tokens == sizes.total:
                break
            step = round((sizes.total - tokens) / per_word)
            if step == 0 or count + step < 1:
                break
            count += step
        if tokens is not None and abs(count - _PROBE_COUNTS[0]) >= _PROBE_COUNTS[0]:
            per_word = max(0.05, (tokens - small) / (count - _PROBE_COUNTS[0]))
            extra = small - per_word * _PROBE_COUNTS[0]
        return self._lengths(per_word, extra, count, tokens)

    def _lengths(self, per_word: float, extra: float, count: int, tokens: int | None) -> Lengths:
        prefix = min(count - 1, round(self._sizes.prefix / per_word)) if count > 1 else 0
        method = self._method if tokens is not None else "one word a token is guessed"
        return Lengths(count - prefix, prefix, tokens, method, per_word, extra)

    async def _measure(self, count: int) -> int | None:
        """Return the tokens of a prompt of ``count`` words; None where they cannot be counted."""
        self._measured += 1
        text = self._text.unique_text(count, f"calibrate/{self._measured}")
        target = self._target
        key: str = "messages" if self._sizes.chat else "prompt"
        value: Any = [{"role": "user", "content": text}] if self._sizes.chat else text
        if self._method == "/tokenize":
            body = {"model": target.model} if target.model else {}
            counted = await count_tokens(
                self._transport, target.endpoint, {**body, key: value}, _SECONDS
            )
            if counted is not None:
                return counted
            self._method = "usage of two requests"
        fields = fixed_fields(target.model, AnswerPlan(1), None)
        path = "/chat/completions" if self._sizes.chat else "/completions"
        request = LoadRequest(path, request_body(fields, key, value), False)
        reported = await prompt_tokens_by_usage(
            self._transport, target.endpoint, request, Timeouts(total=_SECONDS)
        )
        return None if isinstance(reported, Failure) else reported
