"""``bagent hosts`` as a user meets it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from bagent.fleet.health_check import FleetHealthCheck
from bagent.fleet.hostfile import read_hostfile
from support.cli import Running
from support.fake_server import FakeServer
from support.http_servers import refusing_port
from support.jumping_loop import ShiftedLoop, skip
from support.replies import status

DEAD = "127.0.0.1:1999"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_table_of_all_endpoints_and_1_where_some_are_not_ready(bagent, job_dir):
    with FakeServer(flavour="vllm", version="0.33.0", max_model_len=4096) as fs:
        hosts = write(job_dir, "# two", f"{fs.address} role=critic", f"{DEAD} role=worker")
        done = bagent(["hosts", hosts])
        first, second = bagent(["hosts", hosts, "--format", "json"]).lines()
    assert (first["state"], first["tags"], first["running"]) == ("ready", {"role": "critic"}, 0)
    assert (second["state"], second["model"], second["ms"]) == ("dead", None, None)
    assert first.keys() == second.keys()
    assert done.code == 1, done.err
    head, _, ready, dead = done.out.splitlines()
    assert " ".join(head.split()) == (
        "endpoint state engine model context can running waiting ms tags reason"
    )
    assert ready.startswith(fs.address)
    for word in ("ready", "vllm 0.33.0", "fake-model", "4096", "chat batch", "role=critic"):
        assert word in ready
    assert "dead" in dead and "Connection refused" in dead and "role=worker" in dead
    assert "1 of 2 ready, 1 dead" in done.err
    assert "next: start the others, then the same command" in done.err
    (job_dir / "ready.txt").write_text("old\n")
    done = bagent(["hosts", write(job_dir, DEAD), "--write", "ready.txt"])
    assert done.code == 1
    assert (job_dir / "ready.txt").read_text() == "old\n"
    assert "none ready: ready.txt not written" in done.err


def test_all_ready_is_0_and_says_what_comes_next(bagent, job_dir):
    with FakeServer() as fs:
        done = bagent(["hosts", write(job_dir, fs.address)])
        assert sum(seen.method == "POST" for seen in fs.probes) == 1
        unwritten = bagent(["hosts", job_dir / "hosts.txt", "--write", "no/ready.txt"])
    assert done.code == 0, done.err
    assert unwritten.code == 74
    assert "bagent: error: cannot write no/ready.txt" in unwritten.err
    assert done.err.splitlines()[-1] == f"next: bagent run JOB.yaml --hostfile {job_dir}/hosts.txt"


def test_the_hostfile_may_be_stdin_or_named_by_the_environment(bagent, job_dir):
    with FakeServer() as fs:
        path = write(job_dir, fs.address)
        ways = [
            (["hosts", "-"], {}, path.read_text()),
            (["hosts"], {"BAGENT_HOSTFILE": str(path)}, None),
            (["hosts"], {"AURORA_SWARM_HOSTFILE": str(path)}, None),
        ]
        for args, env, stdin in ways:
            done = bagent(args, env=env, stdin=stdin)
            assert done.code == 0, done.err
            assert done.out.count(fs.address) == 1
    assert "AURORA_SWARM_HOSTFILE is read; its name is BAGENT_HOSTFILE now" in done.err


def test_repeats_and_mistyped_tags_of_a_hostfile_are_noted(bagent, job_dir):
    """A node file of a batch system names a node once for each of its processes."""
    hosts = write(job_dir, *["localhost"] * 8, "127.0.0.1:1999 wieght=2 rack=7")
    done = bagent(["hosts", hosts, "--format", "json"])
    assert done.lines()[0]["url"] == "http://localhost:8000/v1"
    assert "line 2 repeats line 1, and 6 more are repeated; each endpoint counts once" in done.err
    assert "line 9: wieght is a tag of your own (did you mean weight?)" in done.err
    assert "rack is" not in done.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no hostfile (bagent hosts FILE, or set BAGENT_HOSTFILE)"),
        (["none.txt"], "none.txt: the hostfile cannot be read: no such file"),
        (["bad.txt"], "bad.txt:2: port x is no number"),
        (["key.txt"], "key.txt:1: the environment variable NO_SUCH_KEY is not set"),
        (["--format", "jsno"], "'jsno' is not one of 'table', 'json' (did you mean"),
        (["ok.txt", "--timeout", "0"], "--timeout 0: not a duration"),
        (["ok.txt", "--hostfile", "o.txt"], "ok.txt and --hostfile o.txt: two hostfiles"),
        (["ok.txt", "--min-hosts", "2"], "--min-hosts 2: 1 endpoint is in the hostfile (leave it"),
    ],
)
def test_what_is_wrong_is_one_line_and_2(bagent, job_dir, args, words):
    (job_dir / "ok.txt").write_text("node1\n")
    (job_dir / "bad.txt").write_text("node1\nnode2:x\n")
    (job_dir / "key.txt").write_text("node1 api_key_env=NO_SUCH_KEY\n")
    done = bagent(["hosts", *args])
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("bagent: error: ") and words in line


def test_keys_come_from_the_environment_and_are_never_shown(bagent, job_dir):
    env = {"VLLM_API_KEY": "secret-1", "OTHER_KEY": "secret-2"}
    with FakeServer(api_key="secret-1") as first, FakeServer(api_key="secret-2") as second:
        hosts = write(job_dir, first.address, f"{second.address} api_key_env=OTHER_KEY")
        assert bagent(["hosts", hosts], env=env).code == 0
        done = bagent(["hosts", hosts, "--format", "json"], env={**env, "OTHER_KEY": "secret-3"})
    assert [one["state"] for one in done.lines()] == ["ready", "refuses"]
    assert "secret" not in done.out + done.err


def test_only_endpoints_with_the_model_are_ready(bagent, job_dir):
    with FakeServer(model="a") as first, FakeServer(model="b") as second:
        hosts = write(job_dir, first.address, second.address)
        done = bagent(["hosts", hosts, "--model", "b", "--min-hosts", "1"])
    assert done.code == 0, done.err
    assert "serves a, not b" in done.out


def test_the_ready_ones_are_written_with_their_tags(bagent, job_dir):
    with FakeServer() as first, FakeServer() as second:
        hosts = write(
            job_dir,
            f"127.0.0.1 {first.port}   role=critic  # kept as it is",
            f"127.0.0.[1,2]:{second.port}\tweight=2",
            DEAD,
        )
        done = bagent(["hosts", hosts, "--write", "ready.txt"])
    assert done.code == 1
    assert "wrote 2 of them to ready.txt" in done.err
    assert (job_dir / "ready.txt").read_text().splitlines() == [
        f"127.0.0.1 {first.port}   role=critic  # kept as it is",
        f"127.0.0.1:{second.port} weight=2",
    ]
    assert [dict(host.tags) for host in read_hostfile(job_dir / "ready.txt")] == [
        {"role": "critic"},
        {"weight": "2"},
    ]
    assert not list(job_dir.glob("*.part"))


@pytest.mark.process("concurrent")
def test_waiting_ends_when_enough_came_up(job_dir):
    server = FakeServer()
    with refusing_port() as server.port, FakeServer() as fs:
        hosts = write(job_dir, fs.address, server.address, DEAD)
        args = ["hosts", str(hosts), "--wait", "--min-fraction", "0.6", "--timeout", "50s"]
        with Running([*args, "--write", "ready.txt"], job_dir) as running:
            running.wait_for_err("1 of 3 ready, 2 dead")
            running.wait_for_err("2 dead, such as: cannot connect to")
            assert not (job_dir / "ready.txt").exists()
            with server:
                done = running.finish(30)
    assert done.code == 0, done.err
    assert (job_dir / "ready.txt").read_text().split() == [fs.address, server.address]
    assert done.err.splitlines()[-1] == "next: bagent run JOB.yaml --hostfile ready.txt"


def end_after(monkeypatch: pytest.MonkeyPatch, results: int) -> None:
    """Let half an hour pass in a check once so many endpoints have a result."""
    run = FleetHealthCheck.run

    async def watched(check: FleetHealthCheck) -> object:
        async def watch() -> None:
            while len(check.results) - check.results.count(None) < results:
                await asyncio.sleep(0.01)
            skip(1800.0)

        watching = asyncio.ensure_future(watch())
        try:
            return await run(check)
        finally:
            await watching

    monkeypatch.setattr(FleetHealthCheck, "run", watched)
    monkeypatch.setattr("bagent.backends.http.resolver.ResolverLoop", ShiftedLoop)


def test_waiting_in_vain_is_75_and_many_silent_endpoints_hide_no_other(
    bagent, job_dir, monkeypatch
):
    end_after(monkeypatch, results=2)
    loading = FakeServer({"*": [status(503, "Loading model")]})
    silent = socket.create_server(("127.0.0.1", 0), backlog=256)
    with silent, FakeServer() as fs, loading as late:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        many = [f"http://{address}/base{n}" for n in range(200)]
        hosts = write(job_dir, *many, fs.address, late.address)
        done = bagent(["hosts", hosts, "--wait", "--timeout", "20m", "--write", "ready.txt"])
    assert done.code == 75
    states = [line.split()[1] for line in done.out.splitlines()[2:]]
    assert states == ["silent"] * 200 + ["ready", "loading"]
    assert "1 of 202 endpoints ready after 20m, 202 required" in done.err.splitlines()[-1]
    assert (job_dir / "ready.txt").read_text() == f"{fs.address}\n"


def test_a_server_s_words_cannot_colour_the_screen(bagent, job_dir):
    with FakeServer(model="\x1b[31mred\u202e") as fs:
        done = bagent(["hosts", write(job_dir, fs.address)])
    assert done.code == 0, done.err
    assert "\\x1b[31mred" in done.out
    assert not set("\x1b\u202e") & set(done.out + done.err)
