"""Messages about invalid answers: for people, and for the model that is asked again.

They come from jsonschema-rs, which is quick. ``jsonschema`` takes seconds to import and runs
patterns on Python's ``re``, so it only explains broken schemas. The prompt of a retry is always
made from the original messages, so prompts do not grow with each retry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from bagent.text.unicode import wire_text
from bagent.types import Message

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError

    from bagent.answers.schema.schema import OutputSchema


MAX_WORDS = 200
"""Longest message about one fault, in characters."""

_BRANCHES = frozenset({"anyOf", "oneOf"})

LIMIT_CHARS = 2000
"""How much of a bad answer goes back to the model, in characters."""

_MAX_VIOLATIONS = 5


def shorten(text: str, limit: int = MAX_WORDS) -> str:
    """Return ``text`` on one line and at most ``limit`` characters; the middle gives way."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    tail = (limit - 3) * 2 // 3
    return f"{text[: limit - 3 - tail]}...{text[-tail:]}"


def pointer(path: Iterable[str | int]) -> str:
    """Return a path as JSON Pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def validation_messages(errors: Iterable[ValidationError], limit: int) -> list[str]:
    """Return up to ``limit`` different one-line messages, each at most MAX_WORDS long.

    A message is ``POINTER: WORDS``; the pointer ``/`` stands for the whole value. Where no branch
    of an ``anyOf`` or ``oneOf`` holds, the errors of the nearest branch are given.
    """
    seen: dict[str, None] = {}
    for error in errors:
        for inner in _nearest(error):
            seen.setdefault(_phrase(inner))
            if len(seen) == limit:
                return list(seen)
    return list(seen)


def _phrase(error: ValidationError) -> str:
    where = shorten(pointer(error.instance_path) or "/", MAX_WORDS // 2)
    return f"{where}: {shorten(_message(error), MAX_WORDS - len(where) - 2)}"


def _message(error: ValidationError) -> str:
    options = getattr(error.kind, "options", None)
    if options is None:
        return error.message
    # The library names two options and counts the others; a model needs them all.
    allowed = json.dumps(options, ensure_ascii=False, default=str)
    value = json.dumps(error.instance, ensure_ascii=False, default=str)
    return f"{shorten(value, MAX_WORDS // 4)} is not one of {allowed}"


def _nearest(error: ValidationError) -> Sequence[ValidationError]:
    if error.kind.name not in _BRANCHES:
        return (error,)
    branches: list[list[ValidationError]] = getattr(error.kind, "context", [])
    depth = len(error.instance_path)
    scores = [_distance(branch, depth) for branch in branches]
    if not scores or scores.count(min(scores)) > 1:
        return (error,)
    nearest = branches[scores.index(min(scores))]
    return [inner for fault in islice(nearest, 5) for inner in _nearest(fault)]


def _distance(branch: Sequence[ValidationError], depth: int) -> int:
    """Return how far a value is from a branch: a wrong type is far, a wrong tag nearer."""
    distance = 0
    for fault in branch:
        if fault.kind.name == "type" and len(fault.instance_path) == depth:
            distance += 100
        elif fault.kind.name in ("const", "enum"):
            distance += 10
        else:
            distance += 1
    return distance


def retry_messages(
    messages: Sequence[Message],
    reply_text: str | None,
    violations: Sequence[str],
    schema: OutputSchema | None,
    *,
    limit_chars: int = LIMIT_CHARS,
) -> list[Message]:
    """Return the messages that ask again, with the validation messages.

    Args:
        messages: the original messages of the call, not those of an earlier re-ask.
        reply_text: the answer; kept to ``limit_chars`` by leaving out its middle.
        violations: as in ``AnswerResult.violations``; five at most are used.
        schema: what is asked for; its text is not repeated (see ``add_schema_instruction``).
        limit_chars: the most characters of the answer that go back.
    """
    retry = list(messages)
    answer = truncate_middle(wire_text(reply_text or "").strip(), limit_chars)
    if answer:
        retry.append({"role": "assistant", "content": answer})
    lines = [f"- {shorten(wire_text(violation))}" for violation in violations[:_MAX_VIOLATIONS]]
    complaint = (
        "\n".join(["Your answer is not valid:", *lines]) if lines else "Your answer is not valid."
    )
    kind = " object" if schema is not None and schema.document.get("type") == "object" else ""
    demand = (
        f"Answer again, in full, with only the JSON{kind} that was asked for: "
        "no other text, no code fence."
    )
    retry.append({"role": "user", "content": f"{complaint}\n{demand}"})
    return retry


def add_schema_instruction(messages: Sequence[Message], schema: OutputSchema) -> list[Message]:
    """Return ``messages`` with the schema at the end of the system message.

    The text is the same for every row, so a prompt that is shared up to there stays shared.
    Where the first message is no system message, one comes before it.
    """
    described = list(messages)
    first = described[0] if described else {}
    if first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": schema_instruction(schema)}, *described]
    content = first.get("content") or ""
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": schema_instruction(schema)}]
    else:
        content = (
            f"{content}\n\n{schema_instruction(schema)}" if content else schema_instruction(schema)
        )
    described[0] = {**first, "content": content}
    return described


def schema_instruction(schema: OutputSchema) -> str:
    """Return the instruction with the schema, also for raw prompts."""
    return (
        "Answer with only JSON that is valid under this JSON Schema: "
        f"no other text, no code fence.\n{schema.pretty}"
    )


def truncate_middle(text: str, limit: int) -> str:
    """Return ``text`` if it has at most ``limit`` characters, else its head and tail with a mark.

    The mark says how long the whole was; the result has at most ``limit`` characters.
    """
    if len(text) <= limit:
        return text
    mark = f"\n[... {len(text)} characters, middle left out ...]\n"
    room = limit - len(mark)
    if room < 2:
        return text[:limit]
    tail = room // 2
    return text[: room - tail] + mark + text[len(text) - tail :]
