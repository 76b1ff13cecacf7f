"""Start a real vLLM on this machine's CPU, as a context manager.

Needs ``tests/real/install_vllm.sh`` to have run; the model folders are made on first use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from real.parts import LlmServer, model_folder, venv

READY_WITHIN = 600.0  # seconds; 25 to 50 on an idle machine, ten times that beside ten programs

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
POOLING_OPTIONS = [
    "--host=127.0.0.1",
    "--runner=pooling",
    "--dtype=float32",
    "--max-model-len=256",
    "--enforce-eager",
]
PRELOAD = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "lib/libiomp5.so")


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


class VllmServer(LlmServer):
    """One vLLM server.

    Args:
        model: ``tiny`` (random weights, fast), ``smollm2``, or ``minilm``, which makes vectors of
            384 numbers; also the name that it serves.
        options: more options of ``vllm serve``; one given again replaces the usual one.
        log: a file for its output.
        port: default: a free one.
        core: its number among those of this machine (more than there are begin anew). Without it
            all servers compute on the same one: vLLM binds itself to the first, and waits busily.
    """

    def __init__(
        self,
        model: str,
        options: Sequence[str] = (),
        *,
        log: Path,
        port: int = 0,
        core: int | None = None,
    ) -> None:
        super().__init__(log, port)
        self.model = model
        self.core = core
        self.options = list(options)
        self.version = ""

    @property
    def backend(self) -> str:
        """The value for ``--backend``."""
        return f"vllm://{self.address}"

    def _usual(self) -> list[str]:
        """The options that a model is served with."""
        if self.model not in TOOL_PARSERS:
            return POOLING_OPTIONS
        return [f"--tool-call-parser={TOOL_PARSERS[self.model]}", *OPTIONS]

    def start(self) -> Self:
        """Start it and wait until it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy in time.
        """
        folder = venv("vllm")
        command: list[str | Path] = [
            folder / "bin" / "vllm",
            "serve",
            model_folder(self.model),
            f"--port={self.port}",
            f"--served-model-name={self.model}",
            *self._usual(),
            *self.options,
        ]
        env = environment(folder)
        if self.core is not None:
            cores = sorted(os.sched_getaffinity(0))
            one = str(cores[self.core % len(cores)])
            command = ["taskset", "--cpu-list", one, *command]
            env["VLLM_CPU_OMP_THREADS_BIND"] = one
        self.launch(command, env)
        self.wait_until(lambda: self.get("/health") is not None, READY_WITHIN)
        self.version = json.loads(self.get("/version") or "{}").get("version", "?")
        return self
