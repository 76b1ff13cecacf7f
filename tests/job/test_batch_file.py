"""Recognition of an OpenAI batch file."""

from __future__ import annotations

import gzip

import pytest
import zstandard

from bagent.job.load import is_batch_file

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/x", "body": {"model": "m"}}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (LINE, True),
        (b"\xef\xbb\xbf" + LINE, True),
        (LINE.replace(b'"body"', b'"bod"'), False),
        (b'{"id": 1}\n' + LINE, False),
        (b"", True),
        (b"not JSON\n" + 2 * LINE, True),
        (LINE.replace(b'"custom_id"', b'"id"') + LINE, True),
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
    (tmp_path / name).write_bytes(compress(LINE))
    assert is_batch_file(tmp_path / name)
    (tmp_path / name).write_bytes(b"no archive")
    assert not is_batch_file(tmp_path / name)
    assert not is_batch_file(tmp_path / "missing")
