"""The process that makes DuckDB and Parquet at the end of a run, started before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class TablesChild:
    """Builds the tables in a child process, so that this process does not load DuckDB.

    Its start takes longer than the tables of a short run do. It is therefore started while the
    last rows are answered, and waits for a word; without it, or when this process dies, it ends
    and has made nothing.

    Args:
        run_dir: the run directory.
        rows: the JSON of the rows configuration, to read the input again.
    """

    def __init__(self, run_dir: Path, rows: str = "") -> None:
        module = "bagent.store.tables.build"
        self._command = [sys.executable, "-P", "-m", module, str(run_dir), "--wait"]
        self._rows = rows
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it is there."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C is for the run, which decides what becomes of this
            )

    def make(self) -> tuple[int, str]:
        """Make the tables of the journal as it is now; the exit code, and words for people."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed while it waited
        self.start()
        process = self._process
        assert process is not None
        try:
            _, words = process.communicate(self._rows.encode() + b"\n")
        finally:
            self.close()
        return process.returncode, words.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End it, whatever it does: tables are put in place whole or not at all."""
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes the pipes and waits
            process.kill()
