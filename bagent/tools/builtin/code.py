"""``python_eval`` and ``shell``: code of a model, in a process of its own.

The limits bound mistakes and are no sandbox: the code runs as the user of the job. Only jobs with
``allow_code: true`` have these tools.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagent.tools.command_tool import CommandChild, ProcessLimits, answer_of, run_child
from bagent.tools.types import Arguments
from bagent.types import Json

LIMITS = ProcessLimits(memory=8 << 30, file_size=256 << 20)
"""Address space and file size; numerical libraries reserve gigabytes that they never use."""


def _one_text(name: str, description: str) -> Json:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
        "additionalProperties": False,
    }


PYTHON_SCHEMA = _one_text("code", "Python source; what it prints, and its last value, come back.")
PYTHON_DESCRIPTION = "Run Python code in a fresh process and get what it prints and its last value."
SHELL_SCHEMA = _one_text("command", "A command line for sh.")
SHELL_DESCRIPTION = "Run a command line with sh and get its output."


@dataclass(frozen=True, slots=True)
class Code:
    """One of the two tools.

    Attributes:
        argument: the argument with the code.
        root: its working directory; None: an empty folder for each call, removed after it.
        scratch: the folder for such folders.
        env: its environment; without HOME and TMPDIR these are the call's own folder.
    """

    argument: str
    root: Path | None
    scratch: Path
    env: Mapping[str, str]

    async def run(self, arguments: Arguments) -> str:
        """Run the code and return its output.

        Raises:
            ToolFault: it failed; with the end of its error output.
        """
        code: str = arguments[self.argument]
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            # An empty home hides the keys in the user's.
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
