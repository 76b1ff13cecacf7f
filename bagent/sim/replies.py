"""Response bodies and stream chunks, in the form of vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bagent.sim import engine, tokens
from bagent.sim.generator import Answer

encode = msgspec.json.Encoder().encode


class ReplySample(msgspec.Struct):
    """One choice of a reply: its answer, and the engine's sequence that times it."""

    index: int
    prompt: bytes
    answer: Answer
    sequence: engine.Sequence | None = None


class ReplyHead(msgspec.Struct, frozen=True):
    """What all parts of one reply share."""

    id: str
    created: int
    """In Unix seconds."""
    model: str
    chat: bool
    token_ids: bool = False
    prompt_text: str | None = None
    echo: bool = False
    count_cached: bool = True


def make_usage(
    samples: Sequence[ReplySample], prompts: int, *, cached: bool = True
) -> dict[str, Any]:
    """Return ``usage`` of a whole reply: sums over all prompts and choices.

    Args:
        samples: all choices, ordered by prompt.
        prompts: number of prompts; each counts once, however many choices it has.
        cached: whether to report the tokens found in the prefix cache.
    """
    firsts = samples[:: max(1, len(samples) // prompts)]
    prompt = sum(tokens.count(sample.prompt) for sample in firsts)
    completion = sum(tokens.count(sample.answer.packed) for sample in samples)
    cached_tokens = sum(s.sequence.cached_tokens for s in firsts if s.sequence is not None)
    return _usage(prompt, completion, cached_tokens if cached else None)


def _usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def make_timings(samples: Sequence[ReplySample]) -> dict[str, float | None] | None:
    """Return ``metrics`` of a reply with one choice, in milliseconds; None for others, as in
    vLLM."""
    seq = samples[0].sequence
    if len(samples) != 1 or seq is None:
        return None
    if seq.admitted_at is None or seq.first_token_at is None or seq.finished_at is None:
        return None
    generated = tokens.count(samples[0].answer.packed)
    decode = seq.finished_at - seq.first_token_at
    total = seq.finished_at - seq.arrived_at
    return {
        "time_to_first_token_ms": 1000 * (seq.first_token_at - seq.arrived_at),
        "generation_time_ms": 1000 * decode,
        "queue_time_ms": 1000 * (seq.admitted_at - seq.arrived_at),
        "mean_itl_ms": 1000 * decode / (generated - 1) if generated > 1 else None,
        "tokens_per_second": generated / total if total > 0 else None,
    }


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    call = answer.tool
    if call is None:
        return []
    function = {"name": call.name, "arguments": call.arguments}
    return [{"id": call.id, "type": "function", "function": function}]


def _choice(head: ReplyHead, sample: ReplySample) -> dict[str, Any]:
    answer = sample.answer
    ids = tokens.ids_of(answer.packed) if head.token_ids else None
    common: dict[str, Any] = {
        "index": sample.index,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "token_ids": ids,
    }
    if not head.chat:
        echoed = tokens.text_of(sample.prompt) if head.echo else ""
        prompt_ids = tokens.ids_of(sample.prompt) if head.token_ids else None
        return {**common, "text": echoed + answer.text, "prompt_token_ids": prompt_ids}
    message = {
        "role": "assistant",
        "content": None if answer.tool else answer.text,
        "refusal": None,
        "reasoning": None,
        "tool_calls": _tool_calls(answer),
    }
    return {**common, "message": message}


def reply_body(
    head: ReplyHead, samples: Sequence[ReplySample], prompts: int, *, disorder: bool
) -> bytes:
    """Return the body of a whole reply; ``disorder`` reverses the choices and keeps their
    indexes."""
    choices = [_choice(head, sample) for sample in samples]
    body: dict[str, Any] = {
        "id": head.id,
        "object": "chat.completion" if head.chat else "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices[::-1] if disorder else choices,
        "usage": make_usage(samples, prompts, cached=head.count_cached),
        "system_fingerprint": None,
        "metrics": make_timings(samples),
    }
    if head.chat:
        if head.token_ids and prompts == 1:
            body["prompt_token_ids"] = tokens.ids_of(samples[0].prompt)
        if head.prompt_text is not None:
            body["prompt_text"] = head.prompt_text
    return encode(body)


class ChunkWriter:
    """Writes the stream chunks of one reply.

    Args:
        head: what every chunk shares.
        samples: all choices.
        prompts: number of prompts.
        continuous: whether every chunk reports the usage so far.
    """

    def __init__(
        self, head: ReplyHead, samples: Sequence[ReplySample], prompts: int, *, continuous: bool
    ) -> None:
        self.head = head
        self.samples = samples
        self.prompts = prompts
        self.continuous = continuous
        self._sent = [0] * len(samples)
        self._texts = [IncrementalText(sample.answer) for sample in samples]
        self._frame = {
            "id": head.id,
            "object": "chat.completion.chunk" if head.chat else "text_completion",
            "created": head.created,
            "model": head.model,
        }

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        body: dict[str, Any] = {**self._frame, "choices": choices}
        if usage is not None:
            body["usage"] = usage
        return b"data: " + encode(body) + b"\n\n"

    def _current_usage(self, sample: ReplySample) -> dict[str, Any] | None:
        if not self.continuous:
            return None
        prompt = tokens.count(sample.prompt)
        return _usage(prompt, self._sent[sample.index], None)

    def opening(self) -> list[bytes]:
        """Return the chunks before the first token: the role of each chat choice."""
        if not self.head.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([self._delta(sample, delta, None)], self._current_usage(sample))
            for sample in self.samples
        ]

    def tokens_until(self, sample: ReplySample, generated: int) -> bytes:
        """Return the chunk with a choice's tokens up to number ``generated``; empty if none is
        new."""
        start = self._sent[sample.index]
        if generated <= start:
            return b""
        self._sent[sample.index] = generated
        answer = sample.answer
        done = generated >= tokens.count(answer.packed)
        text = self._texts[sample.index].part(start, generated, done=done)
        reason = answer.finish_reason if done else None
        ids = (
            tokens.ids_of(answer.packed[4 * start : 4 * generated]) if self.head.token_ids else None
        )
        if not self.head.chat:
            if self.head.echo and start == 0:
                text = tokens.text_of(sample.prompt) + text
            choice = self._text(sample, text, reason)
        elif answer.tool:
            choice = self._delta(sample, _tool_delta(answer, text, first=start == 0), reason)
        else:
            choice = self._delta(sample, {"content": text}, reason)
        choice["token_ids"] = ids
        if reason:
            choice["stop_reason"] = answer.stop_reason
        return self._event([choice], self._current_usage(sample))

    def closing(self, *, usage: bool) -> bytes:
        """Return what follows the last token: the usage chunk, if requested, and the end mark."""
        last = b""
        if usage:
            last = self._event([], make_usage(self.samples, self.prompts))
        return last + b"data: [DONE]\n\n"

    @staticmethod
    def _delta(sample: ReplySample, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": sample.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    @staticmethod
    def _text(sample: ReplySample, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": sample.index, "text": text, "logprobs": None, "finish_reason": reason}


def _tool_delta(answer: Answer, arguments: str, *, first: bool) -> dict[str, Any]:
    call = answer.tool
    if call is None:
        raise ValueError("the answer calls no tool")
    entry: dict[str, Any] = {"index": 0, "function": {"arguments": arguments}}
    if first:
        entry.update(id=call.id, type="function")
        entry["function"]["name"] = call.name
    return {"tool_calls": [entry]}


class IncrementalText:
    """An answer's visible text by tokens; a character cut by a token comes with the next one."""

    def __init__(self, answer: Answer) -> None:
        self._packed = answer.packed
        self._remaining = len(answer.tool.arguments if answer.tool else answer.text)
        self._decode: Callable[..., str] = codecs.getincrementaldecoder("utf-8")("replace").decode

    def part(self, start: int, stop: int, *, done: bool) -> str:
        """Return the text of tokens ``start`` to ``stop``."""
        data = tokens.bytes_of(self._packed[4 * start : 4 * stop])
        text = self._decode(data, final=done)[: self._remaining]
        self._remaining -= len(text)
        return text
