"""The last words of a run: what came out, what went wrong, what to type next."""

from __future__ import annotations

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
from bagent.observe.next_step import Advice, next_step
from bagent.observe.snapshot import ErrorGroup, Snapshot
from bagent.observe.words import (
    counted,
    duration,
    kinds,
    milliseconds,
    money,
    percent,
    rate,
    tools_text,
    totals_text,
    visible,
)

LOW_SHARE = 0.8
"""Under this share of valid first answers the endpoint seems not to enforce the schema."""

LOW_SHARE_FROM = 10
"""Of fewer answers, at least three, more than half must be wrong to say so."""

MAX_GROUPS_SHOWN = 10

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
        reason: why the run stopped early, a few words; empty where it did not.
        color: whether the lines may hold colour codes (a terminal, and no NO_COLOR).
        brief: only why it did not end well, and the next command.
    """

    advice: Advice
    reason: str = ""
    color: bool = False
    brief: bool = False

    @property
    def exit_code(self) -> int | None:
        """The process's exit code."""
        return self.advice.exit_code


def summary_lines(s: Snapshot, info: EndInfo) -> list[str]:
    """The closing words for standard error, one line each, the last the next command."""
    after = next_step(info.advice, s.causes or s.by_kind)
    if info.brief:
        return list(_aligned([*_in_brief(s, info), *after], info.color))
    pairs = [
        *_rows(s, info),
        ("ended", headline(s, info)),
        *_of_this_start([*_measures(s), *_schema(s), *_requests(s)], s),
        *_errors(s),
        ("results", info.advice.results),
        *after,
    ]
    return list(_aligned(pairs, info.color))


def _in_brief(s: Snapshot, info: EndInfo) -> list[tuple[str, str]]:
    """Nothing of an end that was wished for, else what it was."""
    rows = list(_rows(s, info))
    if info.exit_code == EXIT_OK:
        return [(label, text) for label, text in rows if label == "warning"]
    return [*rows, ("ended", headline(s, info))]


def _of_this_start(pairs: list[tuple[str, str]], s: Snapshot) -> Iterator[tuple[str, str]]:
    """Mark what does not speak of the whole run."""
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
    "first": "1",
    "cause": "33",
    "next": "1",
}


def headline(s: Snapshot, info: EndInfo) -> str:
    """Return how the run ended, on one line."""
    words = _HEADLINES.get(info.exit_code or 0, f"ended with exit code {info.exit_code}")
    if info.exit_code == EXIT_OK and (s.failed or s.dropped):
        words = "finished, with no more failed rows than allowed"
    return f"{words}: {visible(info.reason)}" if info.reason else words


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
        what = "none of the input's rows was selected" if s.feed.read else "the input has no rows"
        yield "warning", what


def _tools(s: Snapshot) -> Iterator[tuple[str, str]]:
    """How often tools were called and failed over the whole run, and what is wrong about that."""
    if not s.tools:
        return
    yield "tools", tools_text(s.tools)
    if s.this_start.done and not any(one.calls for one in s.tools.values()):
        yield "warning", f"no row called a tool: {', '.join(map(visible, s.tools))}"
    for name, one in s.tools.items():
        if one.calls and one.failed == one.calls:
            calls = "the only call" if one.calls == 1 else f"all {one.calls:,} calls"
            yield (
                "warning",
                f"{calls} of {visible(name, 60)} failed: {visible(one.error or '', 300)}",
            )


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
    )
    start = [f"{s.this_start.sent:,} sent"] if s.resumed else []
    if s.this_start.copied:
        start.append(f"{s.this_start.copied:,} copied from equal requests")
    return f"{text}; this start: {', '.join(start)}" if start else text


def _measures(s: Snapshot) -> Iterator[tuple[str, str]]:
    yield "time", f"{duration(s.elapsed_s)}, {rate(s.overall.rows_per_s)} rows/s"
    if s.latency.count:
        words = f"p50 {milliseconds(s.latency.p50)}, p99 {milliseconds(s.latency.p99)}"
        if s.ttft.count:
            words += (
                f"; first token p50 {milliseconds(s.ttft.p50)}, p99 {milliseconds(s.ttft.p99)}"
                f" ({counted(s.ttft.count, 'answer')})"
            )
        yield "latency", words
    if s.tokens.prompt.unknown or s.tokens.prompt.total is not None:
        yield "tokens", _tokens(s)
    if s.tokens.prompt.total:
        yield "cache", _cache(s)
    if s.cost_usd is not None:
        words = money(s.cost_usd)
        if s.cost_unknown:
            words += f", and {counted(s.cost_unknown, 'answer')} of unknown cost"
        yield "cost", f"{words}; by mode: bagent report"


def _tokens(s: Snapshot) -> str:
    t = s.tokens
    prompt = _number(t.prompt.total, "prompt")
    if t.cached.total is not None:
        prompt += f" ({t.cached.total:,} cached{_partly(t.cached.unknown)})"
    completion = _number(t.completion.total, "completion")
    if t.reasoning.total is not None:
        completion += f" ({t.reasoning.total:,} reasoning{_partly(t.reasoning.unknown)})"
    words = f"{prompt}, {completion}"
    if t.completion.total is not None and s.overall.completion_tokens_per_s is not None:
        words += f", {rate(s.overall.completion_tokens_per_s)} completion tokens/s"
    if t.without_counts:
        words += f"; {counted(t.without_counts, 'answer')} without full counts"
    return words


def _cache(s: Snapshot) -> str:
    """What prefix caches knew of the prompts: by counters, else by the answers, else unknown."""
    rate, cached, prompt = s.cache, s.tokens.cached, s.tokens.prompt.total or 0
    if rate is not None:
        words = f"{percent(rate.share)} of {rate.queries:,} prompt tokens were known"
        words += f", by the counters of {counted(rate.endpoints, 'endpoint')}"
        return f"{words}; unknown of {rate.silent:,} more" if rate.silent else words
    if cached.total is not None and prompt:
        least = "at least " if cached.unknown else ""
        return f"{least}{percent(cached.total / prompt)} of the prompt tokens were known"
    return "unknown: the server does not tell what its prefix cache knew"


def _number(total: int | None, sort: str) -> str:
    return f"unknown {sort}" if total is None else f"{total:,} {sort}"


def _partly(unknown: int) -> str:
    return f", {unknown:,} unknown" if unknown else ""


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
    parts = [f"{s.requests:,} sent", counted(s.retries, "retry", "retries")]
    if s.throttled:
        parts.append(counted(s.throttled, "throttled answer"))
    if s.failed_tries:
        parts.append(f"failed tries: {kinds(s.failed_tries)}")
    yield "requests", ", ".join(parts)


def _errors(s: Snapshot) -> Iterator[tuple[str, str]]:
    label = "errors"
    for group in s.errors[:MAX_GROUPS_SHOWN]:
        yield label, _group(group)
        yield "", f"    {_example(group)}"
        label = ""
    left = s.errors[MAX_GROUPS_SHOWN:]
    rows = sum(group.count for group in left) + s.errors_other
    if left:
        more = "at least " if s.errors_other else ""
        kinds_left = counted(len(left), "more kind")
        yield "", f"and {more}{kinds_left} of error ({counted(rows, 'row')})"
    elif rows:
        yield "", f"and {counted(rows, 'row')} with other errors"


def _group(group: ErrorGroup) -> str:
    words = f"{group.count:,} x {group.kind}"
    if group.http_status is not None:
        words += f", HTTP {group.http_status}"
    if group.endpoints > 1:
        words += f", at {group.endpoints:,} endpoints"
    elif group.endpoint:
        words += f", at {group.endpoint}"
    return words


def _example(group: ErrorGroup) -> str:
    row = f"row {group.row}" if group.id is None else f"row {group.id}"
    place = f"{group.source}:{group.line}" if group.line else group.source
    where = f" ({place})" if place else ""
    at = f" at {group.endpoint}" if group.endpoints > 1 and group.endpoint else ""
    return f"{row}{where}{at}: {group.text or 'no error text'}"
