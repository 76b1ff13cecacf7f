"""CPU time a row on the client's side, for each kind of backend.

    python benchmarks/adapters.py [--rows 4000] [--repeats 3] [--arms openai,...] [--out FILE]

The real command, ``bagent run``, with the same chat rows against a server that answers at once in
each provider's own form (unstreamed, 64 in flight). Every run is a process of its own; the order
is turned round with every repeat. ``marginal`` is the slope between a quarter of the rows and all
of them, which leaves start-up out; ``start`` is what is left. Bedrock goes through boto3.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import canned_server
import uvloop
from canned_server import CONTENT, USAGE, Connection

TOKENS = {"input_tokens": USAGE["prompt_tokens"], "output_tokens": USAGE["completion_tokens"]}
MESSAGE = {
    "id": "msg_0",
    "type": "message",
    "role": "assistant",
    "model": "canned",
    "content": [{"type": "text", "text": CONTENT}],
    "stop_reason": "end_turn",
    "usage": TOKENS,
}
CONVERSE = {
    "output": {"message": {"role": "assistant", "content": [{"text": CONTENT}]}},
    "stopReason": "end_turn",
    "usage": {"inputTokens": 120, "outputTokens": 90, "totalTokens": 210},
    "metrics": {"latencyMs": 1},
}
BACKENDS = {
    "openai": "openai+http://{place}/v1",
    "anthropic": "anthropic+http://{place}",
    "bedrock": "bedrock://us-east-1?endpoint=http://{place}",
    "vllm": "vllm://{place}",
    "sglang": "sglang://{place}",
    "dynamo": "dynamo://{place}",
}
KEYS = {
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_API_KEY": "none",
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
}


class Providers(Connection):
    """Answers in the form that the path asks for."""

    message = json.dumps(MESSAGE).encode()
    converse = json.dumps(CONVERSE).encode()

    def on_message_complete(self) -> None:
        if self.url.startswith(b"/v1/messages"):
            self.body = []
            self.reply(self.message)
        elif self.url.startswith(b"/model/"):
            self.body = []
            self.reply(self.converse)
        else:
            super().on_message_complete()


def serve(port_file: Path) -> None:
    canned_server.Connection = Providers
    uvloop.run(canned_server.serve(port_file, 1))


def job(folder: Path, backend: str, rows: int) -> Path:
    write = folder / f"rows-{rows}.jsonl"
    code = "for (int i = 0; i <= n; i++) total += values[i];  // sums the values\n" * 3
    write.write_text(
        "".join(json.dumps({"id": f"r{n}", "code": f"{code}// {n}"}) + "\n" for n in range(rows))
    )
    path = folder / "job.yaml"
    path.write_text(
        f"name: job\nbackend: '{backend}'\nmodel: canned\ninput: {write.name}\nid: id\n"
        "prompt: {system: You review code., user: 'Review: {{ code }}'}\n"
        "sampling: {temperature: 0, max_tokens: 512}\nstream: false\ndedupe: false\n"
        "batching: {mode: single}\nlimits: {concurrency: 64}\n"
        "results: {parquet: false, duckdb: false}\n"
    )
    return path


def cpu_of(folder: Path, backend: str, rows: int) -> float:
    """CPU seconds of one run, imports included."""
    path = job(folder, backend, rows)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "bagent", "run", str(path), "--progress", "none", "--fresh"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **KEYS}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{backend}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(folder / "runs")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(address: str, arms: list[str], rows: int, repeats: int, folder: Path) -> list[dict]:
    results = []
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            backend = BACKENDS[arm].format(place=address)
            few, many = cpu_of(folder, backend, rows // 4), cpu_of(folder, backend, rows)
            slope = (many - few) / (rows - rows // 4)
            results.append(
                {
                    "arm": arm,
                    "repeat": repeat,
                    "rows": rows,
                    "marginal_us": round(1e6 * slope, 1),
                    "start_s": round(many - rows * slope, 3),
                    "load": os.getloadavg()[0],
                }
            )
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", default=",".join(BACKENDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(folder / "port")])
        try:
            while not (folder / "port").exists():
                time.sleep(0.02)
            address = f"127.0.0.1:{(folder / 'port').read_text()}"
            arms = options.arms.split(",")
            runs = measure(address, arms, options.rows, options.repeats, folder)
        finally:
            server.terminate()
    table = {
        arm: {
            key: statistics.median(run[key] for run in runs if run["arm"] == arm)
            for key in ("marginal_us", "start_s")
        }
        for arm in arms
    }
    result = {"machine": platform.platform(), "python": platform.python_version()}
    result |= {"table": table, "runs": runs}
    print(json.dumps(table, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
