"""Numbers, durations and foreign text for people, in one style."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from bagent.store.totals import ToolCount, Totals


LONGEST_WORD = 20
"""Characters of a word that is dropped where a text is cut inside it."""


def visible(text: str, limit: int | None = None) -> str:
    """``text`` on one line, safe for any terminal, at most ``limit`` characters.

    Runs of white space become one blank; control characters, lone surrogates and invisible
    direction marks become visible escapes such as ``\\x1b``, so that text from a server can
    neither colour nor move anything. A cut text ends in ``...``, if possible after a whole word.
    """
    # The slice keeps a megabyte of server text from being walked for 300 characters.
    text = " ".join((text if limit is None else text[: 4 * limit + 4]).split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else _escape(c) for c in text)
    if limit is not None and len(text) > limit:
        text = _cut(text, max(0, limit - 3)) + "..."
    return text


def _cut(text: str, length: int) -> str:
    """Return at most so many characters; a word at their end is dropped unless it is long."""
    cut = text[:length]
    if text[length] == " " or cut[-1:] == " ":
        return cut.rstrip()
    head, _, word = cut.rpartition(" ")
    return head if head and len(word) <= LONGEST_WORD else cut


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def name_of(value: Any, limit: int = 80) -> str | None:
    """Write a row's id: text as it is, other values as JSON; None stays None."""
    if value is None:
        return None
    if isinstance(value, str):
        return visible(value, limit)
    try:
        return visible(msgspec.json.encode(value).decode(), limit)
    except (UnicodeEncodeError, TypeError, OverflowError):
        return visible(repr(value), limit)


def duration(seconds: float | None) -> str:
    """Write ``2.4s``, ``12s``, ``1m20s``, ``2h05m`` or ``3d04h``; ``?`` where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    minutes = total // 60
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = minutes // 60
    return f"{hours // 24}d{hours % 24:02d}h"


def milliseconds(ms: float | None) -> str:
    """Write a duration in milliseconds: ``0.8ms``, ``120ms``, else as :func:`duration`."""
    if ms is None or not math.isfinite(ms):
        return "?"
    if ms < 9.95:
        return f"{ms:.1f}ms"
    return f"{ms:.0f}ms" if ms < 999.5 else duration(ms / 1000)


def rate(per_second: float) -> str:
    """Write a rate: ``0.71``, ``12.3``, ``3,210``."""
    per_second = round(per_second, 3)  # as in JSON, from which other commands read it
    if per_second < 9.995:
        return f"{per_second:.2f}"
    return f"{per_second:.1f}" if per_second < 99.95 else f"{per_second:,.0f}"


def money(usd: float) -> str:
    """Write US dollars: ``$12.30``, ``$0.0123``, ``$0.000012``."""
    if usd >= 1:
        return f"${usd:,.2f}"
    return f"${usd:.4f}" if usd >= 0.01 or usd == 0 else f"${usd:.6f}"


def percent(share: float) -> str:
    """Write a share of 0 to 1 as whole percent, rounded down so that 100 means all."""
    return f"{math.floor(share * 100 + 1e-9)} %"


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Write ``1 row``, ``2,000 rows``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def retries_text(number: int) -> str:
    """Write how many attempts were not a row's first; ``limits.retries`` may count fewer."""
    text = counted(number, "retry", "retries")
    return f"{text} of any cause" if number else text


def totals_text(
    totals: Totals,
    *,
    total: int | None,
    exact: bool = True,
    remaining: int | None = None,
    unit: str = "row",
) -> str:
    """Return the totals of a run: ``200 rows: 168 ok, 20 failed, 12 remaining``.

    Args:
        totals: the rows that have a result.
        total: how many rows there are; None where unknown.
        exact: whether ``total`` and ``remaining`` are exact.
        remaining: how many rows have no result yet.
        unit: what is counted: ``row``, or ``answer`` where a row has several.
    """
    about = "at least " if total is None else "" if exact else "about "
    parts = [f"{totals.ok:,} ok"]
    if totals.accepted:
        parts.append(f"{totals.accepted:,} truncated (accepted)")
    parts.append(f"{totals.failed:,} failed")
    if remaining:
        parts.append(f"{about}{remaining:,} remaining")
    if total is None and not totals.rows:
        return f"not counted yet: {', '.join(parts)}"
    rows = counted(totals.rows if total is None else total, unit)
    return f"{about}{rows}: {', '.join(parts)}"


def tools_text(tools: Mapping[str, ToolCount]) -> str:
    """Return how often tools were called: ``4 calls, 4 failed (lookup 4)``."""
    failed = {
        visible(name, 60) or "no name": count.failed
        for name, count in tools.items()
        if count.failed
    }
    text = counted(sum(count.calls for count in tools.values()), "call")
    return f"{text}, {sum(failed.values()):,} failed" + (f" ({kinds(failed)})" if failed else "")


def kinds(counts: Mapping[str, int], top: int | None = None) -> str:
    """Write ``timeout 3, schema 1``, largest first; beyond ``top`` kinds ``+2 more``."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    largest = order if top is None else order[:top]
    parts = [f"{kind} {count:,}" for kind, count in largest]
    if len(order) > len(largest):
        parts.append(f"+{len(order) - len(largest)} more")
    return ", ".join(parts)
