"""Child process that makes the DuckDB and Parquet tables at the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class TablesChild:
    """Builds the tables in a child process, so that this process does not load DuckDB.

    The child starts before the rows have ended, since starting takes longer than the tables of a
    short run. It waits for a line on stdin; if this process dies before, it makes nothing.

    Args:
        run_dir: the run directory.
        rows: the rows configuration as JSON, to read the input again.
    """

    def __init__(self, run_dir: Path, rows: str = "") -> None:
        module = "bagent.store.tables.build"
        self._command = [sys.executable, "-P", "-m", module, str(run_dir), "--wait"]
        self._rows = rows
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the child, unless it runs."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C goes to the run, which decides about the child
            )

    def make(self) -> tuple[int, str]:
        """Make the tables of the current journal; return the exit code and the child's messages."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed while it waited
        self.start()
        process = self._process
        assert process is not None
        try:
            _, messages = process.communicate(self._rows.encode() + b"\n")
        finally:
            self.close()
        return process.returncode, messages.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Kill the child; tables are put in place complete or not at all."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes the pipes and waits
            process.kill()
