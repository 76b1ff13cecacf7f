"""Parsl's interchange, which ends with the process that started it.

By itself it would outlive a killed run, and keep workers and batch jobs waiting. Schedulers send
SIGTERM to every process of a job, but a run that is stopping still needs its answers. So SIGTERM
ends it only once the file named on the command line exists.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

LOOK_SECONDS = 1.0


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


def _end_if_closing(closing: Path) -> None:
    if closing.exists():
        os._exit(0)


if __name__ == "__main__":
    closing = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda number, frame: _end_if_closing(closing))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    runpy.run_module("parsl.executors.high_throughput.interchange", run_name="__main__")
