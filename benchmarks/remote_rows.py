"""Memory of a reader of large Parquet files in a bucket, which moto serves.

    pip install 'moto[server]'                                      the bucket: anywhere
    python benchmarks/remote_rows.py [--gigabytes 1] [--files 8] [--moto moto_server] [--out FILE]

The files have an id, a text of 1 KB, and another one that the job does not use, uncompressed. Each
reader is a process of its own that reads all rows as a run does: only the column that the job uses,
whole rows, and whole rows from the disk. The peak RSS is noted at every tenth of the rows. Times
say little: moto copies a whole file for each range.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import boto3
import duckdb
from botocore.config import Config

from bagent.rows import RowsConfig, open_rows

ROW_BYTES = 2064
BUCKET = "bench"


def make_files(folder: Path, gigabytes: float, files: int) -> int:
    """Write Parquet files of about that size together; return their rows."""
    rows = int(gigabytes * 1e9 / ROW_BYTES / files)
    for number in range(files):
        first = number * rows
        texts = ", ".join(
            f"repeat(md5((range * {factor})::text), 32) AS {name}"
            for factor, name in ((3, "text"), (7, "other"))
        )
        query = f"SELECT range AS id, {texts} FROM range({first}, {first + rows})"
        duckdb.sql("SET threads = 1; SET memory_limit = '1GB'")
        duckdb.sql(
            f"COPY ({query}) TO '{folder}/{number:02}.parquet'"
            " (FORMAT parquet, ROW_GROUP_SIZE 16384, COMPRESSION uncompressed)"
        )
    return rows * files


def read(pattern: str, fields: list[str], rows: int) -> None:
    """Read all rows as a run does; print rows, seconds and the peak RSS at every tenth."""
    columns = frozenset() if fields else None
    config = RowsConfig((pattern,), Path.cwd(), fields=tuple(fields) or None)
    count, tenths, began = 0, [], time.monotonic()
    for batch in open_rows(config, columns=columns).batches():
        count += len(batch)
        if count * 10 >= rows * (len(tenths) + 1):
            tenths.append(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))
    json.dump(
        {
            "rows": count,
            "wall_s": round(time.monotonic() - began, 1),
            "cpu_s": round(time.process_time(), 1),
            "peak_rss_mb": tenths,
        },
        sys.stdout,
    )


def upload(url: str, folder: Path) -> None:
    """Put the files into the bucket of a server that starts now."""
    settings = Config(s3={"addressing_style": "path"}, read_timeout=300)
    client = boto3.client("s3", endpoint_url=url, config=settings)
    for _ in range(120):
        try:
            client.create_bucket(Bucket=BUCKET)
            break
        except Exception:  # it is not up yet
            time.sleep(0.5)
    for path in sorted(folder.glob("*.parquet")):
        with path.open("rb") as file:
            client.put_object(Bucket=BUCKET, Key=f"rows/{path.name}", Body=file)


def measure(args: argparse.Namespace) -> dict:
    """Return what was measured."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = make_files(folder, args.gigabytes, args.files)
        size = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        runs = {}
        command = [*args.moto.split(), "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            upload(url, folder)
            for what, pattern, fields in (
                ("one column of a bucket", f"s3://{BUCKET}/rows/*.parquet", ["text"]),
                ("whole rows of a bucket", f"s3://{BUCKET}/rows/*.parquet", []),
                ("whole rows of the disk", f"{folder}/*.parquet", []),
            ):
                reader = [
                    sys.executable,
                    __file__,
                    "--read",
                    pattern,
                    "--rows",
                    str(rows),
                ]
                done = subprocess.run([*reader, *fields], capture_output=True, check=True)
                runs[what] = json.loads(done.stdout) | {"load": round(os.getloadavg()[0], 1)}
                print(what, runs[what], flush=True)
        finally:
            server.kill()
            server.wait()
    return {"bytes": size, "files": args.files, "runs": runs}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--moto", default="moto_server", help="the command that starts moto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("fields", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read, args.fields, args.rows)
        return
    result = measure(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
