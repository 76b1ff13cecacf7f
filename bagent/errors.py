"""The error tree and the exit codes.

::

    BagentError                     one line for a person; has an exit code and a hint
    ├── UsageError          (2)     something the user wrote is wrong; nothing was sent
    │   ├── JobError                the job file or an option
    │   ├── InputError              the input rows, as files
    │   ├── SchemaError             an output schema
    │   ├── HostfileError           the hostfile
    │   ├── OwnedError              another live process owns this run
    │   ├── ChangedError            the job changed since the run began
    │   └── MissingPackage          an optional package is not installed
    ├── WriteError          (74)    results cannot be written
    ├── StoppedEarly        (75)    the same command resumes
    └── NeedsPerson         (76)    a person must act before the same command resumes

The failure of a single row is a value, :class:`bagent.types.Failure`. Packages raise only these
exceptions to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

EXIT_OK = 0
EXIT_ROWS_FAILED = 1
EXIT_USAGE = 2
EXIT_CLIENT_LIMITED = 3
EXIT_CANNOT_WRITE = 74
EXIT_STOPPED = 75
EXIT_NEEDS_PERSON = 76
EXIT_INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    EXIT_OK: "every row ok, or failures within the allowed; no rows at all: 0 with a warning",
    EXIT_ROWS_FAILED: "finished, but rows failed; a condition of --fail-if holds; not enough hosts",
    EXIT_USAGE: "job, input, hostfile, schema or an option is wrong; nothing was sent",
    EXIT_CLIENT_LIMITED: "bench: the client itself was the limit, its numbers are not the fleet's",
    EXIT_CANNOT_WRITE: "results cannot be written",
    EXIT_STOPPED: "stopped early, the same command resumes",
    EXIT_NEEDS_PERSON: "stopped early, a person must act first",
    EXIT_INTERRUPTED: "second Ctrl-C",
}
"""Each exit code with a short description."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a file: ``line`` and ``column`` count from 1; 0 means unknown.

    The text of ``file`` is its path or URL.
    """

    file: object
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        text = str(self.file)
        if self.line:
            text += f":{self.line}"
            if self.column:
                text += f":{self.column}"
        return text


class BagentError(Exception):
    """Base class of all errors shown to users.

    Args:
        message: what is wrong, one line.
        hint: how to fix it, one line, shown in brackets; may be empty.
        at: the position in a file, if known.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, *, hint: str = "", at: Position | None = None) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.hint = " ".join(hint.split())
        self.at = at

    def __str__(self) -> str:
        text = f"{self.at}: {self.message}" if self.at else self.message
        return f"{text} ({self.hint})" if self.hint else text


class UsageError(BagentError):
    """Something the user wrote is wrong; found before any request is sent."""


class JobError(UsageError):
    """The job file, or an option that overrides it, is wrong."""


class InputError(UsageError):
    """The input cannot be read as rows: missing, not UTF-8, a cut-off archive."""


class SchemaError(UsageError):
    """The output schema is not a usable JSON Schema."""


class HostfileError(UsageError):
    """A line of the hostfile is wrong."""


class OwnedError(UsageError):
    """Another live process owns this run directory."""


class ChangedError(UsageError):
    """The job differs from the one of the run directory."""


class MissingPackage(UsageError):
    """An optional package is not installed; the hint is the command that installs it."""


class WriteError(BagentError):
    """Results cannot be written (full disk, quota, read-only file system)."""

    exit_code = EXIT_CANNOT_WRITE


class StoppedEarly(BagentError):
    """The run stopped before its end; the same command resumes."""

    exit_code = EXIT_STOPPED


class NeedsPerson(BagentError):
    """The run stopped before its end and a person must act first."""

    exit_code = EXIT_NEEDS_PERSON
