"""Arguments of the library that cannot be right, before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_type_hints

import pydantic
import pytest

import bagent
import bagent.errors
from bagent.errors import UsageError
from bagent.library.arguments import in_python, key_path
from bagent.library.row_values import id_column
from support.jobs import rows, write_job
from support.replies import ok

if TYPE_CHECKING:
    import pandas


@pytest.fixture
def frame() -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame({"review_id": ["a", "b"], "text": ["x", "y"]})


def test_values_that_are_no_rows_are_refused_with_their_form(frame):
    import pyarrow

    one_each = r'rows=\[\{"text": value\} for value in values\]'
    some = "rows are a list of dicts or a table"
    twice = frame.set_axis(["a", "a"], axis=1)
    no_rows = [
        *((values, one_each) for values in (frame["text"], ["x"], pyarrow.array(["x"]), [1])),
        *((values, some) for values in ("rows.jsonl", {"id": 1}, 3)),
        (twice, "two columns of the rows have the name 'a'"),
    ]
    for values, message in no_rows:
        with pytest.raises(UsageError, match=message):
            bagent.run("job.yaml", rows=values)


AS_LIST = r'options=\["--on-change", "continue"\]'


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bagent.run("job.yaml", options="--on-change continue"), AS_LIST),
        (lambda: bagent.run("job.yaml", options=["--on-change continue"]), AS_LIST),
        (lambda: bagent.run("job.yaml", on_progress=True), "on_progress: True is no function"),
        (lambda: bagent.run(3), "a job is a path or a dict, not a value of type int"),
        (lambda: bagent.load_job({"backend": "sim"}), r"load_job takes a path.*run\(\{\.\.\.\}\)"),
    ],
    ids=["one text", "one text in a list", "progress", "run", "load_job"],
)
def test_an_argument_of_another_type_is_refused_at_once(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_numbers_and_paths_may_be_options(fs, job_dir):
    job = write_job(job_dir, fs.url, 3)
    options = ["--limit", 2, "--set=prompt.user=Say {{ text }}", "-i", Path("rows.jsonl")]
    assert len(list(bagent.run(job, options=options))) == 2


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"prompt": "{{ txt }}"}, r"job: prompt\.user: txt is not in the first row "),
        ({"id": "name"}, r"job: id: no field 'name' in the first row "),
        ({"prompt": {"user": "{{ text }}", "sytem": "x"}}, r"job: prompt\.sytem: "),
        ({"output": {"schema": {"type": "objekt"}}}, r"job: output\.schema"),
        ({"stages": [{"kind": "map", "prompt": "x"}, {"kind": "mop"}]}, r"job: stages\.1\.kind: "),
    ],
)
def test_an_error_in_a_dict_names_its_key(keys, place):
    job = {"backend": "sim", "prompt": "{{ text }}", "limits": {"retries": 1}} | keys
    with pytest.raises(UsageError, match=f"^{place}"):
        list(bagent.run(job, rows=rows(1)))


def test_a_pydantic_model_is_an_output_schema(fs, dict_job):
    class Review(pydantic.BaseModel):
        label: Literal["wet", "dry"]

    fs.set_script({"*": [ok('{"label": "wet"}')]})
    (result,) = bagent.run(dict_job | {"output": {"schema": Review}}, rows=rows(1))
    assert result.output == {"label": "wet"}
    with pytest.raises(UsageError, match="a value of type type has no form in JSON"):
        list(bagent.run(dict_job | {"output": {"schema": int}}, rows=rows(1)))


def test_the_types_of_arguments_can_be_resolved():
    for function in (bagent.run, bagent.load_job, bagent.open_run, bagent.OpenedRun.results):
        assert "return" in get_type_hints(function)


@pytest.mark.process("a run in a process of its own")
def test_an_error_in_the_dict_of_a_run_in_a_process_names_its_key():
    with pytest.raises(UsageError, match=r"^job: promt: unknown key promt "):
        list(bagent.run({"backend": "sim", "promt": "x"}, rows=rows(1), process=True))


def test_the_path_of_a_line_counts_items_and_leaves_what_has_ended():
    lines = ["{", ' "a": {', '  "b": 1', " },", ' "c": [', "  1,", "  {", '   "d\\"": "e: f"']
    paths = ["", "a", "a.b", "a", "c", "c.0", "c.1", 'c.1.d"']
    assert [key_path("\n".join(lines), n) for n in range(1, 9)] == paths


@pytest.mark.parametrize(
    ("text", "python"),
    [
        (
            "--on-change continue keeps the finished rows, --fresh moves the old run aside,"
            " --name NAME begins another run",
            'options=["--on-change", "continue"] keeps the finished rows, options=["--fresh"] moves'
            ' the old run aside, name="NAME" begins another run',
        ),
        ("wait for it with --wait-hosts 10m", 'wait for it with options=["--wait-hosts", "10m"]'),
        ("--model a/b-c asks for it", 'options=["--model", "a/b-c"] asks for it'),
        ("--retry sends them, --retry all too", 'options=["--retry"] sends them,'
         ' options=["--retry", "all"] too'),
        ("the same command resumes, or give -i PATH", "the same call resumes, or give rows=..."),
        ("or give another --name; it", "or give another name=; it"),
        ("--name: it cannot name a run", "name: it cannot name a run"),
        ("names the rows: --set id=COLUMN)", "names the rows: set `id: COLUMN` in the job)"),
        ("invalid value for '--limit': x", 'invalid value for options=["--limit"]: x'),
        ("--limitless and --limit-x stay", "--limitless and --limit-x stay"),
    ],
)  # fmt: skip
def test_options_in_messages_are_arguments_in_python(text, python):
    assert in_python(text) == python


def test_a_wrong_option_is_named_as_in_python():
    run = bagent.run({"backend": "sim", "prompt": "x"}, rows=rows(1), options=["--backend", "foo"])
    with pytest.raises(UsageError, match=r'^options=\["--backend"\]: unknown backend foo '):
        list(run)
    assert run.exit_code == 2


def test_a_server_that_is_down_names_the_option_to_wait():
    job = {"backend": "http://127.0.0.1:9", "prompt": "{{ text }}"}
    with pytest.raises(bagent.errors.BagentError, match=r'options=\["--wait-hosts", "10m"\]'):
        list(bagent.run(job, rows=rows(1), options=["--wait-hosts", "0.1s"]))


def test_a_column_that_names_the_rows_is_known_by_its_name_and_values(frame):
    import pyarrow

    assert id_column(frame) == "review_id"
    assert id_column(pyarrow.Table.from_pandas(frame)) == "review_id"
    assert id_column(frame.rename(columns={"review_id": "paid"})) is None
    tickets = frame.rename(columns={"review_id": "ticket"}).set_index("ticket")
    assert id_column(tickets) == "ticket"
    assert id_column(frame.assign(id=[1, 2])) is None
    assert id_column(frame.assign(review_id=["a", "a"])) is None
    assert id_column(frame.assign(review_id=["a", None])) is None
    assert id_column(rows(2)) is None


def test_the_column_that_would_name_the_rows_is_told_once(dict_job, caplog, frame):
    list(bagent.run(dict_job, rows=frame))
    message = "rows are named by their content; `id: review_id` names them by that column"
    assert caplog.messages.count(message) == 1
    caplog.clear()
    results = list(bagent.run(dict_job | {"id": "review_id", "name": "named"}, rows=frame))
    assert {result.id for result in results} == {"a", "b"}
    assert message not in caplog.messages


def test_a_mistyped_table_is_named_with_the_nearest(fs, job_dir):
    list(bagent.run(write_job(job_dir, fs.url, 1)))
    with pytest.raises(UsageError, match=r"answer: no such table or view .did you mean answers"):
        bagent.open_run("job").rows("answer")
