"""The closing summary of a run: results, failures, and the next step."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_OK,
    EXIT_ROWS_FAILED,
    EXIT_STOPPED,
)
from bagent.observe.formatting import (
    counted,
    duration,
    kinds,
    milliseconds,
    money,
    percent,
    rate,
    retries_text,
    tools_text,
    totals_text,
    visible,
)
from bagent.observe.next_step import Advice, next_step
from bagent.observe.snapshot import ErrorGroup, Snapshot
from bagent.types import row_location

LOW_SHARE = 0.8
"""A share of valid first answers below which the schema seems not to be enforced."""

LOW_SHARE_FROM = 10
"""With fewer answers, at least three, more than half must be invalid for that warning."""

MAX_GROUPS_SHOWN = 10

MOST_COLUMNS = 3
"""Columns with empty cells that are named."""

_LABEL_WIDTH = 10

_HEADLINES = {
    EXIT_OK: "finished",
    EXIT_ROWS_FAILED: "finished, but rows failed",
    EXIT_CANNOT_WRITE: "stopped: results cannot be written",
    EXIT_STOPPED: "stopped early",
    EXIT_NEEDS_PERSON: "stopped early, and a person must act first",
    EXIT_INTERRUPTED: "interrupted",
}


class EndInfo(msgspec.Struct, frozen=True):
    """How a run ended, as its last lines need it.

    Args:
        advice: the exit code, and what the next step depends on.
        reason: why the run stopped early; empty where it did not.
        color: whether the lines may have colour codes.
        worked_s: how long all starts worked, without the pauses between them; None where unknown.
        notes: labelled lines about the results of earlier starts.
    """

    advice: Advice
    reason: str = ""
    color: bool = False
    worked_s: float | None = None
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def exit_code(self) -> int | None:
        """The process's exit code."""
        return self.advice.exit_code


def summary_lines(s: Snapshot, info: EndInfo) -> list[str]:
    """Return the lines of the summary; the last is the next command."""
    after = next_step(info.advice, s.causes or s.by_kind)
    pairs = [
        *_rows(s, info),
        *info.notes,
        ("ended", headline(s, info)),
        ("time", _time(s, info.worked_s)),
        *_of_this_start(
            [*_empty_cells(s), *_measures(s, info.worked_s), *_schema(s), *_requests(s)], s
        ),
        *_trouble(s, info.advice.run),
        *_errors(s),
        ("results", info.advice.results),
        *after,
    ]
    return list(_aligned(pairs, info.color))


def _empty_cells(s: Snapshot) -> Iterator[tuple[str, str]]:
    counts = sorted(s.feed.empty.items(), key=lambda item: -item[1])
    texts = [
        f"{counted(rows, 'row')} {'has' if rows == 1 else 'have'} an empty {visible(name, 60)}"
        for name, rows in counts[:MOST_COLUMNS]
    ]
    if texts:
        if len(counts) > MOST_COLUMNS:
            texts.append(counted(len(counts) - MOST_COLUMNS, "more column"))
        yield "empty", "; ".join(texts)


def _of_this_start(pairs: list[tuple[str, str]], s: Snapshot) -> Iterator[tuple[str, str]]:
    """Mark lines that are not about the whole run."""
    for label, text in pairs:
        marked = s.resumed and label != "warning"
        yield label, f"{text} (this start)" if marked else text


def _aligned(pairs: list[tuple[str, str]], color: bool) -> Iterator[str]:
    for label, text in pairs:
        padded = label.ljust(_LABEL_WIDTH)
        code = _COLORS.get(label) if color else None
        yield (f"\033[{code}m{padded}\033[0m  {text}" if code else f"{padded}  {text}").rstrip()


_COLORS = {
    "rows": "1",
    "failed": "31",
    "dropped": "31",
    "errors": "31",
    "warning": "33",
    "empty": "33",
    "endpoints": "33",
    "first": "1",
    "cause": "33",
    "next": "1",
}


def headline(s: Snapshot, info: EndInfo) -> str:
    """Return how the run ended, on one line."""
    text = _HEADLINES.get(info.exit_code or 0, f"ended with exit code {info.exit_code}")
    if info.exit_code == EXIT_OK and (s.failed or s.dropped):
        text = "finished, with no more failed rows than allowed"
    return f"{text}: {visible(info.reason)}" if info.reason else text


def _rows(s: Snapshot, info: EndInfo) -> Iterator[tuple[str, str]]:
    """The whole run: its rows, why some failed, and what this start did where it resumed."""
    yield "rows", whole_run(s, ended=info.exit_code in (EXIT_OK, EXIT_ROWS_FAILED))
    if s.failed:
        bad = {status: n for status, n in s.by_status.items() if status != "ok"}
        if s.accepted:
            bad["truncated"] -= s.accepted
        bad = {status: n for status, n in bad.items() if n}
        yield "failed", f"by status: {kinds(bad)}; by kind: {kinds(s.by_kind)}"
    for stage, number in s.dropped.items():
        rows = counted(number, "row")
        yield "dropped", f"stage {visible(stage, 30)} left out {rows} that failed before it"
    yield from _tools(s)
    if not s.total and not s.this_start.done and info.exit_code == EXIT_OK:
        if s.feed.most == 0:
            message = "--limit 0 selects none of the input's rows"
        elif s.feed.read or s.feed.unselected:
            message = "none of the input's rows was selected"
        else:
            message = "the input has no rows"
        yield "warning", message
    elif s.feed.empty_pipe:
        yield "warning", "standard input had no rows; these are of earlier starts"


def _tools(s: Snapshot) -> Iterator[tuple[str, str]]:
    """How often tools were called and failed over the whole run, with warnings."""
    if not s.tools:
        return
    yield "tools", tools_text(s.tools)
    if s.this_start.done and not any(count.calls for count in s.tools.values()):
        yield "warning", f"no row called a tool: {', '.join(map(visible, s.tools))}"
    for name, count in s.tools.items():
        if count.calls and count.failed == count.calls:
            calls = "the only call" if count.calls == 1 else f"all {count.calls:,} calls"
            whose = f"of {visible(name, 60)}" if name else "without a tool's name"
            yield "warning", f"{calls} {whose} failed: {visible(count.error or '', 300)}"


def whole_run(s: Snapshot, *, ended: bool) -> str:
    """Return the totals of the run: ``200 rows: 168 ok, 32 failed; this start: 178 sent``.

    Args:
        s: the state.
        ended: all rows have a result.
    """
    text = totals_text(
        s.totals,
        total=s.totals.rows if ended else s.total,
        exact=ended or s.total_is_exact,
        remaining=None if ended else s.remaining,
        unit=s.unit,
    )
    start = [f"{s.this_start.sent:,} sent"] if s.resumed else []
    if s.this_start.copied:
        start.append(f"{s.this_start.copied:,} copied from equal requests")
    if dropped := sum(s.dropped.values()):
        text += f"; {counted(dropped, 'row')} left out by stages since they failed before"
    return f"{text}; this start: {', '.join(start)}" if start else text


def _time(s: Snapshot, worked_s: float | None) -> str:
    """The time and speed of the whole run, as ``status`` has it, and of this start beside it."""
    of_all = " of all stages" if s.several_stages else ""
    own = (
        f"{duration(s.elapsed_s)}, {rate(s.overall.rows_per_s)} {s.speed_unit}s/s{of_all}"
        f"{' (this start)' if s.resumed else ''}"
    )
    if not worked_s or not s.totals.rows:
        return own
    text = f"{duration(worked_s)}, {rate(s.totals.rows / worked_s)} {s.unit}s/s"
    return f"{text}; {own}" if s.resumed or s.several_stages else text


def _measures(s: Snapshot, seconds: float | None) -> Iterator[tuple[str, str]]:
    """Latency, tokens, cache and cost; ``seconds`` is the time that ``time`` shows, if known."""
    if s.latency.count:
        text = f"p50 {milliseconds(s.latency.p50)}, p99 {milliseconds(s.latency.p99)}"
        if s.ttft.count:
            text += (
                f"; first token p50 {milliseconds(s.ttft.p50)}, p99 {milliseconds(s.ttft.p99)}"
                f" ({counted(s.ttft.count, 'answer')})"
            )
        yield "latency", text
    if s.tokens.prompt.unknown or s.tokens.prompt.total is not None:
        yield "tokens", tokens_line(s, None if s.resumed else seconds)
    if s.tokens.prompt.total:
        yield "cache", cache_line(s)
    if s.cost_usd is not None:
        text = money(s.cost_usd)
        if s.cost_unknown:
            text += f", and {counted(s.cost_unknown, 'answer')} of unknown cost"
        yield "cost", f"{text}; by mode: bagent report"


def _schema(s: Snapshot) -> Iterator[tuple[str, str]]:
    share = s.first_try_share
    if share is None:
        return
    fit = f"{s.first_try_valid:,} of {counted(s.first_try_total, 'first answer')}"
    yield "schema", f"{fit} valid ({percent(share)})"
    low = LOW_SHARE if s.first_try_total >= LOW_SHARE_FROM else 0.5
    if s.first_try_total >= 3 and share < low:
        text = f"only {percent(share)} of the first answers fit the schema"
        yield "warning", f"{text}: the endpoint may not enforce the schema"


def _requests(s: Snapshot) -> Iterator[tuple[str, str]]:
    if not s.requests and not s.tries:
        return
    parts = [f"{s.requests:,} sent", retries_text(s.retries)]
    if s.tries != s.requests:  # a request may hold several rows, or be cut off at the end
        parts[0] += f"; {counted(s.tries, 'row attempt')} ended"
    if s.throttled:
        parts.append(counted(s.throttled, "throttled answer"))
    if s.failed_tries:
        parts.append(f"failed attempts: {kinds(s.failed_tries)}")
    yield "requests", ", ".join(parts)


MOST_ENDPOINTS = 3
"""Endpoints of a kind that are named."""


def _trouble(s: Snapshot, run: str) -> Iterator[tuple[str, str]]:
    """Name the endpoints that were down at the end, slow or failing, and what shows more."""
    slow = [
        f"{visible(e.name, 60)} takes {e.times:.1f} times the others' median time"
        f" (p50 {milliseconds(1000 * (e.p50_s or 0.0))})"
        for e in s.trouble
        if e.times is not None
    ]
    dead = [
        f"{visible(e.name, 60)} was {e.health} at the end"
        for e in s.trouble
        if e.times is None and e.failed is None
    ]
    failing = [
        f"{visible(e.name, 60)} failed {percent(e.failed)} of its attempts"
        for e in s.trouble
        if e.failed is not None
    ]
    parts = []
    for texts in (dead, slow, failing):
        parts += texts[:MOST_ENDPOINTS]
        if len(texts) > MOST_ENDPOINTS:
            parts.append(f"{len(texts) - MOST_ENDPOINTS:,} more")
    if parts:
        yield "endpoints", f"{'; '.join(parts)}; see bagent report {shlex.quote(run)}"


def _errors(s: Snapshot) -> Iterator[tuple[str, str]]:
    label = "errors"
    for group in s.errors[:MAX_GROUPS_SHOWN]:
        yield label, _group(group)
        yield "", f"    {_example(group)}"
        label = ""
    remaining = s.errors[MAX_GROUPS_SHOWN:]
    rows = sum(group.count for group in remaining) + s.errors_other
    if remaining:
        more = "at least " if s.errors_other else ""
        kinds_left = counted(len(remaining), "more kind")
        yield "", f"and {more}{kinds_left} of error ({counted(rows, 'row')})"
    elif rows:
        yield "", f"and {counted(rows, 'row')} with other errors"


def _group(group: ErrorGroup) -> str:
    text = f"{group.count:,} x {group.kind}"
    if group.http_status is not None:
        text += f", HTTP {group.http_status}"
    if group.endpoints > 1:
        text += f", at {group.endpoints:,} endpoints"
    elif group.endpoint:
        text += f", at {group.endpoint}"
    return text


def _example(group: ErrorGroup) -> str:
    row = f"row {group.row}" if group.id is None else f"row {group.id}"
    location = row_location(group.source, group.line) if group.source else ""
    where = f" ({location})" if location else ""
    at = f" at {group.endpoint}" if group.endpoints > 1 and group.endpoint else ""
    return f"{row}{where}{at}: {group.text or 'no error text'}"


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
