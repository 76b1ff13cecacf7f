"""Rows, images and tables in stores of others: moto, gcp-storage-emulator and Azurite."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest

from real.parts import CACHE, Part, free_port, venv
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results, write_job
from support.replies import echo

pytestmark = [
    pytest.mark.real,
    pytest.mark.process("kills a run"),
    pytest.mark.tables,
    pytest.mark.timeout(600),
]

PNG = b"\x89PNG\r\n\x1a\n...."
AZURE_KEY = (  # Azurite's own, which everybody knows
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
MAKE_BUCKET = {
    "s3": "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')",
    "gs": "",
    "az": "import os; from azure.storage.blob import BlobServiceClient as C;"
    "C.from_connection_string(os.environ['AZURE_STORAGE_CONNECTION_STRING'])"
    ".create_container('bucket')",
}


class Store(Part):
    """A store on a free port.

    Attributes:
        env: variables by which bagent finds it, its keys and its driver.
    """

    def __init__(self, scheme: str, folder: Path) -> None:
        super().__init__(folder / f"{scheme}.log")
        self.scheme = scheme
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        packages = next((venv("stores") / "lib").glob("python*/site-packages"))
        self.env = {"PYTHONPATH": f"{packages}"}
        bin_folder = venv("stores") / "bin"
        if scheme == "s3":
            command = [str(bin_folder / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
            keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            self.env |= {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
            self.env |= dict.fromkeys(keys, "test")
        elif scheme == "gs":
            command = [str(bin_folder / "gcp-storage-emulator"), "start", "--host=127.0.0.1"]
            command += [f"--port={port}", "--in-memory", "--default-bucket=bucket"]
            self.env["STORAGE_EMULATOR_HOST"] = url
        else:
            command = [str(CACHE / "azurite/node_modules/.bin/azurite-blob"), "--silent"]
            command += ["--location", str(folder / "azurite"), "--blobPort", str(port)]
            command += ["--skipApiVersionCheck", "--disableTelemetry"]
            self.env["AZURE_STORAGE_CONNECTION_STRING"] = (
                "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
                f"AccountKey={AZURE_KEY};BlobEndpoint={url}/devstoreaccount1;"
            )
        self.launch(command, os.environ)
        self.wait_until(lambda: answers(port), 60)
        self.python(MAKE_BUCKET[scheme])

    def python(self, program: str) -> bytes:
        """Run a program that may import bagent and the drivers; return what it prints."""
        root = Path(__file__).resolve().parents[2]
        path = os.pathsep.join([str(root), self.env["PYTHONPATH"]])
        env = {**os.environ, **self.env, "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-c", program], env=env, check=True, stdout=subprocess.PIPE
        ).stdout

    def put(self, files: dict[str, Path]) -> None:
        """Write files by their names in the bucket."""
        names = {f"{self.scheme}://bucket/{name}": str(path) for name, path in files.items()}
        self.python(
            "from pathlib import Path; from bagent.remote.storage import storage_of\n"
            f"for url, path in {names}.items():\n"
            f"    storage_of({self.scheme!r}).write(url, Path(path))"
        )

    def get(self, name: str) -> bytes:
        """Read a file of the bucket."""
        url = f"{self.scheme}://bucket/{name}"
        return self.python(
            "import sys; from bagent.remote import open_remote\n"
            f"sys.stdout.buffer.write(open_remote({url!r}).open().read())"
        )


def answers(port: int) -> bool:
    """Whether something listens on the port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture(params=["s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store with a bucket called ``bucket``."""
    if request.param == "az" and not (CACHE / "azurite/.installed").exists():
        pytest.skip("needs npm: tests/real/install_stores.sh")
    made = Store(request.param, tmp_path)
    yield made
    made.stop()


def test_a_killed_run_over_a_store_is_resumed_and_published(store: Store, job_dir: Path) -> None:
    root = f"{store.scheme}://bucket"
    files: dict[str, Path] = {}
    for part in range(2):
        query = (
            f"select 'r' || range as id, 'row ' || range as text, repeat('x', 3000) as other,"
            f" '{root}/photos/' || range % 3 || '.png' as photo from range({part * 30},"
            f" {part * 30 + 30})"
        )
        path = files[f"rows/{part}.parquet"] = job_dir / f"{part}.parquet"
        duckdb.sql(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
    for number in range(3):
        path = files[f"photos/{number}.png"] = job_dir / f"{number}.png"
        path.write_bytes(PNG + b"%d" % number)
    store.put(files)
    content = [{"image": "{{ photo }}"}, {"text": "id={{ id }} {{ text }}"}]
    with FakeServer({"*": [echo(delay=0.05)]}) as fs:
        write_job(
            job_dir,
            fs.url,
            None,
            input=f"{root}/rows/*.parquet",
            prompt={
                "messages": [{"role": "user", "content": content}],
                "image_folders": [f"{root}/photos/"],
            },
            limits={"concurrency": 4},
            results={"publish": f"{root}/out", "duckdb": False},
        )
        command = ["run", "job.yaml", "--progress", "plain"]
        wait: Callable[[], object] = lambda: fs.wait_for(20, "finished", 120)  # noqa: E731
        run_bagent(command, job_dir, env=store.env, kill_at=wait)
        before, ended = len(fs.requests), {row["id"] for row in results(job_dir)}
        done = run_bagent(command, job_dir, env=store.env, timeout=120)
        assert done.code == 0, done.err
        again = [json.dumps(request.body) for request in fs.requests[before:]]
        assert not any(f"id={name} " in text for name in ended for text in again)
        images = {
            request.body["messages"][0]["content"][0]["image_url"]["url"] for request in fs.requests
        }
    assert len(images) == 3
    rows = results(job_dir)
    assert sorted(row["id"] for row in rows) == sorted(f"r{n}" for n in range(60))
    manifest = json.loads(store.get("out/manifest.json"))
    (job_dir / "read.parquet").write_bytes(
        store.get(f"out/{manifest['tables']['results']['file']}")
    )
    read = duckdb.from_parquet(str(job_dir / "read.parquet"))
    assert read.aggregate("count(*), count(DISTINCT id)").fetchall() == [(60, 60)]
