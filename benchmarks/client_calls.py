"""How many functions a row calls: what its client CPU is made of, without the noise of a clock.

    python benchmarks/client_calls.py [--before FOLDER] [--out benchmarks/results/FILE]

``bagent run`` under ``sys.setprofile`` (all threads), on 500 and on 1,500 rows against the canned
server; reported is the difference, a row: calls of Python functions, calls of C functions, and the
Python functions that are called most.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from client_arms import bagent_run
from client_cost import start_server, write_rows

MODES = {"single calls": [], "lists": ["--lists"]}
FEW, MANY = 500, 1_500


def count(options: argparse.Namespace) -> None:
    """Run once and print the counts."""
    from canned_server import SCHEMA

    python: collections.Counter[CodeType] = collections.Counter()
    others = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal others
        if event == "call":
            python[frame.f_code] += 1
        elif event == "c_call":
            others += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    bagent_run(options.url, options.count, SCHEMA, options)
    sys.setprofile(None)
    calls: collections.Counter[str] = collections.Counter()
    for code, number in python.items():
        calls[f"{Path(code.co_filename).name}:{code.co_qualname}"] += number
    print(json.dumps({"python": calls, "c": others}))


def a_row(url: str, folder: Path, mode: list[str], before: Path | None) -> dict:
    """The counts of one mode, a row."""
    env = {**os.environ, "PYTHONPATH": str(before.resolve())} if before else None
    counts = []
    for number in (FEW, MANY):
        rows = write_rows(folder / f"{number}.jsonl", number)
        command = [sys.executable, __file__, "--count", str(rows), "--url", url, *mode]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        counts.append(json.loads(done.stdout.splitlines()[-1]))
    few, many = counts
    per_row = {
        name: round((number - few["python"].get(name, 0)) / (MANY - FEW), 2)
        for name, number in many["python"].items()
    }
    most = sorted(per_row.items(), key=lambda item: -item[1])[:40]
    return {
        "python": round(sum(per_row.values()), 1),
        "c": round((many["c"] - few["c"]) / (MANY - FEW), 1),
        "most": dict(most),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--lists", action="store_true")
    options = parser.parse_args()
    if options.count is not None:
        options.concurrency, options.progress = 512 if options.lists else 64, "plain"
        count(options)
        return
    report: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as name:
        server, url = start_server(Path(name), 40, sorted(os.sched_getaffinity(0))[-1])
        try:
            for mode, description in MODES.items():
                for which in ("before", "now") if options.before else ("now",):
                    folder = Path(name) / f"{mode}-{which}".replace(" ", "-")
                    folder.mkdir()
                    before = options.before if which == "before" else None
                    calls = report.setdefault(mode, {})[which] = a_row(
                        url, folder, description, before
                    )
                    print(mode, which, calls["python"], "Python calls,", calls["c"], "of C")
        finally:
            server.kill()
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
