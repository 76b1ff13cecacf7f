"""How much of earlier answers fits into a reduce prompt."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from bagent.agents.budget import MARGIN_TOKENS
from bagent.agents.plan import StagePlan
from bagent.answers.reask import describe
from bagent.job.template import TemplateFailure
from bagent.stages.items import Response, estimate, responses
from bagent.types import Json, Row

MOST_RESERVED = 1024
"""Tokens kept for a reducer's answer where the job names no number."""

UNKNOWN_PROMPT = 256
"""Tokens thought to stand around the answers where the prompt cannot be rendered without any."""

_SHORTER = 0.8


class Fit:
    """Reckons with one stage's context, on the safe side and the same in every start.

    ``usable`` is how many tokens a prompt may have; None where the context is not known.
    """

    def __init__(self, plan: StagePlan) -> None:
        self._plan = plan
        context = plan.budget.context
        self.usable: int | None = None
        if context is not None:
            asked = plan.settings.max_tokens
            reserved = min(MOST_RESERVED, context // 4) if asked is None else asked
            self.usable = context - reserved - MARGIN_TOKENS

    def room(self, data: dict[str, Any], names: dict[str, Json]) -> int | None:
        """Tokens that answers may have beside the rest of the prompt; None: no limit is known."""
        if self.usable is None:
            return None
        empty = {**names, "responses": responses([]), "n": 0, "level": 1}
        try:
            return self.usable - self._size(data, empty)
        except TemplateFailure:
            return self.usable - UNKNOWN_PROMPT

    def fits(self, row: Row) -> bool:
        """Whether the prompt of a row, as it is rendered, leaves room for an answer."""
        if self.usable is None:
            return True
        try:
            return self._size(row.data, row.extra or {}) <= self.usable
        except TemplateFailure:
            return True  # the row fails by itself, with the reason

    def _size(self, data: dict[str, Any], extra: dict[str, Json]) -> int:
        plan = self._plan
        if plan.prompt.raw:
            return estimate(plan.prompt.render_raw(data, extra).encode("utf-8", "replace"))
        messages = plan.prompt.render(data, extra)
        if plan.describe and plan.schema is not None:
            messages = describe(messages, plan.schema)
        texts = [str(message.get("content")) for message in messages]
        return sum(estimate(text.encode("utf-8", "replace")) + 8 for text in texts)


def shortened(response: Response, tokens: int | None) -> Response:
    """``response``, cut to about ``tokens`` tokens where it is longer, and saying so."""
    if tokens is None or _printed(response) <= tokens:
        return response
    output = response["output"]
    whole = response["text"] or ""
    if response["status"] != "ok":
        whole = response["error"] or ""
    elif output is not None:
        whole = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    kept = len(whole)
    while True:
        kept = int(kept * _SHORTER)
        text = f"{whole[:kept]} ...[cut: {len(whole) - kept} of {len(whole)} characters left out]"
        found = Response(response, output=None, text=text)
        if response["status"] != "ok":
            found = Response(response, error=text)
        if kept == 0 or _printed(found) <= tokens:
            return found


def _printed(response: Response) -> int:
    try:
        return estimate(msgspec.json.encode(response.shown()))
    except (UnicodeEncodeError, TypeError):
        return estimate(json.dumps(response.shown(), default=str).encode())
