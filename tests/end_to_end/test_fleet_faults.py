"""One endpoint of a fleet does something odd to lists of prompts: no row gets another's answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.cli import Completed, Running, hanging_names_env, run_bagent
from support.fake_server import FakeServer
from support.http_servers import in_thread, serve_app
from support.jobs import results, write_job
from support.replies import ok, slow
from support.run_outcomes import NO_TABLES, shell

Json = Any
Spoil = Callable[[list[Json]], list[Json]]
"""What a server makes of the choices of its answer."""

MODELS = {"object": "list", "data": [{"id": "fake-model", "owned_by": "vllm"}]}


def engine(spoil: Spoil, silent: bool) -> web.Application:
    """An engine that answers each prompt with ``of`` and the prompt, but for its oddities."""

    async def look(request: web.Request) -> web.Response:
        if silent:
            await asyncio.sleep(30)
        known = request.path == "/v1/models"
        return web.json_response(MODELS if known else {}, status=200 if known else 404)

    async def complete(request: web.Request) -> web.Response:
        prompts = (await request.json())["prompt"]
        choices = [
            {"index": number, "text": f"of {prompt}", "finish_reason": "stop"}
            for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts)
        ]
        answer = {"object": "text_completion", "model": "m", "choices": spoil(choices)}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/{path:.*}", look)
    app.router.add_post("/v1/completions", complete)
    return app


SPOILS: list[Spoil] = [
    lambda choices: choices[::-1],
    lambda choices: choices[1:] or choices,
    lambda choices: [*choices, {**choices[0], "index": 99}],
    lambda choices: [*choices[1:], choices[-1]],
    lambda choices: [{**choice, "index": 0} for choice in choices],
    lambda choices: choices[:1],
    lambda choices: [],
]
"""The wrong way round, one missing, one too many, one twice, all of index 0, only one, none."""


@contextmanager
def serving(*, host: str = "127.0.0.1", spoil: Spoil = list, silent: bool = False) -> Iterator[str]:
    """Serve an engine with these oddities; yields its address."""
    with in_thread(serve_app(engine(spoil, silent), host)) as url:
        yield url.removeprefix("http://")


def test_wrong_answers_to_lists_fail_no_row_and_give_none_anothers_answer(
    tmp_path: Path,
):
    with ExitStack() as stack:
        addresses = [stack.enter_context(serving(spoil=spoil)) for spoil in (*SPOILS, list, list)]
        done = run_over(tmp_path, "".join(f"{one}\n" for one in addresses))
    assert done.code == 0, done.err
    found = {row["id"]: row["text"] for row in results(tmp_path)}
    assert found == {f"r{n}": f"of r{n}" for n in range(1, 97)}


def run_over(folder: Path, hosts: str, **how: Any) -> Completed:
    """Run 96 rows in lists of 8 over the endpoints of a hostfile."""
    (folder / "hosts.txt").write_bytes(hosts.encode())
    job = write_job(
        folder,
        "",
        96,
        backend="vllm",
        hostfile="hosts.txt",
        prompt={"raw": "{{ id }}"},
        batching={"mode": "completions", "size": 8},
        limits={"timeout": {"total": "1s"}, "retries": 20},
        results=NO_TABLES,
    )
    return run_bagent(["run", job], folder, **how)


def test_a_hostfile_from_windows_a_lost_name_and_a_proxy_are_no_trouble(
    tmp_path: Path,
):
    with serving() as near, serving(host="::1") as six:
        lines = ["\ufeff# our nodes", near, "", six, near, "no-such-host.invalid:8000 # gone"]
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
        done = run_over(tmp_path, "\r\n".join(lines), env=proxies)
    assert done.code == 0, done.err
    found = results(tmp_path)
    assert len(found) == 96
    assert {row["endpoint"] for row in found} == {near, six}


@pytest.mark.process("environment")
def test_names_that_nobody_resolves_hold_up_no_run(tmp_path: Path) -> None:
    """A resolver that hangs, as an unreachable one does, for minutes; on Python's own event loop
    the look-ups of all names, and the end of the process, waited for it."""
    env = hanging_names_env(tmp_path / "site", own_loop=True)
    with serving() as good:
        port = good.rpartition(":")[2]
        done = run_over(tmp_path, f"node[001-100]\nlocalhost:{port}\n", env=env, timeout=50)
    assert done.code == 0, done.err
    assert {row["text"] for row in results(tmp_path)} == {f"of r{n}" for n in range(1, 97)}
    assert done.seconds < 40


def test_a_server_that_is_being_asked_when_the_run_ends_is_not_said_to_be_dead(
    tmp_path: Path,
) -> None:
    with serving(silent=True) as silent, serving() as good:
        done = run_over(tmp_path, f"{silent}\n{good}\n")
    assert done.code == 0, done.err
    assert "does not answer" not in done.err


@pytest.mark.process("concurrent")
def test_a_hostfile_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever opens a pipe to read waits for who writes, a thread of the run as well."""
    hosts = tmp_path / "hosts.txt"
    with FakeServer({"*": [slow(0.1, ok())]}, allow_faults=True) as fs:
        hosts.write_text(f"{fs.address}\n")
        limits = {"per_endpoint": 2}
        keys = {"backend": "vllm", "hostfile": "hosts.txt", "limits": limits}
        job = write_job(tmp_path, "", 16, **keys, results=NO_TABLES)
        with Running(["run", job], tmp_path) as running:
            fs.wait_for(2)
            hosts.unlink()
            os.mkfifo(hosts)
            done = running.finish(40)
    assert done.code == 0, done.err
    assert len(results(tmp_path)) == 16


@pytest.mark.process("pipe")
def test_a_hostfile_may_be_what_another_command_writes(tmp_path: Path) -> None:
    """A pipe gives what it has once."""
    with FakeServer({"*": [ok()]}, allow_faults=True) as fs:
        write_job(tmp_path, "", 3, backend="vllm", results=NO_TABLES)
        run = f"{sys.executable} -m bagent run job.yaml --hostfile <(echo {fs.address})"
        done = shell(run, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(results(tmp_path)) == 3
