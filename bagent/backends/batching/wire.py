"""Replies to lists of prompts and batches of chats.

Source: vLLM's ``entrypoints/openai``. The choices of ``/v1/completions`` with a list of prompts are
numbered prompt by prompt, ``n`` for each; those of ``/v1/chat/completions/batch`` by conversation.
``usage`` is the sum over all calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bagent.backends.failures import failure_from_body, not_json, unexpected_body
from bagent.backends.openai.chat import (
    choice_error,
    normalize_finish_reason,
    optional_text,
    read_usage,
    reply_from_choice,
)
from bagent.text.json import decode_json
from bagent.types import NO_USAGE, Failure, Json, Reply, Usage

MAX_PROMPTS = 1024
"""vLLM's limit of prompts in one request (``VLLM_MAX_COMPLETION_PROMPTS``)."""

_EMPTY = msgspec.Raw(b"")
_FIELDS = ("index", "text", "message", "finish_reason", "logprobs", "error")


class _Choice(msgspec.Struct):
    index: Any = None
    text: Any = None
    message: Any = None
    finish_reason: Any = None
    logprobs: Any = None
    error: Any = None
    token_ids: msgspec.Raw = _EMPTY
    prompt_token_ids: msgspec.Raw = _EMPTY


class _Body(msgspec.Struct):
    choices: list[_Choice]
    model: Any = None
    id: Any = None
    usage: Any = None
    error: Any = None


class _PromptIds(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_prompt_ids = msgspec.json.Decoder(_PromptIds).decode


class GroupAnswer(msgspec.Struct):
    """The parsed response to a group."""

    results: list[Reply | Failure]
    """One entry per call, in order."""
    answered: int
    """Calls for which there was a choice."""
    total: Usage = Usage()
    """The server's counts for all calls."""
    strange_prompt: bool = False
    """A prompt did not begin with the expected tokens."""


def read_group(
    raw: bytes, headers: Mapping[str, str], size: int, first_ids: tuple[int, ...] = ()
) -> GroupAnswer | Failure:
    """Parse the body of an HTTP 200 response to ``size`` calls, one sample each.

    Choices are matched by index. A call whose index is missing or repeated gets a passing failure.
    A failure is returned if the body as a whole is an error.

    Args:
        first_ids: token ids with which every prompt begins, if the server reports them.
    """
    try:
        body = _decode(raw)
        if body.error:
            raise ValueError
    except (msgspec.DecodeError, UnicodeError, RecursionError, ValueError):
        slow_result = _read_slowly(raw, headers)
        if isinstance(slow_result, Failure):
            return slow_result
        body = slow_result
    by_index: dict[int, _Choice | None] = {}
    for choice in body.choices:
        position = choice.index
        if type(position) is int and 0 <= position < size:
            by_index[position] = None if position in by_index else choice
    head = {"model": optional_text(body.model), "id": optional_text(body.id)}
    prefix = b"[%s," % b",".join(b"%d" % i for i in first_ids) if first_ids else b""
    answer = GroupAnswer([], len(by_index), read_usage(body.usage))
    for index in range(size):
        matched = by_index.get(index)
        if matched is None:
            answer.results.append(_unanswered(index in by_index, len(body.choices), size))
            continue
        answer.results.append(_result(matched, head))
        ids = matched.prompt_token_ids
        if prefix and ids and not bytes(ids).startswith(prefix):
            answer.strange_prompt |= not _begins(bytes(ids), first_ids)
    return answer


def _read_slowly(raw: bytes, headers: Mapping[str, str]) -> _Body | Failure:
    """Parse a body that the fast decoder refuses: an error, or unusual JSON."""
    try:
        body = decode_json(raw, strict=True)
        failure = failure_from_body(body, headers)
        if failure is not None:
            return failure
        choices = body.get("choices") if isinstance(body, dict) else None
        if isinstance(choices, list):
            return _Body(
                [_choice(choice) for choice in choices if isinstance(choice, dict)],
                model=body.get("model"),
                id=body.get("id"),
                usage=body.get("usage"),
            )
        return unexpected_body("no choices", raw)
    except ValueError as error:
        return not_json(raw, headers.get("Content-Type", ""), error)


def _choice(choice: dict[str, Any]) -> _Choice:
    index, text, message, finish, logprobs, error = map(choice.get, _FIELDS)
    return _Choice(index, text, message, finish, logprobs, error)


def _unanswered(twice: bool, choices: int, size: int) -> Failure:
    problem = "two answers" if twice else "no answer"
    message = f"{problem} to this call among the {choices} choices for {size} calls"
    return Failure("bad_response", message, passing=True, status=200)


def _result(choice: _Choice, head: dict[str, Any]) -> Reply | Failure:
    if choice.error:
        failed = choice_error({"error": choice.error})
        if failed is not None:
            return failed
    usage = NO_USAGE
    if choice.token_ids or choice.prompt_token_ids:
        usage = Usage(_length(choice.prompt_token_ids), completion=_length(choice.token_ids))
    text = choice.text
    if choice.message is None and (text is None or type(text) is str):
        return Reply(
            text=text,
            finish_reason=normalize_finish_reason(choice.finish_reason),
            model=head["model"],
            usage=usage,
            logprobs=choice.logprobs,
            request_id=head["id"],
        )
    try:
        reply = reply_from_choice({k: getattr(choice, k) for k in _FIELDS}, head)
    except ValueError as error:
        return Failure("bad_response", f"a choice is {error}", passing=True, status=200)
    return msgspec.structs.replace(reply, usage=usage)


def _length(ids: msgspec.Raw) -> int | None:
    """Return how many numbers a JSON list holds; None if it is no list."""
    data = bytes(ids)
    if data[:1] != b"[":
        return None
    return data.count(b",") + 1 if len(data) > 2 and data.strip(b"[] \n") else 0


def _begins(ids: bytes, first: tuple[int, ...]) -> bool:
    """Return whether a JSON list of numbers begins with ``first``; True if it is no such list."""
    try:
        return tuple(_decode_ids(ids)[: len(first)]) == first
    except msgspec.DecodeError:
        return True


def read_prompt_ids(raw: bytes) -> list[int] | None:
    """Return the prompt's token ids of a chat response (vLLM's ``prompt_token_ids``), or None."""
    try:
        return _decode_prompt_ids(raw).prompt_token_ids
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def read_token_ids(body: Json) -> list[int] | None:
    """Return the ids in the response of ``/tokenize``, None if there are none."""
    tokens = body.get("tokens") if isinstance(body, dict) else None
    if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
        return tokens
    return None


def read_detokenized(body: Json) -> str | None:
    """Return the text in the response of ``/detokenize`` (vLLM's ``prompt``), or None."""
    text = body.get("prompt") if isinstance(body, dict) else None
    return text if isinstance(text, str) else None
