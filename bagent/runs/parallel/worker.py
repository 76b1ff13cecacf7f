"""A worker process of a run: reads its options from stdin, reports its state on stderr."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import msgspec

from bagent.errors import EXIT_NEEDS_PERSON, BagentError
from bagent.observe import Live, Snapshot
from bagent.process_privacy import hide_from_children
from bagent.runs.context import RunOptions


def encode_options(options: RunOptions) -> bytes:
    """Encode ``options`` as one line, without ``env``, which the process inherits."""
    fields = {name: getattr(options, name) for name in options.__dataclass_fields__}
    del fields["env"]
    return msgspec.json.encode(fields, enc_hook=str) + b"\n"


def decode_options(line: bytes) -> RunOptions:
    """Decode the line of :func:`encode_options`, with the environment of this process."""
    fields: dict[str, Any] = msgspec.json.decode(line)
    fields["job"] = None if fields["job"] is None else Path(fields["job"])
    fields |= {name: tuple(fields[name]) for name in ("inputs", "sets")}
    return RunOptions(**(fields | {"cwd": Path(fields["cwd"]), "env": dict(os.environ)}))


class WorkerProgress:
    """Reports every state as a JSON line: ``{"event": "state", "state": {...}}``.

    Args:
        out: where lines go; a closed stream is ignored.
    """

    interval_s = 0.5

    def __init__(self, out: TextIO | None) -> None:
        self._out = out

    def start(self, header: str) -> None:
        """Report the header."""
        self._write({"event": "start", "header": header})

    def update(self, snapshot: Snapshot) -> None:
        """Report the newest state."""
        self._write({"event": "state", "state": snapshot})

    def attach(self, live: Live) -> None:
        """Do nothing: only states are reported."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Report a message for people."""
        self._write({"event": "note", "text": text})

    def stop(self) -> None:
        """Do nothing: every line is complete."""

    def _write(self, event: dict[str, Any]) -> None:
        if self._out is None:
            return
        try:
            self._out.write(msgspec.json.encode(event).decode() + "\n")
            self._out.flush()
        except (OSError, ValueError):
            self._out = None


def _end_with_parent() -> None:
    """Stop gracefully when stdin ends, since the parent process has then ended."""
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run the part that the line on stdin describes; return the exit code."""
    from bagent.runs.execute import run_job

    options = decode_options(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        return run_job(options)
    except BagentError as error:
        code, text = error.exit_code, str(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        code, text = EXIT_NEEDS_PERSON, str(error)
    sys.stderr.write(msgspec.json.encode({"event": "error", "text": text}).decode() + "\n")
    return code


if __name__ == "__main__":
    hide_from_children()
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the thread that reads stdin would block the interpreter's exit
