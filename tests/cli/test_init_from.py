"""A job for a file of the user's own runs as it is."""

import json

import pytest


def test_init_from_a_csv_writes_a_job_that_runs(job_dir, bagent):
    (job_dir / "my papers.csv").write_text(
        "Paper No,Abstract {x},year\nP1,A long text about genes.,2001\nP2,Another text.,2001\n"
    )
    made = bagent(["init", "screen", "--from", "my papers.csv"])
    assert made.code == 0, made.err
    assert "rows are named by Paper No, the prompt shows Abstract {x}" in made.err
    job = (job_dir / "screen" / "job.yaml").read_text()
    assert 'Columns of the input: row["Paper No"]' in job
    done = bagent(["run", "screen/job.yaml"])
    assert done.code == 0, done.err
    rows = bagent(["results", "--columns", "id,output"]).lines()
    assert [row["id"] for row in rows] == ["P1", "P2"]
    assert set(rows[0]["output"]) == {"reason", "label"}
    checked = bagent(["check", "screen/job.yaml", "--prompts", "1"])
    assert "A long text about genes." in checked.out


@pytest.mark.parametrize(
    ("value", "reason"),
    [("G0", "G0 is on lines 2 and 302"), ("", "no short value is on line 302")],
)
def test_init_from_takes_no_column_with_repeats_or_gaps_as_id(job_dir, bagent, value, reason):
    rows = "".join(f"G{n},what the gene number {n} does\n" for n in range(300))
    (job_dir / "genes.csv").write_text(f"gene,summary\n{rows}{value},the last of them\n")
    made = bagent(["init", "--from", "genes.csv"])
    assert f"gene does not name every row: {reason}" in made.err
    assert "no column names each row, so an edited row will count as a new one" in made.err
    assert "rows are named by the content of a row" in made.err
    assert "\nid:" not in (job_dir / "job.yaml").read_text()


def test_init_from_keeps_the_job_that_is_there(job_dir, bagent):
    (job_dir / "rows.jsonl").write_text('{"text": "a"}\n')
    (job_dir / "job.yaml").write_text("mine")
    done = bagent(["init", "--from", "rows.jsonl"])
    assert done.code == 2
    assert (job_dir / "job.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["null", 'quote"', "}} {% x", "two\nlines"])
def test_init_from_takes_columns_of_any_name(job_dir, bagent, name):
    (job_dir / "rows.jsonl").write_text(json.dumps({"key": 1, name: "the text of a row"}) + "\n")
    assert bagent(["init", "--from", "rows.jsonl"]).code == 0
    done = bagent(["check", "job.yaml", "--prompts", "1"])
    assert done.code == 0, done.err
    assert "the text of a row" in done.out


def test_init_from_sends_conversations_that_stand_in_a_column(job_dir, bagent):
    row = {"id": "a", "chat": [{"role": "user", "content": "hello there"}], "note": "x" * 99}
    (job_dir / "rows.jsonl").write_text(json.dumps(row) + "\n")
    bagent(["init", "--from", "rows.jsonl"])
    assert "hello there" in bagent(["check", "job.yaml"]).out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it has no rows (name a file of rows"),
        ('{"n": 1}\n', "no column holds a text"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n',
         "an OpenAI batch file, which needs no job (bagent run rows.jsonl --backend"),
    ],
)  # fmt: skip
def test_init_from_says_what_is_wrong_with_a_file(job_dir, bagent, content, message):
    (job_dir / "rows.jsonl").write_text(content)
    done = bagent(["init", "--from", "rows.jsonl"])
    assert done.code == 2
    assert message in done.err
    assert not (job_dir / "job.yaml").exists()
