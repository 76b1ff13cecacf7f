import os

import pytest

from bagent.errors import InputError
from bagent.rows import RowsConfig, open_rows


def ids_of(tmp_path, *inputs):
    source = open_rows(RowsConfig(inputs, tmp_path))
    return [row.id for batch in source.batches() for row in batch]


@pytest.fixture
def files(tmp_path):
    for number, name in enumerate(["b.jsonl", "a.jsonl", "sub/c.jsonl", ".hidden.jsonl"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        mark = "\ufeff" if number % 2 else ""
        path.write_text(f'{mark}{{"id":"{name}"}}\n')
    return tmp_path


def refused(tmp_path, *inputs, words):
    with pytest.raises(InputError, match=words) as caught:
        open_rows(RowsConfig(inputs, tmp_path))
    assert caught.value.exit_code == 2


def test_numbers_and_lines_over_several_files(files):
    source = open_rows(RowsConfig((str(files / "*.jsonl"),), files))
    rows = [row for batch in source.batches() for row in batch]
    assert [(row.index, row.source, row.line) for row in rows] == [
        (0, "a.jsonl", 1),
        (1, "b.jsonl", 1),
    ]


def test_a_file_named_twice_is_read_once_with_a_warning(files):
    source = open_rows(RowsConfig(("a.jsonl", "*.jsonl"), files))
    assert [row.id for batch in source.batches() for row in batch] == ["a.jsonl", "b.jsonl"]
    assert source.warnings == ["files that the input names twice are read once: 1, first a.jsonl"]


def test_a_name_with_pattern_signs_may_be_a_file(files):
    (files / "x[1].jsonl").write_text('{"id":"x"}')
    assert ids_of(files, "x[1].jsonl") == ["x"]


def test_a_missing_file_is_refused_with_the_nearest_name(files):
    refused(files, "aa.jsonl", words=r"aa.jsonl: there is no such file \(did you mean a.jsonl\?\)")
    refused(files, "nope/a.jsonl", words="there is no folder")
    relative = "paths in a job are relative to the job file"
    refused(files, "something-else", words=rf"no such file \({relative}\)")


def test_a_folder_is_refused_with_the_pattern_to_write(files):
    refused(files, "sub", words=r"sub is a folder \(name its files: sub/\*.jsonl\)")
    refused(files, str(files) + "/", words="is a folder")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.txt", "input: {files: PATTERN}"),
        ("x.xlsx", "save it as CSV"),
        ("x.jsonl.bz2", "unpack it"),
        ("x", "known are .jsonl"),
        ("x.parquet.gz", "known are .jsonl"),
    ],
)
def test_unknown_formats_are_refused_with_the_way_out(tmp_path, name, words):
    (tmp_path / name).write_text("{}")
    refused(tmp_path, name, words=words)


def test_a_named_pipe_is_refused_because_it_reads_once(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    refused(tmp_path, "x.jsonl", words=r"pipe it in: ... \| bagent run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    (tmp_path / "x.jsonl").chmod(0)
    refused(tmp_path, "x.jsonl", words="permission denied")


def test_stdin_named_twice_is_refused(tmp_path):
    refused(tmp_path, "-", "/dev/stdin", words="names stdin twice")


def test_names_that_are_not_utf8_are_shown_as_visible_text(tmp_path):
    name = os.fsdecode(b"\xff.jsonl")
    (tmp_path / name).write_text('{"id":1}')
    source = open_rows(RowsConfig(("*.jsonl",), tmp_path))
    assert [row.source for batch in source.batches() for row in batch] == ["\\udcff.jsonl"]


def test_a_file_that_vanishes_before_it_is_read_is_an_input_error(files):
    source = open_rows(RowsConfig(("a.jsonl", "b.jsonl"), files))
    (files / "b.jsonl").unlink()
    with pytest.raises(InputError, match=r"b\.jsonl: cannot be read: no such file"):
        list(source.batches())


def test_links_that_lead_in_circles_bring_no_row_twice(files):
    (files / "sub" / "back").symlink_to("..")
    (files / "sub" / "here").symlink_to(".")
    (files / "over").symlink_to("sub")
    assert ids_of(files, str(files / "**" / "*.jsonl")) == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert ids_of(files, str(files / "**" / "sub" / "*.jsonl")) == ["sub/c.jsonl"]


def test_a_pattern_that_ends_in_any_depth_matches_every_file(files):
    for hidden in (files / ".hidden.jsonl", files / ".git" / "x.jsonl"):
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("{}")
    assert ids_of(files, str(files / "**")) == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]


def test_a_link_that_leads_nowhere_says_where_it_leads(files):
    (files / "gone.jsonl").symlink_to("moved.jsonl")
    refused(files, "*.jsonl", words=r"gone\.jsonl: this is a link to moved\.jsonl")


@pytest.mark.parametrize("url", ["ftp://example.org/x.jsonl", "file:///x.parquet"])
def test_an_address_is_told_from_a_file(files, url):
    refused(files, url, words="copy it here")


def test_braces_are_no_pattern(files):
    refused(files, "{a,b}.json*", words="braces are no pattern here: write a list")
