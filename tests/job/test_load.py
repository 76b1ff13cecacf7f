"""From file, options and environment to a job: names, paths, endpoints, what is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bagent.errors import JobError
from bagent.job.load import JobRequest, job_for_batch_file, load_job


def request_error(request):
    with pytest.raises(JobError) as caught:
        load_job(request)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("job.yaml", "job"),
        ("my job.yml", "my job"),
        ("-x.yaml", "x"),
        ("größe.yaml", "größe"),
        (".yaml", "job"),
    ],
)
def test_a_run_is_named_after_its_file(load, minimal, file, name):
    assert load(minimal, name=file).name == name


def test_a_text_without_a_file_is_a_job_in_the_current_folder(tmp_path, minimal):
    job = load_job(JobRequest(text=minimal, cwd=tmp_path))
    assert (job.name, job.input.path[0].path) == ("job", str(tmp_path / "rows.jsonl"))


def test_a_job_is_a_file_and_no_pipe(tmp_path):
    words = "a job cannot be piped in (rows are piped in with -i -; the job is a file)"
    assert request_error(JobRequest(path=Path("-"), cwd=tmp_path)) == words


def test_rows_that_are_not_there_are_called_a_batch_file(tmp_path):
    request = JobRequest(path=Path("j.jsonl"), cwd=tmp_path)
    assert request_error(request) == "j.jsonl: no such batch file (check the path)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "j.yaml: no such job file (bagent init writes a starter job)"),
        (Path.mkdir, "j.yaml: this is a folder (name the job file in it)"),
        (
            lambda p: p.write_text("# only\n"),
            "j.yaml: the job file is empty (bagent init writes a starter job)",
        ),
        (
            lambda p: p.write_text("- a\n"),
            "j.yaml:1:1: expected KEY: VALUE lines, got a list"
            " (write keys such as input: rows.jsonl)",
        ),
        (
            lambda p: p.write_bytes("a: 1".encode("utf-16")),
            "j.yaml: the file is UTF-16 or UTF-32, not UTF-8 (save it as UTF-8)",
        ),
        (
            lambda p: p.write_bytes(b"a: caf\xe9"),
            "j.yaml:1:7: byte 0xe9 is not UTF-8 (save the file as UTF-8)",
        ),
        (
            lambda p: p.write_bytes(b" " * (16 * 2**20 + 1)),
            "j.yaml: the job file is larger than "
            "16 MB (is it the input? write input: in a job file)",
        ),
    ],
)
def test_a_file_that_is_no_job_says_why(tmp_path, make, message):
    make(tmp_path / "j.yaml")
    assert request_error(JobRequest(path=Path("j.yaml"), cwd=tmp_path)) == message


def test_a_file_that_cannot_be_opened_says_why(tmp_path):
    (tmp_path / "j.yaml").symlink_to("j.yaml")
    message = request_error(JobRequest(path=Path("j.yaml"), cwd=tmp_path))
    assert message == "j.yaml: cannot read the job file: too many levels of symbolic links"


def test_a_byte_order_mark_and_windows_line_ends_are_read(load):
    job = load(b"\xef\xbb\xbfinput: x.jsonl\r\nprompt: |\r\n  Say\r\n  {{ a }}\r\n")
    assert job.prompt.user.text == "Say\n{{ a }}\n"


def test_paths_in_the_file_start_at_its_folder(load, tmp_path):
    job = load(
        "input: [a.jsonl, ../b.csv, /c.jsonl, '-']\nhostfile: h\nprompt: x\n", name="sub/job.yaml"
    )
    assert [item.path for item in job.input.path] == [
        str(tmp_path / "sub/a.jsonl"),
        str(tmp_path / "sub/../b.csv"),
        "/c.jsonl",
        "-",
    ]
    assert job.hostfile.path == tmp_path / "sub/h"
    assert str(job.hostfile) == "h"
    assert os.fspath(job.hostfile) == str(tmp_path / "sub/h")


def test_paths_of_options_start_at_the_current_folder(load, minimal, tmp_path):
    job = load(
        minimal,
        name="sub/job.yaml",
        options={"input": ["a.jsonl", "b.jsonl"]},
        sets=("hostfile=h",),
    )
    assert [item.path for item in job.input.path] == [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "b.jsonl"),
    ]
    assert job.hostfile.path == tmp_path / "h"


def test_runs_go_to_the_current_folder(load, minimal, tmp_path):
    assert load(minimal, name="sub/job.yaml").results.dir.path == tmp_path / "runs"
    job = load(minimal + "results: {dir: out}\n", name="sub/job.yaml")
    assert job.results.dir.path == tmp_path / "out"


def test_the_home_folder_is_that_of_the_environment(load):
    job = load("input: ~/a.jsonl\nprompt: x\n", env={"HOME": "/home/u"})
    assert (job.input.path[0].path, job.input.path[0].text) == ("/home/u/a.jsonl", "~/a.jsonl")


def test_only_what_the_user_wrote_is_a_pattern(load, tmp_path):
    job = load("input: 'data/*.jsonl'\nprompt: x\n", name="run[1]/job.yaml")
    found = job.input.path[0]
    assert found.is_glob
    assert found.path == str(tmp_path) + "/run[[]1]/data/*.jsonl"


@pytest.mark.parametrize("name", ["/dev/stdin", "/dev/fd/0"])
def test_the_system_s_names_of_stdin_are_stdin(load, name):
    found = load(f"input: {name}\nprompt: x\n").input.path[0]
    assert (found.path, found.text) == ("-", "-")


def test_input_may_be_text_files_or_a_query(load, tmp_path):
    job = load("input: {files: 'papers/*.txt'}\nprompt: x\n")
    assert job.input.files[0].path == str(tmp_path / "papers/*.txt")
    assert load("input: {sql: 'select 1 as a'}\nprompt: x\n").input.sql == "select 1 as a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "input: {}\nprompt: x\n",
            "job.yaml:1:8: input: expected a path, {files: ...} or {sql: ...}",
        ),
        (
            "input: []\nprompt: x\n",
            "job.yaml:1:8: input: expected at least one path, got an empty list",
        ),
        ("input: {files: '-'}\nprompt: x\n", None),
        ("prompt: x\n", "job.yaml: input is missing (write input: rows.jsonl, or give -i PATH)"),
        ("input: x\n", 'job.yaml: prompt is missing (write prompt: "... {{ field }} ...")'),
    ],
)
def test_input_and_prompt_are_needed(load, fault, text, message):
    if message is None:
        assert load(text).input.files[0].text == "-"
    else:
        assert fault(text) == message


BATCH_LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'


def test_a_batch_file_as_input_needs_no_prompt(load, tmp_path):
    (tmp_path / "batch.jsonl").write_text(BATCH_LINE)
    assert load("input: batch.jsonl\n").prompt is None


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


def test_a_fault_in_an_option_of_a_batch_job_names_the_option(tmp_path):
    (tmp_path / "b.jsonl").write_text(BATCH_LINE)
    request = JobRequest(path=Path("b.jsonl"), cwd=tmp_path, sets=("modle=x",))
    with pytest.raises(JobError) as caught:
        job_for_batch_file(request)
    assert str(caught.value) == "--set modle: unknown key modle (did you mean model?)"


ENDPOINTS = [
    # file, options, environment -> hostfile, backend kind, base
    ("hostfile: f\n", {}, None, "f", None, None),
    ("backend: {url: vllm, headers: {A: b}}\nhostfile: f\n", {}, None, "f", "vllm", None),
    ("hostfile: f\n", {"backend": "sim"}, None, None, "sim", None),
    ("hostfile: f\n", {"backend": "vllm"}, None, "f", "vllm", None),
    ("backend: vllm://h:1\n", {"hostfile": "o"}, None, "o", "vllm", None),
    ("backend: https://h/v1\n", {"hostfile": "o"}, None, "o", "compatible", None),
    ("", {}, "e", "e", None, None),
    ("backend: vllm://h:1\n", {}, "e", None, "vllm", "http://h:1"),
    ("backend: openai\n", {}, "e", None, "openai", None),
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


@pytest.mark.parametrize("backend", ["vllm://h:1", "sim", "openai"])
def test_an_address_and_a_fleet_in_one_file_exclude_each_other(fault, minimal, backend):
    assert fault(minimal + f"backend: {backend}\nhostfile: f\n") == (
        "job.yaml:4:1: backend names an address and hostfile a fleet (keep one of them)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prompt: {user: {file: no.md}}\n",
            "job.yaml:2:23: no such file: no.md (it was looked for at ROOT/no.md)",
        ),
        ("prompt: {user: {file: .}}\n", "job.yaml:2:23: cannot read .: is a directory"),
        (
            "prompt: x\nagent: {tools: [{python: 'no.py:f'}]}\n",
            "job.yaml:3:26: no such file: no.py (it was looked for at ROOT/no.py)",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_a_fault_where_it_is_named(fault, tmp_path, text, message):
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    assert fault("input: x\n" + text) == message.replace("ROOT", str(tmp_path))


def test_an_option_may_name_a_prompt_file_in_the_current_folder(load, minimal, tmp_path):
    (tmp_path / "p.md").write_text("hi")
    job = load(minimal, name="sub/job.yaml", sets=("prompt.user.file=p.md",))
    assert job.source.texts[tmp_path / "p.md"] == "hi"


def test_a_changed_folder_does_not_change_a_loaded_job(load, minimal, tmp_path, monkeypatch):
    job = load(minimal)
    monkeypatch.chdir("/")
    assert job.input.path[0].path == str(tmp_path / "rows.jsonl")
