"""Agents: turns, tools, compaction."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.job.spec.backend import Headers
from bagent.job.spec.paths import (
    InputPath,
    InputPathsKind,
    PathKind,
    PythonFunction,
    PythonFunctionKind,
    ResolvedPath,
)
from bagent.job.spec.types import (
    Choice,
    Duration,
    Flag,
    FreeForm,
    IntegerKind,
    NumberKind,
    RateKind,
    Section,
    Text,
    TextList,
    TextMap,
    invalid,
)
from bagent.job.validation import LoadContext
from bagent.text.suggest import did_you_mean
from bagent.types import Json


@dataclass(frozen=True, slots=True)
class _Interpreter:
    """How a program is given code.

    ``letter`` are the one-letter options that take it, ``long`` the long ones. ``valued`` and
    ``long_valued`` are options with a value that is no code. ``attached``: code may follow
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
"""Programs that pass all their arguments to a remote shell."""

_VERSION = re.compile(r"[-.]?\d[\d.]*(?:\.exe)?$|\.exe$")


def code_words(argv: Sequence[str]) -> Iterator[int]:
    """Yield the indexes in ``argv`` of code, or of the file that is run.

    An index may come twice.

    Interpreters count at any position, since programs such as ``env``, ``timeout``, ``srun`` or
    ``docker run`` start what their words name.
    """
    data_from = len(argv)
    for index, word in enumerate(argv):
        if index >= data_from:
            return
        name = _program(word)
        following = argv[index + 1 :]
        if name in _REMOTE:
            yield from range(index + 1, len(argv))
        elif name == "busybox":
            continue  # the next argument is checked like any other
        elif name in _INTERPRETERS:
            offsets = _code_of(
                _INTERPRETERS[name], following, to_the_end=name in _OPERANDS_TO_THE_END
            )
            indexes = [index + 1 + number for number in offsets if number < len(following)]
            yield from indexes
            if indexes and not _INTERPRETERS[name].attached:
                data_from = max(indexes) + 1  # what follows are arguments of a script


def _program(word: str) -> str:
    name = PurePosixPath(word).name
    return name if name in _INTERPRETERS else _VERSION.sub("", name)


def _code_of(interpreter: _Interpreter, args: Sequence[str], *, to_the_end: bool) -> Iterator[int]:
    """Yield the indexes of code among the arguments of an interpreter."""
    operands, has_code = 0, False
    for number, kind in _kinds(interpreter, args):
        if kind == "code":
            yield number
            has_code = True
            if not interpreter.attached:
                return  # what follows are a script's arguments
        elif interpreter.operand is None:
            if not interpreter.mixed:
                if not has_code:
                    yield number  # a script: it must not be chosen either
                return  # the remaining arguments are those of the script
        else:
            if (to_the_end or not has_code) and operands >= interpreter.operand:
                yield number
                if not to_the_end:
                    return
            operands += 1


def _kinds(interpreter: _Interpreter, args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the indexes of arguments that are ``code`` by an option, and of operands."""
    is_value = is_code = False
    for number, word in enumerate(args):
        if is_value:
            is_value = False
            continue
        if is_code and (interpreter.attached or not word.startswith(("-", "+"))):
            yield number, "code"
            is_code = False
            continue
        kind = _kind(interpreter, word)
        if kind == "end":  # the file or module that is run is here or in the next argument
            yield number + (word[-1] in interpreter.ends), "code"
            return
        if kind in ("attached", "operand"):
            yield number, "code" if kind == "attached" else kind
        is_value = kind == "value"
        is_code |= kind == "code"


def _kind(interpreter: _Interpreter, word: str) -> str:
    if word in interpreter.long:
        return "code"
    if word.partition("=")[0] in interpreter.long:
        return "attached"
    if word in interpreter.long_valued:
        return "value"
    if len(word) < 2 or word[0] not in "-+":
        return "operand"
    return "" if word.startswith("--") else _option(interpreter, word)


def _option(interpreter: _Interpreter, word: str) -> str:
    """Return what follows a word of one-letter options.

    ``code``, a ``value``, the ``end`` of all options, or nothing special; ``attached`` where the
    word holds the code itself.
    """
    for end, letter in enumerate(word[1:], start=2):
        if letter in interpreter.letter:
            if interpreter.attached and len(word) > end:
                return "attached"
            return "code"
        if letter in interpreter.ends:
            return "end"
        if letter in interpreter.valued:
            return "value" if len(word) == end else ""
    return ""


OnToolFailure = Literal["continue", "fail"]
Builtin = Literal["http_get", "read_file", "web_search", "sql", "python_eval", "shell"]

RUNS_CODE: frozenset[str] = frozenset({"python_eval", "shell"})
"""Built-in tools that need ``allow_code: true``."""

PLACE = re.compile(r"\{\{(?P<text>\w+)\}\}|\{(?P<name>\w+)\}")
"""A placeholder in argv: ``{name}`` is an argument, ``{{name}}`` the text ``{name}``."""

PROGRAM_PLACE = re.compile(r"\{(prompt|model|base_url|folder|job_folder|id|key)\}")
"""A placeholder in the argv and the environment of an agent program."""


@dataclass(frozen=True)
class Cache(Duration):
    """``true``, ``false``, or for how many seconds an answer is kept."""

    def read(self, value: Any, context: LoadContext | None) -> Any:
        """True, false, or seconds."""
        return value if isinstance(value, bool) else super().read(value, context)

    def describe(self) -> Json:
        """Return a flag, or a duration."""
        return {"anyOf": [{"type": "boolean"}, super().describe()]}


class McpSpec(Section):
    """A server of the Model Context Protocol: a program to start, or a URL."""

    short_form: ClassVar[list[Json]] = [TextList(1).describe()]

    url: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="Its http(s) URL."
    )
    command: Annotated[tuple[str, ...], TextList(1)] = Field(
        default=(), description="The program to start, with arguments."
    )
    env: Annotated[Mapping[str, str], TextMap()] = Field(
        default_factory=dict, description="Environment of the program.", repr=False
    )
    headers: Annotated[Mapping[str, str], Headers()] = Field(
        default_factory=dict, description="HTTP headers for the URL.", repr=False
    )
    tools: Annotated[tuple[str, ...] | None, TextList()] = Field(
        default=None, description="Only these of its tools; default: all."
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a URL (a text with ``://``) or a command; a text is split like a shell does."""
        if isinstance(data, list):
            return {"command": data}
        if isinstance(data, str):
            return {"url": data} if "://" in data else {"command": _split(data)}
        return data

    @model_validator(mode="after")
    def _check_forms(self) -> McpSpec:
        if (self.url is None) == (not self.command):
            raise invalid("expected a URL or a command")
        if self.url and not self.url.lower().startswith(("http://", "https://")):
            raise invalid("the URL must begin with http:// or https://", key="url")
        return self


class ToolSpec(Section):
    """One tool that the agent may call: exactly one of builtin, python, command, mcp."""

    builtin: Annotated[Builtin | None, Choice(Builtin)] = Field(
        default=None, description="A tool that comes with bagent."
    )
    python: Annotated[PythonFunction | None, PythonFunctionKind()] = Field(
        default=None, description="file.py:function; its signature and docstring are the schema."
    )
    command: Annotated[tuple[str, ...], TextList(1)] = Field(
        default=(),
        description="A program per call: its argv, {name} stands for an argument.",
    )
    mcp: McpSpec | None = Field(default=None, description="A Model Context Protocol server.")
    name: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="The name that the model sees."
    )
    description: Annotated[str | None, Text()] = Field(
        default=None, description="What the model reads about it."
    )
    parameters: Annotated[Mapping[str, Json] | None, FreeForm(mapping=True)] = Field(
        default=None, description="JSON Schema of the arguments of a command."
    )
    timeout: Annotated[float | None, Duration()] = Field(
        default=60.0, description="Time limit of one call."
    )
    rate_limit: Annotated[float | None, RateKind()] = Field(
        default=None, description="Calls a second, over the whole run.", examples=["5/s"]
    )
    cache: Annotated[bool | float | None, Cache()] = Field(
        default=None, description="Keep answers; default: off for tools with side effects."
    )
    coalesce: Annotated[bool | None, Flag()] = Field(
        default=None,
        description="Equal calls in flight share one run; default: not with side effects.",
    )
    max_tokens: Annotated[int | None, IntegerKind(1)] = Field(
        default=None, description="An answer is cut at this many tokens."
    )
    concurrency: Annotated[int, IntegerKind(1, 10_000)] = Field(
        default=16, description="Most calls of it that run at once."
    )
    batch: Annotated[str | None, Text(empty=False)] = Field(
        default=None,
        description="python, sql with a query: the list argument whose items are gathered from"
        " calls that come together; for sql also the column that holds them.",
    )
    root: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None,
        description="read_file: the folder that it may read; python, shell: where it runs.",
    )
    allow_hosts: Annotated[tuple[str, ...], TextList()] = Field(
        default=(), description="http_get: the hosts that it may ask."
    )
    database: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="sql: the DuckDB file that it may read."
    )
    files: Annotated[tuple[InputPath, ...], InputPathsKind(rows=False)] = Field(
        default=(), description="sql: data files that it may read, each a table."
    )
    query: Annotated[str | None, Text(empty=False)] = Field(
        default=None,
        description="sql: the one statement that is asked, with $name for each argument.",
    )
    url: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="web_search: the address of the search service."
    )
    api_key_env: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="web_search: the environment variable that holds its key."
    )
    env: Annotated[Mapping[str, str], TextMap()] = Field(
        default_factory=dict, description="Environment of a command.", repr=False
    )
    strip_preamble: Annotated[bool, Flag()] = Field(
        default=False,
        description="Drop leading x-anthropic-* and x-amz-* lines of a command's answer.",
    )

    @model_validator(mode="after")
    def _check_forms(self) -> ToolSpec:
        kinds = (self.builtin, self.python, self.command, self.mcp)
        if sum(bool(kind) for kind in kinds) != 1:
            raise invalid("a tool has exactly one of builtin, python, command, mcp")
        if self.parameters is not None and not self.command:
            raise invalid("parameters belong to a command", key="parameters")
        if self.command and self.command != ("claude_code",) and not self.name:
            raise invalid("a command needs a name", "write name: NAME")
        self._check_places()
        if self.command:
            _refuse_code(self.command, PLACE)
        return self

    def _check_places(self) -> None:
        """Check that placeholders name parameters; without a schema each one is a parameter."""
        if self.parameters is None or "$ref" in self.parameters:
            return
        properties = self.parameters.get("properties")
        names = list(properties) if isinstance(properties, dict) else []
        for number, word in enumerate(self.command):
            for match in PLACE.finditer(word):
                name = match["name"]
                if name and name not in names:
                    raise invalid(
                        f"{{{name}}} is no parameter",
                        f"{did_you_mean(name, names)} {{{{{name}}}}} is the text itself".strip(),
                        key=f"command.{number}",
                    )


def _refuse_code(argv: Sequence[str], placeholder: re.Pattern[str]) -> None:
    """Refuse placeholders in code and in the name of the program.

    Raises:
        PydanticCustomError: with the way to pass the value as an argument.
    """
    for number in (0, *code_words(argv)):
        name = next(
            (match[0] for match in placeholder.finditer(argv[number]) if _is_place(match)), None
        )
        if name is None:
            continue
        if number == 0:
            raise invalid(f"{name} would choose the program", "name it", key="command.0")
        raise invalid(
            f"{name} stands in code that a shell or an interpreter runs, and with it what a row or"
            " a model says",
            f"pass it as an argument: [sh, -c, 'grep -r \"$1\" docs', sh, '{name}'],"
            " or read it from standard input",
            key=f"command.{number}",
        )


def _is_place(match: re.Match[str]) -> bool:
    """Return whether a match of :data:`PLACE` or :data:`PROGRAM_PLACE` is filled in."""
    return match.groupdict().get("text") is None


class CompactSpec(Section):
    """When and how a long conversation is made shorter."""

    at: Annotated[float, NumberKind(0, 1, above=True)] = Field(
        default=0.85, description="At this share of the context."
    )
    model: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="A model that sums up; default: old tool answers are cut."
    )


class AgentSpec(Section):
    """One row's conversation: turns and tools, or an external agent program."""

    max_turns: Annotated[int, IntegerKind(1, 10_000)] = Field(
        default=6,
        description="Most turns of a row. It fails earlier where all calls of five turns in a row"
        " fail.",
    )
    on_tool_failure: Annotated[OnToolFailure, Choice(OnToolFailure)] = Field(
        default="continue",
        description="A failed tool: the model is told and continues, or the row fails.",
    )
    tools: tuple[ToolSpec, ...] = Field(
        default=(), description="The only tools that may be called."
    )
    tool_choice: Annotated[str, Text(empty=False)] = Field(
        default="auto",
        description="required, or the name of a tool: the first turn has to call one, or this one.",
    )
    compact: CompactSpec = Field(
        default_factory=CompactSpec, description="Make long conversations shorter."
    )
    command: Annotated[tuple[str, ...], TextList(1)] = Field(
        default=(), description="An external agent program that answers a row, with its arguments."
    )
    env: Annotated[Mapping[str, str], TextMap()] = Field(
        default_factory=dict, description="Environment of the external program.", repr=False
    )
    allow_code: Annotated[bool, Flag()] = Field(
        default=False, description="Allow the tools python_eval and shell."
    )

    @model_validator(mode="after")
    def _check(self) -> AgentSpec:
        if self.command and self.tools:
            raise invalid("command and tools exclude each other", key="command")
        if self.command:
            _refuse_code(self.command, PROGRAM_PLACE)
        if any("{key}" in word for word in self.command):
            hint = "others may read a command line; write it under agent: {env: ...}"
            raise invalid("{key} stands in the command", hint, key="command")
        names = [tool.name or tool.builtin for tool in self.tools if tool.name or tool.builtin]
        for name in names:
            if names.count(name) > 1:
                raise invalid(f"two tools are named {name}", "give one of them another name:")
        return self


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise invalid(f"not a command line: {error}".lower()) from None
