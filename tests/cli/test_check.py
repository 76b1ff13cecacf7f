"""``bagent check`` as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from bagent.cli import process
from support.cli import Completed
from support.fake_server import FakeServer
from support.jobs import write_job, write_rows

Json = Any

SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "bad"]}},
    "required": ["verdict"],
    "additionalProperties": False,
}
Check = Callable[..., Completed]
GENERATING = ("/completions", "/chat/completions", "/batch", "/embeddings", "/responses")


@pytest.fixture
def check(bagent: Callable[..., Completed]) -> Check:
    """``bagent check ARGS`` in ``job_dir``."""
    return lambda args, **options: bagent(["check", *args], **options)


def vllm(fs: FakeServer) -> str:
    return f"vllm://{fs.address}"


def looked(done: Completed) -> Json:
    """The report of ``check --json``."""
    (report,) = done.lines()
    return report


def test_nothing_is_generated_and_nothing_is_written(check, job_dir):
    with FakeServer(flavour="vllm") as fs:
        write_job(job_dir, vllm(fs), 30, output={"schema": SCHEMA})
        before = sorted(job_dir.iterdir())
        done = check(["job.yaml"])
        assert done.code == 0
        assert fs.requests == []
        asked = {(seen.method, seen.path) for seen in fs.probes}
        assert not [path for _, path in asked if path.endswith(GENERATING)]
        assert {path for method, path in asked if method == "POST"} == {"/tokenize"}
        assert [one for one in sorted(job_dir.iterdir()) if one.name != ".home"] == before


def test_the_report_tells_what_the_job_resolves_to(check, job_dir):
    with FakeServer(flavour="vllm", version="0.33.0", max_model_len=4096) as fs:
        keys = {"model": "auto", "answers": 3, "sampling": None, "output": {"schema": SCHEMA}}
        write_job(job_dir, vllm(fs), 12, **keys)
        done = check(["job.yaml"])
    assert done.code == 0, done.err
    for words in (
        f"{fs.address}, answers, vllm 0.33.0, fake-model, context 4,096",
        "model       fake-model (auto), context 4,096 tokens",
        "streaming   every 50th request of one row, for its first-token time",
        "rows        12 rows",
        "answers     3 per row",
        "(automatic: what the",
        "strict), described in the prompt",
        "prompt of row r1 (rows.jsonl:1), ",
        "prompt of row r2 (rows.jsonl:2), ",
        f"counted by /tokenize of {fs.address}",
        "cost        unknown",
    ):
        assert words in done.out
    assert "prompt of row r3" not in done.out
    assert done.err == "next: bagent run job.yaml\n"


def test_totals_and_cost_are_of_all_rows(check, job_dir):
    with FakeServer(flavour="vllm") as fs:
        write_job(job_dir, vllm(fs), 100, answers=2)
        args = ["job.yaml", "--json", "--rows", "20", "--price", "1,2", "--prompts", "0"]
        report = looked(check(args))
        whole = looked(check(["job.yaml", "--json", "--rows", "100"]))["tokens"]
    tokens, cost = report["tokens"], report["cost"]
    assert (report["rows"], report["looked_at"], report["prompts"]) == (100, 20, [])
    assert (tokens["how"], tokens["counted"], tokens["rows"]) == ("tokenize", 20, 20)
    assert tokens["prompts"] == pytest.approx(whole["prompts"], rel=0.01)
    assert tokens["answers_at_most"] == 64 * 200
    assert cost["prompts_usd"] == pytest.approx(tokens["prompts"] / 1e6)
    assert cost["answers_usd_at_most"] == pytest.approx(2 * 64 * 200 / 1e6)


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        ([{"text": "a"}, {"text": "b"}], {"prompt": "{{ text }}"},
         "2 rows, without ids: an edited row counts as a new one (id: COLUMN)"),
        ([{"id": "r1", "text": "a"}, {"id": "r3"}], {},
         "will fail   row r3 (rows.jsonl:2): prompt.user: the row has no field text"),
        ([{"id": "r5", "text": "long " * 500}, {"id": "r6", "text": "a"}], {},
         "too long    row r5 (rows.jsonl:1): 2,"),
        ([{"id": 1, "text": "", "note": ""}, {"id": 2, "text": "b", "note": ""}],
         {"prompt": "{{ text }}{% if row.note %}{{ row.note }}{% endif %}"},
         "warning: 1 of 2 rows has an empty text, the first at rows.jsonl:1"),
        ([{"id": 1, "text": "a"}], {"output": {"schema": SCHEMA, "enforce": "prompt",
                                               "describe": "never"}},
         "warning: the schema is neither enforced nor described"),
        ([{"id": "r1", "row": "x"}], {"prompt": "{{ row }}"}, "the column row is {{ row.row }}"),
    ],
    ids=["no ids", "no field", "too long", "empty value", "untold schema", "hidden column"],
)  # fmt: skip
def test_what_makes_a_run_worse_is_named(check, job_dir, values, keys, message):
    with FakeServer(flavour="vllm", max_model_len=1000) as fs:
        write_job(job_dir, vllm(fs), values, **keys)
        done = check(["job.yaml"])
    assert done.code == 0, done.err
    printed = " ".join((done.out + done.err).split())
    assert " ".join(message.split()) in printed
    assert "empty note" not in printed


def test_a_better_order_is_suggested_and_is_right(check, job_dir):
    values = [{"id": f"r{n}", "text": f"a text of row {n} " * 9} for n in range(20)]
    tail = "Answer with one word, good or bad, and give no other text, no code and no reason."
    with FakeServer(flavour="vllm") as fs:
        job = write_job(job_dir, vllm(fs), values, prompt={"user": "{{ text }}\n\n" + tail})
        first = looked(check(["job.yaml", "--json"]))
        text = job.read_text()
        start, end = text.index("prompt:"), text.index("sampling:")
        job.write_text(text[:start] + first["reorder"]["yaml"] + text[end:])
        second = looked(check(["job.yaml", "--json"]))
    assert first["reorder"]["gain"] >= 64
    gained = second["sharing"]["by_all"] - first["sharing"]["by_all"]
    assert gained == pytest.approx(first["reorder"]["gain"], abs=16)
    assert second["reorder"] is None
    assert second["prompts"][0]["messages"][0]["content"].startswith(tail)


def test_no_endpoint_is_75_after_the_whole_report(check, job_dir):
    with FakeServer() as fs:
        pass
    write_job(job_dir, fs.url, 3)
    done = check(["job.yaml"])
    report = looked(check(["job.yaml", "--json", "--model", "auto"]))
    assert report["model"] is None
    assert done.code == 75
    assert f"{fs.address}, no answer, cannot connect" in done.out
    assert "prompt of row r1" in done.out and "cost" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith(f"bagent: error: cannot connect to {fs.address}")
    assert "bagent run job.yaml --wait-hosts 10m" in line


def test_one_dead_endpoint_of_a_fleet_is_a_warning(check, job_dir):
    with FakeServer() as dead:
        pass
    with FakeServer(flavour="vllm") as fs:
        (job_dir / "hosts.txt").write_text(f"{fs.address}\n{dead.address}\n")
        write_job(job_dir, "vllm", 3)
        done = check(["job.yaml", "--hostfile", "hosts.txt"])
    assert done.code == 0
    assert "1 of 2 endpoints answer" in done.out
    assert f"warning: {dead.address}: cannot connect" in done.err
    assert done.err.endswith("next: bagent run job.yaml --hostfile hosts.txt\n")


def test_a_refused_key_is_76(check, job_dir):
    with FakeServer(api_key="right") as fs:
        write_job(job_dir, fs.url, 3)
        done = check(["job.yaml"])
    assert done.code == 76
    assert "give the right key" in done.err
    assert "prompt of row r1" in done.out


SECRET = "s3cr3t-value"
MCP = {"tools": [{"mcp": ["sh", "-c", "touch ran"]}]}
BROUGHT = {
    "python": ({"agent": {"tools": [{"python": "tools.py:f"}]}}, "tools.py:f"),
    "mcp": ({"agent": MCP}, "sh -c 'touch ran'"),
    "mcp of a stage": ({"stages": [{"kind": "map", "agent": MCP}]}, "sh -c 'touch ran'"),
    "key command": ({"backend": {"url": "URL", "api_key_command": "touch ran"}}, "touch ran"),
    "key": ({"backend": {"url": "URL", "api_key_env": "AWS_KEY"}}, "AWS_KEY"),
    "header": ({"backend": {"url": "URL", "headers": {"A": "${AWS_KEY}"}}}, "AWS_KEY"),
    "body": ({"sampling": {"extra": {"a": "${AWS_KEY}"}}}, "AWS_KEY"),
    "hosts": ({"hostfile": "hosts.txt", "backend": "vllm"}, "AWS_KEY"),
    "vllm": ({"backend": "vllm+URL"}, "VLLM_API_KEY"),
}


@pytest.mark.parametrize(("keys", "expected"), BROUGHT.values(), ids=BROUGHT)
def test_check_executes_nothing_of_the_job_sends_no_key_and_lists_both(
    check, job_dir, fs, keys, expected
):
    text = msgspec.json.encode(keys).decode().replace("URL", fs.url)
    write_job(job_dir, fs.url, 2, **msgspec.json.decode(text))
    (job_dir / "tools.py").write_text(
        'open("ran", "w")\ndef f(x: int) -> int:\n    """Count."""\n    return x\n'
    )
    (job_dir / "hosts.txt").write_text(f"{fs.address} api_key_env=AWS_KEY\n")
    env = {"AWS_KEY": SECRET, "VLLM_API_KEY": SECRET}
    done = check(["job.yaml", "--json"], env=env)
    assert done.code == 0, done.err
    assert not (job_dir / "ran").exists()
    assert not [one for one in fs.probes if SECRET in f"{one.path} {one.headers} {one.body}"]
    effects = looked(done)["effects"]
    listed = [one["what"] for one in effects["executes"]]
    listed += [one["variable"] for one in effects["sends"] if one["to"] == fs.address]
    assert any(expected in text for text in listed)
    assert SECRET not in done.out + done.err


COPY = "COPY (SELECT 1) TO 'ran'"
SQL_STAGES = [
    {"kind": "map", "name": "first", "prompt": {"user": "{{ text }}"}},
    {"kind": "sql", "query": f"WITH x AS ({COPY}) FROM x"},
]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"input": {"sql": f"{COPY}; SELECT 1 AS id, 'a' AS text"}}, "these are 2"),
        ({"input": {"sql": "FROM 'https://127.0.0.1:9/x.parquet'"}}, "httpfs"),
        ({"where": f"(WITH x AS ({COPY}) SELECT 1) = 1"}, "holds COPY"),
        ({"prompt": None, "stages": SQL_STAGES}, "holds COPY"),
    ],
)
def test_sql_that_does_more_than_read_is_refused_and_not_run(check, job_dir, fs, keys, message):
    write_job(job_dir, fs.url, 2, **keys)
    done = check(["job.yaml"])
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (job_dir / "ran").exists()


def test_open_imports_and_starts_tools_shows_them_whole_and_sends_the_key(check, job_dir):
    (job_dir / "tools.py").write_text(
        'def count_rows(x: int) -> int:\n    """Count them."""\n    return x\n'
    )
    with FakeServer(flavour="vllm", api_key=SECRET) as fs:
        backend = {"url": vllm(fs), "api_key_env": "KEY"}
        agent = {"tools": [{"python": "tools.py:count_rows"}]}
        write_job(job_dir, "x", 2, backend=backend, agent=agent)
        closed = check(["job.yaml"], env={"KEY": SECRET})
        opened = check(["job.yaml", "--open"], env={"KEY": SECRET})
    assert closed.code == opened.code == 0
    assert "it wants a key, which was not sent" in " ".join(closed.out.split())
    assert "1 tool not opened" in closed.err and "count_rows(" not in closed.out
    assert '"description": "Count them."' in opened.out
    assert f"{fs.address}, answers" in opened.out
    assert SECRET not in closed.out + closed.err + opened.out + opened.err


def test_a_password_of_an_address_is_never_shown(check, job_dir, fs):
    write_job(job_dir, f"http://user:hunter2@{fs.address}/v1", 2)
    for more in ([], ["--json"]):
        done = check(["job.yaml", *more])
        assert fs.address in done.out
        assert "hunter2" not in done.out + done.err


def test_prompts_are_counted_by_other_machines_only_with_open(check, job_dir, monkeypatch):
    monkeypatch.setattr("bagent.check.check.is_loopback", lambda host: False)
    with FakeServer(flavour="vllm") as fs:
        write_job(job_dir, vllm(fs), 2)
        assert looked(check(["job.yaml", "--json"]))["tokens"]["how"] == "characters"
        assert "POST" not in {one.method for one in fs.probes}
        assert looked(check(["job.yaml", "--json", "--open"]))["tokens"]["how"] == "tokenize"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt": {"user": "{{ nope }}"}}, "nope is in none of the first 3 rows"),
        ({"prompt": "{{ Gene Symbol }} is"}, "with blanks is written {{ row['Gene Symbol'] }}"),
        ({"steps": [{"prompt": "a"}]}, "belongs to topology: {name: pipeline, steps: [...]}"),
        ({"fanin": 4}, "it belongs to topology: {name: ..., fanin: ...}, or to a stage"),
        ({"input": "missing.jsonl"}, "missing.jsonl"),
        (["--rows", "0"], "rows"),
        (["--set", "modle=x"], "did you mean model?"),
    ],
)
def test_what_is_wrong_in_a_job_or_an_option_is_one_line_and_2(check, job_dir, fs, keys, words):
    options = keys if isinstance(keys, list) else []
    write_job(job_dir, fs.url, 3, **({} if options else keys))
    done = check(["job.yaml", *options])
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("bagent: error: ") and words in line
    assert fs.requests == [] and fs.probes == []


def test_endpoints_that_serve_different_models_are_wrong_for_auto(check, job_dir):
    with FakeServer(model="a") as one, FakeServer(model="b") as two:
        (job_dir / "hosts.txt").write_text(f"{one.address}\n{two.address}\n")
        write_job(job_dir, "vllm", 3, model=None, hostfile="hosts.txt")
        done = check(["job.yaml"])
    assert done.code == 2
    assert "the endpoints differ" in done.err


def test_options_of_run_change_what_is_looked_at(check, job_dir):
    write_job(job_dir, "vllm://127.0.0.1:9", 3)
    write_rows(job_dir / "other.jsonl", 40)
    args = ["job.yaml", "-i", "other.jsonl", "--backend", "sim", "--limit", "7"]
    done = check([*args, "--set", "sampling.max_tokens=9", "--model", "auto"])
    assert done.code == 0, done.err
    assert "not started: a run simulates 1 engine" in done.out
    assert "rows        7 rows" in done.out
    assert "max_tokens  9" in done.out
    assert "the simulated engine's tokenizer" in done.out
    command = done.err.removeprefix("next: ").split()
    assert command[:3] == ["bagent", "run", "job.yaml"]
    assert " ".join(command).endswith("--set sampling.max_tokens=9 --limit 7")


def test_a_batch_file_is_looked_at_as_it_is(check, job_dir):
    messages = [{"role": "user", "content": "id=r1 hello"}]
    body = {"model": "m", "messages": messages, "max_tokens": 5, "temperature": 0.5}
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write_rows(job_dir / "batch.jsonl", [line])
    with FakeServer(flavour="vllm") as fs:
        done = check(["batch.jsonl", "--backend", vllm(fs), "--json"])
    report = looked(done)
    assert report["prompts"][0]["messages"] == messages
    assert report["parameters"] == {"model": "m", "max_tokens": 5, "temperature": 0.5}
    lines = {"generating": 1, "without": 0}
    assert report["max_tokens"] == {"least": 5, "most": 5, "automatic": False, **lines}


def test_a_long_row_of_the_sample_does_not_stand_for_others(check, job_dir):
    texts = ["word " * (5 + n % 7) for n in range(600)]
    texts[3] = "word " * 5000
    write_job(job_dir, "sim", [{"text": text} for text in texts], prompt="{{ text }}", model=None)
    sampled = looked(check(["job.yaml", "--json"]))["tokens"]
    whole = looked(check(["job.yaml", "--json", "--rows", "600"]))["tokens"]
    assert (sampled["rows"], whole["rows"]) == (200, 600)
    assert sampled["prompts"] == pytest.approx(whole["prompts"], rel=0.1)


def test_the_cost_of_a_hosted_model_needs_no_key(check, job_dir):
    write_job(job_dir, "openai", 2, model="gpt-5.4-mini")
    # Nothing listens there, as offline.
    done = check(["job.yaml"], env={"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"})
    assert "cost        prompts about $" in done.out
    assert "warning: OPENAI_API_KEY is not set, and a run needs it: export OPENAI_API_" in done.err
    assert done.code == 75
    assert "(look at the network, and at the proxy of the environment)" in done.err


MODEL = "the model other, which no endpoint lists (--model {} asks"


@pytest.mark.parametrize(
    ("backend", "content", "options", "message"),
    [
        ("vllm", None, ["--model", "other"], MODEL.format("fake-model")),
        ("sim", None, ["--model", "other"], MODEL.format("simulated-8b")),
        ("vllm", "{}}\nno json\n", [], "none of 2 rows can be sent: rows.jsonl:1: "),
    ],
    ids=["a model", "a model of simulated engines", "no row can be read"],
)
def test_a_run_that_cannot_work_is_2_and_no_next_command(
    check, job_dir, backend, content, options, message
):
    with FakeServer(flavour="vllm") as fs:
        write_job(job_dir, "sim" if backend == "sim" else vllm(fs), 2)
        if content is not None:
            (job_dir / "rows.jsonl").write_text(content)
        done = check(["job.yaml", *options])
    assert (done.code, "next:" in done.err) == (2, False)
    assert message in done.err.splitlines()[-1]


def test_where_not_all_is_wrong_the_next_command_is_run(check, job_dir, fs):
    """A row that cannot be sent, and a model that a server of unknown kind does not list."""
    write_job(job_dir, fs.url, [{"id": 1}, {"id": 2, "text": "a"}])
    done = check(["job.yaml", "--model", "other"])
    assert done.code == 0
    assert f"warning: {fs.address} serves fake-model, not other (--model fake-model)\n" in done.err
    assert done.err.endswith("next: bagent run job.yaml --model other\n")


def test_a_check_looks_at_the_run_of_the_given_name(check, fs, job_dir, bagent):
    write_job(job_dir, fs.url, 2, prompt={"user": "one {{ id }}"})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    write_job(job_dir, fs.url, 2, prompt={"user": "two {{ id }}"})
    checked, run = check(["job.yaml"]), bagent(["run", "job.yaml"])
    assert checked.code == run.code == 2
    assert "prompt changed since" in checked.err
    assert checked.err.splitlines()[-1] == run.err.splitlines()[-1]
    done = check(["job.yaml", "--name", "second"])
    assert (done.code, done.err.splitlines()[-1]) == (0, "next: bagent run job.yaml --name second")


def test_a_row_that_alone_is_not_utf8_is_to_be_mended(job_dir, bagent):
    (job_dir / "rows.csv").write_bytes(b"id,text\n1,caf\xe9\n2,caf\xc3\xa9\n")
    write_job(job_dir, "sim", None, input="rows.csv", prompt="{{ text }}", model=None)
    done = bagent(["run", "job.yaml"])
    assert done.code == 1
    assert "not UTF-8, as other lines are (mend this line)" in done.err
    assert "iconv" not in done.err


def test_a_folder_of_a_run_is_not_named_as_a_file_of_data(job_dir, bagent):
    write_job(job_dir, "sim", 1, model=None)
    done = bagent(["run", "job.yaml", "-o", "answers.jsonl"])
    assert done.code == 2
    assert "(-o - > answers.jsonl, or afterwards bagent results -o answers.jsonl)" in done.err
    assert not (job_dir / "answers.jsonl").exists()


def test_a_bug_names_the_option_that_shows_where(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bagent", "run"])
    process.report_fault(ValueError("odd"))
    message = capsys.readouterr().err
    assert "bagent has a bug: ValueError: odd (the same command with --debug shows" in message
