"""Failures that are the server's: what is known before the input is sent, and what a run does."""

from __future__ import annotations

import msgspec
import pytest

from support.fake_server import FakeServer
from support.jobs import results_by_id, write_job
from support.replies import echo, error_body, ok, status
from support.run_outcomes import NO_TABLES
from support.tls import site_authority

RUN = ["run", "job.yaml", "--progress", "plain"]
NO_MODEL = status(404, error_body(404, "The model `m9` does not exist."))


def write_batch(folder, models):
    """Write a batch file with one row a model; every seventh line is broken."""
    lines = []
    for number, model in enumerate(models):
        body = {"model": model, "messages": [{"role": "user", "content": f"id=r{number}"}]}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(b"{oh}" if number % 7 == 1 else msgspec.json.encode(line | {"body": body}))
    (folder / "batch.jsonl").write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("where", ["batch file", "job", "hostfile"])
def test_a_model_that_nobody_serves_is_2_and_nothing_of_the_input_is_sent(
    fs, job_dir, bagent, where
):
    fs.set_script({"*": [NO_MODEL]})
    command = RUN
    if where == "batch file":
        write_batch(job_dir, ["fake-model"] * 10 + ["m9"] * 90)
        command = ["run", "batch.jsonl", "--backend", fs.url]
    elif where == "job":
        write_job(job_dir, fs.url, 20, model="m9")
    else:
        (job_dir / "hosts").write_text(f"{fs.address} model=m9\n")
        write_job(job_dir, "vllm", 20, hostfile="hosts", model=None)
    done = bagent(command)
    assert done.code == 2, done.err
    assert f"the model m9, and {fs.address} does not serve it: HTTP 404" in done.err
    assert "--model fake-model" in done.err
    assert fs.requests == []


def test_a_model_that_is_not_listed_but_answers_is_an_alias(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 5, model="latest")
    assert bagent(RUN).code == 0
    assert len(fs.requests) == 5


def test_an_empty_list_of_models_is_waited_for_and_then_75(job_dir, bagent):
    with FakeServer({"*": [NO_MODEL]}, models=[]) as fs:
        write_job(job_dir, fs.url, 5, model="m9")
        done = bagent([*RUN, "--wait-hosts", "0.2s"])
        assert done.code == 75, done.err
        assert "--wait-hosts 10m" in done.err
        assert not [seen for seen in fs.requests if any(seen.rows)]


@pytest.mark.parametrize(
    ("first", "reply", "words"),
    [
        (NO_MODEL, NO_MODEL, "another with --model"),
        (status(403, {"detail": "blocked"}),) * 2 + ("set a key",),
        (ok("early"), status(402, {"error": {"message": "pay first"}}), "raise the quota"),
    ],
    ids=["no model", "a gateway", "no money"],
)
def test_what_a_server_refuses_waits_and_the_same_command_goes_on(
    fs, job_dir, bagent, first, reply, words
):
    fs.set_script({"r1": [first], "*": [reply]})
    write_job(job_dir, fs.url, 80, batching={"mode": "single"}, results=NO_TABLES)
    done = bagent(RUN)
    assert done.code == 76, done.err
    assert words in done.err
    assert sum(row["status"] != "ok" for row in results_by_id(job_dir).values()) == 0
    fs.set_script({"*": [echo()]})
    again = bagent(RUN)
    assert again.code == 0, again.err
    assert {row["status"] for row in results_by_id(job_dir).values()} == {"ok"}
    assert len(results_by_id(job_dir)) == 80


def test_a_row_that_the_server_refuses_while_it_serves_others_fails(fs, job_dir, bagent):
    fs.set_script({"r7": [status(403, {"detail": "blocked"})], "*": [echo()]})
    write_job(job_dir, fs.url, 60)
    assert bagent(RUN).code == 1
    found = results_by_id(job_dir)
    assert [name for name, row in found.items() if row["status"] != "ok"] == ["r7"]
    assert fs.count("r7") == 2


@pytest.mark.parametrize(
    ("name", "end"), [("OPENAI_API_KEY", "\r\n"), ("VLLM_API_KEY", "\ufeff"), ("MYKEY", "\r\n")]
)
def test_signs_around_a_key_are_taken_off(job_dir, bagent, name, end):
    with FakeServer({"*": [echo()]}, api_key="sk-abc") as fs:
        backends = {"OPENAI_API_KEY": f"openai+{fs.url}", "VLLM_API_KEY": f"vllm://{fs.address}"}
        keys = {"backend": backends.get(name, fs.url)}
        if name == "MYKEY":
            (job_dir / "hosts").write_text(f"{fs.address} api_key_env=MYKEY\n")
            keys = {"backend": "vllm", "hostfile": "hosts"}
        write_job(job_dir, "", 1, **keys)
        done = bagent(RUN, env={name: f"sk-abc{end}"})
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backend": {"url": "https://127.0.0.1:1/v1", "ca_file": "none.pem"}}, "none.pem"),
        ({"backend": "http://no-such-host.invalid/v1"}, "no-such-host.invalid"),
        ({"backend": {"url": "{fs}", "api_key_env": "MYKEY"}}, "the key in MYKEY holds a line"),
        ({"backend": "{tls}"}, "certificate not trusted"),
    ],
    ids=["no such file", "no such name", "a key of two lines", "not trusted"],
)
def test_what_no_waiting_mends_is_2_with_its_cause(fs, job_dir, bagent, keys, words):
    with FakeServer(ssl_context=site_authority(job_dir).context) as secure:
        text = msgspec.json.encode(keys).decode()
        text = text.replace("{fs}", fs.url).replace("{tls}", secure.url)
        write_job(job_dir, "", 1, **msgspec.json.decode(text))
        done = bagent(RUN, env={"MYKEY": "sk-a\nbc"})
    assert done.code == 2, done.err
    assert words in done.err
    assert fs.requests == []
