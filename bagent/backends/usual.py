"""The usual answer, read in one step: one choice of plain text, and no error.

Decoding into records that hold only what counts takes half the time of decoding everything and
looking through it. What is not of this form (tool calls, thinking, refusals, lists of parts,
errors, counts that are none) gets None here, and the patient readers have it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from bagent.types import Json, Usage

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_NoText = Annotated[str, msgspec.Meta(max_length=0)]
_NoItems = Annotated[list[Json], msgspec.Meta(max_length=0)]

_NO_USAGE = Usage()


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Text(msgspec.Struct, gc=False):
    """A message or a delta with nothing in it but text."""

    content: str | None = None
    reasoning: _NoText | None = None
    reasoning_content: _NoText | None = None
    reasoning_details: _NoItems | None = None
    refusal: _NoText | None = None
    tool_calls: _NoItems | None = None
    function_call: None = None


class _Choice(msgspec.Struct):
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Json = None
    error: None = None


class UsualReply(msgspec.Struct):
    """The body of an answer with one choice of plain text."""

    choices: tuple[_Choice]
    model: str | None = None
    id: str | None = None
    usage: _Usage | None = None
    error: None = None
    metrics: Json = None

    @property
    def text(self) -> str | None:
        """The text of the answer."""
        choice = self.choices[0]
        return choice.text if choice.message is None else choice.message.content

    @property
    def counts(self) -> Usage:
        """The token counts; what is missing or null stays None."""
        usage = self.usage
        if usage is None:
            return _NO_USAGE
        prompt, answer = usage.prompt_tokens_details, usage.completion_tokens_details
        return Usage(
            usage.prompt_tokens,
            None if prompt is None else prompt.cached_tokens,
            usage.completion_tokens,
            None if answer is None else answer.reasoning_tokens,
        )


class _Piece(msgspec.Struct):
    delta: _Text | None = None
    message: None = None
    text: str | None = None
    index: int = 0
    finish_reason: _NoText | None = None
    logprobs: None = None
    error: None = None


class UsualPiece(msgspec.Struct):
    """An event of a stream with a piece of plain text; ``text`` may be None."""

    choices: tuple[_Piece]
    model: str | None = None
    id: str | None = None
    usage: Json = None
    error: None = None
    metrics: None = None

    @property
    def text(self) -> str | None:
        """The piece, None where there is none for the first choice."""
        choice = self.choices[0]
        if choice.index:
            return None
        return choice.text if choice.delta is None else choice.delta.content


_decode_reply = msgspec.json.Decoder(UsualReply).decode
_decode_piece = msgspec.json.Decoder(UsualPiece).decode
_REFUSALS = (msgspec.DecodeError, UnicodeError, RecursionError)


def usual_reply(raw: bytes) -> UsualReply | None:
    """The body of a usual answer, None where it is not of that form."""
    try:
        return _decode_reply(raw)
    except _REFUSALS:
        return None


def usual_piece(data: bytes) -> UsualPiece | None:
    """A usual event of a stream, None where it is not of that form."""
    try:
        return _decode_piece(data)
    except _REFUSALS:
        return None
