"""Tools that are programs: one process per call, arguments in, answer out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bagent.job.spec.agent import PLACE
from bagent.tools.subprocess_runner import CommandChild, ProcessResult, run_child
from bagent.tools.types import Arguments, ToolFault
from bagent.types import Json

PREAMBLE = re.compile(r"(?:[ \t]*x-(?:anthropic|amz)-[^\n]*(?:\n|\Z)|[ \t]*\n)*", re.I)

CLAUDE_CODE = ("claude_code",)
CLAUDE_CODE_ARGV = ("claude", "--print", "--output-format", "text")
CLAUDE_CODE_WORDS = "Give a task to Claude Code, an agent that can read and change files."
CLAUDE_CODE_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "The task, in full sentences."}},
    "required": ["prompt"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class CommandTool:
    """A program as a tool.

    Attributes:
        argv: its words; ``{name}`` stands for an argument that the schema has, ``{{name}}`` for
            the text ``{name}``.
        names: the arguments that the schema has.
        cwd: the folder it runs in.
        env: its whole environment.
        prompt: the argument that alone is its input; empty: all, as one JSON object.
        strip_preamble: drop leading ``x-anthropic-*`` and ``x-amz-*`` lines of its answer.
    """

    argv: Sequence[str]
    names: frozenset[str]
    cwd: Path
    env: Mapping[str, str]
    prompt: str = ""
    strip_preamble: bool = False

    async def run(self, arguments: Arguments) -> str:
        """The standard output of one run.

        Raises:
            ToolFault: it cannot be started, or ended with a code other than 0.
        """
        argv = [self._filled(word, arguments) for word in self.argv]
        if "\0" in "".join(argv):
            raise ToolFault("an argument holds a NUL character", "bad_arguments")
        stdin = arguments[self.prompt].encode() if self.prompt else msgspec.json.encode(arguments)
        text = answer_of(await run_child(CommandChild(argv, stdin, self.cwd, self.env)))
        return without_preamble(text) if self.strip_preamble else text

    def _filled(self, word: str, arguments: Arguments) -> str:
        """A word with its places filled."""

        def value(found: re.Match[str]) -> str:
            name = found["name"]
            if name is None:
                return f"{{{found['text']}}}"
            return as_word(arguments.get(name)) if name in self.names else found[0]

        return PLACE.sub(value, word)


def as_word(value: Any) -> str:
    """An argument as part of an argv: text as it is, nothing as nothing, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def answer_of(ended: ProcessResult) -> str:
    """The output of a program that went well, or that was stopped since it wrote too much.

    Raises:
        ToolFault: it failed; with the ends of its error output and of its output: some programs
            tell their errors there.
    """
    if ended.code == 0:
        return ended.out
    if ended.cut:
        return f"{ended.out}\n[cut: the program wrote more and was stopped]"
    how = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    words = "; ".join(filter(None, (ended.err, ended.out[-500:].strip())))
    raise ToolFault(f"it ended with {how}" + (f": {words}" if words else ""))


def without_preamble(text: str) -> str:
    """``text`` without the ``x-anthropic-*`` and ``x-amz-*`` header lines that it begins with."""
    found = PREAMBLE.match(text)
    head = found[0] if found else ""
    return text[len(head) :] if "x-" in head.lower() else text


def places_schema(argv: Sequence[str]) -> Json:
    """The schema of a command that has none: a required text for every ``{name}``."""
    found = (place["name"] for word in argv for place in PLACE.finditer(word))
    names = [name for name in dict.fromkeys(found) if name is not None]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
