"""The scripted server as a process of its own, started and ended by a test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from support.replies import Script

PROGRAM = Path(__file__).with_name("fake_server.py")


class FakeProcess:
    """The scripted server in a process: fast, and untouched by what happens to the test.

    Args:
        folder: where its port file, script and log go.
        script: as for :class:`support.fake_server.FakeServer`.
        options: the fields of :class:`support.options.Options`.
    """

    def __init__(self, folder: Path, script: Script | None = None, **options: Any) -> None:
        self.folder = folder
        self.port = 0
        self._log = folder / "fake-server.log"
        self._script = folder / "fake-server.json"
        options.setdefault("keep_requests", False)
        file = {"script": script, "options": options}
        self._script.write_bytes(msgspec.json.encode(file))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The base URL of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, a hostfile line."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start the process and wait until it listens, on the port of the last time if any.

        Raises:
            RuntimeError: it ended or did not listen within 20 seconds.
        """
        port_file = self.folder / "fake-server.port"
        port_file.unlink(missing_ok=True)
        command = [sys.executable, str(PROGRAM), "--port-file", str(port_file)]
        command += ["--script", str(self._script), "--log", str(self._log)]
        command += ["--port", str(self.port)]
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": ""})
        end = time.monotonic() + 20
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the fake server did not start: {self._process.poll()}")
            time.sleep(0.02)
        self.port = int(port_file.read_text())
        return self

    def requests(self) -> list[dict[str, Any]]:
        """Return the log: one entry per request that is over, in the order of ending."""
        if not self._log.exists():
            return []
        whole = self._log.read_bytes().rpartition(b"\n")[0]
        return [msgspec.json.decode(line) for line in whole.splitlines()]

    def stop(self) -> None:
        """End the process with SIGTERM and wait for it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(10)

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash of the server would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()
