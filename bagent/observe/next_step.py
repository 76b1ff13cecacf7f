"""What to type after a run has ended: why rows failed, and the command that sends them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bagent.errors import EXIT_CANNOT_WRITE, EXIT_OK, EXIT_ROWS_FAILED
from bagent.observe.words import counted, kinds, visible

FAILED_QUERY = (
    "select id, error_kind, endpoint, attempts, error from results where status <> 'ok' limit 20"
)

_WITH_VALUE = ("--retry", "--on-change")


class Advice(msgspec.Struct, frozen=True):
    """What the next step depends on besides the totals.

    Args:
        exit_code: the process's exit code; None while the run goes on.
        run: how the run is named in a command (a name under ``./runs`` or a directory).
        results: where the results are, for people.
        command: the words of the command that goes on with the run.
        action: what a person must do first, one line.
        resent: the kinds of failure that the same command sends again.
        max_tokens: ``sampling.max_tokens`` of the job.
        max_turns: ``agent.max_turns`` of the job.
        own_bodies: the rows are lines of a batch file, with limits of their own.
        cut_at: the fewest and the most tokens at which answers were cut off; None: not known.
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
        yield "advice", "the same command goes on where the run stopped"
        yield "next", shlex.join(_without(advice.command, ("--fresh",)))


def base_command(words: Sequence[str]) -> list[str]:
    """Return a command without what is of one start only, such as ``--fresh`` and ``--retry``."""
    return _without(words, ("--fresh", "--retry", "--on-change"))


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    result: list[str] = []
    skip = False
    for word in words:
        if not skip and word.partition("=")[0] not in options:
            result.append(word)
        skip = not skip and word in options and word in _WITH_VALUE
    return result


def _after_failures(advice: Advice, by_kind: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    again = {kind: n for kind, n in by_kind.items() if kind in advice.resent}
    lasting = {kind: n for kind, n in by_kind.items() if kind not in advice.resent}
    command = base_command(advice.command)
    for kind, number in sorted(lasting.items(), key=lambda item: (-item[1], item[0])):
        yield "cause", _cause(kind, number, advice)
    if lasting:
        yield "look", f'bagent query {shlex.quote(advice.run)} "{FAILED_QUERY}"'
    if not again:
        yield "advice", "the same command sends none of these rows again; this one does"
        yield "next", shlex.join(_retry(command, lasting, advice))
        return
    if lasting:
        yield "retry", shlex.join(_retry(command, lasting, advice))
    yield "advice", f"the same command sends again what may come out otherwise: {kinds(again)}"
    yield "next", shlex.join(command)


def _retry(command: Sequence[str], lasting: Mapping[str, int], advice: Advice) -> list[str]:
    """The command that sends rows again that failed for lasting reasons, with a mended job."""
    words = list(command)
    if "truncated" in lasting:
        if advice.own_bodies:
            words += ["--set", "output.truncated=accept"]
            lasting = {kind: n for kind, n in lasting.items() if kind != "truncated"}
        elif (most := _cut_at(advice)) is not None:
            words += ["--set", f"sampling.max_tokens={2 * most[1]}", "--on-change", "continue"]
    return [*words, "--retry", ",".join(sorted(lasting))] if lasting else words


def _cut_at(advice: Advice) -> tuple[int, int] | None:
    if advice.max_tokens is not None:
        return advice.max_tokens, advice.max_tokens
    return advice.cut_at


def _cause(kind: str, number: int, advice: Advice) -> str:
    """What to change where rows failed for a lasting reason, one line."""
    if kind == "truncated":
        return _cause_of_cuts(number, advice)
    if kind == "max_turns":
        turns = "" if advice.max_turns is None else f" after {counted(advice.max_turns, 'turn')}"
        return f"raise agent.max_turns: {counted(number, 'agent')} had no answer{turns}"
    mend, what = _CAUSES.get(kind, ("look at the errors", "failed"))
    return f"{mend}: {counted(number, 'row')} {what} ({kind})"


def _cause_of_cuts(number: int, advice: Advice) -> str:
    answers = counted(number, "answer")
    place = _cut_at(advice)
    if place is None:
        where = "were cut off" if number > 1 else "was cut off"
    elif place[0] == place[1]:
        where = f"ended at {counted(place[1], 'token')}"
    else:
        where = f"ended at {place[0]:,} to {place[1]:,} tokens"
    if advice.own_bodies:
        return f"raise max_tokens in the lines, or accept cut answers: {answers} {where}"
    return f"raise sampling.max_tokens: {answers} {where}"


_CAUSES = {
    "schema": (
        "change the prompt or the schema, or set sampling.temperature",
        "without an answer that fits the schema, and temperature 0 gives the same answer again",
    ),
    "bad_input": ("mend the input", "not readable or not to be sent"),
    "template": ("mend the prompt or the input", "not fit for the prompt"),
    "context_overflow": (
        "shorten the input or take a model with a longer context",
        "too long for the context",
    ),
    "rejected": ("change the job or the input", "refused by the server"),
    "refused": ("change the prompt or the input", "refused by the model or a filter"),
}
