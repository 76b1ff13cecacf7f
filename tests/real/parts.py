"""What every real server under test has in common: where it is installed, its process, its log."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "real"


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def venv(name: str) -> Path:
    """Return the virtual environment ``name`` under the cache.

    Raises:
        FileNotFoundError: it is not installed; the message names the script that does it.
    """
    folder = CACHE / name
    if not (folder / ".installed").exists():
        raise FileNotFoundError(f"{folder} is missing: run tests/real/install_{name}.sh")
    return folder


def model_folder(kind: str) -> Path:
    """Return the folder of the model ``tiny``, ``smollm2`` or ``minilm``, made where missing."""
    folder = CACHE / "models" / kind
    if not (folder / "generation_config.json").exists():  # the last file that is written
        python = venv("vllm") / "bin" / "python"
        command = [python, HERE / "make_model.py", kind, folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


class Part:
    """A server process in a group of its own, with its output in a log.

    Args:
        log: a file for its output; later starts append.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        """Start ``command``; it ends when this process does, however that ends."""
        bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*bound, *(str(word) for word in command)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until ``ready`` says so.

        Raises:
            RuntimeError: the process ended, or ``timeout`` seconds went by; it is stopped then,
                and the message has the end of its log.
        """
        assert self.process is not None
        end = time.monotonic() + timeout
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"{self.log.stem} did not start:\n{self.tail()}")
            time.sleep(0.3)

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """End it and everything that it started."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End its whole process group with SIGKILL, as a lost node would."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


class LlmServer(Part):
    """A part that serves an OpenAI-compatible API at ``address``."""

    def __init__(self, log: Path, port: int = 0) -> None:
        super().__init__(log)
        self.port = port or free_port()

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, a hostfile line."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start it and wait until it answers."""
        raise NotImplementedError

    def get(self, path: str) -> str | None:
        """Return the body that a GET of ``path`` answers with 200, else None."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0.0 where it is not there."""
        lines = (self.get("/metrics") or "").splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()
