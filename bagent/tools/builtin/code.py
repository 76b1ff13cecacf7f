"""``python_eval`` and ``shell``: code that a model wrote, in a process of its own.

This bounds mistakes, it does not hold an attacker: the code runs as the user who runs the job, and
only a job that says ``allow_code: true`` has these tools.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagent.tools.command_tool import answer_of
from bagent.tools.subprocess_runner import CommandChild, ProcessLimits, run_child
from bagent.tools.types import Arguments
from bagent.types import Json

LIMITS = ProcessLimits(memory=8 << 30, file_size=256 << 20)
"""Address space and file size of a process. Numerical libraries reserve gigabytes that they never
use, hence so much memory."""


def _one_text(name: str, words: str) -> Json:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": words}},
        "required": [name],
        "additionalProperties": False,
    }


PYTHON_SCHEMA = _one_text("code", "Python source; what it prints, and its last value, come back.")
PYTHON_WORDS = "Run Python code in a fresh process and get what it prints and its last value."
SHELL_SCHEMA = _one_text("command", "A command line for sh.")
SHELL_WORDS = "Run a command line with sh and get its output."


@dataclass(frozen=True, slots=True)
class Code:
    """One of the two tools.

    Attributes:
        argument: the argument that holds the code.
        root: the folder it runs in; None: an empty one for every call, gone after it.
        scratch: where such folders are made.
        env: its environment, less HOME and TMPDIR where these are to be the call's own folder.
    """

    argument: str
    root: Path | None
    scratch: Path
    env: Mapping[str, str]

    async def run(self, arguments: Arguments) -> str:
        """What the code wrote.

        Raises:
            ToolFault: it failed; with the end of its error output.
        """
        code: str = arguments[self.argument]
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            # Its own empty home keeps it from the keys that lie in the user's.
            env = {"HOME": str(folder), "TMPDIR": str(folder), **self.env}
            cwd = self.root or folder
            if self.argument == "code":
                child = CommandChild(_PYTHON, code.encode(), cwd, env, LIMITS)
            else:
                child = CommandChild(("/bin/sh", "-c", code), b"", cwd, env, LIMITS)
            ended = await run_child(child)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return answer_of(ended)


_PYTHON = (sys.executable, "-I", str(Path(__file__).with_name("_python_runner.py")))
"""Isolated: no packages of the user, no ``PYTHON*`` variables, no folder of the job in its path."""
