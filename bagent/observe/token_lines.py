"""The lines of a summary about tokens and prefix caches."""

from __future__ import annotations

from bagent.observe.formatting import counted, percent, rate
from bagent.observe.snapshot import Snapshot


def tokens_line(s: Snapshot, seconds: float | None = None) -> str:
    """Return the tokens of prompts and answers, and how many answers do not say.

    Args:
        s: the state.
        seconds: how long the run worked; None: the time that this start counted.
    """
    t = s.tokens
    prompt = _number(t.prompt.total, "prompt")
    if t.cached.total is not None:
        prompt += f" ({t.cached.total:,} cached{_partly(t.cached.unknown)})"
    completion = _number(t.completion.total, "completion")
    if t.reasoning.total is not None:
        completion += f" ({t.reasoning.total:,} reasoning{_partly(t.reasoning.unknown)})"
    text = f"{prompt}, {completion}"
    speed = s.overall.completion_tokens_per_s
    if t.completion.total is not None and speed is not None:
        speed = t.completion.total / seconds if seconds else speed
        text += f", {rate(speed)} completion tokens/s"
    if t.without_counts:
        text += f"; {counted(t.without_counts, 'answer')} without full counts"
    return text


def cache_line(s: Snapshot) -> str:
    """Return the share of cached prompt tokens by answers, and by counters where that differs."""
    counters, cached, prompt_tokens = s.cache, s.tokens.cached, s.tokens.cached_of
    own = server = ""
    if cached.total is not None and prompt_tokens:
        own = percent(cached.total / prompt_tokens)
        own += f" of {prompt_tokens:,} prompt tokens were known"
        own += f" ({counted(cached.unknown, 'answer')} did not say)" if cached.unknown else ""
    if counters is not None:
        share = percent(counters.share)
        if not own:
            share = f"{share} of {counters.queries:,} prompt tokens were known"
        elif not cached.unknown and own.startswith(share):
            return own
        endpoints = counted(counters.endpoints, "endpoint")
        server = f"{share}, by the counters of {endpoints}, of all its clients"
        server += f"; unknown of {counters.silent:,} more" if counters.silent else ""
    shares = "; ".join(filter(None, (own, server)))
    return shares or "unknown: the server does not tell what its prefix cache knew"


def _number(total: int | None, sort: str) -> str:
    return f"unknown {sort}" if total is None else f"{total:,} {sort}"


def _partly(silent: int) -> str:
    return f"; {counted(silent, 'answer')} did not say" if silent else ""
