"""What reading a job needs besides its text: folders for relative paths, and a list of faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bagent.errors import JobError, Position


@dataclass(slots=True)
class Problems:
    """The faults found so far in one job; the first in file order is raised for all."""

    found: list[tuple[Position, str, str]] = field(default_factory=list)

    def add(self, at: Position, message: str, hint: str = "") -> None:
        """Note one fault; the same place and message counts once."""
        if (at, message, hint) not in self.found:
            self.found.append((at, message, hint))

    def raise_first(self) -> None:
        """Raise the first fault in file order, those of options before those of the file.

        Raises:
            JobError: with ``(and N more)`` where there are more.
        """
        if not self.found:
            return
        at, message, hint = min(self.found, key=lambda fault: (fault[0].line, fault[0].column))
        more = len(self.found) - 1
        if more:
            message += f" (and {more} more)"
        raise JobError(message, hint=hint, at=at)


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Passed to every validator: ``folder`` of the job file, ``cwd``, environment, faults."""

    folder: Path
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def absolute(self, given: str, *, from_command: bool) -> Path:
        """``given`` as an absolute path; ``~`` is the home folder of ``env``."""
        home = self.env.get("HOME", "")
        if home and (given == "~" or given.startswith("~/")):
            given = home + given[1:]
        return (self.cwd if from_command else self.folder) / given
