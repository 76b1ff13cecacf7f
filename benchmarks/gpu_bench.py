"""A load test whose server and DuckDB are on different machines: sent there, summed up here.

    python benchmarks/gpu_bench.py send HOST:PORT FOLDER [--preset saturation] [--workers 4]
    python benchmarks/gpu_bench.py summarise FOLDER

``send`` is ``bagent bench`` up to its raw rows (``requests-*.jsonl`` and their like in FOLDER),
and ``record.pickle`` with what else it knows. ``summarise`` makes of them what ``bagent bench``
makes: ``summary.json``, ``report.html``, Parquet; what these say of the client is of the machine
that sums up. A GPU machine without network may lack DuckDB.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from bagent.bench.plan import make_plan
from bagent.bench.runner import BenchRequest, make_folder, send_all, write_results
from bagent.fleet.hostfile import parse_hostfile
from bagent.report.load_test import page
from bagent.servers.resolve import host_endpoints

RECORD_FILE = "record.pickle"


def send(address: str, folder: Path, preset: str, settings: dict[str, Any]) -> None:
    make_folder(folder)
    endpoints = host_endpoints(parse_hostfile(address), Path(address), None, {})
    request = BenchRequest(
        plan=make_plan(preset, settings),
        endpoints=endpoints,
        folder=folder,
        command=f"bagent bench --preset {preset}",
    )
    health, record = send_all(
        request, None, lambda message: print(message, file=sys.stderr, flush=True)
    )
    (folder / RECORD_FILE).write_bytes(pickle.dumps((request, health, record)))


def summarise(folder: Path) -> None:
    # Written by this script on a machine of one's own: no foreign pickle is read.
    request, health, record = pickle.loads((folder / RECORD_FILE).read_bytes())
    summary = write_results(
        structs.replace(request, folder=folder), health, record, partial(page, old=None)
    )
    for load in summary["loads"]:
        print(json.dumps({key: load[key] for key in ("load", "rps", "output_tok_s", "e2e_p50_ms")}))


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
    options = parser.parse_args()
    if options.what == "summarise":
        summarise(options.folder)
    else:
        settings = {"workers": options.workers}
        if options.seconds is not None:
            settings["seconds"] = options.seconds
        send(options.address, options.folder, options.preset, settings)


if __name__ == "__main__":
    main()
