"""``bagent bench`` and ``vllm bench serve`` at the same time on the same vLLM.

    python benchmarks/cross_together.py OUT.json [--requests 11] [--repeats 2]

The server is that of ``cross_check.py``, on a core of its own; prompts have 256 tokens, answers 6.
A first token takes 0.2 s then, of which the 6 to 11 ms that vLLM's tool sees more of are little.
Each tool sends evenly, at a rate of its own, so that their requests come in between each other and
seldom meet: both see the same engine in the same minute, and their plain numbers are compared:
medians of TTFT, TPOT and E2E, and output tokens a second as a share of what was asked for.

A repeat is disturbed where the engine was busy for more than :data:`MOST_BUSY` of the time (by its
own histogram), where bagent says that the client was the limit, or where the mean and the median of
a tool's TPOT are more than :data:`UNEVEN` apart: a median of few requests says little then. It is
made again, ``--repeats`` in all; the first that was undisturbed decides.

Exit code 0: all within ``--band`` (10 %). 1: not so. 3: every repeat was disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cross_check import BASE, LAYERS, ShallowVllm, about, bagent, counted, vllm_command, vllm_found

OTHER = "vllm bench serve"
RATES = {BASE: 0.36, OTHER: 0.31}
INPUT, OUTPUT = 256, 6
MOST_BUSY = 0.3
UNEVEN = 0.08
COMPARED = ("ttft_ms", "tpot_ms", "e2e_ms", "of_rate")
MAIN_RUN = "Starting main benchmark run"


def repeat_once(
    requests: int, server: ShallowVllm, folder: Path, repeat: int, stack: contextlib.ExitStack
) -> list[dict]:
    """bagent's numbers and those of vLLM's tool."""
    loads = {
        name: {
            "requests": round(requests * rate / min(RATES.values())),
            "rate": rate,
            "input": INPUT,
            "output": OUTPUT,
        }
        for name, rate in RATES.items()
    }
    command, env = vllm_command(server, loads[OTHER], folder, 2 * repeat + 1)
    errors = stack.enter_context((folder / "errors").open("w"))
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    stack.callback(other.kill)
    if server.process is None:
        stack.enter_context(server)  # it starts while vLLM's tool loads its modules
    assert other.stdout is not None
    for line in other.stdout:
        if MAIN_RUN in line:
            break
    began, before = time.monotonic(), counted(server)
    own = bagent(server, loads[BASE], folder, 2 * repeat)
    other.communicate()
    if other.returncode:
        raise SystemExit(f"{OTHER}: {(folder / 'errors').read_text()[-2000:]}")
    busy = (counted(server)[2] - before[2]) / (time.monotonic() - began)
    pair = [{"tool": BASE, **own}, {"tool": OTHER, **vllm_found(folder)}]
    for run in pair:
        run["of_rate"] = run["output_tok_s"] / RATES[run["tool"]] / OUTPUT
        run |= {"repeat": repeat, "engine_busy": round(busy, 3)}
    return pair


def disturbed(pair: list[dict]) -> list[str]:
    """Why the numbers of a repeat say little, in words."""
    summary = [
        f"{run['tool']}: TPOT has a mean of {run['tpot_mean_ms']:.1f} ms, a median of"
        f" {run['tpot_ms']:.1f}"
        for run in pair
        if abs(run["tpot_mean_ms"] / run["tpot_ms"] - 1) > UNEVEN
    ]
    if pair[0]["engine_busy"] > MOST_BUSY:
        summary.append(f"the engine was busy for {pair[0]['engine_busy']:.0%} of the time")
    if pair[0]["client_limited"]:
        summary.append("the client was the limit")
    return summary


def main() -> int:
    """Measure until a repeat is undisturbed, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=11, help="of vLLM's tool")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--band", type=float, default=0.10)
    options = parser.parse_args()
    runs: list[dict] = []
    why, apart = [""], []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = ShallowVllm(f"smollm2-{LAYERS}", log=folder / "vllm.log", core=0)
        server.make_model()  # vLLM's tool, which begins first, reads its tokenizer
        while why and len(runs) < 2 * options.repeats:
            folder_ = Path(tempfile.mkdtemp(dir=folder))
            pair = repeat_once(options.requests, server, folder_, len(runs) // 2, stack)
            why = disturbed(pair)
            runs += [{**run, "disturbed": why} for run in pair]
            print(*map(json.dumps, runs[-2:]), sep="\n", file=sys.stderr)
    if not why:
        own, other = runs[-2:]
        shares = {name: other[name] / own[name] for name in COMPARED}
        apart = [
            f"{name} of {OTHER} is {share:.3f} of bagent's"
            for name, share in shares.items()
            if abs(share - 1) > options.band
        ]
    summary = {**about(server), "apart": apart, "runs": runs}
    options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print("\n".join(why or apart) or f"all within {options.band:.0%}", file=sys.stderr)
    return 3 if why else 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
