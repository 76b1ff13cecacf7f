"""How many functions a row calls: what its client CPU is made of, without the noise of a clock.

    python benchmarks/client_calls.py [--before FOLDER] [--out benchmarks/results/FILE]
    python benchmarks/client_calls.py --chain FILE [--before FOLDER]

``bagent run`` under ``sys.setprofile`` (all threads), on 500 and on 1,500 rows against the canned
server; reported is the difference, a row: calls of Python functions, calls of C functions, and the
Python functions that are called most.

``--chain`` also writes the chain of calls of a row: each function of bagent that is called for
every second row or more often, below the function that calls it most, with the calls a row. What is
called once for all rows that end in one turn of the event loop is left out.
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

PACKAGE = "/bagent/"
MODES = {"single calls": [], "lists": ["--lists"]}
FEW, MANY = 500, 1_500
EACH_ROW = 0.5
"""From how many calls a row on a function belongs to the chain of a row."""


def count(options: argparse.Namespace) -> None:
    """Run once and print the counts."""
    from canned_server import SCHEMA

    python: collections.Counter[CodeType] = collections.Counter()
    callers: dict[CodeType, collections.Counter[CodeType]] = {}
    others = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal others
        if event == "call":
            python[frame.f_code] += 1
            if PACKAGE in frame.f_code.co_filename:
                caller = frame.f_back
                while caller is not None and PACKAGE not in caller.f_code.co_filename:
                    caller = caller.f_back
                if caller is not None:
                    known = callers.setdefault(frame.f_code, collections.Counter())
                    known[caller.f_code] += 1
        elif event == "c_call":
            others += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    bagent_run(options.url, options.count, SCHEMA, options)
    sys.setprofile(None)
    calls: collections.Counter[str] = collections.Counter()
    for code, number in python.items():
        calls[_name(code)] += number
    edges = {
        _name(code): {_name(caller): number for caller, number in known.items()}
        for code, known in callers.items()
    }
    print(json.dumps({"python": calls, "c": others, "callers": edges}))


def _name(code: CodeType) -> str:
    """Return ``package/file.py:function``; of other packages the file's name alone."""
    _, inside, path = code.co_filename.rpartition(PACKAGE)
    return f"{path if inside else Path(path).name}:{code.co_qualname}"


def chain(calls: dict) -> list[str]:
    """Return the chain of calls of a row as indented lines, its counts first."""
    a_row = {
        name: number
        for name, number in calls["rows"].items()
        if number >= EACH_ROW and name in calls["callers"] and not name.endswith(">")
    }
    below = collections.defaultdict(list)
    for name in a_row:
        caller = max(calls["callers"][name].items(), key=lambda item: item[1])[0]
        below[caller if caller in a_row else ""].append(name)
    lines: list[str] = []

    def add(caller: str, depth: int) -> None:
        for name in below[caller]:
            lines.append(f"{'  ' * depth}{name}  {a_row[name]:.2f}")
            add(name, depth + 1)

    add("", 0)
    passing = [name for name in a_row if below[name]]
    modules = [len({name.partition(":")[0] for name in names}) for names in (a_row, passing)]
    counts = (
        f"{len(a_row)} functions in {modules[0]} modules;"
        f" {len(passing)} of them, in {modules[1]} modules, call others of the list"
    )
    return [counts, *lines]


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
        "rows": per_row,
        "callers": many["callers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chain", type=Path, help="write the chain of calls of a row to this file")
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
    chains: list[str] = []
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
                    chains += [f"{mode}, {which}", *chain(calls), ""]
                    del calls["rows"], calls["callers"]
        finally:
            server.kill()
    if options.chain:
        options.chain.write_text("\n".join(chains))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
