"""Which words of a command line are code that a shell or an interpreter runs.

What a row or a model says may stand in an argument, never inside code: quotes do not help, since
the value may end them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class _Interpreter:
    """How a program is given code.

    ``letter`` are the one-letter options that take it, ``long`` the long ones. ``valued`` and
    ``long_valued`` are options with a value that is no code. ``attached``: code may stand behind
    the letter in the same word. ``operand`` is the number of the operand that is code where no
    option gave any; ``ends`` are options behind which no code comes. ``mixed``: options may follow
    operands.
    """

    letter: str = ""
    long: tuple[str, ...] = ()
    valued: str = ""
    long_valued: tuple[str, ...] = ()
    attached: bool = True
    operand: int | None = None
    ends: str = ""
    mixed: bool = False


_SHELL = _Interpreter(
    "c", ("--command",), "oO", ("--rcfile", "--init-file", "--emulate"), attached=False
)
_SQL = _Interpreter("ce", ("--command", "--execute"), "hpPuUdDSfF", mixed=True)
_NODE = _Interpreter(
    "ep", ("--eval", "--print"), "rC", ("--require", "--import", "--loader"), attached=False
)
_DATABASE = _Interpreter("", ("-cmd", "--cmd", "-c", "-s"), operand=1)
_USER_SHELL = _Interpreter("c", ("--command", "--session-command"), "sgGwE", mixed=True)
_INTERPRETERS: dict[str, _Interpreter] = {
    **dict.fromkeys(("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "csh", "tcsh"), _SHELL),
    **dict.fromkeys(("rbash", "yash", "oksh", "nu", "xonsh", "elvish"), _SHELL),
    "fish": _Interpreter("cC", ("--command", "--init-command"), ""),
    **dict.fromkeys(("python", "pypy", "ipython"), _Interpreter("c", (), "WX", ends="m")),
    **dict.fromkeys(("perl", "ruby"), _Interpreter("eE", (), "IMmr")),
    **dict.fromkeys(("node", "nodejs", "bun", "deno", "tsx", "ts-node"), _NODE),
    "php": _Interpreter("rBRE", ("--run",), "dc"),
    "lua": _Interpreter("e", (), "l"),
    "julia": _Interpreter("eE", ("--eval", "--print"), "LpJ"),
    **dict.fromkeys(("R", "Rscript"), _Interpreter("e", (), "")),
    "osascript": _Interpreter("e", (), "l"),
    "groovy": _Interpreter("e", (), ""),
    **dict.fromkeys(
        ("pwsh", "powershell"),
        _Interpreter("", ("-c", "-command", "-Command", "--command", "-EncodedCommand"), ""),
    ),
    **dict.fromkeys(
        ("awk", "gawk", "mawk", "nawk"), _Interpreter("e", ("--source",), "Fv", operand=0, ends="f")
    ),
    "sed": _Interpreter("e", ("--expression",), "l", operand=0, ends="f"),
    **dict.fromkeys(("psql", "mysql", "mariadb"), _SQL),
    **dict.fromkeys(("sqlite3", "duckdb"), _DATABASE),
    **dict.fromkeys(("su", "runuser", "script", "flock"), _USER_SHELL),
    **dict.fromkeys(("watch", "parallel", "eval", "tclsh"), _Interpreter(operand=0)),
    "sbatch": _Interpreter("", ("--wrap",), operand=0),
    "make": _Interpreter("", ("--eval",), mixed=True),
    "env": _Interpreter("S", ("--split-string",), "uC", mixed=True),
}
_OPERANDS_TO_THE_END = frozenset({"sqlite3", "duckdb", "watch", "parallel", "eval"})
_REMOTE = frozenset({"ssh", "rsh", "pdsh", "clush", "mosh"})
"""Programs that hand all their words to a shell elsewhere."""

_VERSION = re.compile(r"[-.]?\d[\d.]*(?:\.exe)?$|\.exe$")


def code_words(argv: Sequence[str]) -> Iterator[int]:
    """Yield the places of the words of ``argv`` that are run as code, or name the file that is run.

    A place may come twice.

    Interpreters count wherever they stand, since programs such as ``env``, ``timeout``, ``srun`` or
    ``docker run`` start what their words name.
    """
    data_from = len(argv)
    for place, word in enumerate(argv):
        if place >= data_from:
            return
        name = _program(word)
        rest = argv[place + 1 :]
        if name in _REMOTE:
            yield from range(place + 1, len(argv))
        elif name == "busybox":
            continue  # the word behind it is looked at like any other
        elif name in _INTERPRETERS:
            found = _code_of(_INTERPRETERS[name], rest, to_the_end=name in _OPERANDS_TO_THE_END)
            places = [place + 1 + number for number in found if number < len(rest)]
            yield from places
            if places and not _INTERPRETERS[name].attached:
                data_from = max(places) + 1  # what follows are arguments of a script


def _program(word: str) -> str:
    name = PurePosixPath(word).name
    return name if name in _INTERPRETERS else _VERSION.sub("", name)


def _code_of(how: _Interpreter, words: Sequence[str], *, to_the_end: bool) -> Iterator[int]:
    """Yield the places of code among the words behind an interpreter."""
    operands, given = 0, False
    for number, kind in _kinds(how, words):
        if kind == "code":
            yield number
            given = True
            if not how.attached:
                return  # what follows are a script's arguments
        elif how.operand is None:
            if not how.mixed:
                if not given:
                    yield number  # a script: it must not be chosen either
                return  # what follows are its own words
        else:
            if (to_the_end or not given) and operands >= how.operand:
                yield number
                if not to_the_end:
                    return
            operands += 1


def _kinds(how: _Interpreter, words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the words that are ``code`` by an option, and those that are an ``operand``."""
    is_value = is_code = False
    for number, word in enumerate(words):
        if is_value:
            is_value = False
            continue
        if is_code and (how.attached or not word.startswith(("-", "+"))):
            yield number, "code"
            is_code = False
            continue
        kind = _kind(how, word)
        if kind == "end":  # the file, or the module, that is run stands here or in the next word
            yield number + (word[-1] in how.ends), "code"
            return
        if kind in ("attached", "operand"):
            yield number, "code" if kind == "attached" else kind
        is_value = kind == "value"
        is_code |= kind == "code"


def _kind(how: _Interpreter, word: str) -> str:
    if word in how.long:
        return "code"
    if word.partition("=")[0] in how.long:
        return "attached"
    if word in how.long_valued:
        return "value"
    if len(word) < 2 or word[0] not in "-+":
        return "operand"
    return "" if word.startswith("--") else _option(how, word)


def _option(how: _Interpreter, word: str) -> str:
    """What comes behind a word of one-letter options: ``code``, a ``value``, the ``end`` of all
    options, or nothing special; ``attached`` where the word holds the code itself."""
    for place, letter in enumerate(word[1:], start=2):
        if letter in how.letter:
            if how.attached and len(word) > place:
                return "attached"
            return "code"
        if letter in how.ends:
            return "end"
        if letter in how.valued:
            return "value" if len(word) == place else ""
    return ""
