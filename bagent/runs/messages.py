"""Messages of a run for people, on the display and in ``run.log``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bagent.errors import BagentError
from bagent.observe import Progress, RunLog


class RunMessages:
    """Takes the messages of a run, and masks its secrets in them.

    Args:
        log: ``run.log``.
        progress: the display.
        redact: masks the run's secrets.
    """

    def __init__(self, log: RunLog, progress: Progress, redact: Callable[[str], str]) -> None:
        self._log = log
        self._progress = progress
        self._redact = redact

    def notify(self, text: str) -> None:
        """Show a message, and write it into the log."""
        text = self._redact(text)
        self._log.info(text)
        self._progress.note(text)

    def show(self, text: str) -> None:
        """Show the state of the moment, which is not worth a line of the log."""
        self._progress.note(text)

    def log(self, text: str) -> None:
        """Write a detail into the log alone, such as a tool's traceback."""
        self._log.warning(self._redact(text))


@contextmanager
def open_messages(
    run_dir: Path, progress: Progress, redact: Callable[[str], str]
) -> Iterator[RunMessages]:
    """Open ``run.log``; write an error of the block into it, with secrets masked."""
    with closing(RunLog(run_dir / "run.log")) as log:
        try:
            yield RunMessages(log, progress, redact)
        except BagentError as error:
            error.message = redact(error.message)
            log.error(str(error))
            raise
