"""Time to the end of a run on unequal fleets of SIMULATED engines, beside the ideal.

    python benchmarks/makespan.py [--rows 10000] [--repeats 3] [--mixed] [--out FILE]

``--mixed``: nine of ten answers have 10 tokens, the tenth 300.

The engines are simulated and the clock jumps, so nothing here says how fast an engine is, and
nothing depends on this machine: only how well the work is shared out is measured, by the fleet,
limits, looks and groups of a run (``simulated_fleet.py``). Ideal: all work over the sum of the
speeds, where an engine's speed is what a full one does in the middle of a long backlog; where
engines die and come back, over the speeds that are there at each time. ``modulo`` is what is easily
written instead: row i goes to endpoint i % n, all of an endpoint's rows in one list; what died with
an endpoint is shared out again when all have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from random import Random

from simulated_fleet import Plan, bagent, modulo, rows_of

from bagent.sim.config import EngineConfig
from bagent.sim.engine import SimEngine, SimRequest

ENGINE = EngineConfig(max_num_seqs=64, decode=100.0, batch_slowdown=0.02, prefix_cache=False)
SLOW = replace(ENGINE, decode=ENGINE.decode / 10, prefill=ENGINE.prefill / 10)
COUNT = 16
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
ARMS = {
    "auto": {},
    "schema": {"output": {"schema": SCHEMA}},
    "lists of 64": {"batching": {"mode": "completions", "size": 64}},
    "single": {"batching": {"mode": "single"}},
}
AIMS = {"equal": 1.05, "two slow": 1.15, "three dying": 1.25}


def speed_of(config: EngineConfig, rows: list) -> float:
    """Rows a second of one engine that always has enough to do."""
    engine = SimEngine(config)
    for row in rows:
        engine.submit(SimRequest(row.tokens, row.answer), 0.0)
    ends = []
    while (due := engine.next_event()) is not None:
        ends += [seq.finished_at for seq in engine.advance(due) if seq.finished_at is not None]
    first, last = len(ends) // 10, len(ends) * 8 // 10
    return (last - first) / (ends[last] - ends[first])


def ideal_seconds(
    rows: int, speed: float, changes: list[tuple[float, int]], engines: float
) -> float:
    """When all rows are done if every engine that is there works at full speed all the time."""
    now, remaining = 0.0, float(rows)
    for at, change in changes:
        done = (at - now) * engines * speed
        if done >= remaining:
            break
        now, remaining, engines = at, remaining - done, engines + change
    return now + remaining / (engines * speed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fleets", default=",".join(AIMS))
    parser.add_argument("--arms", default=",".join([*ARMS, "modulo"]))
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = []
    for repeat in range(options.repeats):
        rows = rows_of(options.rows, repeat)
        if options.mixed:
            lengths = Random(repeat)
            rows = [replace(row, answer=10 if lengths.random() < 0.9 else 300) for row in rows]
        speed = speed_of(ENGINE, rows[:4000])
        expected = options.rows / (COUNT * speed)
        death, back = round(expected * 0.2, 2), round(expected * 0.6, 2)
        fleets = {
            "equal": ([ENGINE] * COUNT, [], COUNT),
            "two slow": ([ENGINE] * (COUNT - 2) + [SLOW] * 2, [], COUNT - 2 + 0.2),
            "three dying": (
                [ENGINE] * COUNT,
                [*((death, index, False) for index in (3, 7, 11)), (back, 7, True)],
                COUNT,
            ),
        }
        for fleet in options.fleets.split(","):
            engines, events, strength = fleets[fleet]
            changes = [(at, 1 if up else -1) for at, _, up in events]
            ideal = ideal_seconds(options.rows, speed, changes, strength)
            for arm in options.arms.split(","):
                plan = Plan(engines, rows, events, ARMS.get(arm, {}), lists=arm != "single")
                began = time.process_time()
                seconds, requests = (modulo if arm == "modulo" else bagent)(plan)
                result = {
                    "fleet": fleet,
                    "arm": arm,
                    "repeat": repeat,
                    "seconds": round(seconds, 2),
                    "ideal": round(ideal, 2),
                    "ratio": round(seconds / ideal, 3),
                    "requests": requests,
                    "cpu_s": round(time.process_time() - began, 2),
                }
                runs.append(result)
                print(json.dumps(result), flush=True)
    summary = {}
    for fleet in options.fleets.split(","):
        for arm in options.arms.split(","):
            mine = [r["ratio"] for r in runs if (r["fleet"], r["arm"]) == (fleet, arm)]
            summary[f"{fleet}, {arm}"] = statistics.median(mine)
            print(f"{fleet:12} {arm:12} {statistics.median(mine):.3f} (aim {AIMS[fleet]})")
    if options.out:
        report = {"simulated": True, "rows": options.rows, "summary": summary, "runs": runs}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
