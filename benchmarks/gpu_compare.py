"""One shape of work, many ways to have it done: bagent's modes, servers that differ, the ceiling.

    python benchmarks/gpu_compare.py OUT.json --shape short --model NAME
        --at api1=HOST:PORT --at offline=HOST:PORT
        --arms auto@api1,lists-64@api1,single-512@api1,offline@offline
        [--repeats 3] [--rows N] [--seconds S] [--code old=FOLDER]

Arms of a server are those of ``gpu_modes.py``; ``auto:old@api1`` is the same by the version of
bagent in the folder that ``--code`` names. ``offline@NAME`` asks a ``gpu_offline.py``, and
``openai-512@api1`` is a loop over ``AsyncOpenAI`` (``gpu_openai_loop.py``). The order is
turned round with each repeat, prefix caches are emptied before each arm, all repeats are kept, and
no arm is begun that would end after ``--seconds``. ``single-256@api1*2`` is run in the first two
repeats alone. ``preemptions`` are those that the server counted in the run. ``equal`` counts the
rows with the answer of the first arm's first run; ``medians`` are rows a second and client CPU a
row of each arm.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

from gpu_modes import SHAPES, arms_of, digest, empty_cache, job_of, run_arm, write_rows

WARM_ROWS = 200


def pairs(texts: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def parted(arms: str) -> list[tuple[str, str, str]]:
    """``arm*2`` as the arm, the star, and how often."""
    return [arm.partition("*") for arm in arms.split(",")]


def run_offline(address: str, shape: str, rows: Path) -> tuple[dict, list[str]]:
    body = json.dumps({"rows": str(rows), "shape": shape}).encode()
    request = urllib.request.Request(f"http://{address}/run", body)
    try:
        with urllib.request.urlopen(request, timeout=200) as answer:
            result = json.load(answer)
    except OSError as error:
        return {"error": str(error)}, []
    return of_texts(result)


def run_openai_loop(
    folder: Path, shape: str, address: str, model: str, rows: Path, concurrency: str
) -> tuple[dict, list[str]]:
    out = folder / "openai.json"
    script = Path(__file__).with_name("gpu_openai_loop.py")
    command = [sys.executable, str(script), str(rows), shape, address, model, str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--concurrency", concurrency], capture_output=True, text=True, timeout=200
    )
    if done.returncode:
        return {"error": done.stderr[-800:]}, []
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(out.read_text())
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result["cpu_us"] = round(seconds / len(result["texts"]) * 1e6, 1)
    return of_texts(result)


def of_texts(result: dict) -> tuple[dict, list[str]]:
    """What ``run_arm`` returns, of a result with ``seconds`` and ``texts``."""
    texts = result.pop("texts")
    rate = round(len(texts) / result["seconds"], 1)
    result["seconds"] = round(result["seconds"], 3)
    return result | {"rows": len(texts), "rows_per_s": rate, "answers": digest(texts)}, texts


def medians(runs: list[dict]) -> dict[str, dict]:
    """Of each arm's runs that ended: rows a second, client CPU, how many runs, least equal rows."""
    result: dict[str, dict] = {}
    for arm in dict.fromkeys(run["arm"] for run in runs):
        mine = [run for run in runs if run["arm"] == arm and "error" not in run]
        if mine:
            result[arm] = {
                "rows_per_s": round(median(run["rows_per_s"] for run in mine), 1),
                "cpu_us": round(median(run.get("cpu_us", 0.0) for run in mine), 1),
                "runs": len(mine),
                "equal": min(run["equal"] for run in mine),
            }
    return result


def preemptions(address: str) -> int | None:
    """How many requests the server has preempted since its start; None if it does not say."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    counts = [line for line in lines if line.startswith("vllm:num_preemptions_total")]
    return round(sum(float(line.split()[-1]) for line in counts)) if counts else None


class Compare:
    """All arms of one shape."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.at, self.code = pairs(options.at), pairs(options.code)
        self.rows = folder / "rows.jsonl"
        count = options.rows or SHAPES[options.shape]["rows"]
        write_rows(self.rows, count, SHAPES[options.shape]["words"])
        self.first: list[str] = []
        self.runs: list[dict] = []
        self.longest: dict[str, float] = {}
        self.began = time.monotonic()

    def run(self, arm: str, rows: Path) -> tuple[dict, list[str]]:
        way, _, index = arm.partition("@")
        mode, _, version = way.partition(":")
        shape, address = self.options.shape, self.at[index]
        if mode == "offline":
            return run_offline(address, shape, rows)
        empty_cache(address)
        if mode.startswith("openai-"):
            concurrency = mode.removeprefix("openai-")
            model = self.options.model
            return run_openai_loop(self.folder, shape, address, model, rows, concurrency)
        job = job_of(shape, address, self.options.model, rows, arms_of(shape)[mode])
        return run_arm(self.folder, job, Path(self.code[version]) if version else None)

    def warm(self, arms: list[str]) -> None:
        """What a first request compiles, at each place."""
        few = self.folder / "few.jsonl"
        few.write_text("".join(self.rows.open().readlines()[:WARM_ROWS]))
        for index in self.at:
            mine = [arm for arm in arms if arm.endswith(f"@{index}")]
            if mine:
                print("warm", index, json.dumps(self.run(mine[0], few)[0])[:300], flush=True)

    def time_for(self, arm: str) -> bool:
        """Whether it would end in time, by what it took before."""
        usual = self.longest.get(arm, 20.0)
        return time.monotonic() - self.began + usual < self.options.seconds

    def note(self, arm: str, repeat: int) -> None:
        address = self.at[arm.partition("@")[2]]
        before = preemptions(address)
        began = time.monotonic()
        result, texts = self.run(arm, self.rows)
        took = time.monotonic() - began
        after = preemptions(address)
        if before is not None and after is not None:
            result["preemptions"] = after - before
        self.longest[arm] = max(took, self.longest.get(arm, 0.0))
        self.first = self.first or texts
        equal = sum(a == b for a, b in zip(texts, self.first, strict=False))
        run = {"arm": arm, "repeat": repeat, **result, "equal": equal, "whole_s": round(took, 2)}
        self.runs.append(run)
        summary = {key: value for key, value in run.items() if key != "sent_done_rows"}
        print(json.dumps(summary), flush=True)
        report = {"device": os.environ.get("DEVICE", ""), "shape": self.options.shape}
        report |= {"model": self.options.model, "medians": medians(self.runs), "runs": self.runs}
        self.options.out.write_text(json.dumps(report) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--at", action="append", default=[], metavar="NAME=HOST:PORT")
    parser.add_argument("--code", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--arms", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seconds", type=float, default=10_000)
    options = parser.parse_args()
    most = {arm: int(times or options.repeats) for arm, _, times in parted(options.arms)}
    arms = list(most)
    with tempfile.TemporaryDirectory() as name:
        compare = Compare(options, Path(name))
        compare.warm(arms)
        for repeat in range(options.repeats):
            for arm in arms if repeat % 2 == 0 else arms[::-1]:
                if repeat >= most[arm]:
                    continue
                if compare.time_for(arm):
                    compare.note(arm, repeat)
                else:
                    print("no time for", arm, flush=True)
        for arm, middle in medians(compare.runs).items():
            print(arm, json.dumps(middle), flush=True)


if __name__ == "__main__":
    main()
