"""Pages of documentation: their files, commands and outputs, and whether these are real.

A fence of a page with a name behind its language is a file (```` ```yaml job.yaml ````). A fence of
the language ``console`` holds commands, each after ``$``, with what they print. A line of three
dots stands for any lines. Outputs are compared with times and numbers masked.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from support.cli import run_bagent
from support.simulated_fleets import simulated

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "bagent" / "guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]

FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRESS = re.compile(r"^\[[\d.hms]+\] .*\n", re.MULTILINE)
LIMITED = re.compile(r"^CLIENT-LIMITED, .*\n(?:  .*\n)*", re.MULTILINE)
"""What a load test says where this machine was too busy."""
NUMBER = re.compile(r"(?:\d[\d,.:]*(?:e[+-]?\d+)?(?:ms|us|kB|MB|[hmsd])?(?![A-Za-z]))+")
HIDDEN = {"make": "slow", "pip": "an installation", "uvx": "an installation"}
"""Programs that are not started here."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command of a page with the output that the page shows."""

    command: str
    output: str


@dataclass(slots=True)
class Shell:
    """A folder in which the commands of a page run one after the other."""

    folder: Path
    timeout: float = 60.0
    stack: ExitStack = field(default_factory=ExitStack)

    def run(self, command: str) -> str:
        """Run ``command`` and return what it prints: standard output, then standard error."""
        if command.startswith("bagent sim ") and command.endswith("&"):
            return self._serve(shlex.split(command)[2:-1])
        commands = [shlex.split(part) for part in re.split(r" \| (?=head)", command)]
        output = self._start(commands[0])
        if len(commands) > 1:
            output = "".join(output.splitlines(keepends=True)[: int(commands[1][-1].strip("-"))])
        return LIMITED.sub("", PROGRESS.sub("", output))

    def _start(self, words: list[str]) -> str:
        environment = {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        match words:
            case ["bagent", *arguments]:
                done = run_bagent(
                    arguments,
                    self.folder,
                    env={"COLUMNS": "80", **environment},
                    timeout=self.timeout,
                )
                assert "bagent has a bug" not in done.err, done.err
                return done.out + done.err
            case ["cat", name]:
                return (self.folder / name).read_text(encoding="utf-8")
            case ["ls", name]:
                return "".join(f"{path.name}\n" for path in sorted((self.folder / name).iterdir()))
            case ["python", name]:
                return self._python(name)
        raise AssertionError(f"a page shows {words}, which its test cannot run")

    def _python(self, name: str) -> str:
        output = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(output):
            runpy.run_path(name, run_name="__main__")
        return output.getvalue()

    def _serve(self, arguments: list[str]) -> str:
        """Start simulated endpoints that last as long as the page."""
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        hostfile = options.pop("--write-hostfile", None)
        settings = {name.strip("-").replace("-", "_"): value for name, value in options.items()}
        query = "&".join(f"{name}={value}" for name, value in settings.items())
        sim = self.stack.enter_context(simulated(query))
        if hostfile:
            lines = "".join(f"{url.removeprefix('http://')}\n" for url in sim.urls)
            (self.folder / hostfile).write_text(lines)
        return "".join(f"{url}\n" for url in sim.urls)


def steps(text: str) -> Iterator[Step]:
    """Yield the commands of a fence of the language ``console``."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Step(command, output)


def agrees(shown: str, actual: str) -> bool:
    """Whether a page shows what a command printed."""
    pattern = "".join(
        "(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in _lines(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _lines(actual))) is not None


def _lines(text: str) -> list[str]:
    lines = [
        re.sub(r"-{2,}", "--", " ".join(NUMBER.sub("N", line).split()))
        for line in text.splitlines()
    ]
    return [line for line in lines if line]


BUSY_CLIENT = (
    "next: the same command on a client with more cores, with more --workers or alone,"
    " or with a lower --concurrency or --rate"
)
"""What a load test prints last where other programs kept its client from being on time."""

NEXT_LINE = re.compile(r"^next: .*\n", re.MULTILINE)


def check_page(page: Path, folder: Path, *, update: bool) -> list[str]:
    """Run the commands of a page in ``folder`` and return how outputs differ from the page.

    Args:
        page: the Markdown file.
        folder: an empty folder.
        update: write the actual outputs into the page.
    """
    text = page.read_text(encoding="utf-8")
    differences: list[str] = []
    shell = Shell(folder)

    def check(fence: re.Match[str]) -> str:
        language, name, body = fence.groups()
        if name:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(body, encoding="utf-8")
        if language != "console":
            return fence[0]
        parts = []
        for step in steps(body):
            output = step.output
            if step.command.split()[0] not in HIDDEN:
                actual = shell.run(step.command)
                if BUSY_CLIENT in actual:  # the next step of a load test is another one then
                    output_to_find = NEXT_LINE.sub(f"{BUSY_CLIENT}\n", output)
                    actual = NEXT_LINE.sub(f"{BUSY_CLIENT}\n", actual)
                else:
                    output_to_find = output
                if not agrees(output_to_find, actual):
                    differences.append(f"$ {step.command}\n{actual}\n--- shown:\n{output}")
                    output = actual if not actual or actual.endswith("\n") else f"{actual}\n"
            parts.append(f"$ {step.command}\n{output}")
        return f"```console\n{''.join(parts)}```"

    with shell.stack:
        new = FENCE.sub(check, text)
    if update and new != text:
        page.write_text(new, encoding="utf-8")
    return differences
