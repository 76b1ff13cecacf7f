"""Start Dynamo's real frontend and router with mocked engines behind it.

The mocker's answers are random text in any form asked for: what is real is the wire, the routing,
the overload answers and the worker that can die. Needs ``tests/real/install_dynamo.sh``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from real.parts import LlmServer, Part, model_folder, venv

READY_WITHIN = 60.0  # seconds; about one on an idle machine


def environment(store: Path) -> dict[str, str]:
    """Return the environment of the parts of one deployment, which find each other in ``store``."""
    return dict(os.environ) | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(store),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        # else it advertises the machine's own address
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_EVENT_PLANE_HOST": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }


class DynamoMocker(LlmServer):
    """A Dynamo frontend with mocked workers of the model ``tiny``.

    Args:
        frontend: more options of ``dynamo.frontend``.
        mocker: more options of ``dynamo.mocker``.
        log: a file for the output of the frontend; the worker's goes beside it.
    """

    model = "tiny"

    def __init__(
        self, frontend: Sequence[str] = (), mocker: Sequence[str] = (), *, log: Path
    ) -> None:
        super().__init__(log)
        self.worker = Part(log.with_name(f"{log.stem}-worker.log"))
        self._frontend = list(frontend)
        self._mocker = list(mocker)

    @property
    def backend(self) -> str:
        """The value for ``--backend``."""
        return f"dynamo://{self.address}"

    def start(self) -> Self:
        """Start both and wait until the model is listed.

        Raises:
            RuntimeError: one of them ended, or the model was not listed in time.
        """
        python = venv("dynamo") / "bin" / "python"
        env = environment(Path(tempfile.mkdtemp(prefix="dynamo-")))
        address = ["--http-host", "127.0.0.1", "--http-port", str(self.port)]
        self.launch([python, "-m", "dynamo.frontend", *address, *self._frontend], env)
        options = ["--model-path", str(model_folder("tiny")), "--model-name", self.model]
        options += ["--block-size", "32", "--max-model-len", "4096", "--speedup-ratio", "10"]
        self.worker.launch([python, "-m", "dynamo.mocker", *options, *self._mocker], env)
        try:
            # /health is well even with no worker behind it
            self.worker.wait_until(self._listed, READY_WITHIN)
        except RuntimeError:
            self.stop()
            raise
        return self

    def _listed(self) -> bool:
        return f'"{self.model}"' in (self.get("/v1/models") or "")

    def stop(self) -> None:
        """End the worker and the frontend."""
        self.worker.stop()
        super().stop()
