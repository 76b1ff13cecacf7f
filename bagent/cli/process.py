"""The process around a command: standard files, early signals, unhandled errors, a bounded exit."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from typing import Any

from bagent.errors import EXIT_NEEDS_PERSON, EXIT_STOPPED
from bagent.text.terminal import escape_controls


def log(message: str) -> None:
    """Print a message on stderr."""
    sys.stderr.write(f"bagent: {message}\n")
    sys.stderr.flush()


def open_standard_files() -> None:
    """Open a stand-in for each of stdin, stdout and stderr that the caller closed.

    Otherwise the next files to be opened would get their numbers, and be read and written as such.
    A closed stdout becomes a pipe without a reader.
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


def silence(number: int) -> None:
    """Point stdout (1) or stderr (2) at nothing, so that the interpreter's last flush is quiet."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)


def flush_streams() -> None:
    """Flush stdout and stderr; one that cannot be written is silenced."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(number)


def print_error(text: str, code: int) -> int:
    """Print one line on stderr, passwords of URLs masked; returns ``code``."""
    line = re.sub(r"(://)[^/@\s]*@", r"\1***@", " ".join(text.split()))
    print(escape_controls(f"bagent: error: {line}"), file=sys.stderr)  # noqa: T201
    return code


def report_fault(error: BaseException) -> int:
    """Print one line about an error that nothing handled; returns the exit code.

    The interpreter's own exit code would be 1, which means that only rows failed.
    """
    if isinstance(error, MemoryError):
        message = "memory is used up (allow more, or lower limits.concurrency)"
    else:
        message = (
            f"bagent has a bug: {type(error).__name__}: {error} (the same command with --debug"
            " shows where; please report it)"
        )
    return print_error(message, EXIT_NEEDS_PERSON)


def exit_on_fault(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Report an unhandled error and leave; a ``sys.excepthook``."""
    code = report_fault(error)
    sys.stderr.flush()
    os._exit(code)


def exit_at_signals() -> None:
    """Leave with 75 at a signal while a run has no handlers: while modules load, and at its end."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, _exit_stopped)


def _exit_stopped(number: int, frame: object) -> None:
    message = f"bagent: stopped by {signal.Signals(number).name}; the same command resumes"
    os.write(2, f"{message}\n".encode())
    os._exit(EXIT_STOPPED)


def exit_within(seconds: float, code: int) -> None:
    """Leave after ``seconds`` even if threads and processes of the job's tools still run.

    The interpreter joins every worker of a ``ThreadPoolExecutor``, and every child that
    ``multiprocessing`` started, however long these take.
    """

    def leave() -> None:
        # The message comes first: a parent that waits for a child may end this process then.
        os.write(2, b"bagent: what tools of the job left running was not waited for\n")
        multiprocessing = sys.modules.get("multiprocessing")
        for child in multiprocessing.active_children() if multiprocessing is not None else ():
            child.kill()
            child.join(1.0)
        os._exit(code)

    watch = threading.Timer(seconds, leave)
    watch.daemon = True
    watch.start()
