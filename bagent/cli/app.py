"""The ``bagent`` command: finds the subcommand, turns errors into one line and an exit code."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from bagent import __version__
from bagent.cli import process
from bagent.errors import (
    EXIT_CANNOT_WRITE,
    EXIT_INTERRUPTED,
    EXIT_NEEDS_PERSON,
    EXIT_USAGE,
    BagentError,
    UsageError,
)
from bagent.text.suggest import did_you_mean
from bagent.text.terminal import guarded_streams

if TYPE_CHECKING:
    from bagent.runs.context import RunOptions

GROUPS: dict[str, dict[str, str]] = {
    "Run a job": {
        "init": "Write a job to start from, also for your own file.",
        "check": "Show prompts, tokens and cost without generating.",
        "run": "Run a job, or resume it: rows in, validated rows out.",
        "submit": "Make or submit the batch script of a job for SLURM or PBS.",
    },
    "Look at a run": {
        "status": "Show how far a run is; without RUN, list the runs.",
        "results": "Print rows as jsonl, csv, parquet or a table.",
        "query": "Ask a run with DuckDB SQL.",
        "view": "Look at every row of a run in the browser.",
        "publish": "Copy the tables of a run to a bucket or a folder.",
        "report": "Write one HTML page about a run.",
        "compare": "Compare two runs, or a run with known answers.",
    },
    "Servers": {
        "hosts": "Show which endpoints of a hostfile are ready.",
        "bench": "Load-test a fleet, endpoint by endpoint.",
        "proxy": "Serve one OpenAI-compatible address for a fleet.",
        "sim": "Serve simulated endpoints, to try things without a GPU.",
        "prices": "List known prices of hosted models.",
    },
    "Read": {
        "guide": "Print a guide: job files, outputs, fleets, Python and more.",
        "schema": "Print the JSON Schema of job files, for editors.",
    },
}
"""Groups of subcommands, each with a line of help."""

COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
"""Subcommands with a line of help.

Each is a function of the same name in a module of the same name in ``commands``.
"""

START = """\
bagent sends rows to LLMs and writes validated rows. To begin:

  bagent init first            write a small job into the folder first
  bagent run first/job.yaml    run it on a simulated server
  bagent guide                 list the guides; bagent -h lists all commands
"""


class LazyGroup(TyperGroup):
    """Imports a subcommand's module only when that subcommand is called.

    ``bagent --help`` and a mistyped command import neither aiohttp nor pydantic.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a stand-in with the line of help: enough to list and to suggest."""
        line = COMMANDS.get(cmd_name)
        return TyperCommand(cmd_name, help=line, rich_markup_mode=None) if line else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their groups."""
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the real command.

        Raises:
            UsageError: there is no such command.
        """
        if args[0] not in COMMANDS and args[0][:1] != "-" and not ctx.resilient_parsing:
            hint = did_you_mean(args[0], COMMANDS) or "bagent -h lists the commands"
            raise UsageError(f"{args[0]}: no such command", hint=hint)
        name, stand_in, remaining = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else stand_in, remaining


@cache
def load_command(name: str) -> Any:
    """Import the command ``name`` of :data:`COMMANDS`, with its options."""
    function: Callable[..., Any] = getattr(import_module(f"bagent.cli.commands.{name}"), name)
    from bagent.cli.help import Command

    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": HELP}
    )
    app.command(name, cls=Command)(function)
    return typer.main.get_command(app)


def parse_run_options(args: Sequence[str], *, several: bool = False) -> RunOptions:
    """Return the options of ``bagent run *args``, without those that start more processes.

    Args:
        several: accept options that ask for more processes.

    Raises:
        UsageError: an option is wrong, or asks for more processes.
    """
    from bagent.cli.commands.run import make_options
    from bagent.cli.options import find_job

    try:
        parameters = load_command("run").make_context("bagent run", list(args)).params
    except _USAGE_ERROR as error:
        raise UsageError(_usage_message(error)) from None
    workers, executor = parameters.pop("workers"), parameters.pop("executor")
    if not several and (workers > 1 or executor != "local"):
        raise UsageError(
            "--workers, --executor: only the command bagent run divides the rows",
            hint="leave them out",
        )
    parameters["job"] = find_job(Path(parameters["job"]) if parameters["job"] else None)
    return make_options(parameters, ["bagent", "run", *args])


PROTECTED = ("run", "check", "proxy")
"""Commands with keys that other processes of the user need not see."""

HELP = ["-h", "--help"]
COMPLETE = "_BAGENT_COMPLETE"
"""Variable by which a shell asks for completions."""

END_SECONDS = 10.0
"""How long the end of the process may take once a run has ended and all is written."""

# Typer carries click inside; this is the public way to its usage error.
_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]
app = typer.Typer(
    cls=LazyGroup,
    add_completion=True,
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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Send rows to LLMs and write validated rows; nothing is lost or paid twice.

    Example: bagent run job.yaml
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv``; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    with guarded_streams():
        if args or COMPLETE in os.environ:
            code = _invoke(args)
        else:
            sys.stdout.write(START)
            code = 0
        process.flush_streams()
        return code


@cache
def _root() -> Any:
    return typer.main.get_command(app)


def _invoke(args: list[str]) -> int:
    try:
        result = _root().main(args=args, prog_name="bagent", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except _USAGE_ERROR as error:
        return process.print_error(_usage_message(error), EXIT_USAGE)
    except BrokenPipeError:
        return _closed_pipe()
    except SystemExit as end:
        return _exit_of_typer(end)
    except BagentError as error:
        if "--debug" in args:
            raise
        return process.print_error(str(error), error.exit_code)
    except OSError as error:
        if "--debug" in args:
            raise
        if isinstance(error, FileNotFoundError) and not _has_folder():
            return process.print_error(
                "the current folder is gone (cd to one that is there)", EXIT_USAGE
            )
        prefix = f"{error.filename}: " if error.filename else ""
        full = error.errno in (28, 122)  # ENOSPC, EDQUOT
        return process.print_error(
            f"{prefix}{error.strerror or error}", EXIT_CANNOT_WRITE if full else EXIT_USAGE
        )
    return result if isinstance(result, int) else 0


_INSTEAD: dict[tuple[str | None, str | None], str] = {
    ("run", "--dry-run"): "bagent check shows what would be sent",
    ("run", "--resume"): "the same command resumes",
    ("submit", "--dry-run"): "nothing is submitted without --go",
}
"""What to type instead of options that other programs have."""


_WORDINGS = (
    ("Value error, ", ""),
    ("Input should be a valid integer.*", "it must be a whole number"),
    ("Input should be a valid number.*", "it must be a number"),
    ("Input should be greater than or equal to ", "it must be at least "),
    ("Input should be ", "it must be "),
    (r"Got unexpected extra arguments?\S* \((.*)\)$", r"unexpected: \1"),
)
"""Messages of the libraries that read options, and what they mean."""


def _usage_message(error: Any) -> str:
    """Return what is wrong with an option, and the nearest option or the command that lists all."""
    option, near = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    hint = _INSTEAD.get((error.ctx.info_name if error.ctx else None, option))
    if near and not hint:
        hint = f"did you mean {near[0]}?"
    if hint:
        return f"no such option: {option} ({hint})"
    message = error.format_message().rstrip(".")
    for pattern, text in _WORDINGS:
        message = re.sub(pattern, text, message)
    message = message[:1].lower() + message[1:]
    wrong = re.search(r": '(.*)' is not one of (.*)$", message)
    if wrong and (nearest := did_you_mean(wrong[1], wrong[2].replace("'", "").split(", "))):
        return f"{message} ({nearest})"
    return f"{message} (try: {error.ctx.command_path} --help)" if error.ctx else message


def _has_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _exit_of_typer(end: SystemExit) -> int:
    """Return the exit code where Typer ended: after completions, or with 1 at a closed pipe."""
    if COMPLETE in os.environ:
        return 0
    return _closed_pipe() if end.code == 1 else EXIT_NEEDS_PERSON


def _closed_pipe() -> int:
    """End quietly: the reader of stdout has seen enough."""
    process.silence(1)
    return 0


def run_and_exit() -> None:
    """Run as the console script; an unhandled error is one line, a traceback with --debug."""
    process.open_standard_files()
    gc.set_threshold(200_000, 20, 100)  # imports make many objects and no garbage
    # Otherwise pydantic searches all installed packages for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if "--debug" not in sys.argv:
        sys.excepthook = process.exit_on_fault
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_run = command == "run"
    if is_run:
        process.exit_at_signals()
    if command in PROTECTED:
        from bagent.process_privacy import hide_from_children

        hide_from_children()
    code = main()
    if is_run:
        process.exit_within(END_SECONDS, code)
    sys.exit(code)
