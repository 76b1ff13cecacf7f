import dataclasses
import errno
import gzip
import io
import json
import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from bagent.errors import InputError, WriteError
from bagent.rows import RowsConfig, open_rows, read_again
from bagent.rows.stdin import StdinSpool


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def config(tmp_path):
    return RowsConfig(("-",), tmp_path, stdin_spool=tmp_path / "input.jsonl")


@pytest.fixture
def pipe():
    """The reading end as a stream, and the descriptor to write to."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as stream:
        yield stream, write


def all_rows(config, stdin):
    return [row for batch in open_rows(config, stdin=stdin).batches() for row in batch]


def piped(config, text):
    return all_rows(config, io.BytesIO(text if isinstance(text, bytes) else text.encode()))


def replayed(config):
    return all_rows(config, None)


def test_a_row_is_delivered_before_the_next_comes(config, pipe):
    stream, write = pipe
    source = open_rows(config, stdin=stream)
    batches = source.batches()
    for number in (1, 2, 3):
        os.write(write, b'{"id":%d}\n' % number)
        assert [row.id for row in next(batches)] == [number]
        # It is kept before it is delivered.
        assert config.stdin_spool.read_text().splitlines()[-1] == f'{{"id":{number}}}'
    os.write(write, b'{"id":4}\n{"id":5}\n{"id"')
    assert [row.id for row in next(batches)] == [4, 5]
    os.write(write, b":6}")
    os.close(write)
    assert [row.id for row in next(batches)] == [6]
    assert list(batches) == []
    assert config.stdin_spool.read_text() == "".join(f'{{"id":{n}}}\n' for n in range(1, 7))


def test_peek_waits_for_the_first_line_only_and_limit_reads_no_further(config, pipe):
    stream, write = pipe
    source = open_rows(dataclasses.replace(config, limit=2), stdin=stream)
    os.write(write, b'{"id":1}\n')
    assert [row.id for row in source.peek(100)] == [1]
    os.write(write, b'{"id":2}\n{"id":3}\n')
    # The pipe stays open: reading on would wait for ever.
    assert [row.id for batch in source.batches() for row in batch] == [1, 2]
    os.close(write)
    assert [row.id for row in replayed(config)] == [1, 2, 3]


def test_rows_that_were_only_peeked_leave_the_kept_rows_as_they_are(config):
    piped(config, '{"id":1}\n')
    for rewrites in (False, True):
        source = open_rows(
            dataclasses.replace(config, replace_stdin=rewrites), stdin=io.BytesIO(b'{"id":2}\n')
        )
        assert source.peek(1)
        assert config.stdin_spool.read_text() == '{"id":1}\n'
    assert [row.id for batch in source.batches() for row in batch] == [2]
    assert config.stdin_spool.read_text() == '{"id":2}\n'


def test_close_ends_a_reader_that_waits(config, pipe):
    stream, write = pipe
    source = open_rows(config, stdin=stream)
    got = []
    first = threading.Event()

    def read():
        for batch in source.batches():
            got.extend(row.id for row in batch)
            first.set()

    reader = threading.Thread(target=read)
    reader.start()
    os.write(write, b'{"id":1}\n{"half":')
    assert first.wait(20)
    source.close()
    reader.join(20)
    assert not reader.is_alive()
    assert got == [1]
    assert config.stdin_spool.read_text() == '{"id":1}\n'  # half a line is no row
    os.close(write)


def test_a_resume_needs_no_stdin(config):
    first = piped(config, '{"id":1}\n\n{"id":2}\nbroken\n{"id":1}')
    kept = config.stdin_spool.read_bytes()
    assert piped(config, '{"id":1}\n\n{"id":2}\nbroken\n{"id":1}') == first
    assert config.stdin_spool.read_bytes() == kept
    for again in (replayed(config), piped(config, ""), [r for b in read_again(config) for r in b]):
        assert again == first
    assert [row.line for row in first] == [1, 3, 4, 5]
    assert {row.source for row in first} == {"stdin"}


def test_the_union_of_what_was_kept_and_what_comes_has_the_larger_counts(config):
    source = random.Random(4)
    for _ in range(20):
        config.stdin_spool.unlink(missing_ok=True)
        one, two, three = (
            [source.choice('ABCDEx"') for _ in range(source.randrange(30))] for _ in range(3)
        )
        union = Counter(one) | Counter(two) | Counter(three)
        for letters in (one, two, three):
            lines = "".join(
                (letter if letter == "x" else json.dumps({"a": letter})) + "\n"
                for letter in letters
            )
            rows = piped(config, lines or "\n")
        got = Counter("x" if row.error else row.data["a"] for row in rows)
        assert got == union
        assert [row.index for row in rows] == list(range(len(rows)))
        assert len({row.key for row in rows}) == len(rows)
        assert replayed(config) == rows


def test_rows_of_files_beside_do_not_hide_rows_of_the_pipe(config, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a":1}\n')
    both = RowsConfig(("a.jsonl", "-"), tmp_path, stdin_spool=config.stdin_spool)
    first = piped(both, '{"a":1}\n{"a":1}\n')
    assert len({row.key for row in first}) == 3
    assert piped(both, '{"a":1}\n{"a":1}\n') == first


def test_a_line_that_was_not_kept_to_its_end_is_dropped(config):
    config.stdin_spool.write_bytes(b'{"id":1}\n{"id":2')
    assert [row.id for row in replayed(config)] == [1]
    assert [row.id for row in piped(config, '{"id":3}\n')] == [1, 3]
    assert config.stdin_spool.read_bytes() == b'{"id":1}\n{"id":3}\n'


def test_a_terminal_is_refused_with_the_way_out(config):
    with pytest.raises(InputError, match=r"stdin is a terminal \(pipe rows in, e.g. cat"):
        open_rows(config, stdin=Terminal())
    with pytest.raises(InputError, match="nothing is piped in"):
        open_rows(config, stdin=None)
    config.stdin_spool.touch()
    with pytest.raises(InputError, match="stdin is a terminal"):
        open_rows(config, stdin=Terminal())
    piped(config, '{"id":1}\n')
    assert [row.id for row in all_rows(config, Terminal(b'{"id":2}\n'))] == [1]


def test_elements_of_an_array_come_before_its_end(config, pipe):
    stream, write = pipe
    batches = open_rows(config, stdin=stream).batches()
    os.write(write, b'\xef\xbb\xbf\n[\n{"id":1,\n"t":"a"},')
    assert [row.data for row in next(batches)] == [{"id": 1, "t": "a"}]
    os.write(write, b'{"id":2}')
    os.close(write)
    (bad,) = next(batches)  # the array has no end, so neither has the row
    assert bad.error is not None
    assert [row.error for row in replayed(config)] == [None, bad.error]


def test_a_packed_pipe_says_how_to_unpack_it(config):
    with pytest.raises(InputError, match=r"stdin: this is a gzip file \(pipe in its text"):
        piped(config, gzip.compress(b'{"id":1}'))


def test_a_full_disk_is_a_write_error(monkeypatch):
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = StdinSpool(Path("/dev/full"))
    with pytest.raises(WriteError, match="no space left"):
        spool.append([b"{}"])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="cannot keep the rows"):
        spool.close()


def test_a_sample_of_a_pipe_is_drawn_from_all_of_it(tmp_path):
    lines = "".join(f'{{"id":{n}}}\n' for n in range(3000))
    (tmp_path / "a.jsonl").write_text(lines)
    drawn = [
        row.id for row in all_rows(RowsConfig(("a.jsonl",), tmp_path, sample=20, seed=1), None)
    ]
    assert len(drawn) == 20
    unkept = RowsConfig(("-",), tmp_path, sample=20, seed=1)
    kept = RowsConfig(("-",), tmp_path, sample=20, seed=1, stdin_spool=tmp_path / "input.jsonl")
    for config in (unkept, kept, kept):
        assert [row.id for row in piped(config, lines)] == drawn
    assert [row.id for batch in read_again(kept) for row in batch] == drawn
