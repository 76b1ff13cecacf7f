from __future__ import annotations

import csv
import io
import json
from itertools import cycle
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from bagent.store.results import RESULT_NAMES
from bagent.store.tables.build import TableOptions, make_tables
from bagent.store.tables.schema import RESULTS
from support.jobs import write_job
from support.replies import ok_json
from support.stored_runs import make_run, stored


@pytest.fixture
def run(job_dir: Path) -> Path:
    failed = {"status": "failed", "error_kind": "timeout", "error": "no answer", "text": None}
    outcomes = [
        stored(2),
        stored(0, **failed),
        stored(1, text='comma, "quote"\nline'),
        stored(3, **failed),
        stored(0),
    ]
    input_file = job_dir / "rows.jsonl"
    input_file.write_text("".join(f'{{"id":"r{n}","t":{n}}}\n' for n in range(4)))
    columns = [("score", "BIGINT"), ("error", "VARCHAR")]
    make_run(job_dir / "runs" / "review", outcomes, answer_columns=columns)
    return job_dir / "runs" / "review"


def test_lines_hold_every_current_row_in_input_order_with_all_columns(bagent, run):
    done = bagent(["results"])
    assert (done.code, done.err) == (0, "")
    rows = done.lines()
    assert [row["id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert all(tuple(row) == RESULT_NAMES for row in rows)
    assert rows[2]["output"] == {"score": 2}
    assert rows[3]["ttft_ms"] is None
    finished = bagent(["results", "--as-finished"]).lines()
    assert [row["id"] for row in finished] == ["r2", "r1", "r3", "r0"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_the_ending_of_a_file_names_its_format(bagent, run, job_dir, name):
    path = job_dir / name
    path.write_text("of before")
    assert bagent(["results", "-o", name]).out == ""
    if name == "out.parquet":
        table = pq.read_table(path)
        assert table["id"].to_pylist() == ["r0", "r1", "r2", "r3"]
        assert [str(table.schema.field(one).type) for one in ("output", "input")] == ["string"] * 2
    else:
        head = '{"id":"r0",' if name == "out.jsonl" else "id,status,score"
        assert path.read_text().startswith(head)
    assert bagent(["results", "-o", f"missing/{name}"]).code == 74


def test_a_damaged_run_json_is_a_warning_since_the_journal_has_the_rows(bagent, run):
    whole = bagent(["results"]).lines()
    make_tables(run, TableOptions(), print)
    before = (run / "answers.parquet").read_bytes()
    (run / "run.json").write_bytes(b'{"name": "review", "starts": [{"at"')
    done = bagent(["results", "review"])
    assert (done.code, done.lines()) == (0, whole)
    asked = bagent(["results", "review", "--format", "csv", "--columns", "id,status"])
    assert asked.code == 0
    assert asked.out.splitlines()[1:] == ["r0,ok", "r1,ok", "r2,ok", "r3,failed"]
    for words in (done.err, asked.err):
        assert words.count("\n") == 1
        assert "run.json" in words
    assert (run / "answers.parquet").read_bytes() == before, "it has types that are unknown now"


def test_a_run_is_named_by_directory_or_name(bagent, run):
    by_name, by_path = bagent(["results", "review"]), bagent(["results", str(run)])
    assert by_name.out == by_path.out != ""
    missing = bagent(["results", "revew"])
    assert missing.code == 2
    assert "did you mean review?" in missing.err


def test_order_status_and_columns(bagent, run):
    done = bagent(["results", "--ordered", "--status", "ok", "--columns", "id,output"])
    assert [tuple(row.values()) for row in done.lines()] == [
        ("r0", {"score": 0}),
        ("r1", {"score": 1}),
        ("r2", {"score": 2}),
    ]
    assert bagent(["results", "--status", "failed,refused"]).lines()[0]["id"] == "r3"


def test_rows_without_a_result_are_told_beside_those_of_a_stopped_run(bagent, fs, job_dir):
    fs.set_script({"*": [ok_json({"score": 1})]})
    write_job(job_dir, fs.url, 9, limits={"concurrency": 1}, prices={"input": 1000, "output": 1})
    assert bagent(["run", "job.yaml", "--progress", "none", "--budget", "0.1"]).code == 76
    done = bagent(["results", "--columns", "id"])
    said = f"{9 - len(done.lines())} rows of runs/job without a result; bagent status runs/job says"
    assert said in done.err


def test_status_failed_stands_for_all_failures(bagent, job_dir):
    cut = {"status": "truncated", "text": None}
    outcomes = [
        stored(0),
        stored(1, **cut, error_kind="truncated"),
        stored(2, **cut),  # a truncated answer that the job accepts
        stored(3, status="bad_input", error_kind="bad_input", text=None),
    ]
    make_run(job_dir / "runs" / "cut", outcomes)
    for options in ([], ["--where", "true"]):
        rows = bagent(["results", "--status", "failed", *options]).lines()
        assert [row["id"] for row in rows] == ["r1", "r3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--status", "done"], "no such status"),
        (["--status", "ok,fail"], "--status fail: no such status (did you mean failed?)"),
        (["--columns", "idd"], "no such column"),
        (["--format", "xml"], "no such format"),
        (["--format", "parquet"], "-o results.parquet"),
        (["--where", "nonsense ="], "SQL"),
        (["--where", " "], "--where: the condition is empty"),
        (["-o", "out.xlsx"], "no format has the ending .xlsx (-o FILE.csv --excel)"),
        (["-o", "out.json"], "no format has the ending .json (.jsonl, .ndjson, .csv, .parquet)"),
        (["-o", "out.csv", "--format", "jsonl"], ".csv is not an ending of --format jsonl"),
    ],
)
def test_a_wrong_option_is_told_and_nothing_comes_out(bagent, run, options, words):
    done = bagent(["results", *options])
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert done.err.startswith("bagent: error: ")


def test_where_gives_the_same_lines_as_without(bagent, run):
    plain = bagent(["results", "--ordered"]).lines()
    asked = bagent(["results", "--where", "row >= 1 and status = 'ok'"]).lines()
    assert asked == [row for row in plain if row["row"] >= 1 and row["status"] == "ok"]


def test_where_takes_fields_of_the_answer_and_of_the_input(bagent, fs, job_dir):
    spans = [{"by": f"b{n}", "at": [n]} for n in range(3)]
    answers = [
        {"score": n, "text": "t", "span": span, "spans": [{}, span], "ID": f"a{n}", "score_2": n}
        for n, span in enumerate(spans)
    ]
    fs.set_script({"*": [ok_json(answer) for answer in answers]})
    text, integer = {"type": "string"}, {"type": "integer"}
    span = {
        "type": "object",
        "properties": {"by": text, "at": {"type": "array", "items": integer}},
        "additionalProperties": False,
    }
    kinds = {
        "score": integer,
        "text": text,
        "span": span,
        "spans": {"type": "array", "items": span},
    }
    schema = {"type": "object", "properties": kinds | {"ID": text, "score_2": integer}}
    job = {"output": {"schema": schema}, "limits": {"concurrency": 1}}
    rows = [{"id": f"r{n}", "Gene": f"G{n}"} for n in range(3)]
    write_job(job_dir, fs.url, rows, prompt="{{ Gene }}", **job)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    options = cycle(([], ["--columns", "id,score"], ["--redact", "score"], ["-o", "rows.parquet"]))
    for where, ids in (
        ("score >= 1", ["r1", "r2"]),
        ("SCORE = 1 and gene = 'G1' and status = 'ok'", ["r1"]),
        ("score < (select avg(score) from answers)", ["r0"]),
        ("text like '{%'", ["r0", "r1", "r2"]),  # the column of results, not the field
        ("results.score = 1 and results.status = 'ok' and results.Gene = 'G1'", ["r1"]),
        ("span.by = 'b1' and span.at[1] = 1", ["r1"]),
        ("span ->> 'by' = 'b2'", ["r2"]),
        ("spans[2].by = 'b0'", ["r0"]),
        ("id_2 = 'a1' and score_2 = 1", ["r1"]),  # the property ID: results have an id
    ):
        form = next(options)
        done = bagent(["results", "--where", where, *form])
        if form[:1] == ["-o"]:
            table = pq.read_table(job_dir / "rows.parquet")
            assert table.column_names == list(RESULTS)
            assert table["id"].to_pylist() == ids
        else:
            assert [row["id"] for row in done.lines()] == ids, done.err
    done = bagent(["results", "--where", "label = 'x'"])
    assert (done.code, done.out) == (2, "")
    assert '"label" not found' in done.err
    assert "(columns of results, id, Gene, score, text, span, spans, ID_2, score_2)" in done.err


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [1, "1", 2.5, "x"]),
        ({"id": "key"}, [1, "1", 2.5, "x"]),
        ({"results": {"keep_input": False}}, [7, 8]),
        ({"results": {"keep_input": False}}, ["7", "8"]),
    ],
)
def test_ids_in_lines_have_the_type_that_they_have_in_the_rows(bagent, fs, job_dir, settings, ids):
    fs.set_script({"*": [ok_json({"score": 1})]})
    rows = [{settings.get("id", "id"): id_, "text": str(n)} for n, id_ in enumerate(ids)]
    schema = {"type": "object", "properties": {"score": {"type": "integer"}}}
    write_job(job_dir, fs.url, rows, prompt="{{ text }}", output={"schema": schema}, **settings)
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    options = "--limit 9", "--with-input", "--where score=1", "--columns id,score", "--redact score"
    for option in ("", *options):
        assert [row["id"] for row in bagent(["results", *option.split()]).lines()] == ids, option


def test_csv_has_the_answers_first_and_every_column_if_asked(bagent, run):
    rows = list(csv.DictReader(io.StringIO(bagent(["results", "--format", "csv"]).out)))
    assert list(rows[0]) == ["id", "status", "score", "error", "result_error"]
    assert [row["score"] for row in rows] == ["0", "1", "2", ""]
    done = bagent(["results", "--format", "csv", "--all-columns"])
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert set(RESULT_NAMES) <= set(rows[0])
    assert rows[1]["text"] == 'comma, "quote"\nline'


def test_columns_may_be_fields_of_the_answer_and_of_the_input(bagent, fs, job_dir):
    fs.set_script({"*": [ok_json({"label": "good"})]})
    body = {"messages": [{"role": "user", "content": "a"}], "n": 1}
    row = {"id": "r1", "text": "a", "body": body, "size": 2.5, "no": None, "odd/name~": 5}
    schema = {"type": "object", "properties": {"label": {"type": "string"}}}
    write_job(job_dir, fs.url, [row], output={"schema": schema})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    columns = ["results", "job", "--columns", "id,label,input.text,body,size,no"]
    expected = {"id": "r1", "label": "good", "input.text": "a", "body": body, "size": 2.5}
    assert bagent(columns).lines() == [expected | {"no": None}]
    assert bagent([*columns, "-o", "rows.jsonl"]).code == 0
    assert json.loads((job_dir / "rows.jsonl").read_text()) == expected | {"no": None}
    named = ["--columns", "id,label,input,started_at,odd/name~"]
    (first,) = csv.DictReader(io.StringIO(bagent(["results", "--format", "csv", *named]).out))
    assert (first["id"], first["label"], first["odd/name~"]) == ("r1", "good", "5")
    assert json.loads(first["input"]) == row
    assert first["started_at"].endswith("Z")
    done = bagent(["results", "job", "--columns", "id,nothing"])
    assert (done.code, "nothing: no such column" in done.err) == (2, True)


def test_fields_of_the_answer_that_a_column_hides_are_named_with_answer(bagent, job_dir):
    output = msgspec.Raw(b'{"text":"note","more":1}')
    kinds = [("text", "VARCHAR"), ("more", "BIGINT")]
    make_run(job_dir / "runs" / "job", [stored(0, output=output)], answer_columns=kinds)
    options = ["results", "job", "--format", "csv", "--columns"]
    shown = bagent([*options, "answer.text,more"])
    assert shown.out.splitlines() == ["answer.text,more", "note,1"]
    shown = bagent([*options, "text,more"])
    assert shown.out.splitlines() == ["text,more", "text 0,1"]
    assert "--columns text is that of the result, not answer.text" in shown.err


def test_fields_of_the_input_that_a_column_hides_are_named_with_input(bagent, fs, job_dir):
    write_job(job_dir, fs.url, [{"id": "a", "text": "first", "more": "m", "extra": 1, "body": 2}])
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    options = ["results", "--format", "csv"]
    header, row = bagent([*options, "--columns", "id,input.text,more"]).out.splitlines()
    assert (header, row) == ("id,input.text,more", "a,first,m")
    (row,) = csv.DictReader(io.StringIO(bagent([*options, "--with-input"]).out))
    assert (row["input.text"], row["more"]) == ("first", "m")
    shown = bagent([*options, "--columns", "id,text,more"])
    assert "--columns text is that of the result, not input.text" in shown.err
    assert [name for name in row if name in ("more", "extra", "body")] == ["more", "extra", "body"]
    refused = bagent(["results", "--with-input", "--format", "table"])
    assert (refused.code, refused.err.count("\n")) == (2, 1)


@pytest.mark.process("environment")
def test_csv_for_excel_has_a_byte_order_mark_and_no_formulas(bagent, job_dir):
    """It is UTF-8 whatever the locale says."""
    texts = ["=1+1", "-5", "\ud55c"]
    rows = [stored(n, output=None, text=text) for n, text in enumerate(texts)]
    make_run(job_dir / "runs" / "odd", rows)
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    args = ["results", "odd", "--format", "csv", "--excel", "--columns", "text"]
    done = bagent(args, env=env | {"PYTHONIOENCODING": "latin-1"})
    assert (done.code, done.out.splitlines()) == (0, ["\ufefftext", "'=1+1", "-5", "\ud55c"])


def test_excel_does_not_turn_texts_into_dates_and_numbers(bagent, job_dir):
    texts = ["SEPT2", "MARCH1", "2-Mar", "0012", "2E10", "12", "May", "TP53", "1.5"]
    texts[5:5] = ["12/2020", "1.2.2020", "1.10", "-0012", "5%", "12:30 PM", "TRUE", "9" * 16]
    long = "x" * 40_000
    rows = [stored(n, output=None, text=text) for n, text in enumerate([*texts, long])]
    make_run(job_dir / "runs" / "genes", rows)
    done = bagent(["results", "genes", "--format", "csv", "--excel", "--columns", "text"])
    lines = done.out.splitlines()[1:]
    kept = [text for text in texts if f'"=""{text}"""' in lines]
    assert kept == texts[:13]
    assert "1 cell longer than 32,767 characters" in done.err
    assert "the first is text of row 18 (--columns without text leaves it out)" in done.err
    done = bagent(["results", "genes", "--format", "csv", "--excel"])
    assert "the first is text of row r17" in done.err


ESCAPES = "\x1b]0;TITLE\x07\x9b2J\u202e"


@pytest.mark.parametrize(
    "args",
    [
        ["results", "esc", "--format", "table"],
        ["query", "esc", "select id, text from results"],
        ["query", "esc", f"select '{ESCAPES}' as \"{ESCAPES}\""],
        ["report", f"no{ESCAPES}"],
        ["results", "esc", "--columns", f"a{ESCAPES}"],
    ],
    ids=["table", "query", "name of a column", "name of a run", "option"],
)
def test_no_text_of_others_controls_the_terminal(bagent, job_dir, args):
    row = stored(0, id=f"r{ESCAPES}", text=f"{ESCAPES}\n{ESCAPES}", output=None)
    make_run(job_dir / "runs" / "esc", [row])
    done = bagent(args)
    assert done.out + done.err
    assert not set("\x1b\x07\x9b\u202e") & set(done.out + done.err)
    exact = bagent(["results", "esc", "--format", "csv", "--columns", "text"])
    assert ESCAPES in exact.out


def test_the_table_for_people_shows_typed_answers_beside_failures(bagent, run):
    done = bagent(["results", "--format", "table"])
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split()[:3] == ["id", "status", "score"]
    assert lines[4].split()[:3] == ["r2", "ok", "2"]
    assert lines[5].split()[:2] == ["r3", "failed"]
    assert "no answer" in lines[5]


def test_batch_lines_tell_answers_from_failures(bagent, run):
    lines = bagent(["results", "--format", "openai-batch"]).lines()
    good, bad = lines[0], lines[3]
    assert (good["custom_id"], good["error"]) == ("r0", None)
    body = good["response"]["body"]
    assert (good["response"]["status_code"], body["object"]) == (200, "chat.completion")
    assert body["choices"][0]["message"]["content"] == "text 0"
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    assert (bad["custom_id"], bad["response"]) == ("r3", None)
    assert bad["error"]["code"] == "timeout"


def test_a_limit_gives_the_first_rows_from_the_journal_and_from_fresh_tables(bagent, run):
    whole = bagent(["results"]).lines()
    assert bagent(["results", "--limit", "2"]).lines() == whole[:2]
    make_tables(run, TableOptions(), print)
    assert bagent(["results", "--limit", "2"]).lines() == whole[:2]
    assert bagent(["results", "--limit", "1", "--as-finished"]).lines()[0]["id"] == "r2"
    assert len(bagent(["results", "--limit", "2", "--format", "openai-batch"]).lines()) == 2


def test_shards_of_one_input_come_in_its_order_and_other_runs_one_after_the_other(bagent, job_dir):
    def shard(part: int, rows: list[int], base: str = "/data") -> str:
        config = {"inputs": ["rows.jsonl"], "base": base, "shard": [part, 2]}
        name = f"part{part}{base.strip('/')}"
        make_run(job_dir / "runs" / name, [stored(n) for n in rows], rows=json.dumps(config))
        return name

    parts = [shard(1, [0, 2, 4]), shard(2, [1, 3])]
    in_order = ["r0", "r1", "r2", "r3", "r4"]
    assert [row["id"] for row in bagent(["results", *parts]).lines()] == in_order
    by_sql = bagent(["results", *parts, "--where", "row >= 0"]).lines()
    assert [row["id"] for row in by_sql] == in_order
    other = shard(2, [0], base="/other")
    ids = [row["id"] for row in bagent(["results", parts[0], other]).lines()]
    assert ids == ["r0", "r2", "r4", "r0"]


def test_only_the_wanted_stage_comes(bagent, job_dir):
    outcomes = [stored(0, stage="draft"), stored(0, stage="final"), stored(1, stage="draft")]
    make_run(job_dir / "runs" / "two", outcomes, stages=["draft", "final"])
    shown = bagent(["results", "two", "--stage", "draft", "--columns", "id,stage"]).lines()
    assert shown == [{"id": "r0", "stage": "draft"}, {"id": "r1", "stage": "draft"}]
    done = bagent(["results", "two", "--stage", "finale"])
    assert done.code == 2
    assert done.err == "bagent: error: --stage finale: no such stage (draft, final)\n"
    assert bagent(["results", "two", "--stage", "draft.critic"]).code == 0


def test_csv_shows_the_answers_of_every_stage(bagent, job_dir):
    raw = msgspec.Raw
    outcomes = [
        stored(0, stage="label", output=raw(b'{"label":"x"}'), text='{"label":"x"}'),
        stored(0, stage="parts", output=raw(b'"one part"'), text=None),
        stored(0, stage="say", output=None, text="a sentence"),
        stored(1, stage="say", output=None, text="cut off", status="truncated"),
    ]
    columns = [("label", "VARCHAR")]
    stages = ["label", "parts", "say"]
    make_run(job_dir / "runs" / "mix", outcomes, answer_columns=columns, stages=stages)
    printed = bagent(["results", "mix", "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(printed.out)))
    assert [row["text"] for row in rows] == ["", "one part", "a sentence", "cut off"]
    head, _, *lines = bagent(["results", "mix", "--format", "table"]).out.splitlines()
    assert head.split() == ["id", "stage", "status", "label", "text"]
    assert [line.split() for line in lines[:3]] == [
        ["r0", "label", "ok", "x"],
        ["r0", "parts", "ok", "one", "part"],
        ["r0", "say", "ok", "a", "sentence"],
    ]
    (alone,) = csv.DictReader(
        io.StringIO(bagent(["results", "mix", "--format", "csv", "--stage", "label"]).out)
    )
    assert list(alone) == ["id", "stage", "status", "label", "error"]


@pytest.mark.parametrize("field", ["name", "output.name.first"])
def test_a_hidden_property_is_in_no_column_that_could_repeat_it(bagent, job_dir, field):
    secret = {"name": {"first": "Ada"}, "age": 36}
    raw = json.dumps(secret)
    outcome = stored(0, output=msgspec.Raw(raw.encode()), text=raw, reasoning="It is Ada.")
    listed = stored(1, output=msgspec.Raw(b'[{"name":"Ada"}]'), text="Ada")
    columns = [("name", "JSON"), ("age", "BIGINT")]
    make_run(job_dir / "runs" / "who", [outcome, listed], answer_columns=columns)
    shown = bagent(["results", "who", "--redact", field])
    assert shown.code == 0, shown.err
    assert "Ada" not in shown.out
    first = shown.lines()[0]
    assert first["output"]["age"] == 36
    assert (first["text"], first["reasoning"], first["error"]) == ("***", "***", None)
    for form in ("csv", "table"):
        hidden = bagent(["results", "who", "--redact", field, "--format", form]).out
        assert "Ada" not in hidden
        assert "36" in hidden
    args = ["--redact", field, "--format", "parquet", "-o", "out.parquet"]
    assert bagent(["results", "who", *args]).code == 0
    assert "Ada" not in str(pq.read_table(job_dir / "out.parquet").to_pylist())


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize("fields", ["mail", "text,mail", "mail, output"])
def test_a_hidden_field_is_hidden_under_every_name_that_it_has(bagent, fs, job_dir, form, fields):
    fs.set_script({"*": [ok_json({"mail": "a@x.org", "text": "hello"})]})
    rows = [{"mail": "a@x.org", "text": "hello"}, {"mail": "b@x.org", "text": "hello"}]
    properties = {"mail": {"type": "string"}, "text": {"type": "string"}}
    schema = {"type": "object", "properties": properties}
    prompt = "id=r1 {{ text }}"
    write_job(job_dir, fs.url, rows, id="mail", prompt=prompt, output={"schema": schema})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    options = ["--with-input", *(["--all-columns"] if form == "csv" else [])]
    shown = bagent(["results", "--format", form, "--redact", fields, *options])
    assert shown.code == 0, shown.err
    assert "@x.org" not in shown.out
    assert ("hello" in shown.out) == ("text" not in fields)


@pytest.mark.parametrize("field", ["id", "output.id"])
def test_a_property_is_hidden_in_a_column_of_another_name(bagent, fs, job_dir, field):
    fs.set_script({"*": [ok_json({"id": "A-17"})]})
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    prompt = "id=r1 {{ text }}"
    write_job(job_dir, fs.url, [{"text": "hello"}], prompt=prompt, output={"schema": schema})
    assert bagent(["run", "job.yaml", "--progress", "none"]).code == 0
    assert "A-17" in bagent(["results", "--format", "csv"]).out
    for options in (["--format", "csv"], ["--format", "table"], ["--columns", "status,id_2"]):
        shown = bagent(["results", "--redact", field, *options])
        assert shown.code == 0, shown.err
        assert "A-17" not in shown.out


@pytest.mark.parametrize(
    ("field", "message"),
    [("row", "no field to hide"), ("scroe", "no row has this field"), ("", "no field to hide")],
)
def test_what_cannot_be_hidden_is_refused(bagent, job_dir, field, message):
    make_run(job_dir / "runs" / "who", [stored(0)])
    done = bagent(["results", "--redact", field])
    assert (done.code, done.out) == (2, "")
    assert message in done.err
