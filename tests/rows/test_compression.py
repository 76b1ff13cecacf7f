import gzip
import json
import random

import pytest
import zstandard

from bagent.errors import InputError
from bagent.rows import RowsConfig, open_rows
from bagent.rows.discovery import FileSource
from bagent.rows.formats.chunks import CancelToken, ReadProgress, source_chunks
from bagent.rows.warnings import RowWarnings

NOISE = random.Random(3)
LINES = "".join(json.dumps({"id": n, "x": NOISE.getrandbits(64)}) + "\n" for n in range(20_000))
PACK = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("kind", PACK)
def test_members_or_frames_one_after_the_other_are_one_text(rows_of, kind):
    frames = [PACK[kind](part) for part in (b'{"id":1}\n{"id"', b":2}\n", b"", b'{"id":3}')]
    if kind == "zst":  # a frame that holds no data is skipped
        frames.insert(1, b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello")
    assert [row.id for row in rows_of(b"".join(frames), f"in.JSONL.{kind}")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.json", "in.ndjson"])
@pytest.mark.parametrize("kind", PACK)
def test_every_text_format_may_be_packed(rows_of, kind, name):
    text = {"in.csv": "id,b\n1,2", "in.tsv": "id\tb\n1\t2"}.get(name, '{"id":"1","b":"2"}')
    (row,) = rows_of(PACK[kind](b"\xef\xbb\xbf" + text.encode()), f"{name}.{kind}")
    assert row.data == {"id": "1", "b": "2"}


@pytest.mark.parametrize("kind", PACK)
def test_a_cut_off_archive_found_on_the_way_is_an_error_not_an_end(tmp_path, kind):
    path = tmp_path / f"in.jsonl.{kind}"
    path.write_bytes(PACK[kind](LINES.encode())[:-9])
    with pytest.raises(
        InputError, match=rf"in\.jsonl\.{kind}: the {kind[0]}.* archive is cut off or damaged"
    ):
        open_rows(RowsConfig((str(path),), tmp_path))  # the end is looked at before any row
    source = FileSource(path, "in", "jsonl", kind, path.stat().st_size)
    read = 0
    with pytest.raises(InputError, match="cut off or damaged"):
        for chunk in source_chunks(
            source, tmp_path, ReadProgress(None), CancelToken(), RowWarnings()
        ):
            read += len(chunk.items)
    assert 0 < read < 20_000


def test_utf16_is_refused_with_the_way_out(source_of):
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        for name in ("in.jsonl", "in.json", "in.csv"):
            with pytest.raises(InputError, match=r"UTF-16, not UTF-8.*iconv"):
                source_of('{"id":"a"}\n'.encode(encoding), name)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"{}", mtime=0), r"a gzip file \(name it .gz\)"),
        (PACK["zst"](b"{}"), "a zstd file"),
        (b"PAR1....PAR1", "a Parquet file"),
        (b"PK\x03\x04....", "a zip file or a spreadsheet"),
    ],
)
def test_files_of_another_kind_than_their_name_says_are_refused(source_of, content, words):
    for name in ("in.jsonl", "in.csv"):
        with pytest.raises(InputError, match=words):
            source_of(content, name)
