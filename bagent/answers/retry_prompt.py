"""Messages that ask for an answer again, and the schema in the prompt.

They are always made from the original messages, so prompts do not grow with each retry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagent.answers.validation_messages import shorten
from bagent.text.unicode import wire_text
from bagent.types import Message

if TYPE_CHECKING:
    from bagent.answers.schema.schema import OutputSchema

LIMIT_CHARS = 2000
"""How much of a bad answer goes back to the model, in characters."""

_MAX_VIOLATIONS = 5


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
