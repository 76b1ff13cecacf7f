"""The closing summary of a run: results, failures, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

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
    tools_text,
    totals_text,
    visible,
)
from bagent.observe.python_call import OPTION, command_text
from bagent.observe.snapshot import ErrorGroup, Snapshot
from bagent.observe.token_lines import cache_line, tokens_line
from bagent.types import row_location

FAILED_QUERY = (
    "select id, error_kind, endpoint, attempts, error from results"
    " where error_kind is not null limit 20"
)

_NOT_SENT = ("bad_input", "budget")
"""Kinds of failure that changing the job does not mend."""

_MENDED_BY_JOB = frozenset({"context_overflow", "refused", "rejected", "schema", "template"})
"""Kinds of failure that a change of the job may mend, which ``run`` has to be told to accept."""

_WITH_VALUE = ("--retry", "--on-change", "--budget")
_CONTINUE = ("--on-change", "continue")

_WAIT = ("--wait-hosts", "10m")
"""Options for servers that start later."""

MORE_BUDGET = "write a larger budget in place of MORE"
"""What to do where the budget of a start does not allow a single call."""


class Advice(msgspec.Struct, frozen=True):
    """What the next step depends on beside the totals.

    Args:
        exit_code: the exit code of the process; None while the run is running.
        run: how the run is named in a command (a name under ``./runs`` or a directory).
        results: where the results are, for people.
        command: the arguments of the command that resumes the run.
        action: what a person must do first, in one line.
        resent: the kinds of failure that the same command sends again.
        max_tokens: ``sampling.max_tokens`` of the job.
        max_turns: ``agent.max_turns`` of the job.
        own_bodies: the rows are lines of a batch file with their own limits.
        cut_at: the fewest and most tokens at which answers were cut off; None where unknown.
        none_ok: no row of the run has a good answer.
        long_field: the longest field of the prompt in the failed rows; empty where unknown.
    """

    exit_code: int | None
    run: str
    results: str
    command: list[str]
    action: str = ""
    resent: frozenset[str] = frozenset()
    max_tokens: int | None = None
    max_turns: int | None = None
    own_bodies: bool = False
    cut_at: tuple[int, int] | None = None
    none_ok: bool = False
    long_field: str = ""

    @property
    def noun(self) -> str:
        """What resumes the run: a command, or a call of the library."""
        return "call" if OPTION in self.command else "command"

    @property
    def piped(self) -> str:
        """What the same command needs besides, where its rows come from a pipe."""
        from_pipe = "-" in base_command(self.command) and OPTION not in self.command
        return ", with the same rows on standard input," if from_pipe else ""


def next_step(advice: Advice, by_kind: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield labelled lines; the last is the command to type next.

    Args:
        advice: how the run ended.
        by_kind: how many rows of the whole run failed, by kind.
    """
    run = shlex.quote(advice.run)
    if advice.exit_code is None:
        yield "next", f"bagent status {run} --follow"
    elif advice.exit_code == EXIT_OK:
        yield "next", f"bagent results {run} | head"
    elif advice.exit_code == EXIT_ROWS_FAILED:
        yield from _after_failures(advice, by_kind)
    else:
        action = visible(advice.action)
        if advice.exit_code == EXIT_CANNOT_WRITE and not action:
            action = f"free space for {advice.results}"
        if action:
            yield "first", action
        yield from _resume(advice, by_kind)


def mending(advice: Advice, kind: str, number: int) -> tuple[str, str]:
    """Return what to change so that failed rows of one kind come out ok, and the command.

    Args:
        advice: how the run ended.
        kind: the kind of failure.
        number: how many rows failed for it.
    """
    command = base_command(advice.command)
    if kind in advice.resent:
        return f"the same {advice.noun} sends these rows again", command_text(command)
    if kind == "bad_input":
        return _remedy(kind, advice), command_text(command)
    return _remedy(kind, advice), command_text(_retry(command, {kind: number}, advice))


def base_command(command: Sequence[str]) -> list[str]:
    """Return a command without options for one start only, such as ``--fresh`` and ``--retry``."""
    return _without(command, ("--fresh", "--retry", "--on-change"))


def _resume_command(command: Sequence[str]) -> list[str]:
    """Return a command without the options that begin a run anew."""
    anew = "--on-change=fresh" in command or ("--on-change", "fresh") in pairwise(command)
    return _without(command, ("--fresh", "--on-change") if anew else ("--fresh",))


def _resume(advice: Advice, by_kind: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the lines about the command that resumes a run that stopped early."""
    failed = _sent_after_repair(advice, by_kind)
    if not failed:
        command = _resume_command(advice.command)
        same = "the same"
        if advice.action == MORE_BUDGET:
            command, same = [*_without(command, ("--budget",)), "--budget", "MORE"], "this"
        elif _WAIT[0] in advice.action and _WAIT[0] not in command:
            command, same = [*command, *_WAIT], "this"
        yield "advice", f"{same} {advice.noun}{advice.piped} resumes where the run stopped"
        yield "next", command_text(command)
        return
    causes = {kind: n for kind, n in failed.items() if kind != "rejected"}
    for kind, number in causes.items():
        yield "cause", _cause(kind, number, advice)
    rows = f"sends {kinds(failed)} again" if causes else "sends what was rejected"
    yield "advice", f"this {advice.noun}{advice.piped} resumes where the run stopped, and {rows}"
    again = {kind: n for kind, n in by_kind.items() if kind in advice.resent}
    yield "next", command_text(_retry(base_command(advice.command), failed | again, advice))


def _sent_after_repair(advice: Advice, by_kind: Mapping[str, int]) -> dict[str, int]:
    """Return the kinds to send again with ``--retry`` after a stop that needs a person.

    Resuming leaves lasting failures as they are. Rejected rows may be right once the cause is
    removed. Where no row is ok, each lasting failure has a cause in the job: without ``--retry``
    the next rows would fail alike.
    """
    if advice.exit_code != EXIT_NEEDS_PERSON:
        return {}
    again = {
        kind: number
        for kind, number in by_kind.items()
        if kind == "rejected"
        or (advice.none_ok and kind not in advice.resent and kind not in _NOT_SENT)
    }
    return dict(sorted(again.items(), key=lambda item: (-item[1], item[0])))


def _without(command: Sequence[str], options: Sequence[str]) -> list[str]:
    result: list[str] = []
    skip = False
    for argument in command:
        if not skip and argument.partition("=")[0] not in options:
            result.append(argument)
        skip = not skip and argument in options and argument in _WITH_VALUE
    return result


def _after_failures(advice: Advice, by_kind: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    again = {kind: n for kind, n in by_kind.items() if kind in advice.resent}
    lasting = {kind: n for kind, n in by_kind.items() if kind not in advice.resent}
    command = base_command(advice.command)
    for kind, number in sorted(lasting.items(), key=lambda item: (-item[1], item[0])):
        yield "cause", _cause(kind, number, advice)
    if lasting:
        yield "look", f'bagent query {shlex.quote(advice.run)} "{FAILED_QUERY}"'
    sendable = {kind: n for kind, n in lasting.items() if kind != "bad_input"}
    if not again and not sendable:
        yield "advice", f"the same {advice.noun} reads the corrected lines and sends them"
        yield "next", command_text(command)
        return
    if not again:
        unless = " unless their input is mended" if "bad_input" in lasting else ""
        what = f"sends {kinds(sendable)}" if "bad_input" in lasting else "does"
        after = ", once the cause is removed," if _needs_change(sendable, advice) else ""
        yield (
            "advice",
            f"the same {advice.noun} sends none of these rows again{unless};"
            f" this one{after} {what}",
        )
        yield "next", command_text(_retry(command, sendable, advice))
        return
    if sendable:
        yield "retry", command_text(_retry(command, sendable, advice))
    yield (
        "advice",
        f"the same {advice.noun} sends again what may come out otherwise: {kinds(again)}",
    )
    yield "next", command_text(command)


def _retry(command: Sequence[str], lasting: Mapping[str, int], advice: Advice) -> list[str]:
    """The command that sends rows again that failed for lasting reasons, with a mended job."""
    command = arguments = _without(command, ("--skip-failed",))
    if "truncated" in lasting:
        if advice.own_bodies:
            command = arguments = _with_setting(arguments, "output.truncated=accept")
            lasting = {kind: n for kind, n in lasting.items() if kind != "truncated"}
        elif (limits := _cut_at(advice)) is not None:
            arguments = _with_setting(arguments, f"sampling.max_tokens={2 * limits[1]}")
    if "max_turns" in lasting and advice.max_turns is not None:
        arguments = _with_setting(arguments, f"agent.max_turns={2 * advice.max_turns}")
    if arguments is not command or _needs_change(lasting, advice):
        arguments = [*arguments, *_CONTINUE]
    return [*arguments, "--retry", ",".join(sorted(lasting))] if lasting else arguments


def _with_setting(command: Sequence[str], setting: str) -> list[str]:
    """Return a command with a ``--set``, in place of those of the same key."""
    key = setting.partition("=")[0]
    result: list[str] = []
    for argument in command:
        apart = result[-1:] == ["--set"]
        is_setting = apart or argument.startswith("--set=")
        if not is_setting or argument.removeprefix("--set=").partition("=")[0] != key:
            result.append(argument)
        elif apart:
            result.pop()
    return [*result, "--set", setting]


def _needs_change(lasting: Mapping[str, int], advice: Advice) -> bool:
    """Whether the user may have to change the job before rows are sent again."""
    return not advice.own_bodies and not _MENDED_BY_JOB.isdisjoint(lasting)


def _cut_at(advice: Advice) -> tuple[int, int] | None:
    if advice.max_tokens is not None:
        return advice.max_tokens, advice.max_tokens
    return advice.cut_at


def _cause(kind: str, number: int, advice: Advice) -> str:
    """Why rows failed for a lasting reason, and what to change, one line."""
    return f"{_problem(kind, number, advice)}: {_remedy(kind, advice)}"


def _problem(kind: str, number: int, advice: Advice) -> str:
    if kind == "truncated":
        return _cut_answers(number, advice)
    if kind == "max_turns":
        turns = "" if advice.max_turns is None else f" after {counted(advice.max_turns, 'turn')}"
        return f"{counted(number, 'agent')} had no answer{turns}"
    problem, _ = _CAUSES.get(kind, _OTHER_CAUSE)
    return f"{counted(number, 'row')} {problem} ({kind})"


def _remedy(kind: str, advice: Advice) -> str:
    if kind == "truncated" and advice.own_bodies:
        return "raise max_tokens in the lines, or accept cut answers"
    if kind == "context_overflow" and not advice.own_bodies:
        field = advice.long_field
        which = f"the field {field}" if field else "the long field"
        return f"shorten {which} in the prompt, such as {{{{ {field or 'FIELD'}[:2000] }}}}"
    _, remedy = _CAUSES.get(kind, _OTHER_CAUSE)
    return remedy


def _cut_answers(number: int, advice: Advice) -> str:
    answers = counted(number, "answer")
    limits = _cut_at(advice)
    if limits is None:
        return f"{answers} were cut off" if number > 1 else f"{answers} was cut off"
    if limits[0] == limits[1]:
        return f"{answers} ended at {counted(limits[1], 'token')}"
    return f"{answers} ended at {limits[0]:,} to {limits[1]:,} tokens"


_OTHER_CAUSE = ("failed", "look at the errors")
_CAUSES = {
    "schema": (
        "without an answer that fits the schema",
        "change the prompt or the schema, or set sampling.temperature, since temperature 0 gives"
        " the same answer again",
    ),
    "bad_input": ("not readable or not to be sent", "correct the input"),
    "template": ("not fit for the prompt", "correct the prompt or the input"),
    "context_overflow": (
        "too long for the context",
        "shorten the input or take a model with a longer context",
    ),
    "rejected": ("refused by the server", "change the job or the input"),
    "refused": ("refused by the model or a filter", "change the prompt or the input"),
    "truncated": ("cut off", "raise sampling.max_tokens"),
    "max_turns": ("without an answer", "raise agent.max_turns"),
}
"""What is wrong with rows of each kind, and what to change."""


LOW_SHARE = 0.8
"""A share of valid first answers below which the schema seems not to be enforced."""

LOW_SHARE_FROM = 10
"""With fewer answers, at least three, more than half must be invalid for that warning."""

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
        reason: why the run stopped early; empty where it did not.
        color: whether the lines may have colour codes.
        worked_s: how long all starts worked, without the pauses between them; None where unknown.
        absent: what to know about results whose rows left the input; empty where there are none.
    """

    advice: Advice
    reason: str = ""
    color: bool = False
    worked_s: float | None = None
    absent: str = ""

    @property
    def exit_code(self) -> int | None:
        """The process's exit code."""
        return self.advice.exit_code


def summary_lines(s: Snapshot, info: EndInfo) -> list[str]:
    """Return the lines of the summary; the last is the next command."""
    after = next_step(info.advice, s.causes or s.by_kind)
    pairs = [
        *_rows(s, info),
        *([("absent", info.absent)] if info.absent else []),
        ("ended", headline(s, info)),
        ("time", _time(s, info.worked_s)),
        *_of_this_start([*_measures(s, info.worked_s), *_schema(s), *_requests(s)], s),
        *_trouble(s, info.advice.run),
        *_errors(s),
        ("results", info.advice.results),
        *after,
    ]
    return list(_aligned(pairs, info.color))


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
        message = (
            "none of the input's rows was selected"
            if s.feed.read or s.feed.unselected
            else "the input has no rows"
        )
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
            yield (
                "warning",
                f"{calls} of {visible(name, 60)} failed: {visible(count.error or '', 300)}",
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
    parts = [f"{s.requests:,} sent", counted(s.retries, "retry", "retries")]
    if s.tries != s.requests:  # a request may hold several rows, or be cut off at the end
        parts[0] += f"; {counted(s.tries, 'row attempt')} ended"
        parts[1] = f"{s.retries:,} of them retries"
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
