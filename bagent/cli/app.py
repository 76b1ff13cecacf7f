"""The ``bagent`` command: finds the subcommand, turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from bagent import __version__
from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_STOPPED,
    EXIT_USAGE,
    BagentError,
)
from bagent.text.terminal import escape_controls, guarded_streams

COMMANDS: dict[str, tuple[str, str]] = {
    "run": (
        "bagent.cli.commands.run",
        "Run a job: rows in, validated rows out; the same command resumes.",
    ),
    "check": (
        "bagent.cli.commands.check",
        "Look at a job without generating: prompts, tokens, cost.",
    ),
    "status": ("bagent.cli.commands.status", "How far a run is; without RUN, the list of runs."),
    "results": (
        "bagent.cli.commands.results",
        "The rows of a run as jsonl, csv, parquet or a table.",
    ),
    "query": ("bagent.cli.commands.query", "Ask a run by SQL, while it goes on or after it."),
    "compare": (
        "bagent.cli.commands.compare",
        "Two runs row by row, or a run against known answers.",
    ),
    "report": ("bagent.cli.commands.report", "One HTML page about a run."),
    "hosts": (
        "bagent.cli.commands.hosts",
        "Which endpoints of a hostfile are ready, and what they are.",
    ),
    "proxy": (
        "bagent.cli.commands.proxy",
        "One OpenAI-compatible local address in front of a fleet.",
    ),
    "submit": (
        "bagent.cli.commands.submit",
        "The batch script of a job for SLURM or PBS, and its sending.",
    ),
    "bench": (
        "bagent.cli.commands.bench",
        "Load test of a whole fleet: what it can do, who is slow.",
    ),
    "sim": ("bagent.cli.commands.sim", "Serve simulated endpoints to try things without a GPU."),
    "init": ("bagent.cli.commands.init", "Write a small job to start from."),
    "prices": (
        "bagent.cli.commands.prices",
        "What hosted models cost, each with its source and date.",
    ),
    "schema": ("bagent.cli.commands.schema", "The JSON Schema of job files, for editors."),
}
"""Subcommands: the module that holds the function of the same name, and a line of help."""


class LazyGroup(TyperGroup):
    """Imports a subcommand's module only when that subcommand is called.

    ``bagent --help`` and a mistyped command must not pay for aiohttp or pydantic.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order in which people need them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the one line of help: enough to list and to suggest."""
        entry = COMMANDS.get(cmd_name)
        return TyperCommand(cmd_name, help=entry[1], rich_markup_mode=None) if entry else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command that is called; an unknown name is the parent's to complain of."""
        name, stand_in, remaining = super().resolve_command(ctx, args)
        entry = COMMANDS.get(name or "")
        return (
            (name, _load(entry[0], name), remaining)
            if entry and name
            else (name, stand_in, remaining)
        )


def command_of(name: str) -> Any:
    """The real command of a name of :data:`COMMANDS`, with its options.

    Raises:
        KeyError: there is no such command.
    """
    return _load(COMMANDS[name][0], name)


def _load(module: str, name: str) -> Any:
    function: Callable[..., Any] = getattr(import_module(module), name)
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": HELP}
    )
    app.command(name)(function)
    return typer.main.get_command(app)


PROTECTED = (["run"], ["check"], ["proxy"])
"""Commands that hold keys which the programs beside them need not know."""

HELP = ["-h", "--help"]
END_SECONDS = 10.0
"""How long the end of the process may take once the run has ended and all is written."""

# Typer carries click inside; this is the public way to its usage error.
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": HELP},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"bagent {__version__}")
        raise typer.Exit


@app.callback()
def bagent(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Batches of LLM calls: rows in, validated rows out, nothing lost or paid twice.

    Example: bagent run job.yaml
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    with guarded_streams():
        return _flush(_invoke(args))


def _invoke(args: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        result = command.main(args=args, prog_name="bagent", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except _USAGE_ERROR as error:
        context = error.ctx
        hint = f" (try: {context.command_path} --help)" if context else ""
        return _complain(f"{error.format_message()}{hint}", EXIT_USAGE)
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as end:
        # Typer answers a closed pipe by leaving with 1; it leaves in no other way here.
        return _closed_pipe() if end.code == 1 else EXIT_NEEDS_PERSON
    except BagentError as error:
        if "--debug" in args:
            raise
        return _complain(str(error), error.exit_code)
    except OSError as error:
        if "--debug" in args:
            raise
        if isinstance(error, FileNotFoundError) and not _has_folder():
            return _complain("the current folder is gone (cd to one that is there)", EXIT_USAGE)
        prefix = f"{error.filename}: " if error.filename else ""
        full = error.errno in (28, 122)  # ENOSPC, EDQUOT
        return _complain(
            f"{prefix}{error.strerror or error}", EXIT_CANNOT_WRITE if full else EXIT_USAGE
        )
    return result if isinstance(result, int) else 0


def _has_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _closed_pipe() -> int:
    """Whoever read stdout has seen enough: that is a quiet end."""
    _silence(1)
    return 0


def _complain(text: str, code: int) -> int:
    line = re.sub(r"(://)[^/@\s]*@", r"\1***@", " ".join(text.split()))
    print(escape_controls(f"bagent: error: {line}"), file=sys.stderr)  # noqa: T201
    return code


def _flush(code: int) -> int:
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            _silence(number)
    return code


def _silence(number: int) -> None:
    """Point stdout or stderr at nothing, so that the interpreter's last flush stays quiet."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)


def run_and_exit() -> None:
    """The console script: a fault in bagent itself is one line too, a traceback with --debug."""
    _open_standard_files()
    gc.set_threshold(200_000, 20, 100)  # imports make much to look through and no waste
    # Else pydantic looks through all installed packages for plugins: nothing here wants one.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if "--debug" not in sys.argv:
        sys.excepthook = _one_line
    if sys.argv[1:2] == ["run"]:
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, _stop_before_the_start)
    if sys.argv[1:2] in PROTECTED:
        from bagent.process_privacy import hide_from_children

        hide_from_children()
    code = main()
    if sys.argv[1:2] == ["run"]:
        _end_within(END_SECONDS, code)
    sys.exit(code)


def _end_within(seconds: float, code: int) -> None:
    """Leave in any case: threads and processes that tools of the user left are not waited for.

    The interpreter joins every worker of a ``ThreadPoolExecutor``, and every child that
    ``multiprocessing`` started, however long these take.
    """
    import threading

    def leave() -> None:
        # First the words: once a child is gone, whoever waits for it may end the process.
        os.write(2, b"bagent: what tools of the job left running was not waited for\n")
        multiprocessing = sys.modules.get("multiprocessing")
        for child in multiprocessing.active_children() if multiprocessing is not None else ():
            child.kill()
            child.join(1.0)
        os._exit(code)

    watch = threading.Timer(seconds, leave)
    watch.daemon = True
    watch.start()


def _stop_before_the_start(number: int, frame: object) -> None:
    """A signal where a run has no handlers of its own: while modules are loaded, or at its end."""
    message = f"bagent: stopped by {signal.Signals(number).name}; the same command resumes"
    os.write(2, f"{message}\n".encode())
    os._exit(EXIT_STOPPED)


def _open_standard_files() -> None:
    """Stand in for stdin, stdout and stderr that were closed by who started us.

    Else the next files to be opened would get their numbers, and be read and written as such.
    A closed stdout becomes a pipe without a reader, which is what it is.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        if name == "stdout":
            reader, opened = os.pipe()
        else:
            reader, opened = -1, os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
        if reader not in (-1, number):
            os.close(reader)
        setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _one_line(kind: type[BaseException], error: BaseException, _: Any) -> None:
    code = report_fault(error)
    sys.stderr.flush()
    os._exit(code)


DEBUGGED = ("run", "check", "bench", "hosts", "submit")
"""Commands that have ``--debug``."""


def _where(error: BaseException) -> str:
    """Where a fault happened: the option that shows it, else its own line."""
    if sys.argv[1:2] and sys.argv[1] in DEBUGGED:
        return "--debug shows where"
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "report it"


def report_fault(error: BaseException) -> int:
    """Print one line about an error that nothing handled; returns the exit code.

    The interpreter's own exit code would be 1, which says that only rows failed.
    """
    message = f"a fault in bagent: {type(error).__name__}: {error} ({_where(error)})"
    if isinstance(error, MemoryError):
        message = "memory is used up (allow more, or lower limits.concurrency)"
    return _complain(message, EXIT_NEEDS_PERSON)
