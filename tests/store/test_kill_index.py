"""A writer that is killed at any instant, among small segments: what counts as finished is true."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from bagent.store.journal.codec import decode_outcome, unit_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.journal.segments import list_segments

ROWS = 20_000
AT_ONCE = 100

WRITER = """
import sys, time
from pathlib import Path
import msgspec
from bagent.store.journal.codec import unit_of
from bagent.store.journal.done_index import ResumePolicy, load_index
from bagent.store.journal.journal import Journal
from bagent.types import Outcome

run, rows, at_once = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
journal = Journal.open(run, "all", clock=time.monotonic, report=print, segment_bytes=30_000)
done = load_index(run, None, ResumePolicy(), report=print)
print("open", flush=True)
for start in range(0, rows, at_once):
    numbers = range(start, start + at_once)
    keys = [number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers]
    if done.has_all([unit_of(key, "main") for key in keys]):
        continue
    for number, key in zip(numbers, keys):
        if not done.has(unit_of(key, "main")):
            journal.write(Outcome(key=f"{key:016x}", row=number, id=number, source="in", line=1,
                stage="main", status="ok", output=msgspec.Raw(b"1"), text="x"))
journal.close()
"""


def lines(run: Path) -> list[int]:
    """The rows of all whole lines."""
    result = []
    for segment in list_segments(run / "journal", "rows"):
        complete = segment.path.read_bytes().rpartition(b"\n")[0]
        result += [decode_outcome(line).row for line in complete.splitlines()]
    return result


def written(run: Path) -> int:
    """Bytes of all segments."""
    return sum(segment.path.stat().st_size for segment in list_segments(run / "journal", "rows"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_row_is_written_twice_or_passed_over_whenever_the_writer_is_killed(tmp_path, seed):
    random = Random(seed)
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(ROWS), str(AT_ONCE)]
    kills = 0
    for _ in range(200):
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        size = written(tmp_path) + random.randrange(400_000)
        while writer.poll() is None and written(tmp_path) < size:
            pass
        writer.send_signal(signal.SIGKILL)
        code = writer.wait()
        kills += code != 0
        writer.stdout.close()
        if code == 0:
            break
        result = lines(tmp_path)
        assert len(result) == len(set(result))
    assert kills > 5
    assert sorted(lines(tmp_path)) == list(range(ROWS))
    index = load_index(tmp_path, None, ResumePolicy(), report=print, save=False)
    keys = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(ROWS)]
    assert len(index) == ROWS
    assert all(index.has(unit_of(key, "main")) for key in keys)
