"""Start a real vLLM on this machine's CPU, as a context manager or from the command line.

    python tests/real/serve_vllm.py smollm2 --port 18401 [options of vllm serve]

Needs ``tests/real/install_vllm.sh`` to have run; the model folders are made on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "real"
READY_WITHIN = 240.0  # seconds; 25 to 50 on an idle machine

OPTIONS = [
    "--host=127.0.0.1",
    "--dtype=bfloat16",
    "--max-model-len=4096",
    "--enforce-eager",
    "--block-size=32",  # on CPU a multiple of 32, else the engine ends at its start
    "--scheduling-policy=priority",
    "--enable-prompt-tokens-details",
    "--enable-force-include-usage",
    "--enable-per-request-metrics",
    "--enable-request-id-headers",
    "--enable-server-load-tracking",
    "--enable-auto-tool-choice",
    '--structured-outputs-config={"backend":"xgrammar","disable_any_whitespace":true}',
]
TOOL_PARSERS = {"tiny": "xlam", "smollm2": "hermes"}
PRELOAD = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "lib/libiomp5.so")


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
    """Return the folder of the model ``tiny`` or ``smollm2``, made where it is missing."""
    folder = CACHE / "models" / kind
    if not (folder / "generation_config.json").exists():  # the last file that is written
        python = venv("vllm") / "bin" / "python"
        command = [python, HERE / "make_model.py", kind, folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Return the environment for vLLM in the virtual environment ``folder``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    preload = [str(folder / path) for path in PRELOAD if (folder / path).exists()]
    return env | {
        "PATH": f"{folder / 'bin'}:{env['PATH']}",  # vLLM starts helpers by name
        "LD_PRELOAD": ":".join(preload),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "TORCHDYNAMO_DISABLE": "1",  # else the first logprobs request compiles for 20 s
    }


class VllmServer:
    """One vLLM server.

    Args:
        model: ``tiny`` or ``smollm2``; also the name that it serves.
        options: more options of ``vllm serve``; one given again replaces the usual one.
        log: a file for its output.
        port: default: a free one.
    """

    def __init__(
        self, model: str, options: Sequence[str] = (), *, log: Path, port: int = 0
    ) -> None:
        self.model = model
        self.port = port or free_port()
        self.log = log
        self.options = list(options)
        self.version = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """``127.0.0.1:PORT``, a hostfile line."""
        return f"127.0.0.1:{self.port}"

    @property
    def backend(self) -> str:
        """The value for ``--backend``."""
        return f"vllm://{self.address}"

    def command(self) -> list[str]:
        """Return the command line."""
        return [
            str(venv("vllm") / "bin" / "vllm"),
            "serve",
            str(model_folder(self.model)),
            f"--port={self.port}",
            f"--served-model-name={self.model}",
            f"--tool-call-parser={TOOL_PARSERS[self.model]}",
            *OPTIONS,
            *self.options,
        ]

    def start(self) -> Self:
        """Start it and wait until it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy in time; the message has the log's end.
        """
        command = self.command()
        env = environment(venv("vllm"))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + READY_WITHIN
        while self.get("/health") is None:
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"vLLM did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.3)
        self.version = json.loads(self.get("/version") or "{}").get("version", "?")
        return self

    def get(self, path: str) -> str | None:
        """Return the body that a GET of ``path`` answers with 200, else None."""
        try:
            url = f"http://{self.address}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return None

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0.0 where it is not there."""
        lines = (self.get("/metrics") or "").splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def stop(self) -> None:
        """End it and everything that it started."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End its whole process group with SIGKILL, as a lost node would."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> Any:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(TOOL_PARSERS))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("/dev/stderr"))
    arguments, options = parser.parse_known_args()
    server = VllmServer(arguments.model, options, log=arguments.log, port=arguments.port)
    with server:
        print(f"vLLM {server.version} serves {server.model} at http://{server.address}/v1")
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
