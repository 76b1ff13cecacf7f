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


def test_a_file_named_twice_is_read_once_with_a_warning(files):
    (files / "x[1].jsonl").write_text('{"id":"x"}')
    source = open_rows(RowsConfig(("a.jsonl", "x[1].jsonl", "*.jsonl"), files))
    rows = [row for batch in source.batches() for row in batch]
    assert [row.id for row in rows] == ["a.jsonl", "x", "b.jsonl"]
    assert [(row.index, row.line) for row in rows] == [(0, 1), (1, 1), (2, 1)]
    assert source.warnings == ["files that the input names twice are read once: 2, first a.jsonl"]


def test_a_missing_file_is_refused_with_the_nearest_name(files):
    refused(files, "aa.jsonl", words=r"aa.jsonl: there is no such file \(did you mean a.jsonl\?\)")
    refused(files, "nope/a.jsonl", words="there is no folder")
    (files / "gone.jsonl").symlink_to("moved.jsonl")
    refused(files, "*.jsonl", words=r"gone\.jsonl: this is a link to moved\.jsonl")
    relative = "paths in a job are relative to the job file"
    refused(files, "something-else", words=rf"no such file \({relative}\)")


def test_folders_and_pipes_are_refused_with_the_way_out(files):
    refused(files, "sub", words=r"sub is a folder \(name its files: sub/\*.jsonl\)")
    refused(files, str(files) + "/", words="is a folder")
    os.mkfifo(files / "x.jsonl")
    refused(files, "x.jsonl", words=r"pipe it in: ... \| bagent run")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.txt", "input: {files: PATTERN}"),
        ("x.xlsx", "save it as CSV"),
        ("x.jsonl.bz2", "unpack it"),
        ("x.parquet.gz", "known are .jsonl"),
    ],
)
def test_unknown_formats_are_refused_with_the_way_out(tmp_path, name, words):
    (tmp_path / name).write_text("{}")
    refused(tmp_path, name, words=words)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}")
    (tmp_path / "x.jsonl").chmod(0)
    refused(tmp_path, "x.jsonl", words="permission denied")


def test_stdin_twice_braces_and_other_addresses_are_refused(tmp_path):
    refused(tmp_path, "-", "/dev/stdin", words="names stdin twice")
    refused(tmp_path, "{a,b}.json*", words="braces are no pattern here: write a list")
    refused(tmp_path, "ftp://example.org/x.jsonl", words="copy it here")


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


def test_each_text_file_is_a_row_of_path_and_text(tmp_path):
    (tmp_path / "papers").mkdir()
    for name, content in (("b", b"second"), ("a", b"\xef\xbb\xbffirst\r\n"), ("c", b"gr\xf6\xdfe")):
        (tmp_path / f"papers/{name}.txt").write_bytes(content)
    (tmp_path / "papers/d.txt").write_bytes("text".encode("utf-16"))
    source = open_rows(RowsConfig(({"files": "papers/*.txt"},), tmp_path))
    *rows, bad, wide = [row for batch in source.batches() for row in batch]
    assert [row.data for row in rows] == [
        {"path": "papers/a.txt", "text": "first\r\n"},
        {"path": "papers/b.txt", "text": "second"},
    ]
    assert (bad.error, bad.raw) == ("not UTF-8: byte 0xf6 at 3", b"gr\xf6\xdfe")
    assert wide.error == "the text is UTF-16, not UTF-8"
