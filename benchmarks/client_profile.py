"""Where the client's CPU time for a row goes, by part of the program and by function.

    python benchmarks/client_profile.py [--rows 20000] [--lists] [--top 12]

It profiles the arm ``bagent`` of ``client_cost.py`` with ``cProfile`` for ``--rows`` rows and for a
tenth of them, and prints the difference a row: microseconds of each part (packages of bagent,
libraries, the event loop, system calls) and of the functions that cost most. The profiler makes
Python code about twice as slow and C code hardly, so shares are those of the profiled program.
"""

from __future__ import annotations

import argparse
import os
import pstats
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from client_cost import HERE, start_server, write_rows

Function = tuple[str, int, str]
BUILT_IN = "~"
"""The file that ``pstats`` names for functions in C."""


def own_times(folder: Path, url: str, rows: Path, more: list[str]) -> dict[Function, float]:
    """Return the seconds spent in each function itself."""
    out = folder / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", str(out), str(HERE / "client_arms.py")]
    subprocess.run([*command, "bagent", url, str(rows), *more], check=True, capture_output=True)
    stats = pstats.Stats(str(out)).stats  # type: ignore[attr-defined]
    return {function: times[2] for function, times in stats.items()}


def part_of(function: Function) -> str:
    """Return the package that a function belongs to."""
    file, _, name = function
    parts = Path(file).parts
    if "bagent" in parts:
        after = parts[parts.index("bagent") + 1 :]
        return f"bagent.{Path(after[0]).stem}"
    if "site-packages" in parts:
        return Path(parts[parts.index("site-packages") + 1]).stem
    if file == BUILT_IN:
        return f"C: {name.strip('<>').removeprefix('built-in ').removeprefix('method ')}"
    return f"Python's {Path(file).stem}" if "asyncio" not in parts else "asyncio"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--lists", action="store_true", help="raw prompts in lists of 64")
    parser.add_argument("--top", type=int, default=12)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    more = ["--cpu", str(cores[0])]
    if options.lists:
        more += ["--lists", "--concurrency", "512"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, url = start_server(folder, 40, cores[-1])
        try:
            few = write_rows(folder / "few.jsonl", options.rows // 10)
            many = write_rows(folder / "many.jsonl", options.rows)
            small, large = (own_times(folder, url, rows, more) for rows in (few, many))
        finally:
            server.kill()
    count = options.rows - options.rows // 10
    costs = {
        function: (seconds - small.get(function, 0.0)) / count * 1e6
        for function, seconds in large.items()
    }
    parts: dict[str, float] = defaultdict(float)
    for function, cost in costs.items():
        parts[part_of(function)] += cost
    print(f"{sum(costs.values()):.0f} us a row under the profiler")
    for part, cost in sorted(parts.items(), key=lambda item: -item[1])[: options.top]:
        print(f"{cost:8.1f}  {part}")
    print()
    for (file, line, name), cost in sorted(costs.items(), key=lambda item: -item[1])[: options.top]:
        place = name if file == BUILT_IN else f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"
        print(f"{cost:8.1f}  {place}")


if __name__ == "__main__":
    main()
