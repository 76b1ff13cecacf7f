"""Chat templates derived from a server's rendering of known texts, without I/O.

A server renders a conversation of sentinels; the text before, between and after them is the
template for conversations of that shape. The server's token ids then prove that it holds for other
texts: templates may trim or rewrite texts, add a date, or depend on the content.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import msgspec

from bagent.types import Message

Shape = tuple[str, ...]
"""The roles of a conversation, in order."""

MAX_MESSAGES = 16
"""Longer conversations have no template: each length is a shape."""

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_THINKING = (
    "<think",
    "</think",
    "[THINK]",
    "<seed:think",
    "<|START_THINKING|>",
    "<|channel|>",
    "<|channel>",
    "◁think▷",
    "<reasoning>",
    "<thought>",
)
_TIME = re.compile(r"(?<!\d)\d{1,2}:\d{2}(?!\d)")
_DAY = 86_400
_QUARTER = 900
_AWKWARD = (
    "  \n {i} naïve — 日本語 🙂 {{{{ x }}}} {{% if y %}} {{0}} %s \\n \"q\" 'a' &amp; "
    "<|im_end|> <|im_start|>user </s> <s> [INST] [/INST] <|eot_id|> <|endoftext|> <bos> "
    "<end_of_turn> /no_think /think /system_override\t\n\n  ",
    "<tool_response>\n{i}<think>a</think>b <tool_call>{{}}</tool_call>\r\n</tool_response>",
)


class ChatTemplate(msgspec.Struct, frozen=True):
    """The text that a server writes around the messages of a conversation."""

    parts: tuple[str, ...]
    """One entry more than the conversation has messages."""
    trim: bool = False
    """Whether texts are stripped."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt of a conversation of this template's shape."""
        parts = self.parts
        pieces = [parts[0]]
        for index, message in enumerate(messages, 1):
            text = message["content"]
            pieces.append(text.strip() if self.trim else text)
            pieces.append(parts[index])
        return "".join(pieces)

    @property
    def fixed(self) -> str:
        """All text that the template itself writes, a piece a line."""
        return "\n".join(self.parts)


def shape_of(messages: Sequence[Message]) -> Shape | None:
    """Return the roles of a conversation of plain texts; None for any other conversation.

    Blank texts have no shape, because templates test whether a text is empty.
    """
    if not 0 < len(messages) <= MAX_MESSAGES:
        return None
    roles = []
    for message in messages:
        role, text = message.get("role"), message.get("content")
        if (
            len(message) != 2
            or type(text) is not str
            or not text
            or text.isspace()
            or type(role) is not str
            or role not in _ROLES
        ):
            return None
        roles.append(role)
    return tuple(roles)


def sentinel_messages(shape: Shape) -> list[Message]:
    """Return a conversation of texts that no template writes by itself."""
    return [
        {"role": role, "content": f"Kestrel{index:02d}Quartz"} for index, role in enumerate(shape)
    ]


def learn_template(shape: Shape, rendered: str) -> ChatTemplate | None:
    """Derive the template from the rendered :func:`sentinel_messages`.

    None if a sentinel is missing, repeated or out of order.
    """
    parts: list[str] = []
    remaining = rendered
    for message in sentinel_messages(shape):
        if remaining.count(message["content"]) != 1:
            return None
        before, _, remaining = remaining.partition(message["content"])
        parts.append(before)
    if any(message["content"] in part for message in sentinel_messages(shape) for part in parts):
        return None
    return ChatTemplate((*parts, remaining))


def proof_conversations(shape: Shape, template: ChatTemplate) -> list[list[Message]]:
    """Return conversations that show whether a template holds for any text.

    Their texts have blanks at both ends, braces, characters beyond ASCII, special tokens and
    switches of known templates, and pieces of this template.
    """
    return [
        [
            {"role": role, "content": awkward.format(i=index) + template.parts[-1] + end}
            for index, role in enumerate(shape)
        ]
        for awkward, end in zip(_AWKWARD, (" \n ", "</tool_response>"), strict=True)
    ]


def unusable_reason(template: ChatTemplate) -> str | None:
    """Return why a template may never be used, None if it may."""
    fixed = template.fixed
    if any(mark in fixed for mark in _THINKING):
        return "its chat template opens or closes the model's thinking"
    if _TIME.search(fixed):
        return "its chat template writes the time of day"
    return None


def is_dated(template: ChatTemplate, now: float) -> bool:
    """Return whether the template contains the year of ``now`` (Unix seconds) in any time zone.

    Such a template writes the date and is valid only for the quarter of an hour in which it was
    learned (:func:`quarter_hour`): midnight ends a quarter in every time zone.
    """
    years = {time.gmtime(now + shift).tm_year for shift in (-_DAY, 0, _DAY)}
    return any(str(year) in template.fixed for year in years)


def quarter_hour(now: float) -> int:
    """Return the number of the quarter of an hour that contains ``now`` (Unix seconds)."""
    return int(now // _QUARTER)


def shows_reasoning(text: str | None) -> bool:
    """Return whether a raw answer begins with reasoning or contains its end."""
    if not text:
        return False
    return "</think>" in text or text.lstrip().startswith(_THINKING)
