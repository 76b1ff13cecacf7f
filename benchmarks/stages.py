"""Stages against what simulated endpoints can do: a tree of reductions, and a map after a map.

    python benchmarks/stages.py tree [--leaves 10000,100000]   wall, and peak memory of the run
    python benchmarks/stages.py maps [--rows 8000]             two maps, one after the other

The endpoints of ``timed_server.py`` are simulated: so many slots, so many seconds an answer. So the
least time there is can be told: the seconds for which slots were held (as the server measured them,
so that its own waiting for a processor counts) over all slots, and, for a tree, the seconds of one
path from a leaf to the end. ``wall_s`` is from the first request sent to the last answer,
``command_s`` the whole command. ``--out FILE`` keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scale import BAGENT, timed

FANIN = 10
HERE = Path(__file__).parent
TEXT = "Tell in one sentence what the harbour master wrote about ship number {{ id }}: {{ text }}"
NOTE = " ".join(f"On day {day} it lay at quay {day * 7 % 13}." for day in range(12))


@contextlib.contextmanager
def endpoints(options: argparse.Namespace, seconds: dict[str, float]) -> Iterator[list[str]]:
    """Simulated endpoints; their addresses."""
    with tempfile.TemporaryDirectory(prefix="bagent-stages-") as folder:
        ports = Path(folder) / "ports"
        argv = [sys.executable, str(HERE / "timed_server.py"), "--port-file", str(ports)]
        argv += ["--endpoints", str(options.endpoints), "--slots", str(options.slots)]
        argv += ["--seconds", ",".join(f"{name}={number}" for name, number in seconds.items())]
        process = subprocess.Popen(argv)
        try:
            while not ports.exists():
                time.sleep(0.05)
            yield [f"127.0.0.1:{port}" for port in ports.read_text().split()]
        finally:
            process.kill()
            process.wait(10)


def held(hosts: list[str]) -> float:
    """Seconds for which slots were held so far."""
    total = 0.0
    for host in hosts:
        with urllib.request.urlopen(f"http://{host}/held") as answer:
            total += json.load(answer)
    return total


def run(hosts: list[str], rows: int, stages: list[dict], slots: int) -> dict:
    """One run of the real command; its times, its memory, its requests by stage."""
    with tempfile.TemporaryDirectory(prefix="bagent-stages-") as name:
        folder = Path(name)
        (folder / "hosts.txt").write_text("\n".join(hosts) + "\n")
        with (folder / "rows.jsonl").open("w") as lines:
            for number in range(rows):
                lines.write(json.dumps({"id": f"s{number}", "text": NOTE}) + "\n")
        job = {
            "name": "stages",
            "hostfile": "hosts.txt",
            "input": "rows.jsonl",
            "stages": stages,
            "batching": {"mode": "single"},
            "stream": False,
            # As many wait at the endpoint as it works on, so that it never waits for the client.
            "limits": {"per_endpoint": 2 * slots},
            "results": {"duckdb": False, "parquet": False},
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        results = timed([*BAGENT, "run", "job.yaml", "--progress", "plain"], folder)
        requests: dict[str, int] = {}
        first, last = float("inf"), 0.0
        for path in (folder / "runs/stages/journal").glob("attempts-*.jsonl"):
            with path.open() as lines:
                for line in lines:
                    row = json.loads(line)
                    requests[row["stage"]] = requests.get(row["stage"], 0) + 1
                    first, last = min(first, row["sent"]), max(last, row["done"])
        assert results.pop("code") == 0, (folder / "stderr").read_text()
        results["command_s"] = results.pop("wall_s")
        return {"wall_s": round(last - first, 2), **results, "requests": requests}


def tree(options: argparse.Namespace) -> list[dict]:
    """Leaves and the tree over them, for each number of leaves."""
    seconds = {"leaf": options.seconds, "sum": options.seconds}
    stages = [
        {"kind": "map", "name": "leaf", "model": "leaf", "prompt": TEXT},
        {
            "kind": "reduce",
            "name": "sum",
            "model": "sum",
            "fanin": FANIN,
            "prompt": "One sentence about all of these:\n{{ responses }}",
        },
    ]
    results = []
    with endpoints(options, seconds) as hosts:
        for leaves in map(int, options.leaves.split(",")):
            before = held(hosts)
            row = run(hosts, leaves, stages, options.slots)
            levels = 1
            while FANIN**levels < leaves:
                levels += 1
            path = (1 + levels) * options.seconds
            least = path + (held(hosts) - before) / (options.slots * options.endpoints)
            results.append({"leaves": leaves, "least_s": round(least, 2)} | row)
            results[-1]["ratio"] = round(row["wall_s"] / least, 3)
            results[-1]["load"] = os.getloadavg()[0]
            print(json.dumps(results[-1]), flush=True)
    return results


def maps(options: argparse.Namespace) -> list[dict]:
    """Each of two maps alone, and both, each with endpoints of its own."""
    seconds = {"one": options.seconds, "two": options.seconds * 1.25}
    one_map = {"kind": "map", "name": "one", "model": "one", "prompt": TEXT}
    two_map = {"kind": "map", "name": "two", "model": "two", "prompt": "Shorter: {{ text }}"}
    results = []
    with endpoints(options, seconds) as first, endpoints(options, seconds) as second:
        for repeat in range(options.repeats):
            times = {}
            arms = {"one": [one_map], "two": [two_map], "both": [one_map, two_map]}
            for arm in sorted(arms, reverse=bool(repeat % 2)):
                stages = [_at(stage, first, second) for stage in arms[arm]]
                if arm == "both":
                    stages[1] = stages[1] | {"prompt": "Shorter: {{ one }}"}
                times[arm] = run(first, options.rows, stages, options.slots)
                print(repeat, arm, json.dumps(times[arm]), flush=True)
            slower = max(times["one"]["wall_s"], times["two"]["wall_s"])
            ratio = round(times["both"]["wall_s"] / slower, 3)
            results.append({"repeat": repeat, "ratio": ratio, "load": os.getloadavg()[0]} | times)
            print(json.dumps({"repeat": repeat, "ratio": ratio}), flush=True)
    return results


def _at(stage: dict, first: list[str], second: list[str]) -> dict:
    """The stage with the address of its own endpoint."""
    hosts = first if stage["name"] == "one" else second
    return stage | {"backend": f"http://{hosts[0]}/v1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["tree", "maps"])
    parser.add_argument("--leaves", default="10000,100000")
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.32)
    parser.add_argument("--endpoints", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = {"tree": tree, "maps": maps}[options.what](options)
    if options.out:
        report = {name: value for name, value in vars(options).items() if name != "out"}
        options.out.write_text(
            json.dumps({"simulated": True} | report | {"runs": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
