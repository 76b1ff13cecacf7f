"""The next step after a run ended: what to change first, and the command to type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec

from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_NEEDS_PERSON,
    EXIT_OK,
    EXIT_ROWS_FAILED,
)
from bagent.observe.formatting import counted, kinds, visible

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

_DEFAULT_MAX_TOKENS = 4096
"""Most tokens of an answer where a job sets no limit."""

_NEAR_LIMIT = 0.9
"""Share of the limit of a request from which a cut answer counts as ended by that limit."""

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
        return "call" if _PYTHON_OPTION in self.command else "command"

    @property
    def piped(self) -> str:
        """What the same command needs besides, where its rows come from a pipe."""
        read = {("-i", "-"), ("--input", "-")}.intersection(pairwise(self.command))
        from_pipe = read or "--input=-" in self.command or "-i-" in self.command
        from_python = _PYTHON_OPTION in self.command
        return ", with the same rows on standard input," if from_pipe and not from_python else ""


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
        if advice.action == MORE_BUDGET:
            command = [*_without(command, ("--budget",)), "--budget", "MORE"]
        elif _WAIT[0] in advice.action and _WAIT[0] not in command:
            command = [*command, *_WAIT]
        same = "the same" if command == list(advice.command) else "this"
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
    """Return the command that sends rows with lasting failures again, with a mended job."""
    command = arguments = _without(command, ("--skip-failed",))
    if "truncated" in lasting:
        if advice.own_bodies:
            command = arguments = _with_setting(arguments, "output.truncated=accept")
            lasting = {kind: n for kind, n in lasting.items() if kind != "truncated"}
        elif not _cut_by_server(advice) and _cut_at(advice) is not None:
            arguments = _with_setting(arguments, f"sampling.max_tokens={2 * _requested(advice)}")
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
    mended = _MENDED_BY_JOB | ({"truncated"} if _cut_by_server(advice) else set())
    return not advice.own_bodies and not mended.isdisjoint(lasting)


def _requested(advice: Advice) -> int:
    """Return the most tokens that a request of the job allowed."""
    return advice.max_tokens or _DEFAULT_MAX_TOKENS


def _cut_by_server(advice: Advice) -> bool:
    """Whether every cut answer ended well before its request's limit.

    The context was full then, or the server has a lower limit; a larger limit changes nothing.
    """
    cut_at = advice.cut_at
    return (
        cut_at is not None
        and not advice.own_bodies
        and cut_at[1] < _NEAR_LIMIT * _requested(advice)
    )


def _cut_at(advice: Advice) -> tuple[int, int] | None:
    if advice.max_tokens is not None and not _cut_by_server(advice):
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
    if kind == "truncated" and _cut_by_server(advice):
        return "shorten the prompt, which may fill the context, or raise the server's own limit"
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
    tokens = counted(limits[1], "token")
    if limits[0] != limits[1]:
        tokens = f"{limits[0]:,} to {limits[1]:,} tokens"
    allowed = f", though up to {_requested(advice):,} were allowed" * _cut_by_server(advice)
    return f"{answers} ended at {tokens}{allowed}"


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


_PYTHON_OPTION = "--python"
"""Marks the command of a run that the library started."""

_DROPPED = (_PYTHON_OPTION, "-o", "-i", "--progress")
_TEMPORARY = re.compile(r"(?:.*/)?\.bagent-[0-9a-f]+\.yaml")
"""The file of a job that is a dict."""


def command_text(command: Sequence[str]) -> str:
    """Return a command to type, or the call to make where the library started the run."""
    return python_call(command) if _PYTHON_OPTION in command else shlex.join(command)


def python_call(command: Sequence[str]) -> str:
    """Return what to do in Python for the command of a run that the library started."""
    arguments = list(command[2:])
    job = arguments.pop(0) if arguments else ""
    parts = ["job" if _TEMPORARY.fullmatch(job) else _quoted(job)]
    options: list[str] = []
    same = "the same job"
    while arguments:
        argument = arguments.pop(0)
        if argument in _DROPPED:
            value = arguments.pop(0) if arguments else ""
            if argument == _PYTHON_OPTION and value.startswith("rows"):
                parts.append("rows=rows")
                same = "the same job and rows"
        elif argument == "--name" and arguments:
            parts.append(f"name={_quoted(arguments.pop(0))}")
        elif argument == "--ordered":
            parts.append("ordered=True")
        else:
            options.append(argument)
    if options:
        parts.append(f"options=[{', '.join(map(_quoted, options))}]")
    return f"call run({', '.join(parts)}) again in Python, with {same}"


def _quoted(text: str) -> str:
    quote = "'" if '"' in text and "'" not in text else '"'
    return repr(text) if quote in text or not text.isprintable() else f"{quote}{text}{quote}"
