"""What a prefix cache brings rows that share a long beginning, through ``bagent run``.

    python benchmarks/gpu_prefix.py OUT.json --model NAME --on HOST:PORT --off HOST:PORT
        [--rows 5,20,50,100] [--repeats 3] [--seconds S]

Chats of a shared system text of 2,048 tokens and 500 tokens of their own that really differ, 64
tokens out, all at once, streamed. Arms: ``off`` (a server without prefix caching), ``cold`` (one
with it that has never met the text; ``batching.prefix: auto``), ``warmed`` (the same with
``always``: one request goes ahead and the others follow at its first token, whose wait is in
``seconds``, reported as ``alone_s``) and ``cached`` (the same text as the run before, so all of it
is cached). Each run but ``cached`` has a new shared text. At most (shared + own) / own = 5.1 can be
gained. Texts are cut to length by the server's own ``/tokenize``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random
from statistics import median

from gpu_modes import WORDS, lines_of, run_job

SHARED, OWN, ANSWER = 2048, 500, 64
ARMS = ("off", "cold", "warmed", "known")


def tokens_a_word(address: str, model: str) -> float:
    text = words(Random(0), 1000)
    body = json.dumps({"model": model, "prompt": text}).encode()
    request = urllib.request.Request(
        f"http://{address}/tokenize", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)["count"] / 1000


def words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


class Prefix:
    """Runs one arm at a time; ``seed`` makes each shared text a new one."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.a_word = tokens_a_word(options.on, options.model)
        self.seed = 0
        self.runs: list[dict] = []

    def write(self, count: int, *, cached: bool) -> Path:
        if not cached:
            self.seed += 1
        random = Random(self.seed)
        (self.folder / "shared.md").write_text(words(random, int(SHARED / self.a_word)))
        own = Random(f"{self.seed} {cached}")
        rows = self.folder / "rows.jsonl"
        with rows.open("w") as file:
            for number in range(count):
                line = {"id": number, "text": words(own, int(OWN / self.a_word))}
                file.write(json.dumps(line) + "\n")
        return rows

    def run(self, arm: str, count: int) -> dict:
        rows = self.write(count, known=arm == "known")
        job = {
            "name": "prefix",
            "backend": f"vllm://{self.options.off if arm == 'off' else self.options.on}",
            "model": self.options.model,
            "input": str(rows),
            "prompt": {"system": {"file": "shared.md"}, "user": "{{ text }}"},
            "sampling": {"temperature": 0, "max_tokens": ANSWER, "extra": {"ignore_eos": True}},
            "stream": True,
            "dedupe": False,
            "batching": {"mode": "single", "prefix": "always" if arm == "warmed" else "auto"},
            "limits": {"concurrency": count},
            "results": {"parquet": False, "duckdb": False},
        }
        result, out = run_job(self.folder, job)
        if "error" in result:
            return result
        attempts = lines_of(out, "attempts")
        starts = sorted(row["sent"] for row in attempts)
        first = sorted((row["first_token"] - row["sent"]) * 1000 for row in attempts)
        seconds = max(row["done"] for row in attempts) - starts[0]
        return {
            "requests": len(attempts),
            "prompt_tokens": median(row["prompt_tokens"] for row in attempts),
            "cached_tokens": sum(row.get("cached_tokens") or 0 for row in attempts),
            "ttft_p50_ms": round(median(first), 1),
            "ttft_p95_ms": round(first[min(len(first) - 1, int(len(first) * 0.95))], 1),
            "seconds": round(seconds, 3),
            "alone_s": round(starts[1] - starts[0], 3) if arm == "warmed" else 0.0,
        }

    def note(self, arm: str, count: int, repeat: int) -> None:
        row = {"arm": arm, "rows": count, "repeat": repeat, **self.run(arm, count)}
        self.runs.append(row)
        print(json.dumps(row), flush=True)
        report = {"device": os.environ.get("DEVICE", ""), "model": self.options.model}
        self.options.out.write_text(json.dumps(report | {"runs": self.runs}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--on", required=True, metavar="HOST:PORT")
    parser.add_argument("--off", required=True, metavar="HOST:PORT")
    parser.add_argument("--rows", default="5,20,50,100")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10_000)
    options = parser.parse_args()
    began, longest = time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as name:
        prefix = Prefix(options, Path(name))
        for arm in ("off", "cold"):  # what a first request compiles
            print("warm", arm, prefix.run(arm, 64), flush=True)
        for repeat in range(options.repeats):
            at = time.monotonic()
            if at + longest > began + options.seconds:
                break
            for count in map(int, options.rows.split(",")):
                # "known" asks once more with the text of "cold", which so must come before it.
                turned = ARMS if repeat % 2 == 0 else ("warmed", "cold", "known", "off")
                for arm in ("off", "cold", "known", "warmed") if turned is ARMS else turned:
                    prefix.note(arm, count, repeat)
            longest = max(longest, time.monotonic() - at)


if __name__ == "__main__":
    main()
