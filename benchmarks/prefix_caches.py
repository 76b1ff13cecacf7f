"""What care for prefix caches brings over SIMULATED engines and a simulated hosted cache.

    python benchmarks/prefix_caches.py OUT.json

The cases are those of ``tests/fleet/test_prefix_routing.py``, larger: 100 documents of 1,000 tokens
with 16 questions each, in three orders, on four engines whose caches hold a third of them; and 400
rows behind 2,000 shared tokens before a hosted cache that is warmed or not. The clock jumps, so
that a second run gives the same numbers, on any machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fleet.support_cache import Case, run  # noqa: E402

ORDERS = ("interleaved", "shuffled", "sorted")


def text(seed: int, size: int) -> str:
    """``size`` letters of noise; four of them are a token."""
    return Random(seed).randbytes(size // 2).hex()


def asked(documents: int, questions: int, order: str) -> list[str]:
    """Prompts: what all share, a document, a question."""
    begin = text(0, 1600)
    rows = [
        (index, begin + text(1000 + number, 4000) + text(number * 1000 + index, 200))
        for number in range(documents)
        for index in range(questions)
    ]
    if order == "interleaved":
        rows.sort(key=lambda row: row[0])
    if order == "shuffled":
        Random(5).shuffle(rows)
    return [content for _, content in rows]


def main() -> int:
    """Run all cases, write them."""
    runs: list[dict[str, Any]] = []
    for order in ORDERS:
        case = Case(asked(100, 16, order))
        for mode in ("never", "auto"):
            ran = run(replace(case, mode=mode))
            result = {"hits": round(ran.hits, 3), "seconds": round(ran.seconds, 2)}
            runs.append({"what": f"documents, {order}", "prefix": mode, **result})
    begin = text(0, 8000)
    rows = [begin + text(1000 + number, 400) + text(number * 1000, 200) for number in range(400)]
    hosted = Case(rows, engines=1, limit=64, hosted=True)
    for mode in ("never", "auto"):
        ran = run(replace(hosted, mode=mode))
        result = {"written": ran.backend.written, "seconds": round(ran.seconds, 2)}
        runs.append({"what": "hosted", "prefix": mode, **result})
    made = {"simulated": True, "clock": "jumps", "runs": runs}
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")
    for row in runs:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
