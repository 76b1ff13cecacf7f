"""Playing many worlds: ``python -m worlds --seeds 10000 --first 0``."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter

from worlds.draw import draw
from worlds.invariants import first_problem
from worlds.play import play
from worlds.shrink import script, shrink


def check(seed: int) -> tuple[int, str, str]:
    """Return seed, broken invariant and details of a world."""
    try:
        problem = first_problem(play(draw(seed)))
    except BaseException:
        return seed, "worlds", traceback.format_exc()
    return seed, *(problem or ("", ""))


def _prepare() -> None:
    play(draw(0))
    gc.collect()
    gc.freeze()


def main() -> int:
    """Play worlds; return 1 if an invariant is broken."""
    parser = argparse.ArgumentParser(prog="worlds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--all", action="store_true", help="go on after a broken invariant")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    began, failures = time.perf_counter(), list[tuple[int, str, str]]()
    with multiprocessing.get_context("fork").Pool(options.jobs, _prepare) as pool:
        for number, result in enumerate(pool.imap_unordered(check, seeds, 10), 1):
            if result[1]:
                failures.append(result)
                print(f"seed {result[0]}: {result[1]}: {result[2]}", flush=True)
                if not options.all:
                    break
            if number % 100 == 0:
                rate = number / (time.perf_counter() - began)
                print(f"{number} worlds, {rate:.1f}/s, {len(failures)} broken", flush=True)
    seconds = time.perf_counter() - began
    print(f"{len(seeds) if options.all or not failures else number} worlds in {seconds:.0f} s")
    for name, count in Counter(name for _, name, _ in failures).most_common():
        print(f"{count:6} {name}")
    if failures and not options.all and failures[0][1] != "worlds":
        world = shrink(draw(failures[0][0]), failures[0][1])
        print(script(world, failures[0][1]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
