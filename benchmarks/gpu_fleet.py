"""Several servers as one fleet, one of them killed in the middle of a run.

    python benchmarks/gpu_fleet.py OUT.json --model NAME --at HOST:PORT --at HOST:PORT ...
        --victim PID [--rows 12000] [--kill-at 0.4]

Two runs of the same raw rows (100 tokens in, 8 out): one undisturbed, and one in which the process
group of ``--victim`` gets SIGKILL once that share of the rows has ended. Told are how the rows
ended, what each endpoint was sent and answered, and which tries failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from gpu_modes import job_of, lines_of, request_of, run_job, write_rows

WATCH_SECONDS = 0.05


class Killer(threading.Thread):
    """Kills a server as soon as so many rows have ended."""

    def __init__(self, folder: Path, victim: int, after: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.victim, self.after = folder, victim, after
        self.killed_at: float | None = None
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(WATCH_SECONDS):
            ended = 0
            for file in self.folder.glob("run-*/journal/rows-*.jsonl"):
                with file.open("rb") as lines:
                    ended += sum(1 for _ in lines)
            if ended >= self.after:
                os.killpg(os.getpgid(self.victim), signal.SIGKILL)
                self.killed_at = time.time()
                return


def summarize_run(result: dict, out: Path) -> dict:
    if "error" in result:
        return result
    rows, attempts = lines_of(out, "rows"), lines_of(out, "attempts")
    began = min(row["sent"] for row in attempts)
    requests = Counter()
    for endpoint, _ in {(row["endpoint"], request_of(row)) for row in attempts}:
        requests[endpoint] += 1
    return {
        "rows": len(rows),
        "statuses": Counter(row["status"] for row in rows),
        "seconds": round(max(row["done"] for row in attempts) - began, 3),
        "began": began,
        "answered_by": Counter(row["endpoint"] for row in rows),
        "requests": requests,
        "tries": len(attempts),
        "failed_tries": Counter(
            f"{row['endpoint']} {row['error_kind']}" for row in attempts if row.get("error_kind")
        ),
        "most_attempts": max(row["attempts"] for row in rows),
        "cpu_us": round(result["cpu_s"] / len(rows) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--at", action="append", default=[], metavar="HOST:PORT", required=True)
    parser.add_argument("--victim", type=int, metavar="PID")
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--kill-at", type=float, default=0.4)
    options = parser.parse_args()
    report: dict = {"device": os.environ.get("DEVICE", ""), "runs": {}}
    for name in ("undisturbed", "one killed"):
        with tempfile.TemporaryDirectory() as folder_name, contextlib.ExitStack() as stack:
            folder = Path(folder_name)
            rows, hosts = folder / "rows.jsonl", folder / "hosts.txt"
            write_rows(rows, options.rows, 100)
            hosts.write_text("\n".join(options.at) + "\n")
            job = job_of("short", "", options.model, rows, {})
            job |= {"backend": "vllm", "hostfile": str(hosts)}
            killer = None
            if name == "one killed" and options.victim:
                killer = Killer(folder, options.victim, int(options.kill_at * options.rows))
                stack.callback(killer.over.set)
                killer.start()
            result, out = run_job(folder, job)
            row = summarize_run(result, out)
            if killer is not None and killer.killed_at and "began" in row:
                row["killed_after_s"] = round(killer.killed_at - row["began"], 3)
            report["runs"][name] = row
            print(name, json.dumps(row), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
