"""Clients that users have, through the proxy before a simulated engine, and on the results."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from real.parts import venv
from support.cli import Completed, Running
from support.jobs import write_rows
from support.simulated_fleets import addresses, simulated

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

Bagent = Callable[..., Completed]
MODEL = "simulated-8b"

OPENAI = """
import openai
assert openai.__version__.startswith(MAJOR)
client = openai.OpenAI()
chat = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": "hi"}])
assert chat.choices[0].message.content and chat.usage.total_tokens
response = client.responses.create(model=MODEL, input="hi")
with client.responses.stream(model=MODEL, input="hi") as stream:
    assert [event for event in stream][-1].type == "response.completed"
    assert stream.get_final_response().output_text == response.output_text != ""
assert client.embeddings.create(model=MODEL, input=["a"]).data[0].embedding
assert client.models.list().data[0].max_model_len == 8192
"""

CLIENTS = {
    "openai-3": "MAJOR = '3.'" + OPENAI,
    "openai-2": "MAJOR = '2.'\nimport sys\nsys.path.insert(0, OLDER + '/openai')" + OPENAI,
    "anthropic": """
import anthropic
client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"))
asked = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": "hi"}]}
text = client.messages.create(**asked).content[0].text
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == text != ""
""",
    "litellm": """
import litellm
asked = {"api_base": BASE, "messages": [{"role": "user", "content": "hi"}]}
answer = litellm.completion(model=f"openai/{MODEL}", **asked)
assert answer.choices[0].message.content and answer.usage.total_tokens
""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model=MODEL, base_url=BASE)
assert model.invoke("hi").content
assert "".join(chunk.content for chunk in model.stream("hi"))
""",
    "pydantic-ai": """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
assert Agent(OpenAIChatModel(MODEL)).run_sync("hi").output
""",
    "inspect-ai": """
import asyncio
from inspect_ai.model import get_model
async def main():
    return await get_model(f"openai-api/bagent/{MODEL}", base_url=BASE, api_key="x").generate("hi")
assert asyncio.run(main()).completion
""",
    "llm": """
import pathlib, os, llm
folder = pathlib.Path(os.environ["LLM_USER_PATH"])
folder.mkdir()
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: sim\\n  model_name: {MODEL}\\n  api_base: {BASE}\\n")
assert llm.get_model("sim").prompt("hi", stream=False).text()
""",
}

READERS = {
    "pandas": """
import pandas
assert len(pandas.read_parquet(PARQUET)) == len(pandas.read_csv(CSV)) == 5
assert len(pandas.read_json(JSONL, lines=True)) == 5
""",
    "polars": """
import polars
assert len(polars.read_parquet(PARQUET)) == len(polars.read_csv(CSV)) == 5
assert len(polars.read_ndjson(JSONL)) == 5
""",
    "datasets": """
import datasets
assert len(datasets.Dataset.from_parquet(PARQUET, cache_dir=CACHE)) == 5
assert len(datasets.Dataset.from_json(JSONL, cache_dir=CACHE)) == 5
""",
    "openpyxl": """
import csv, openpyxl
book = openpyxl.Workbook()
for row in csv.reader(open(EXCEL, encoding="utf-8-sig", newline="")):
    book.active.append(row)
book.save("out.xlsx")
rows = list(openpyxl.load_workbook("out.xlsx").active.iter_rows())
assert [cell.value for cell in rows[0]] == ["id", "q"]
assert [row[1].value for row in rows[1:]] == [f"'={n}\\n\u00fc," for n in range(5)]
assert {cell.data_type for row in rows for cell in row} == {"s"}
""",
    "duckdb-cli": """
import pathlib, subprocess, sys
shell = pathlib.Path(sys.executable).with_name("duckdb")
sql = "select count(*), count(distinct input->>'q'), min(typeof(output)) from results"
out = subprocess.run([shell, "-readonly", "-csv", DATABASE, sql], check=True, capture_output=True)
assert out.stdout.split()[-1].startswith(b"5,5"), out.stdout
""",
    "duckdb-1.1": """
import sys
sys.path.insert(0, OLDER + "/duckdb")
import duckdb
assert duckdb.__version__ == "1.1.3"
connection = duckdb.connect(DATABASE, read_only=True)
for table in ("results", "answers", "attempts", "endpoints"):
    connection.sql(f"select * from {table}").fetchall()
assert len(connection.sql("select * from results").fetchall()) == 5
""",
}


def run_in_venv(code: str, folder: Path, names: dict[str, str], **env: str) -> None:
    """Run Python code among the clients, with these names set to texts."""
    script = folder / "client.py"
    names = {**names, "OLDER": str(venv("clients") / "older")}
    head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    script.write_text(head + code)
    done = subprocess.run(
        [venv("clients") / "bin" / "python", script],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a proxy before a simulated engine."""
    folder = tmp_path_factory.mktemp("proxy")
    with ExitStack() as stack:
        sim = stack.enter_context(simulated("speedup=100"))
        (folder / "hosts").write_text("\n".join(addresses(sim)) + "\n")
        command = ["proxy", "--hostfile", "hosts", "--port", "0", "-o", "run"]
        proxy = stack.enter_context(Running(command, folder, {}))
        proxy.wait_for_out("\n")
        yield proxy.out.strip()


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_work_through_the_proxy(client: str, proxied: str, tmp_path: Path) -> None:
    keys = {"OPENAI_API_KEY": "x", "ANTHROPIC_API_KEY": "x", "OPENAI_BASE_URL": proxied}
    user = str(tmp_path / "llm")
    run_in_venv(
        CLIENTS[client], tmp_path, {"BASE": proxied, "MODEL": MODEL}, LLM_USER_PATH=user, **keys
    )


@pytest.mark.parametrize("reader", READERS)
def test_libraries_read_the_results(
    reader: str, job_dir: Path, tmp_path: Path, bagent: Bagent
) -> None:
    write_rows(job_dir / "rows.jsonl", [{"id": f"r{n}", "q": f"={n}\n\u00fc,"} for n in range(5)])
    (job_dir / "job.yaml").write_text("backend: sim\ninput: rows.jsonl\nprompt: 'Say {{ q }}'\n")
    assert bagent(["run", "job.yaml"]).code == 0
    for form in ("csv", "jsonl"):
        assert bagent(["results", "job", "--format", form, "-o", f"out.{form}"]).code == 0
    excel = ["--format", "csv", "--excel", "--columns", "id,q"]
    assert bagent(["results", "job", *excel, "-o", "excel.csv"]).code == 0
    names = {
        "DATABASE": str(job_dir / "runs/job/run.duckdb"),
        "EXCEL": str(job_dir / "excel.csv"),
        "PARQUET": str(job_dir / "runs/job/results.parquet"),
        "CSV": str(job_dir / "out.csv"),
        "JSONL": str(job_dir / "out.jsonl"),
        "CACHE": str(tmp_path / "cache"),
    }
    run_in_venv(READERS[reader], tmp_path, names)
