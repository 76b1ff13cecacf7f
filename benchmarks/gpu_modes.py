"""``bagent run`` against a real engine: batch modes side by side, by shape of the work.

    python benchmarks/gpu_modes.py HOST:PORT MODEL OUT.json [--repeats 2] [--shapes short,chat]

Every arm is the real command on the same rows; the order is turned round with each repeat, and the
engine's prefix cache is emptied before each arm where it lets one (vLLM's developer mode). Rows a
second are from the first request sent to the last answer; ``cpu_us`` is the CPU of the whole client
process, start-up included, per row. Random-weight models fill ``max_tokens``, so in the raw shapes
answers are cut and count as truncated: that is what is asked for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from math import log
from pathlib import Path
from random import Random
from typing import Any

WORDS = [
    f"{a}{b}" for a in ("ta", "re", "mo", "li", "ku", "se") for b in ("ran", "del", "vik", "pon")
]
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["label", "score"],
    "properties": {
        "label": {"enum": ["good", "bad", "mixed", "none"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 9},
    },
}
REVIEW_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["verdict", "topic", "score", "reason"],
    "properties": {
        "verdict": {"enum": ["accept", "minor revision", "major revision", "reject"]},
        "topic": {"enum": ["biology", "chemistry", "physics", "computing", "medicine", "other"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 9},
        "reason": {"type": "string", "maxLength": 160},
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "short": {"rows": 6000, "words": 100, "max_tokens": 8},
    "middle": {"rows": 2000, "words": 300, "max_tokens": 64},
    "long": {"rows": 200, "words": 2000, "max_tokens": 256},
    "chat": {"rows": 4000, "words": 100, "max_tokens": 32, "schema": SCHEMA},
    "review": {"rows": 3000, "words": (15, 1200), "max_tokens": 200, "schema": REVIEW_SCHEMA},
}
"""A number of words is one of tokens; a pair is a log-normal length in words, within bounds."""
TOKENS_PER_WORD = 2.4
RAW_ARMS = {
    "auto": {},
    "single-256": {"batching": {"mode": "single"}, "limits": {"concurrency": 256}},
    "single-512": {"batching": {"mode": "single"}, "limits": {"concurrency": 512}},
    "single-1024": {"batching": {"mode": "single"}, "limits": {"concurrency": 1024}},
    "lists-64": {"batching": {"mode": "completions", "size": 64}},
    "lists-256": {"batching": {"mode": "completions", "size": 256}},
}
CHAT_ARMS = {
    "auto": {},
    "single-256": {"batching": {"mode": "single"}, "limits": {"concurrency": 256}},
    "single-512": {"batching": {"mode": "single"}, "limits": {"concurrency": 512}},
    "single-1024": {"batching": {"mode": "single"}, "limits": {"concurrency": 1024}},
    "chat-64": {"batching": {"mode": "chat", "size": 64}},
    "lists-64": {"batching": {"mode": "completions", "size": 64}},
    "lists-256": {"batching": {"mode": "completions", "size": 256}},
}
SYSTEM = "You judge texts."
ASKED = "Judge this: "
ARM_SECONDS = 90.0
"""After so long an arm is given up: a server that hangs must not hold the others back."""
MOST_TOLD = 120
"""Requests of a run beyond which their times are not kept."""


def write_rows(path: Path, count: int, words: int | tuple[int, int]) -> None:
    """Write rows whose texts have the length that ``SHAPES`` describes as ``words``."""
    random = Random(7)
    with path.open("w") as file:
        for number in range(count):
            if isinstance(words, tuple):
                low, high = words
                count_words = min(high, max(low, int(random.lognormvariate(log(100), 1.0))))
            else:
                count_words = int(words / TOKENS_PER_WORD)
            text = " ".join(random.choice(WORDS) for _ in range(count_words))
            file.write(json.dumps({"id": f"r{number}", "text": text}) + "\n")


def arms_of(shape: str) -> dict[str, dict]:
    return CHAT_ARMS if "schema" in SHAPES[shape] else RAW_ARMS


def job_of(shape: str, url: str, model: str, rows: Path, arm: dict) -> dict:
    numbers = SHAPES[shape]
    sampling: dict = {"temperature": 0, "max_tokens": numbers["max_tokens"]}
    job = {
        "name": "gpu",
        "backend": f"vllm://{url}",
        "model": model,
        "input": str(rows),
        "sampling": sampling,
        "dedupe": False,
        "results": {"parquet": False, "duckdb": False},
    }
    if "schema" in numbers:
        job["prompt"] = {"system": SYSTEM, "user": ASKED + "{{ text }}"}
        job["output"] = {"schema": numbers["schema"], "describe": "never", "retries": 0}
    else:
        job["prompt"] = {"raw": ASKED + "{{ text }}"}
        sampling["extra"] = {"ignore_eos": True}
    return job | arm


def run_job(folder: Path, job: dict, code: Path | None = None) -> tuple[dict, Path]:
    """Run ``job`` as a user would; ``code`` is a folder with another version of bagent."""
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    out = folder / f"run-{time.time_ns()}"
    command = [sys.executable, "-m", "bagent", "run", str(path), "-o", str(out)]
    env = dict(os.environ)
    if code is not None:
        env["PYTHONPATH"] = f"{code.resolve()}:{env.get('PYTHONPATH', '')}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            [*command, "--no-canary", "--progress", "none"],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=folder,
            timeout=ARM_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {ARM_SECONDS:g} s"}, out
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = {"cpu_s": round(cpu, 3)}
    if done.returncode not in (0, 1):
        result |= {"error": done.stderr[-800:], "code": done.returncode}
    return result, out


def lines_of(out: Path, kind: str) -> list[dict]:
    """The records of one kind in a run's journal."""
    files = sorted((out / "journal").glob(f"{kind}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.open()]


def request_of(attempt: dict) -> object:
    """What is equal for the tries that travelled in one request; one alone has no group's name."""
    return attempt.get("group") or (attempt["row"], attempt.get("turn"), attempt["sent"])


def requests_of(out: Path) -> list[list[float]]:
    """When each request was sent and done, in seconds since the first, and how many rows it had."""
    sent_at = {
        request_of(attempt): [attempt["sent"], attempt["done"], attempt.get("group_size", 1)]
        for attempt in lines_of(out, "attempts")
    }
    first = min(times[0] for times in sent_at.values())
    return sorted(
        [round(a - first, 3), round(b - first, 3), size] for a, b, size in sent_at.values()
    )


def run_arm(folder: Path, job: dict, code: Path | None = None) -> tuple[dict, list[str]]:
    """What a run of ``job`` took, and its answers in the order of the rows."""
    result, out = run_job(folder, job, code)
    if "error" in result:
        return result, []
    rows = sorted(lines_of(out, "rows"), key=lambda row: row["row"])
    texts = [row.get("text") or "" for row in rows]
    seconds = max(r["finished_at"] for r in rows) - min(r["started_at"] for r in rows)
    latencies = sorted(r["latency_ms"] for r in rows)
    statuses: dict[str, int] = {}
    for row in rows:
        statuses[row["status"]] = statuses.get(row["status"], 0) + 1
    requests = requests_of(out)
    return {
        "rows": len(rows),
        "seconds": round(seconds, 3),
        "rows_per_s": round(len(rows) / seconds, 1),
        "completion_tokens": sum(r.get("completion_tokens") or 0 for r in rows),
        "p50_ms": latencies[len(latencies) // 2],
        "p99_ms": latencies[len(latencies) * 99 // 100],
        "cpu_us": round(result["cpu_s"] / len(rows) * 1e6, 1),
        "requests": len(requests),
        "statuses": statuses,
        "answers": digest(texts),
        "sent_done_rows": requests if len(requests) <= MOST_TOLD else [],
    }, texts


def digest(texts: list[str]) -> str:
    """What equal answers have in common."""
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def empty_cache(url: str) -> None:
    request = urllib.request.Request(f"http://{url}/reset_prefix_cache", method="POST")
    try:
        urllib.request.urlopen(request, timeout=10).read()
    except OSError as error:
        print("the prefix cache stays as it is:", error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", help="HOST:PORT")
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--shapes", default="short,middle,long,chat")
    parser.add_argument("--arms", help="Only these, parted by commas.")
    parser.add_argument("--scale", type=float, default=1.0, help="Share of the rows.")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in options.shapes.split(","):
            rows = folder / f"{shape}.jsonl"
            count = int(SHAPES[shape]["rows"] * options.scale)
            write_rows(rows, count, SHAPES[shape]["words"])
            arms = arms_of(shape)
            if options.arms:
                arms = {name: arm for name, arm in arms.items() if name in options.arms.split(",")}
            warm = job_of(shape, options.url, options.model, rows, {})
            few = folder / "few.jsonl"
            few.write_text("".join(rows.open().readlines()[: min(200, count)]))
            run_arm(folder, warm | {"input": str(few)})
            for repeat in range(options.repeats):
                order = list(arms) if repeat % 2 == 0 else list(reversed(arms))
                for arm in order:
                    empty_cache(options.url)
                    result, _ = run_arm(
                        folder, job_of(shape, options.url, options.model, rows, arms[arm])
                    )
                    runs.append({"shape": shape, "arm": arm, "repeat": repeat} | result)
                    print(json.dumps(runs[-1]), flush=True)
                    options.out.write_text(
                        json.dumps({"device": os.environ.get("DEVICE", ""), "runs": runs}, indent=1)
                    )


if __name__ == "__main__":
    main()
