"""The same load on the same vLLM by ``bagent bench``, ``vllm bench serve`` and ``guidellm``.

    python benchmarks/cross_check.py OUT.json [--repeats 3] [--guidellm VENV/bin/guidellm]

It starts a vLLM on this machine's CPU with the first four of SmolLM2-135M's thirty layers
(``tests/real/install_vllm.sh``; so it is quick enough for a low load, and writes words), in 32
bits (a CPU without bfloat16 takes five times as long with it), and sends prompts of 128 tokens for
answers of 16, as raw texts, to ``/v1/completions``: one after the other (``c=1``), and evenly at a
low rate. The order of the tools is turned round with each repeat; where OUT.json is there already
its runs are kept and new repeats are added. Kept are all numbers of all repeats; compared are the
medians of each tool's medians (throughput: its mean). ``engine_busy`` is the share of the load's
time in which a request was in the engine, by its own histogram and for the whole rate.

A machine that does other work makes one tool's minute slower than the next one's. So each run also
has ``engine_tpot_ms``, the mean gap between two tokens by vLLM's own histogram over the very same
requests: what a tool says beyond that is the tool's doing, the rest the machine's. The numbers
``..._by_engine`` are times in such gaps (TPOT by its mean), and tokens in each of them.

Exit code 1 where such a number differs by more than ``--band`` (10 %). What is defined otherwise is
brought to the same definition first (see :data:`DEFINITIONS`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from real.parts import model_folder, venv  # noqa: E402
from real.serve_vllm import OPTIONS, VllmServer, environment  # noqa: E402

INPUT, OUTPUT = 128, 16
NUMBERS = ("ttft_ms", "tpot_ms", "e2e_ms", "output_tok_s")
BASE = "bagent"
GAPS = "vllm:inter_token_latency_seconds"
INSIDE = "vllm:e2e_request_latency_seconds"
LAYERS = 4
CUT = """
import sys
from safetensors.torch import load_file, save_file
source, target, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
kept = {}
for name, value in load_file(source).items():
    parts = name.split(".")
    if parts[1] != "layers" or int(parts[2]) < layers:
        kept[name] = value
save_file(kept, target, metadata={"format": "pt"})
"""
DEFINITIONS = {
    "ttft_ms": "all: first piece of the answer minus sent. bagent passes over pieces without text,"
    " which vLLM's tool takes as a first token",
    "tpot_ms": "(last - first token) / (output tokens - 1); guidellm's inter_token_latency_ms is"
    " this, its time_per_output_token_ms counts the first token's wait too",
    "e2e_ms": "end minus sent (bagent's e2e_sent: its e2e is from the schedule)."
    " vLLM's ends with the last piece, the others with the stream",
    "output_tok_s": "bagent: of the steady window, tokens spread over their request; vLLM: all"
    " tokens by the time from the first request to the last answer; guidellm: of the requests'"
    " times, per second",
}


class ShallowVllm(VllmServer):
    """A vLLM with the first :data:`LAYERS` layers of SmolLM2; its folder is made where missing."""

    def _usual(self) -> list[str]:
        return ["--tool-call-parser=hermes", *OPTIONS, "--dtype=float32"]

    def make_model(self) -> None:
        """Make the model's folder where it is missing."""
        model_path = model_folder("smollm2")
        folder = model_path.with_name(self.model)
        folder.mkdir(exist_ok=True)
        if not (folder / "generation_config.json").exists():
            weights = [
                str(weights_dir / "model.safetensors") for weights_dir in (model_path, folder)
            ]
            python = venv("vllm") / "bin" / "python"
            subprocess.run([python, "-c", CUT, *weights, str(LAYERS)], check=True)
            config = json.loads((model_path / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
            # The last one tells that the folder is whole.
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                shutil.copy(model_path / name, folder)

    def start(self) -> ShallowVllm:
        """Start it and wait until it is healthy."""
        self.make_model()
        super().start()
        return self


def bagent(server: VllmServer, load: dict, folder: Path, seed: int) -> dict:
    """One load by ``bagent bench``."""
    hosts = folder / "hosts"
    hosts.write_text(f"{server.address}\n")
    how = ["--concurrency", "1"]
    if "rate" in load:
        how = ["--rate", str(load["rate"]), "--arrival", "constant"]
    program = Path(sys.executable).parent / "bagent"
    command = [str(program), "bench", "--hostfile", str(hosts), *how]
    command += ["--requests", str(load["requests"]), "--as", "completions", "--warmup", "1"]
    sizes = str(load.get("input", INPUT)), str(load.get("output", OUTPUT))
    command += ["--input-tokens", sizes[0], "--output-tokens", sizes[1], "--seed", str(seed)]
    out = folder / "bagent"
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(f"bagent bench: {done.stderr}")
    (load_result,) = json.loads((out / "summary.json").read_text())["loads"]
    return {
        "ttft_ms": load_result["ttft_p50_ms"],
        "tpot_ms": load_result["tpot_p50_ms"],
        "tpot_mean_ms": load_result["tpot_mean_ms"],
        "e2e_ms": load_result["e2e_sent_p50_ms"],
        "output_tok_s": load_result["output_tok_s"],
        "requests": load_result["requests"],
        "input_tokens": load_result["input_tokens"],
        "output_tokens": load_result["output_tokens"],
        "client_limited": done.returncode == 3,
    }


def vllm(server: VllmServer, load: dict, folder: Path, seed: int) -> dict:
    """One load by ``vllm bench serve``."""
    command, env = vllm_command(server, load, folder, seed)
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"vllm bench serve: {done.stderr[-2000:]}")
    return vllm_found(folder)


def vllm_command(
    server: VllmServer, load: dict, folder: Path, seed: int
) -> tuple[list[str], dict[str, str]]:
    """The command and its environment; it writes its numbers into ``folder``."""
    how = ["--max-concurrency", "1"]
    if "rate" in load:
        how = ["--request-rate", str(load["rate"]), "--burstiness", "10000"]
    python_home = venv("vllm")
    command = [str(python_home / "bin" / "vllm"), "bench", "serve", "--backend", "openai", *how]
    command += ["--base-url", f"http://{server.address}", "--model", server.model]
    command += ["--tokenizer", str(model_folder(server.model)), "--endpoint", "/v1/completions"]
    command += ["--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", str(load.get("input", INPUT))]
    command += ["--random-output-len", str(load.get("output", OUTPUT))]
    command += ["--num-prompts", str(load["requests"]), "--ready-check-timeout-sec", "600"]
    command += ["--temperature", "0", "--seed", str(seed), "--num-warmups", "1", "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
    command += ["--result-dir", str(folder), "--result-filename", "vllm.json"]
    return command, environment(python_home) | {"PYTHONUNBUFFERED": "1"}


def vllm_found(folder: Path) -> dict:
    """What vLLM's tool measured."""
    result = json.loads((folder / "vllm.json").read_text())
    return {
        "ttft_ms": result["median_ttft_ms"],
        "tpot_ms": result["median_tpot_ms"],
        "tpot_mean_ms": result["mean_tpot_ms"],
        "e2e_ms": result["median_e2el_ms"],
        "output_tok_s": result["output_throughput"],
        "requests": result["completed"],
        "input_tokens": result["total_input_tokens"] / result["completed"],
        "output_tokens": result["total_output_tokens"] / result["completed"],
    }


def guidellm(program: str, server: VllmServer, load: dict, folder: Path, seed: int) -> dict:
    """One load by ``guidellm benchmark``."""
    profile = "kind=synchronous"
    if "rate" in load:
        profile = f"kind=constant,rate={load['rate']}"
    out = folder / "guidellm.json"
    backend = f"kind=openai_http,target=http://{server.address},model={server.model}"
    command = [program, "run", "--backend", f"{backend},request_format=/v1/completions"]
    command += ["--profile", profile, "--seed", f"kind=static,value={seed}"]
    command += ["--constraint", f"kind=max_requests,count={load['requests']}"]
    command += ["--tokenizer", f"kind=hf_auto,model={model_folder(server.model)}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    command += ["--output", f"kind=json,path={out}", "--disable-console"]
    # Ten processes, its default, take a small machine a minute to start.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    if done.returncode or not out.exists():
        raise SystemExit(f"guidellm: {done.stdout[-1500:]} {done.stderr[-2500:]}")
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    metrics = benchmark["metrics"]

    def of(name: str, number: str = "median") -> float:
        return metrics[name]["successful"][number]

    return {
        "ttft_ms": of("time_to_first_token_ms"),
        "tpot_ms": of("inter_token_latency_ms"),
        "tpot_mean_ms": of("inter_token_latency_ms", "mean"),
        "own_tpot_ms": of("time_per_output_token_ms"),
        "e2e_ms": 1000 * of("request_latency"),
        "output_tok_s": of("output_tokens_per_second", "mean"),
        "requests": metrics["request_totals"]["successful"],
        "input_tokens": of("prompt_token_count", "mean"),
        "output_tokens": of("output_token_count", "mean"),
    }


def counted(server: VllmServer) -> tuple[float, float, float]:
    """By the engine so far: seconds between tokens, how many such gaps, seconds of requests."""
    names = (f"{GAPS}_sum", f"{GAPS}_count", f"{INSIDE}_sum")
    return tuple(server.metric(name) for name in names)


def measure(
    options: argparse.Namespace, server: VllmServer, runs: list[dict]
) -> Iterator[list[dict]]:
    """All runs, those of before first, in the order in which they were made; after each one. A
    repeat that was ended in the middle is gone on with."""
    loads = {
        "c=1": {"requests": options.requests},
        f"rate={options.rate:g}": {"requests": options.requests, "rate": options.rate},
    }
    loads = {name: load for name, load in loads.items() if name.startswith(options.load)}
    arms = {BASE: bagent, "vllm bench serve": vllm}
    if options.guidellm:
        program = str(Path(options.guidellm).absolute())
        arms["guidellm"] = lambda *arguments: guidellm(program, *arguments)
    done = {(run["load"], run["tool"], run["repeat"]) for run in runs}
    first = 0
    while all((name, tool, first) in done for name in loads for tool in arms):
        first += 1
    for repeat in range(first, first + options.repeats):
        order = list(arms) if repeat % 2 == 0 else list(reversed(arms))
        for name, load in loads.items():
            for tool in order:
                if (name, tool, repeat) in done:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    load_average, before = os.getloadavg()[0], counted(server)
                    # No seed twice on one server: prompts that came before are cached.
                    seed = int(time.time())
                    result = arms[tool](server, load, Path(folder), seed)
                    after = counted(server)
                seconds, count, inside = (b - a for a, b in zip(before, after, strict=True))
                runs.append({"load": name, "tool": tool, "repeat": repeat, **result})
                runs[-1]["engine_tpot_ms"] = 1000 * seconds / count
                if "rate" in load:
                    busy = inside / (load["requests"] / load["rate"])
                    runs[-1]["engine_busy"] = round(busy, 3)
                runs[-1] |= by_engine(runs[-1])
                runs[-1]["load_average_before"] = round(load_average, 2)
                print(json.dumps(runs[-1]), file=sys.stderr)
                yield runs


def by_engine(run: dict) -> dict:
    """The numbers of a run by the engine's own speed in that minute.

    What an open loop gets through is its rate, whatever the engine's speed.
    """
    gap = run["engine_tpot_ms"]
    result = {f"{name}_by_engine": run[name] / gap for name in NUMBERS[:3]}
    result["tpot_ms_by_engine"] = run["tpot_mean_ms"] / gap
    speed = 1.0 if run["load"].startswith("rate") else gap / 1000
    return {**result, "output_tok_s_by_engine": run["output_tok_s"] * speed}


def compare(runs: list[dict]) -> list[dict]:
    """Each tool's medians over the repeats, also by the engine's speed and by bagent's."""
    rows = []
    for load in dict.fromkeys(run["load"] for run in runs):
        for tool in dict.fromkeys(run["tool"] for run in runs):
            row: dict = {"load": load, "tool": tool}
            for name in NUMBERS:
                for key in (name, f"{name}_by_engine"):
                    own = [run[key] for run in runs if (run["load"], run["tool"]) == (load, tool)]
                    base = [run[key] for run in runs if (run["load"], run["tool"]) == (load, BASE)]
                    if own and base:
                        row[key] = round(statistics.median(own), 3)
                        ratio = statistics.median(own) / statistics.median(base)
                        row[f"{key}_by_bagent"] = round(ratio, 4)
            rows.append(row)
    return rows


def write(
    options: argparse.Namespace, server: VllmServer, runs: list[dict]
) -> tuple[list[dict], list[str]]:
    """Write all runs to the file; returns the medians and what is too far apart."""
    rows = compare(runs)
    apart = [
        f"{row['load']}: {name} of {row['tool']} by the engine's speed is {share:.3f} of bagent's"
        for row in rows
        for name in NUMBERS
        if abs((share := row.get(f"{name}_by_engine_by_bagent", 1)) - 1) > options.band
    ]
    result = {**about(server), "medians": rows, "apart": apart, "runs": runs}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return rows, apart


def about(server: VllmServer) -> dict:
    """What was measured, where and when."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "server": f"vLLM {server.version} on CPU, {server.model}",
        "definitions": DEFINITIONS,
    }


def main() -> int:
    """Measure, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.4, help="requests a second, evenly")
    parser.add_argument("--load", default="", choices=["c=1", "rate"], help="only this one")
    parser.add_argument("--port", type=int, help="of a server of this model that runs already")
    parser.add_argument("--guidellm", metavar="PROGRAM", help="the program, in its own environment")
    parser.add_argument("--band", type=float, default=0.10)
    options = parser.parse_args()
    runs: list[dict] = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        server = ShallowVllm(f"smollm2-{LAYERS}", log=log, port=options.port or 0)
        if options.port:
            server.version = json.loads(server.get("/version") or "{}").get("version", "?")
        with contextlib.nullcontext() if options.port else server:
            for done in measure(options, server, runs):  # a run is kept, whatever comes next
                rows, apart = write(options, server, done)
    for row in rows:
        print(json.dumps(row))
    print("\n".join(apart) or f"all within {options.band:.0%}", file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
