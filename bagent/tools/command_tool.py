"""Tools that are programs: one process per call."""

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
CLAUDE_CODE_DESCRIPTION = "Give a task to Claude Code, an agent that can read and change files."
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
        argv: its arguments; ``{name}`` is a property of the schema, ``{{name}}`` is ``{name}``.
        names: the arguments that the schema has.
        cwd: its working directory.
        env: its whole environment.
        prompt: the argument that is its input; empty: all arguments as one JSON object.
        strip_preamble: whether leading ``x-anthropic-*`` and ``x-amz-*`` lines are removed.
    """

    argv: Sequence[str]
    names: frozenset[str]
    cwd: Path
    env: Mapping[str, str]
    prompt: str = ""
    strip_preamble: bool = False

    async def run(self, arguments: Arguments) -> str:
        """Run the program once and return its standard output.

        Raises:
            ToolFault: it cannot be started, or ended with a code other than 0.
        """
        argv = [self._fill(word, arguments) for word in self.argv]
        if "\0" in "".join(argv):
            raise ToolFault("an argument holds a NUL character", "bad_arguments")
        stdin = arguments[self.prompt].encode() if self.prompt else msgspec.json.encode(arguments)
        text = answer_of(await run_child(CommandChild(argv, stdin, self.cwd, self.env)))
        return without_preamble(text) if self.strip_preamble else text

    def _fill(self, word: str, arguments: Arguments) -> str:
        """Return a word with its placeholders filled."""

        def value(match: re.Match[str]) -> str:
            name = match["name"]
            if name is None:
                return f"{{{match['text']}}}"
            return as_word(arguments.get(name)) if name in self.names else match[0]

        return PLACE.sub(value, word)


def as_word(value: Any) -> str:
    """Return an argument as a word: a text as it is, null as an empty word, the rest as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def answer_of(ended: ProcessResult) -> str:
    """Return the output of a program that succeeded, or that was stopped for too much output.

    Raises:
        ToolFault: it failed; the message has the ends of its error output and of its output.
    """
    if ended.code == 0:
        return ended.out
    if ended.cut:
        return f"{ended.out}\n[cut: the program wrote more and was stopped]"
    how = f"signal {-ended.code}" if ended.code < 0 else f"code {ended.code}"
    details = "; ".join(filter(None, (ended.err, ended.out[-500:].strip())))
    raise ToolFault(f"it ended with {how}" + (f": {details}" if details else ""))


def without_preamble(text: str) -> str:
    """Return ``text`` without leading ``x-anthropic-*`` and ``x-amz-*`` header lines."""
    match = PREAMBLE.match(text)
    head = match[0] if match else ""
    return text[len(head) :] if "x-" in head.lower() else text


def places_schema(argv: Sequence[str]) -> Json:
    """Return the schema of a command without one: a required text for every ``{name}``."""
    names_found = (match["name"] for word in argv for match in PLACE.finditer(word))
    names = [name for name in dict.fromkeys(names_found) if name is not None]
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
