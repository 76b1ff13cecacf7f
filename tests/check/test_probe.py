"""Which endpoints a job would talk to, and what they tell of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bagent.backends.http.client import Transport
from bagent.backends.openai.backend import OpenAIBackend
from bagent.check.probe import (
    CheckTarget,
    Probed,
    capabilities_by_name,
    find_target,
    kv_tokens,
    probe_all,
)
from bagent.errors import BagentError
from bagent.job.load import JobRequest, load_job
from support.fake_server import FakeServer


def target_of(
    folder: Path, head: str, env: Mapping[str, str] | None = None, *, keys: bool = True
) -> CheckTarget:
    text = f'{head}\ninput: rows.jsonl\nprompt: "{{{{ x }}}}"\n'
    request = JobRequest(path=folder / "job.yaml", text=text, cwd=folder, env=env or {})

    async def find() -> CheckTarget:
        async with AsyncExitStack() as stack:
            return await find_target(load_job(request), env or {}, stack, keys=keys)

    return asyncio.run(find())


def probe(target: CheckTarget) -> list[Probed]:
    async def run() -> list[Probed]:
        transport = Transport()
        backend = OpenAIBackend(transport)
        try:
            return await probe_all(backend, transport, target)
        finally:
            await backend.close()

    return asyncio.run(run())


def test_every_endpoint_of_a_hostfile_is_asked_in_its_order(tmp_path: Path) -> None:
    engine = {"flavour": "vllm", "version": "0.33.0", "max_model_len": 4096}
    with FakeServer(**engine) as one, FakeServer(model="b") as two:
        three = FakeServer().start()
        three.stop()
        lines = [f"{server.address} role=x" for server in (one, three, two)]
        (tmp_path / "hosts.txt").write_text("\n".join(lines))
        target = target_of(tmp_path, "hostfile: hosts.txt")
        found = probe(target)
    assert [server.endpoint.name for server in found] == [one.address, three.address, two.address]
    assert [server.alive for server in found] == [True, False, True]
    assert capabilities_by_name(found).keys() == {one.address, two.address}
    assert target.servers.own
    capabilities = capabilities_by_name(found)[one.address]
    assert (capabilities.models, capabilities.context) == (("fake-model",), 4096)
    assert found[0].version == "0.33.0"


def test_simulated_engines_are_not_started(tmp_path: Path) -> None:
    target = target_of(tmp_path, "backend: sim://?replicas=3&max_model_len=512")
    assert target.planned is not None
    assert target.planned.startswith("a run simulates")
    assert "3 engines" in target.planned
    assert (target.servers.endpoints, target.servers.context) == ([], 512)


@pytest.mark.parametrize(
    "head",
    [
        "name: x",
        "backend: vllm",
        "backend: local://missing.gguf",
        "backend: sim://?replica=2",
        "hostfile: missing.txt",
    ],
)
def test_what_cannot_be_talked_to_is_an_error_of_the_user(tmp_path: Path, head: str) -> None:
    with pytest.raises(BagentError) as caught:
        target_of(tmp_path, head)
    assert caught.value.exit_code == 2


def test_the_kv_cache_is_the_sum_over_engines() -> None:
    line = (
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="%d",'
        'num_gpu_blocks="%s",prefix="{\\"a\\"}"} 1.0\n'
    )
    text = '# HELP vllm:cache_config_info x\nvllm:other{a="b"} 2\n' + line % (0, "1000")
    assert kv_tokens(text) == 16_000
    assert kv_tokens(text + line % (1, "500")) == 24_000
    assert kv_tokens(line % (0, "None")) is None
    assert kv_tokens("vllm:num_requests_running 0.0\n") is None
