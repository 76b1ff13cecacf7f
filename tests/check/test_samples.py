"""What `bagent check` shows and counts: lines of batch files, texts to embed, pieces of texts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.jobs import write_job, write_rows


def line(number: int, route: str, body: Any) -> dict[str, Any]:
    if isinstance(body, dict):
        body = {"model": "simulated-8b", **body}
    entry = {"custom_id": f"r{number}", "method": "POST", "url": f"/v1{route}"}
    return entry if body is None else {**entry, "body": body}


@pytest.fixture
def report(job_dir, bagent):
    """Checks lines, each a route and its body, and returns the report."""

    def check(*bodies: tuple[str, Any], rows: int = 8) -> Any:
        lines = [line(n, route, body) for n, (route, body) in enumerate(bodies, 1)]
        write_rows(job_dir / "b.jsonl", lines)
        args = ["check", "b.jsonl", "--backend", "sim", "--prompts", str(rows), "--json"]
        return msgspec.json.decode(bagent(args).out)

    return check


@pytest.fixture
def check_job(job_dir, bagent):
    """Checks a job whose prompt is elsewhere, and returns the report."""

    def check(rows, *options, backend="sim", **keys):
        keys = {"model": "auto", "prompt": None, "sampling": {"max_tokens": 10}, **keys}
        write_job(job_dir, backend, rows, **keys)
        done = bagent(["check", "job.yaml", "--json", *options])
        assert done.out, done.err
        return msgspec.json.decode(done.out)

    return check


SAY_HI = [{"role": "user", "content": "hi"}]
BE = {"role": "system", "content": "be"}


@pytest.mark.parametrize(
    ("route", "body", "prompt", "messages"),
    [
        ("/embeddings", {"input": "text two"}, "text two", None),
        ("/embeddings", {"input": ["one", "two"]}, "one\ntwo", None),
        ("/embeddings", {"input": [1, 2, 3]}, "[1,2,3]", None),
        ("/completions", {"prompt": [[1, 2], [3]]}, "[1,2]\n[3]", None),
        ("/responses", {"input": "hello"}, "hello", None),
        ("/chat/completions", {"messages": SAY_HI}, None, SAY_HI),
        ("/responses", {"input": SAY_HI}, None, SAY_HI),
        ("/responses", {"input": "hi", "instructions": "be"}, "hi", [BE, *SAY_HI]),
    ],
)
def test_a_line_is_shown_and_counted(report, route, body, prompt, messages):
    [shown] = report((route, body))["prompts"]
    assert (shown["prompt"], shown["messages"]) == (prompt, messages)
    assert shown["tokens"] == 3 if prompt and "[" in prompt else shown["tokens"] > 0


def test_the_limits_are_those_of_lines_that_ask_for_text(report):
    embedding = ("/embeddings", {"input": "a"})
    chat = ("/chat/completions", {"messages": SAY_HI, "max_tokens": 20})
    response = ("/responses", {"input": "a", "max_output_tokens": 7})
    found = report(embedding, chat, response)
    assert (found["max_tokens"]["least"], found["max_tokens"]["most"]) == (7, 20)
    assert found["tokens"]["answers_at_most"] == 27
    mixed = report(embedding, chat, ("/completions", {"prompt": "a"}))["max_tokens"]
    assert (mixed["most"], mixed["without"], mixed["generating"]) == (None, 1, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "no body"),
        ([1, 2], "its body is a list, not an object"),
        ({"prompt": "hi"}, "no messages in its body"),
    ],
)
def test_a_body_that_cannot_be_sent_is_named(report, body, message):
    [_, row] = report(
        ("/chat/completions", {"messages": SAY_HI}), ("/chat/completions", body)
    )["prompts"]  # fmt: skip
    assert row["error"] == message


def test_an_embed_stage_is_shown_as_the_texts_that_it_sends(check_job):
    stages = [{"kind": "embed", "name": "vector", "prompt": "about {{ text }}"}]
    report = check_job(2, sampling=None, stages=stages)
    assert [one["prompt"] for one in report["prompts"]] == [
        f"about text number {n}" for n in (1, 2)
    ]
    assert [one["messages"] for one in report["prompts"]] == [None, None]
    assert report["tokens"]["answers_at_most"] == 0
    assert (report["stream"], report["max_tokens"]["generating"]) == ("never", 0)
    assert "max_tokens" not in report["parameters"]


def test_rows_that_are_split_first_are_shown_and_counted_in_pieces(check_job):
    texts = [{"text": "word " * 300}, {"text": "word " * 100}, {"text": ""}, {}]
    stages = [
        {"kind": "expand", "name": "part", "split": {"field": "text", "tokens": 150}},
        {"kind": "map", "name": "note", "prompt": "Note {{ part.piece }}: {{ text }}"},
    ]
    rows = [{"id": f"r{n}", **text} for n, text in enumerate(texts)]
    report = check_job(rows, "--prompts", "9", stages=stages)
    shown = [(one["id"], one["error"] is None) for one in report["prompts"]]
    parts = sum(name.startswith("r0/") for name, _ in shown)
    assert parts >= 2
    assert shown[:parts] == [(f"r0/{n}", True) for n in range(parts)]
    assert (report["rows"], report["looked_at"], report["failing_count"]) == (4, 4, 2)
    assert [row["id"] for row in report["failing"]] == ["r2", "r3"]
    assert report["tokens"]["most"] < 250


def test_rows_that_are_reduced_first_are_estimated_in_groups(check_job):
    stages = [{"kind": "reduce", "name": "sum", "fanin": 5, "prompt": "Sum {{ responses }}"}]
    report = check_job(20, stages=stages)
    assert (report["rows"], report["looked_at"], report["tokens"]["rows"]) == (20, 20, 4)
    assert report["tokens"]["answers_at_most"] == 40


def test_a_broadcast_is_estimated_for_every_endpoint(check_job, job_dir):
    (job_dir / "hosts").write_text("http://127.0.0.1:9\nhttp://127.0.0.2:9\n")
    keys = {"hostfile": "hosts", "model": "m", "topology": "broadcast", "prompt": "{{ text }}"}
    report = check_job(20, backend=None, **keys)
    assert (report["rows"], report["tokens"]["answers_at_most"]) == (20, 400)


def test_a_blackboard_is_estimated_for_all_sections_and_rounds(check_job):
    sections = [{"name": name, "prompt": "{{ text }} {{ board }}"} for name in ("one", "two")]
    topology = {"name": "blackboard", "sections": sections, "max_rounds": 3}
    report = check_job(20, topology=topology)
    assert report["tokens"]["answers_at_most"] == 20 * 2 * 3 * 10
    assert any("grow with it" in warning for warning in report["warnings"])


def test_the_turns_of_an_agent_count_for_its_answers(job_dir, bagent):
    agent = {"max_turns": 4, "tools": [{"builtin": "read_file", "root": "."}]}
    prices = {"input": 1, "output": 10}
    keys = {"model": "auto", "agent": agent, "prices": prices, "sampling": {"max_tokens": 10}}
    write_job(job_dir, "sim", 20, **keys)
    done = bagent(["check", "job.yaml"])
    assert "all prompts: at least " in done.out, done.err
    assert "all answers: at most 800" in done.out
    assert "prompts at least $" in done.out
    assert "together at most" not in done.out
