"""A load test whose server and DuckDB are on different machines: sent there, summed up here.

    python benchmarks/gpu_bench.py send HOST:PORT FOLDER [--preset saturation] [--workers 4]
    python benchmarks/gpu_bench.py summarise FOLDER

``send`` is ``bagent bench`` up to its raw rows (``requests-*.jsonl`` and their like in FOLDER),
and ``course.pickle`` with what else it knows. ``summarise`` makes of them what ``bagent bench``
makes: ``summary.json``, ``report.html``, Parquet; what these say of the client is of the machine
that sums up. A GPU machine without network may lack DuckDB.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from msgspec import structs

from bagent.bench.plan import make_plan
from bagent.bench.runner import BenchRequest, make_folder, send_all, write_results
from bagent.fleet.hostfile import parse_hostfile
from bagent.servers.resolve import host_endpoints

KEPT = "course.pickle"


def send(address: str, folder: Path, preset: str, given: dict[str, Any]) -> None:
    make_folder(folder)
    endpoints = host_endpoints(parse_hostfile(address), Path(address), None, {})
    wanted = BenchRequest(
        plan=make_plan(preset, given),
        endpoints=endpoints,
        folder=folder,
        command=f"bagent bench --preset {preset}",
    )
    called, course = send_all(wanted, None, lambda words: print(words, file=sys.stderr, flush=True))
    (folder / KEPT).write_bytes(pickle.dumps((wanted, called, course)))


def summarise(folder: Path) -> None:
    # Written by this script on a machine of one's own: no foreign pickle is read.
    wanted, called, course = pickle.loads((folder / KEPT).read_bytes())
    summary = write_results(structs.replace(wanted, folder=folder), called, course, None)
    for one in summary["loads"]:
        print(json.dumps({key: one[key] for key in ("load", "rps", "output_tok_s", "e2e_p50_ms")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    sending = parts.add_parser("send")
    sending.add_argument("address")
    sending.add_argument("folder", type=Path)
    sending.add_argument("--preset", default="saturation")
    sending.add_argument("--workers", type=int, default=4)
    sending.add_argument("--seconds", type=float)
    parts.add_parser("summarise").add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.what == "summarise":
        summarise(asked.folder)
    else:
        given = {"workers": asked.workers}
        if asked.seconds is not None:
            given["seconds"] = asked.seconds
        send(asked.address, asked.folder, asked.preset, given)


if __name__ == "__main__":
    main()
