"""From file, options and environment to a job: names, paths, endpoints, what is needed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import zstandard

from bagent.errors import JobError
from bagent.job.load import JobRequest, is_batch_file, job_for_batch_file, load_job


def request_error(request):
    with pytest.raises(JobError) as caught:
        load_job(request)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("job.yaml", "job"),
        ("-x.yaml", "x"),
        (".yaml", "job"),
    ],
)
def test_a_run_is_named_after_its_file(load, minimal, file, name):
    assert load(minimal, name=file).name == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "no such job file (bagent init writes a starter job)"),
        (Path.mkdir, "this is a folder (name the job file in it)"),
        (lambda file: file.symlink_to("j.yaml"), "too many levels of symbolic links"),
        (lambda file: file.write_text("# only\n"), "the job file is empty"),
        (
            lambda file: file.write_text("- a\n"),
            "1:1: expected KEY: VALUE lines, got a list",
        ),
        (lambda file: file.write_bytes("a: 1".encode("utf-16")), "is UTF-16 or UTF-32, not UTF-8"),
        (lambda file: file.write_bytes(b"a: caf\xe9"), "j.yaml:1:7: byte 0xe9 is not UTF-8"),
        (
            lambda file: file.write_bytes(b" " * (16 * 2**20 + 1)),
            "job file is larger than 16 MB",
        ),
    ],
)
def test_a_file_that_is_no_job_says_why(tmp_path, make, message):
    make(tmp_path / "j.yaml")
    assert message in request_error(JobRequest(path=Path("j.yaml"), cwd=tmp_path))


def test_a_job_is_a_file_and_no_pipe(tmp_path):
    message = request_error(JobRequest(path=Path("-"), cwd=tmp_path))
    assert "rows are piped in with -i -" in message


def test_paths_in_the_file_start_at_its_folder(load, tmp_path):
    text = "input: [a.jsonl, ../b.csv, ~/c.jsonl, '-']\nhostfile: h\nprompt: x\n"
    job = load(text, name="sub/job.yaml", env={"HOME": "/home/u"})
    folder = tmp_path / "sub"
    assert [item.path for item in job.input.path] == [
        *map(str, [folder / "a.jsonl", folder / "../b.csv", "/home/u/c.jsonl"]),
        "-",
    ]
    assert (str(job.hostfile), os.fspath(job.hostfile)) == ("h", str(folder / "h"))


def test_paths_of_options_and_runs_start_at_the_current_folder(load, minimal, tmp_path):
    (tmp_path / "p.md").write_text("hi")
    sets = ("hostfile=h", "prompt.user.file=p.md")
    job = load(minimal, name="sub/job.yaml", options={"input": ["a.jsonl"]}, sets=sets)
    assert [item.path for item in job.input.path] == [str(tmp_path / "a.jsonl")]
    assert job.hostfile.path == tmp_path / "h"
    assert job.source.texts[tmp_path / "p.md"] == "hi"
    assert job.results.dir.path == tmp_path / "runs"
    job = load(minimal + "results: {dir: out}\n", name="sub/job.yaml")
    assert job.results.dir.path == tmp_path / "out"


def test_only_what_the_user_wrote_is_a_pattern(load, tmp_path):
    job = load("input: 'data/*.jsonl'\nprompt: x\n", name="run[1]/job.yaml")
    found = job.input.path[0]
    assert found.is_glob
    assert found.path == str(tmp_path) + "/run[[]1]/data/*.jsonl"


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0"])
def test_the_system_s_names_of_stdin_are_stdin(load, name):
    found = load(f"input: {name}\nprompt: x\n").input.path[0]
    assert (found.path, found.text) == ("-", "-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input: {}\nprompt: x\n", "input: expected a path, {files: ...} or {sql: ...}"),
        ("input: []\nprompt: x\n", "input: expected at least one path, got an empty list"),
        ("prompt: x\n", "input is missing (write input: rows.jsonl, or give -i PATH)"),
        ("input: x\n", 'prompt is missing (write prompt: "... {{ field }} ...")'),
    ],
)
def test_input_and_prompt_are_needed(fault, text, message):
    assert fault(text).endswith(f": {message}")


BATCH_LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


LINE_BYTES = BATCH_LINE.encode()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LINE_BYTES, True),
        (b"\xef\xbb\xbf" + LINE_BYTES, True),
        (b'{"custom_id": "a", ', False),
        (LINE_BYTES.replace(b'"body"', b'"bod"'), False),
        (b'{"id": 1}\n' + LINE_BYTES, False),
        (b"", True),
        (b"not JSON\n" + 2 * LINE_BYTES, True),
        (LINE_BYTES.replace(b'"custom_id"', b'"id"') + LINE_BYTES, True),
        (b'["custom_id", "method", "url", "body"]', False),
        (b'{"custom_id": "\\ud800", "method": "POST", "url": "u", "body": {}}', True),
    ],
)
def test_the_first_lines_decide(tmp_path, content, expected):
    path = tmp_path / "b.jsonl"
    path.write_bytes(content)
    assert is_batch_file(path) is expected


@pytest.mark.parametrize(
    ("name", "compress"), [("b.jsonl.gz", gzip.compress), ("b.jsonl.zst", zstandard.compress)]
)
def test_compressed_files_are_looked_into(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(LINE_BYTES))
    assert is_batch_file(tmp_path / name)
    (tmp_path / name).write_bytes(b"no archive")
    assert not is_batch_file(tmp_path / name)
    assert not is_batch_file(tmp_path / "missing")


def test_a_batch_file_is_a_job_by_itself(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/my.batch.jsonl").write_text(BATCH_LINE)
    request = JobRequest(
        path=Path("sub/my.batch.jsonl"),
        cwd=tmp_path,
        sets=("limits.retries=1",),
        options={"backend": "sim"},
    )
    job = job_for_batch_file(request)
    assert (job.name, job.prompt) == ("my.batch", None)
    assert job.input.path[0].path == str(tmp_path / "sub/my.batch.jsonl")
    assert (job.limits.retries, job.backend.kind) == (1, "sim")


ENDPOINTS = [
    # file, options, environment -> hostfile, backend kind, base
    ("backend: {url: vllm, headers: {A: b}}\nhostfile: f\n", {}, None, "f", "vllm", None),
    ("hostfile: f\n", {"backend": "sim"}, None, None, "sim", None),
    ("hostfile: f\n", {"backend": "vllm"}, None, "f", "vllm", None),
    ("backend: vllm://h:1\n", {"hostfile": "o"}, None, "o", "vllm", None),
    ("", {}, "e", "e", None, None),
    ("backend: vllm://h:1\n", {}, "e", None, "vllm", "http://h:1"),
    ("hostfile: f\n", {}, "e", "f", None, None),
    ("", {"backend": "sim"}, "e", None, "sim", None),
    ("", {}, " ", None, None, None),
]


@pytest.mark.parametrize(("text", "options", "preset", "hostfile", "kind", "base"), ENDPOINTS)
def test_what_is_nearest_to_the_user_says_where_endpoints_are(
    load, minimal, text, options, preset, hostfile, kind, base
):
    env = {"BAGENT_HOSTFILE": preset} if preset else {}
    job = load(minimal + text, options=options, env=env)
    assert (str(job.hostfile) if job.hostfile else None) == hostfile
    assert (job.backend.kind if job.backend else None) == kind
    assert (job.backend.base if job.backend else None) == base


def test_a_hostfile_option_keeps_the_headers_of_the_backend(load, minimal):
    text = "backend: {url: 'https://h/v1', headers: {A: b}}\n"
    assert load(minimal + text, options={"hostfile": "o"}).backend.headers == {"A": "b"}


def test_an_address_and_a_fleet_in_one_file_exclude_each_other(fault, minimal):
    assert fault(minimal + "backend: vllm://h:1\nhostfile: f\n") == (
        "job.yaml:4:1: backend names an address and hostfile a fleet (keep one of them)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt: {user: {file: no.md}}\n", "2:23: no such file: no.md (it was looked for at "),
        ("prompt: {user: {file: .}}\n", "2:23: cannot read .: is a directory"),
        ("prompt: x\nagent: {tools: [{python: 'no.py:f'}]}\n", "3:26: no such file: no.py ("),
    ],
)
def test_a_file_that_cannot_be_read_is_a_fault_where_it_is_named(fault, text, message):
    assert fault("input: x\n" + text).startswith(f"job.yaml:{message}")
