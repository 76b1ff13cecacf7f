"""Whether one request first, and the others once it has begun, saves an engine of one's own work.

    python benchmarks/warming.py HOST:PORT MODEL [--rows 48] [--repeats 3] [--out FILE]

The real command against a real vLLM (prefix caching is its default) on rows that share a text of
some 1,200 tokens. Arms: ``cold`` (``batching.prefix: auto``, which leaves such engines to
themselves) and ``warmed`` (``always``), in turns, by single calls and by lists; each run's shared
text is new to the engine. Seconds are from the first request to the last answer; ``cached`` is the
share of prompt tokens that the engine's own counters say it knew already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from random import Random

BAGENT = [sys.executable, "-m", "bagent"]
ARMS = {"cold": "auto", "warmed": "always"}
MODES = ("single", "completions")
WORDS = (
    "the of and to in is was for on that with as by at from his her were are which this be or had"
)


def counters(address: str) -> tuple[float, float]:
    """Prompt tokens that the engine was asked for, and those that its cache knew."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    return total("vllm:prefix_cache_queries_total"), total("vllm:prefix_cache_hits_total")


def text(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS.split(), k=count))


def measure(folder: Path, options: argparse.Namespace, arm: str, mode: str, number: int) -> dict:
    random = Random(number)
    shared = text(random, options.shared)
    rows = folder / f"rows-{number}.jsonl"
    with rows.open("w") as file:
        for index in range(options.rows):
            line = {"id": index, "text": f"{index} {text(random, options.own)}"}
            file.write(json.dumps(line) + "\n")
    job = {
        "backend": f"vllm://{options.address}",
        "model": options.model,
        "input": str(rows),
        "prompt": {"raw": shared + " {{ text }}"},
        "sampling": {"temperature": 0, "max_tokens": options.answer},
        "batching": {"mode": mode, "prefix": ARMS[arm]},
        "results": {"parquet": False, "duckdb": False},
    }
    path, out = folder / f"job-{number}.yaml", folder / f"run-{number}"
    path.write_text(json.dumps(job))
    before = counters(options.address)
    command = [*BAGENT, "run", str(path), "-o", str(out), "--progress", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = counters(options.address)
    ends = [
        json.loads(line)["status"]
        for file in (out / "journal").glob("rows-*.jsonl")
        for line in file.open()
    ]
    if len(ends) != options.rows or not {"ok", "truncated"}.issuperset(ends):
        raise SystemExit(done.stderr[-3000:])
    attempts = [
        json.loads(line)
        for file in (out / "journal").glob("attempts-*.jsonl")
        for line in file.open()
    ]
    sent_times = sorted({attempt["sent"] for attempt in attempts})
    return {
        "arm": arm,
        "mode": mode,
        "rows": options.rows,
        "requests": len({attempt["group"] for attempt in attempts}),
        "seconds": round(max(attempt["done"] for attempt in attempts) - sent_times[0], 3),
        "alone_s": round(sent_times[1] - sent_times[0], 3) if len(sent_times) > 1 else None,
        "prompt_tokens": round(after[0] - before[0]),
        "cached": round((after[1] - before[1]) / (after[0] - before[0]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--shared", type=int, default=1200, help="words that all rows begin with")
    parser.add_argument("--own", type=int, default=40, help="words of each row")
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), options, "cold", "single", 0)  # what a first request compiles
        for repeat in range(options.repeats):
            for mode in MODES:
                arms = list(ARMS) if repeat % 2 == 0 else list(reversed(ARMS))
                for arm in arms:
                    runs.append(measure(Path(name), options, arm, mode, len(runs) + 1))
                    print(json.dumps(runs[-1]), flush=True)
    for mode in MODES:
        for arm in ARMS:
            mine = [run for run in runs if (run["arm"], run["mode"]) == (arm, mode)]
            seconds = statistics.median(run["seconds"] for run in mine)
            cached = statistics.median(run["cached"] for run in mine)
            print(f"{mode:12} {arm:7} {seconds:.2f} s, {cached:.1%} cached")
    if options.out:
        options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
