"""Input files of every format: what other readers read, and whatever else they hold."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard
from hypothesis import assume, example, given
from hypothesis import strategies as st

from bagent.errors import InputError
from bagent.rows import RowsConfig, open_rows
from bagent.rows.discovery import FileSource
from bagent.rows.formats.chunks import text_chunk
from bagent.rows.formats.json import ElementSplitter, LineSplitter
from bagent.types import Row
from support.strategies import CUTS, json_objects, pieces, texts_of

PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
PACKED = st.sampled_from(sorted(PACKINGS))
MARK = st.sampled_from([b"", b"\xef\xbb\xbf"])


def rows_in(folder: Path, content: bytes, name: str) -> list[Row]:
    path = folder / name
    path.write_bytes(content)
    reader = open_rows(RowsConfig((str(path),), folder))
    try:
        return [row for batch in reader.batches() for row in batch]
    finally:
        reader.close()


def rows_or_error(folder: Path, content: bytes, name: str) -> list[Row] | InputError:
    try:
        return rows_in(folder, content, name)
    except InputError as error:
        assert "\n" not in str(error)
        return error


@given(
    objects=st.lists(json_objects(), max_size=5),
    ascii_only=st.booleans(),
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \t\n"]),
    last=st.booleans(),
    mark=MARK,
    packing=PACKED,
)
def test_json_lines_are_the_objects_that_were_written(
    folder, objects, ascii_only, end, last, mark, packing
):
    lines = [json.dumps(value, ensure_ascii=ascii_only).encode() for value in objects]
    content = mark + end.join(lines) + end * last
    rows = rows_in(folder, PACKINGS[packing](content), f"in.jsonl{packing}")
    assert [row.data for row in rows] == objects
    assert [row.index for row in rows] == list(range(len(objects)))
    physical = content.split(b"\n")
    assert all(json.loads(physical[row.line - 1].decode("utf-8-sig")) == row.data for row in rows)


JSON_PIECES = texts_of(
    *'{}[]",:\\ \r\n', "{}\n", '{"a": 1}', '{"a": 1}\n', '"a":', "1e400", "9" * 30, "-0", "NaN",
    "\\ud800", "\\u0041", "true", "null", "é", "\0", "\ufeff", "!bad_input ", '{"error": 1}',
)  # fmt: skip
JSON_BYTES = st.builds(
    lambda parts: b"".join(parts),
    st.lists(JSON_PIECES.map(str.encode) | st.binary(max_size=3), max_size=4),
)


def expected_row(line: bytes) -> Any:
    """Return the object of a line as the standard library reads it; None if it reads none."""
    try:
        value = json.loads(line.decode().removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@given(content=JSON_BYTES)
def test_any_bytes_are_lines_each_read_as_json_or_a_bad_row(folder, content):
    rows = rows_or_error(folder, content, "in.jsonl")
    if isinstance(rows, InputError):
        return
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    by_line = {row.line: row for row in rows}
    for number, line in enumerate(lines, 1):
        blank = not line.decode("utf-8", "replace").removeprefix("\ufeff").strip()
        row = by_line.pop(number, None)
        assert (row is None) == blank, line
        if row is None or line.startswith(b"!bad_input "):
            continue
        expected = expected_row(line)
        assert (row.error is None) == (expected is not None), line
        if row.error is not None:
            assert row.raw == line
        elif finite(expected) and "\\ud" not in line.decode():
            assert row.data == expected
    assert not by_line


def finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@given(
    objects=st.lists(json_objects(texts_of(*'"{}[],\\', "\u2028")), max_size=5),
    indent=st.sampled_from([None, 0, 1]),
    form=st.sampled_from(["array", "values"]),
    mark=MARK,
    packing=PACKED,
)
def test_a_json_file_is_the_objects_that_were_written(folder, objects, indent, form, mark, packing):
    text = json.dumps(objects, indent=indent)
    if form == "values":
        text = "\n".join(json.dumps(value, indent=indent) for value in objects)
    content = mark + text.encode()
    rows = rows_in(folder, PACKINGS[packing](content), f"in.json{packing}")
    assert [row.data for row in rows] == objects


@given(content=JSON_BYTES)
def test_any_bytes_of_a_json_file_are_rows_or_bad_rows(folder, content):
    rows = rows_or_error(folder, content, "in.json")
    assume(not isinstance(rows, InputError))
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return
    values = value if isinstance(value, list) else [value]
    if all(isinstance(item, dict) for item in values) and finite(values) and b"\\ud" not in content:
        assert [row.data for row in rows] == values


@given(content=JSON_BYTES, cuts=CUTS, array=st.booleans())
def test_pieces_of_any_size_make_the_same_elements_and_lines(content, cuts, array):
    whole, cut = (ElementSplitter("x", array=array) for _ in range(2))
    elements = whole.feed(content) + whole.finish()
    assert [
        e for piece in pieces(content, cuts) for e in cut.feed(piece)
    ] + cut.finish() == elements
    assert cut.cut_off == whole.cut_off
    splitter = LineSplitter("x")
    lines = [line for piece in pieces(content, cuts) for line in splitter.feed(piece)]
    lines += splitter.finish()
    assert b"\n".join(lines) == content.removesuffix(b"\n")


class Pipe(io.BytesIO):
    """A stream that hands out its bytes in given parts."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__()
        self._parts = list(parts)

    def read1(self, size: int | None = -1) -> bytes:
        """Return the next part."""
        return self._parts.pop(0) if self._parts else b""


def piped(folder: Path, parts: list[bytes]) -> list[tuple[int, Any]] | InputError:
    try:
        reader = open_rows(RowsConfig(("-",), folder), stdin=Pipe(parts))
        rows = [row for batch in reader.batches() for row in batch]
    except InputError as error:
        return error
    return [(row.line, row.error or row.data) for row in rows]


@given(content=JSON_BYTES, cuts=CUTS)
def test_any_cut_of_a_pipe_gives_the_same_rows(folder, content, cuts):
    whole = piped(folder, [content])
    if not isinstance(whole, InputError):
        assert piped(folder, pieces(content, cuts)) == whole


@given(content=JSON_BYTES, array=st.booleans())
@example(content=b'{"a":"two\nlines"}', array=True)
def test_a_pipe_gives_the_rows_of_a_file(folder, content, array):
    if array:
        content = b'[{"first":1},' + content + b"]"
    rows = rows_or_error(folder, content, "in.json" if array else "in.jsonl")
    through_pipe = piped(folder, [content])
    if isinstance(rows, InputError) or isinstance(through_pipe, InputError):
        assert type(rows) is type(through_pipe)
    elif array or not content.lstrip().startswith(b"["):
        errors = [error for row in rows if (error := row.error)]
        assert len(through_pipe) == len(rows)
        assert [data for _, data in through_pipe if isinstance(data, dict)] == [
            row.data for row in rows if row.error is None
        ]
        assert len(errors) == sum(isinstance(data, str) for _, data in through_pipe)


CELLS = texts_of('"', "'", " ", "\n", "\r\n", "\\", "é", ",", ";", "\t", "1", "")
HEADERS = st.lists(st.text("abcdé_", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


@st.composite
def tables(draw: st.DrawFn, cells: st.SearchStrategy[str] = CELLS) -> list[list[str]]:
    """Return a header and rows."""
    header = draw(HEADERS)
    row = st.lists(cells, min_size=len(header), max_size=len(header))
    return [header, *draw(st.lists(row, max_size=5))]


def data_of(table: list[list[str]]) -> list[dict[str, str]]:
    # A line of blanks is no row.
    rows = [row for row in table[1:] if len(row) > 1 or row[0].strip() or '"' in row[0]]
    return [dict(zip(table[0], row, strict=True)) for row in rows]


@given(
    table=tables(),
    separator=st.sampled_from([",", ";", "\t"]),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    mark=MARK,
    packing=PACKED,
)
def test_csv_is_the_table_that_was_written(folder, table, separator, end, quoting, mark, packing):
    if len(table[0]) == 1:
        separator = ","
    if any(end in cell for row in table for cell in row for end in "\r\n"):
        quoting = csv.QUOTE_ALL  # Python quotes only the line end that it writes itself
    out = io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator=end, quoting=quoting).writerows(table)
    content = mark + out.getvalue().encode()
    rows = rows_in(folder, PACKINGS[packing](content), f"in.csv{packing}")
    if len(table[0]) > 1:
        assert [row.data for row in rows] == [
            dict(zip(table[0], row, strict=True)) for row in table[1:]
        ]
    else:
        texts = [row.data[table[0][0]] for row in rows]
        assert [text for text in texts if text.strip()] == [
            row[0] for row in table[1:] if row[0].strip()
        ]


@given(table=tables(texts_of('"', "'", " ", "é", ",", "x", odd=st.text("xyz", max_size=3))))
def test_tabs_and_line_ends_divide_a_tsv_and_quotes_are_text(folder, table):
    assume(not any(cell.startswith('"') for row in table for cell in row))
    content = "".join("\t".join(row) + "\n" for row in table).encode()
    rows = rows_in(folder, content, "in.tsv")
    assert [row.data for row in rows] == [
        item for item in data_of(table) if len(table[0]) > 1 or item[table[0][0]].strip()
    ]


@given(table=tables(), end=st.sampled_from(["\n", "\r\n"]))
def test_a_tsv_with_everything_in_quotes_is_the_table_that_was_written(folder, table, end):
    out = io.StringIO()
    csv.writer(out, "excel-tab", lineterminator=end, quoting=csv.QUOTE_ALL).writerows(table)
    rows = rows_in(folder, out.getvalue().encode(), "in.tsv")
    assert [list(row.data.values()) for row in rows] == table[1:]


TABLE_BYTES = st.builds(
    lambda head, parts: head + b"".join(parts),
    st.sampled_from(
        [b"a,b\n", b"a\tb\r\n", b'"a"\t"b"\n', b"a\n", b"sep=;\na;b\n", b"", b"a, b\r"]
    ),
    st.lists(
        texts_of(*'",;\t\n\r ', '""', "x", "\0", "é").map(str.encode) | st.binary(max_size=3),
        max_size=4,
    ),
)


@given(content=TABLE_BYTES, name=st.sampled_from(["in.csv", "in.tsv"]))
def test_any_bytes_are_rows_of_the_headers_width_or_bad_rows(folder, content, name):
    rows = rows_or_error(folder, content, name)
    if isinstance(rows, InputError):
        return
    lines = content.count(b"\n") + content.count(b"\r") + 1
    assert all(1 < row.line <= lines for row in rows)
    assert sorted({row.line for row in rows}) == [row.line for row in rows]
    assert len({tuple(row.data) for row in rows if row.error is None}) <= 1
    for row in rows:
        if row.error is None:
            "".join(row.data.values()).encode()


@given(content=st.binary(max_size=60) | texts_of("é", "\ufeff", "\n").map(str.encode))
def test_a_text_file_is_its_text_or_a_bad_row(folder, content):
    path = folder / "in.txt"
    path.write_bytes(content)
    (item,) = text_chunk(FileSource(path, "in.txt", "text", "", len(content))).items
    if isinstance(item, dict):
        assert item["text"] == content.decode().removeprefix("\ufeff")
    else:
        assert item.raw == content


SUFFIXES = {
    "in.jsonl": b'{"id":1}\n{"id":2}\n',
    "in.json": b'[{"id":1},{"id":2}]',
    "in.csv": b"id,b\n1,x\n2,y\n",
}


@given(
    name=st.sampled_from(sorted(SUFFIXES)),
    packing=st.sampled_from([".gz", ".zst"]),
    cut=st.integers(0, 1 << 16),
)
def test_an_archive_that_is_cut_at_any_byte_is_refused(folder, name, packing, cut):
    packed = PACKINGS[packing](SUFFIXES[name])
    result = rows_or_error(folder, packed[: cut % len(packed)], name + packing)
    assert isinstance(result, InputError)


@given(
    name=st.sampled_from(sorted(SUFFIXES)),
    packing=st.sampled_from([".gz", ".zst"]),
    bit=st.integers(0, 1 << 16),
    extra=st.binary(max_size=4),
)
def test_a_damaged_archive_is_refused_or_gives_its_rows(folder, name, packing, bit, extra):
    packed = bytearray(PACKINGS[packing](SUFFIXES[name]))
    packed[bit // 8 % len(packed)] ^= 1 << bit % 8
    result = rows_or_error(folder, bytes(packed) + extra, name + packing)
    if isinstance(result, list):
        assert [str(row.id) for row in result] == ["1", "2"]
