"""Parsl's interchange, ended when the process that started it is gone.

By itself it would outlive a run that was killed, and keep workers, and so batch jobs, waiting.
Workers without it end after a missed heartbeat.
"""

from __future__ import annotations

import os
import runpy
import threading
import time

LOOK_SECONDS = 1.0


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    runpy.run_module("parsl.executors.high_throughput.interchange", run_name="__main__")
