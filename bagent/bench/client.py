"""Sends one request and notes when what came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from bagent.backends.base import Timeouts
from bagent.backends.batching.wire import read_group
from bagent.backends.endpoint import Endpoint
from bagent.backends.http.client import (
    NETWORK_ERRORS,
    StreamTimeout,
    Transport,
    network_failure,
    reused,
)
from bagent.backends.http.connection import PlainResponse
from bagent.backends.http.request import whole_body
from bagent.backends.openai.chat import read_reply, read_usage
from bagent.backends.openai.errors import from_status
from bagent.backends.openai.stream import StreamReader
from bagent.bench.plan import BenchTarget
from bagent.bench.prompts import AnswerPlan, Lengths, PromptMaker, body_of, fixed_fields
from bagent.bench.records import RequestRow
from bagent.bench.workload import LoadRequest
from bagent.text.json import decode_json
from bagent.types import Failure, Reply, Usage

EASE_SECONDS = 0.1
"""So much earlier than it says the limit between two pieces may strike."""

_WORDS = 200


async def send_request(
    transport: Transport,
    endpoint: Endpoint,
    shot: LoadRequest,
    row: RequestRow,
    limits: tuple[Timeouts, Callable[[], float]],
) -> Reply | None:
    """Send ``shot`` and fill ``row``; nothing is sent a second time. Returns a good answer to a
    single call.

    What a server or the network does becomes the row's ``error_kind``. A cancelled request stays
    ``unfinished``, with the time at which it was given up.

    Args:
        row: a negative ``scheduled`` in it stands for now.
        limits: time limits of the request, and the clock of the row's times.
    """
    timeouts, clock = limits
    row.size = shot.size
    row.sent = clock()
    if row.scheduled < 0:
        row.scheduled = row.sent
    reader = StreamReader(row.sent, clock) if shot.stream else None
    try:
        found = await _exchange(transport, endpoint, shot, row, reader, limits)
    except NETWORK_ERRORS as error:
        if reader is not None and reader.whole:
            found = reader.result()
        else:
            found = network_failure(error, endpoint, timeouts)
    except asyncio.CancelledError:
        row.done = clock()
        _note_stream(row, reader)
        raise
    row.done = clock()
    row.opened = not reused()
    _note_stream(row, reader)
    if isinstance(found, Reply) and not _has_answer(found):
        found = Failure("empty", "an answer without content", status=row.code)
    if isinstance(found, Failure):
        row.status, row.error_kind = "failed", found.kind
        row.error = endpoint.without_secrets(found.message)[:_WORDS]
        return None
    row.status = "ok"
    if found is not None:
        row.finish_reason = found.finish_reason
        _note_usage(row, found.usage)
    return found


async def _exchange(
    transport: Transport,
    endpoint: Endpoint,
    shot: LoadRequest,
    row: RequestRow,
    reader: StreamReader | None,
    limits: tuple[Timeouts, Callable[[], float]],
) -> Reply | Failure | None:
    """The answer; None is a good one to several calls, whose usage is noted already."""
    timeouts, clock = limits
    first, idle = (timeouts.first_token, timeouts.idle) if reader else (None, None)
    async with (
        StreamTimeout(first, idle) as patience,
        transport.post(endpoint, shot.path, shot.body, timeouts) as response,
    ):
        row.code = response.status
        if not 200 <= response.status < 300:
            patience.lift()
            text = (await whole_body(response)).decode("utf-8", "replace")
            return from_status(response.status, text, response.headers)
        if reader is not None and response.content_type == "text/event-stream":
            await _read_stream(response, reader, patience, row, clock)
            return reader.result()
        patience.lift()
        raw = await whole_body(response)
        row.first_byte = clock()
        if shot.size == 1:
            return read_reply(raw, response.content_type, response.headers)
        return _read_group(raw, response.headers, shot.size, row)


async def _read_stream(
    response: aiohttp.ClientResponse | PlainResponse,
    reader: StreamReader,
    patience: StreamTimeout,
    row: RequestRow,
    clock: Callable[[], float],
) -> None:
    deltas, sent, eased = 0, row.sent, 0.0
    row.chunk_at, row.chunk_count, row.chunk_tokens = (
        [],
        [],
        [],
    )  # appended to often: by short names
    at, count, tokens = row.chunk_at, row.chunk_count, row.chunk_tokens
    async for data in response.content.iter_any():
        now = clock()
        if row.first_byte is None:
            row.first_byte = now
        reader.feed(data)
        if reader.deltas > deltas:
            at.append(int(1e6 * (now - sent)))
            count.append(reader.deltas - deltas)
            told = reader.usage.completion
            if told is not None:
                tokens.append(told)
            deltas = reader.deltas
            row.last_token = now
            if now >= eased:  # moving a timer costs as much as reading a piece
                patience.went_on()
                eased = now + EASE_SECONDS
        if reader.error is not None or reader.done:
            break


def _read_group(
    raw: bytes, headers: Mapping[str, str], size: int, row: RequestRow
) -> Failure | None:
    found = read_group(raw, headers, size)
    if isinstance(found, Failure):
        return found
    for result in found.results:
        if isinstance(result, Failure):
            return result
        if not _has_answer(result):
            return Failure("empty", "one of the answers has no content")
    _note_usage(row, found.total)
    return None


def _has_answer(reply: Reply) -> bool:
    return bool(reply.text or reply.reasoning or reply.refusal or reply.tool_calls)


def _note_stream(row: RequestRow, reader: StreamReader | None) -> None:
    """What a stream told, be it whole or not."""
    if reader is None or not reader.pieces:
        return
    row.first_token, row.first_answer = reader.first_token, reader.first_answer
    _note_usage(row, reader.usage)
    if len(row.chunk_tokens) != len(row.chunk_at):
        row.chunk_tokens = []  # counts of the closing chunk alone say nothing of the others
    if not row.completion_tokens and reader.deltas:  # some servers tell 0 of every answer
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
    """The tokens of a prompt by the server's ``/tokenize``; None where it does not tell."""
    root = msgspec.structs.replace(endpoint, url=endpoint.root)
    limits = Timeouts(total=seconds, connect=seconds)
    try:
        async with transport.post(root, "/tokenize", msgspec.json.encode(body), limits) as response:
            raw = await whole_body(response)
            if response.status != 200:
                return None
        return msgspec.json.decode(raw, type=_Count).count
    except (*NETWORK_ERRORS, msgspec.DecodeError):
        return None


async def prompt_tokens_by_usage(
    transport: Transport, endpoint: Endpoint, shot: LoadRequest, timeouts: Timeouts
) -> int | Failure:
    """The prompt tokens that a real, unstreamed request is told to have."""
    try:
        async with transport.post(endpoint, shot.path, shot.body, timeouts) as response:
            raw = await whole_body(response)
    except NETWORK_ERRORS as error:
        return network_failure(error, endpoint, timeouts)
    if not 200 <= response.status < 300:
        return from_status(response.status, raw.decode("utf-8", "replace"), response.headers)
    try:
        body = decode_json(raw)
    except ValueError:
        body = None
    found = read_usage(body.get("usage") if isinstance(body, dict) else None).prompt
    return found if found is not None else Failure("bad_response", "no token counts in the answer")


ROUNDS = 4
"""Corrections of the word count at most."""

_PROBE_WORDS = (64, 320)
_SECONDS = 60.0


class PromptSizes(msgspec.Struct, frozen=True):
    """Prompt sizes in tokens: ``prefix`` shared by a group, ``total`` with it; ``chat`` or text."""

    total: int
    prefix: int = 0
    chat: bool = True


async def calibrate(
    transport: Transport, targets: Sequence[BenchTarget], wanted: PromptSizes, salt: str
) -> dict[str, Lengths]:
    """Sizes in words for each model among ``targets``, measured on its first endpoint."""
    found: dict[str, Lengths] = {}
    for target in targets:
        model = target.model or ""
        if model in found and found[model].tokens is not None:
            continue
        found[model] = await _Scale(transport, target, wanted, salt).lengths()
    return found


class _Scale:
    """Weighs prompts of one endpoint."""

    def __init__(
        self, transport: Transport, target: BenchTarget, wanted: PromptSizes, salt: str
    ) -> None:
        self._transport = transport
        self._target = target
        self._wanted = wanted
        self._text = PromptMaker(salt)
        self._weighed = 0
        self._way = "/tokenize"

    async def lengths(self) -> Lengths:
        """The sizes, exact to a token or two where the server counts quickly."""
        wanted = self._wanted
        small, large = [await self._weigh(words) for words in _PROBE_WORDS]
        if small is None or large is None:
            return self._lengths((1.0, 0.0), wanted.total, None)
        per_word = max(0.05, (large - small) / (_PROBE_WORDS[1] - _PROBE_WORDS[0]))
        extra = small - per_word * _PROBE_WORDS[0]
        words = max(1, round((wanted.total - extra) / per_word))
        tokens: int | None = round(extra + per_word * words)
        for _ in range(ROUNDS if self._way == "/tokenize" else 0):
            tokens = await self._weigh(words)
            if tokens is None or tokens == wanted.total:
                break
            step = round((wanted.total - tokens) / per_word)
            if step == 0 or words + step < 1:
                break
            words += step
        if tokens is not None and abs(words - _PROBE_WORDS[0]) >= _PROBE_WORDS[0]:
            per_word = max(0.05, (tokens - small) / (words - _PROBE_WORDS[0]))
            extra = small - per_word * _PROBE_WORDS[0]
        return self._lengths((per_word, extra), words, tokens)

    def _lengths(self, line: tuple[float, float], words: int, tokens: int | None) -> Lengths:
        prefix = min(words - 1, round(self._wanted.prefix / line[0])) if words > 1 else 0
        way = self._way if tokens is not None else "one word a token is guessed"
        return Lengths(words - prefix, prefix, tokens, way, *line)

    async def _weigh(self, words: int) -> int | None:
        """The tokens of a prompt with so many words; None where no way of asking works."""
        self._weighed += 1
        text = self._text.own(words, f"calibrate/{self._weighed}")
        target = self._target
        key: str = "messages" if self._wanted.chat else "prompt"
        value: Any = [{"role": "user", "content": text}] if self._wanted.chat else text
        if self._way == "/tokenize":
            body = {"model": target.model} if target.model else {}
            counted = await count_tokens(
                self._transport, target.endpoint, {**body, key: value}, _SECONDS
            )
            if counted is not None:
                return counted
            self._way = "usage of two requests"
        fields = fixed_fields(target.model, AnswerPlan(1), None)
        path = "/chat/completions" if self._wanted.chat else "/completions"
        shot = LoadRequest(path, body_of(fields, key, value), False)
        told = await prompt_tokens_by_usage(
            self._transport, target.endpoint, shot, Timeouts(total=_SECONDS)
        )
        return None if isinstance(told, Failure) else told
