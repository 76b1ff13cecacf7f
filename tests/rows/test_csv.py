import pytest

from bagent.errors import InputError


def shown(rows):
    return [(row.line, row.data) for row in rows]


def test_the_line_by_which_excel_tells_the_separator_is_obeyed(rows_of):
    assert shown(rows_of("sep=|\r\nid|b\r\n1|x\r\n", "in.csv")) == [(3, {"id": "1", "b": "x"})]


QUOTED = 'malformed CSV: a quote is never closed, so 3 lines are one row (double it: "")'


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (
            b"a,b\n1\n1,2\n1,2,3\n",
            [f"{n} cells where the header has 2" if n != 2 else None for n in (1, 2, 3)],
        ),
        (b"a,b\n1,\xe9\n2,\xc3\xa9\n", ["not UTF-8, as other lines are (mend this line)", None]),
        ("a,b\n1,é\n2,日本".encode()[:-1], [None, "the file is cut off inside a character"]),
        (b'a,b\n"x"y,1\n5" pipe,2\n', ["malformed CSV: ',' expected after '\"'", None]),
        (b'a,b\n1,"abc\n2,x\n3,y\n', [QUOTED]),
    ],
)
def test_a_bad_row_says_why_and_leaves_the_others(rows_of, content, errors):
    rows = rows_of(content, "in.csv")
    assert [row.error for row in rows] == errors
    assert all(row.raw in content for row in rows if row.error)


def test_a_header_may_span_lines_but_not_name_a_column_twice(rows_of):
    assert shown(rows_of('id,"two\nlines"\n1,2', "in.csv")) == [(3, {"id": "1", "two\nlines": "2"})]
    with pytest.raises(InputError, match=r"in.csv:2: the header names a column twice: 'a'"):
        rows_of("\na,b,a\n1,2,3", "in.csv")
    with pytest.raises(InputError, match="100,001 columns, at most 100,000"):
        rows_of("," * 100_000 + "\n", "in.csv")
    with pytest.raises(InputError, match="iconv -f WINDOWS-1252"):
        rows_of("id,größe\n1,2".encode("latin-1"), "in.csv")


def test_blanks_around_names_and_nameless_cells_at_the_end_do_not_count(rows_of):
    assert shown(rows_of('id, text\n1, "a, b"\n2,x\n', "in.csv")) == [
        (2, {"id": "1", "text": "a, b"}),
        (3, {"id": "2", "text": "x"}),
    ]
    rows = rows_of("id,text,,\n1,a,,\n2,b\n3,c,,more\n", "in.csv")
    assert shown(rows[:2]) == [(2, {"id": "1", "text": "a"}), (3, {"id": "2", "text": "b"})]
    assert rows[2].error == "4 cells where the header has 2"


@pytest.mark.parametrize(
    ("rows", "warned"),
    [
        ('r2,"It began\nr3,he went on\nr4,and so it ended."\n', True),
        ('r2,"' + "line\n" * 101 + '"\n', True),
        ('r2,"two\nlines, or\nthree"\n', False),
    ],
)
def test_quoted_cells_that_may_have_swallowed_rows_are_warned_of(source_of, rows, warned):
    source = source_of("id,text\nr1,plain\n" + rows, "in.csv")
    assert [row.id for batch in source.batches() for row in batch] == ["r1", "r2"]
    assert ["in.csv:3" in line for line in source.warnings] == [True] * warned


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (['r1\t"It began', "r2\the went on", 'r3\tand so it ended."'], None),
        (['r1\tinner "quoted" words', 'r2\t"all of it"', 'r3\t5" pipe'], None),
        (['r1\t"never closed', "r2\tx"], None),
        (['r1\t"a ""b"" c"'], ['a "b" c']),
        (['r1\t"two', 'lines"', "r2\tx"], ["two\nlines", "x"]),
        (['r1\t"a\ttab"'], ["a\ttab"]),
    ],
)
def test_quotes_of_a_tsv_count_only_where_lines_need_them(source_of, lines, texts):
    source = source_of("id\ttext\n" + "\n".join(lines) + "\n", "in.tsv")
    rows = [row for batch in source.batches() for row in batch]
    expected = texts or [line.partition("\t")[2] for line in lines]
    assert [row.data.get("text") for row in rows] == expected
    assert source.warnings == []


@pytest.mark.parametrize(
    ("encoding", "text", "message"),
    [
        ("cp1252", "IL1µ – “naïve”", "probably windows-1252"),
        ("gbk", "基因表达", "iconv -f ENCODING -t UTF-8"),
        ("mac_roman", "Å", "iconv -f ENCODING"),
    ],
)
def test_a_file_in_another_encoding_is_refused(rows_of, monkeypatch, encoding, text, message):
    monkeypatch.setattr("bagent.rows.formats.compression.BLOCK", 1 << 10)
    lines = f"id,text\na,plain\nb,{text}\nc,plain\n"
    with pytest.raises(InputError, match=rf"in\.csv:3: the file is not UTF-8.*{message}"):
        rows_of(lines.encode(encoding), "in.csv")
    assert len(rows_of(lines.encode(), "in.csv")) == 3
    later = b"id,text\n" + b"a,plain\n" * 1_000 + b"b,\xe9\n"
    assert rows_of(later, "in.csv")[-1].error.startswith("not UTF-8, probably windows-1252")


@pytest.mark.parametrize("shift", ["", "x", "xx"])
def test_a_first_block_may_end_inside_a_character(rows_of, monkeypatch, shift):
    monkeypatch.setattr("bagent.rows.formats.compression.BLOCK", 1 << 10)
    (wide,) = rows_of(f"id,{shift}{'日' * 1_000}\n1,2\n", "wide.csv")
    assert wide.error is None
    assert len(rows_of("id,text\n" + f"1,{shift}日本語\n" * 200, "in.csv")) == 200


def test_lines_that_one_quote_makes_a_row_are_bounded(rows_of, monkeypatch):
    monkeypatch.setattr("bagent.rows.formats.csv.LONGEST", 10_000)
    with pytest.raises(InputError, match=r"in\.csv:2: one row is longer"):
        rows_of('id,t\n1,"' + "a line\n" * 2_000 + '"\n', "in.csv")
