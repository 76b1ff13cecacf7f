"""What of a conversation outlives the process that sent its call."""

from __future__ import annotations

import msgspec

from bagent.types import Message, Usage


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation that waits for the answer to one call, without its row and its prompt.

    ``max_tokens``, ``tries`` and ``counted`` are those of the call; ``messages`` are what it
    asked where that is not the row's own prompt. ``started`` is in Unix seconds.
    """

    max_tokens: int | None = None
    tries: int = 0
    counted: int = 0
    messages: list[Message] | None = None
    attempts: int = 0
    turns: int = 1
    reasks: int = 0
    grown: bool = False
    shrunk: bool = False
    first_valid: bool | None = None
    usage: Usage = Usage()
    started: float | None = None
