"""What the live display costs: the same run with ``--progress rich`` and ``plain``, on a terminal.

    python benchmarks/display_cost.py [--rows 10000] [--repeats 5] [--out benchmarks/results/FILE]

Each run is a process of its own whose standard error is a pseudo-terminal of 100 columns; the order
is turned round with every repeat. Reported per display: CPU of the whole process, and of it the
share spent drawing (imports, some 0.1 s once, are outside it), counted where the run hands over its
state four times a second.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from pathlib import Path

from client_cost import HERE, start_server, write_rows


def run_on_terminal(progress: str, url: str, rows: Path, cpu: int) -> dict:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, str(HERE / "client_arms.py"), "bagent", url, str(rows)]
    command += ["--cpu", str(cpu), "--progress", progress, "--time-display"]
    written = 0

    def drain() -> None:
        nonlocal written
        try:
            while data := os.read(master, 65536):
                written += len(data)
        except OSError:  # the other end is closed
            return

    env = {**os.environ, "TERM": "xterm-256color"}
    env.pop("CI", None)
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, text=True, env=env)
    os.close(slave)
    reader = threading.Thread(target=drain)
    reader.start()
    out, _ = done.communicate()
    reader.join()
    os.close(master)
    for old in rows.parent.glob("run-*"):
        shutil.rmtree(old)
    if done.returncode:
        raise SystemExit(f"{progress} failed")
    return json.loads(out.splitlines()[-1]) | {"progress": progress, "terminal_bytes": written}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    load, runs = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as name:
        server, url = start_server(Path(name), 1, cores[-1])
        try:
            rows = write_rows(Path(name) / "rows.jsonl", options.rows)
            for repeat in range(options.repeats):
                order = ("rich", "plain") if repeat % 2 else ("plain", "rich")
                for progress in order:
                    result = run_on_terminal(progress, url, rows, cores[0])
                    runs.append(result | {"repeat": repeat})
                    print(json.dumps(runs[-1]), file=sys.stderr)
        finally:
            server.kill()
    summary = {}
    for progress in ("plain", "rich"):
        mine = [run for run in runs if run["progress"] == progress]
        summary[progress] = {
            "cpu_s_median": round(statistics.median(run["cpu_s"] for run in mine), 2),
            "cpu_s_least": round(min(run["cpu_s"] for run in mine), 2),
            "display_share_median": round(
                statistics.median(run["display_s"] / run["cpu_s"] for run in mine), 4
            ),
            "ms_a_drawing": round(
                statistics.median(run["display_s"] / run["updates"] for run in mine) * 1e3, 3
            ),
        }
    report = {
        "what": "CPU of a run by display",
        "load_before": round(load, 1),
        "rows": options.rows,
        "python": platform.python_version(),
        "summary": summary,
        "runs": runs,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    for progress, numbers in summary.items():
        print(f"{progress:8}", numbers)


if __name__ == "__main__":
    main()
