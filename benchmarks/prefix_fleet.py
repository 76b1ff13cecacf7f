"""Questions about documents over several real engines: hit rate and time, of two bagents in turns.

    python benchmarks/prefix_fleet.py OUT.json MODEL HOST:PORT HOST:PORT --before FOLDER --repeats 3

25 documents with 6 questions each, the first question of all documents first: more rows than the
engines are sent at once when a run begins. Each run's documents are new to the engines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["gene", "cell", "river", "stone", "light", "market", "paper", "house", "green", "north"]
DOCUMENTS, QUESTIONS, LENGTH = 25, 6, 280


def counted(host: str) -> list[float]:
    """Prompt tokens that the engine looked up and found since its start."""
    with urllib.request.urlopen(f"http://{host}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        for name in ("vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{")
    ]


def write(folder: Path, seed: str, model: str, hosts: list[str], mode: str) -> None:
    """Write the job; JSON is YAML too."""
    random = Random(seed)
    texts = [" ".join(random.choices(WORDS, k=LENGTH)) for _ in range(DOCUMENTS)]
    rows = [
        {"id": f"{number} {index}", "document": text, "text": WORDS[index]}
        for index in range(QUESTIONS)
        for number, text in enumerate(texts)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "hosts.txt").write_text("\n".join(hosts) + "\n")
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    job = {
        "name": "job",
        "backend": "vllm",
        "hostfile": "hosts.txt",
        "model": model,
        "input": "rows.jsonl",
        "prompt": {"system": "Answer.", "user": "{{ document }}\n{{ text }}?"},
        "sampling": {"temperature": 0, "max_tokens": 8, "extra": choice},
        "batching": {"mode": mode},
    }
    (folder / "job.yaml").write_text(json.dumps(job))


def one(arm: str, code: Path, seed: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the bagent in ``code``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, seed, arguments.model, arguments.hosts, arguments.mode)
        before = [counted(host) for host in arguments.hosts]
        command = [sys.executable, "-m", "bagent", "run", "job.yaml", "--progress", "none"]
        env = os.environ | {"PYTHONPATH": str(code)}
        subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
        grown = [
            [after - first for after, first in zip(counted(host), earlier, strict=True)]
            for host, earlier in zip(arguments.hosts, before, strict=True)
        ]
        files = (folder / "runs/job/journal").glob("attempts-*.jsonl")
        attempts = [json.loads(line) for file in files for line in file.open()]
    homes = defaultdict(set)
    for attempt in attempts:
        homes[attempt["id"].partition(" ")[0]].add(attempt["endpoint"])
    begin, end = min(a["sent"] for a in attempts), max(a["done"] for a in attempts)
    return {
        "arm": arm,
        "hits": round(sum(hits for _, hits in grown) / sum(queries for queries, _ in grown), 3),
        "tokens": [int(queries) for queries, _ in grown],
        "documents_at_one": sum(len(endpoints) == 1 for endpoints in homes.values()),
        "seconds": round(end - begin, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    """Run both in turns, write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("model")
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", default="auto")
    arguments = parser.parse_args()
    runs = []
    arms = [("before", arguments.before), ("now", ROOT)]
    for repeat in range(arguments.repeats):
        for arm, code in arms if repeat % 2 == 0 else reversed(arms):
            runs.append(one(arm, code, f"{os.getpid()} {repeat} {arm}", arguments))
            print(json.dumps(runs[-1]), flush=True)
    documents = {"documents": DOCUMENTS, "questions": QUESTIONS, "words": LENGTH}
    made = {"mode": arguments.mode, **documents, "runs": runs}
    arguments.out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
