from bagent.rows import RowsConfig, open_rows


def rows_in(tmp_path, pattern, **settings):
    source = open_rows(RowsConfig(({"files": pattern},), tmp_path, **settings))
    return [row for batch in source.batches() for row in batch]


def test_each_file_is_a_row_of_path_and_text(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "b.txt").write_text("second")
    (tmp_path / "papers" / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\n\nline ")
    rows = rows_in(tmp_path, "papers/*.txt")
    assert [row.data for row in rows] == [
        {"path": "papers/a.txt", "text": "first\r\n\nline "},
        {"path": "papers/b.txt", "text": "second"},
    ]
    assert [(row.source, row.line) for row in rows] == [("papers/a.txt", 1), ("papers/b.txt", 1)]


def test_a_file_that_is_not_utf8_is_a_bad_row(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"gr\xf6\xdfe")
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "c.txt").write_text("good")
    rows = rows_in(tmp_path, "*.txt")
    assert [row.error for row in rows] == [
        "not UTF-8: byte 0xf6 at 3",
        "the text is UTF-16, not UTF-8",
        None,
    ]
    assert rows[0].raw == b"gr\xf6\xdfe"
