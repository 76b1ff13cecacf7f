"""The memory of tables follows the size of rows, up to what the machine allows."""

import json

import duckdb
import msgspec
import pytest

from bagent.store.tables import build
from bagent.store.tables.build import TableOptions, make_tables, most_memory_mb
from bagent.store.tables.parquet import VECTOR_BYTES, longest_line, memory_steps

MB = 1_000_000


def test_memory_is_doubled_up_to_the_most_and_then_lines_get_shorter():
    steps = list(memory_steps(150, 1000, 2_000_000, 1000))
    assert [step.memory_mb for step in steps[:4]] == [150, 300, 600, 1000]
    assert {step.memory_mb for step in steps[3:]} == {1000}
    sizes = [1000 * MB // 12, 1000 * MB // 48, 1000 * MB // 192, 1000 * MB // 768, 1 << 20]
    assert [step.line_bytes for step in steps[3:]] == sizes
    assert all(step.threads == 1 for step in steps[1:])


def test_long_lines_begin_with_more_memory():
    (first, *_) = memory_steps(150, 50 * MB, 50 * MB, 4000)
    assert first.memory_mb == 150 + (50 * MB - VECTOR_BYTES) * 14 // MB
    assert first.threads == 1
    (only, *_) = memory_steps(150, 50 * MB, 50 * MB, 100)
    assert only.memory_mb == 150


@pytest.mark.parametrize(
    ("files", "env", "most"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 4000000 kB\n"}, {}, 1433),
        ({}, {"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "4"}, 1468),
        ({}, {"SLURM_MEM_PER_NODE": "100"}, 150),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "3000000000",
                "sys/fs/cgroup/a/memory.current": "1500000000",
                "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 500000000\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": "5",
            },
            {},
            700,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/host/path\n2:cpu:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            },
            {},
            350,
        ),
    ],
)
def test_the_most_is_a_share_of_what_machine_cgroup_and_slurm_leave(tmp_path, files, env, most):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert most_memory_mb(env, tmp_path) == most


def test_the_longest_line_is_found_where_it_is_longer_than_usual(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"x\n" * 9_000_000 + b"y" * 20_000_000 + b"\n" + b"z\n" * 10)
    assert longest_line(path) == 20_000_001
    path.write_bytes(b"x" * 1000 + b"\n" + (b"y" * 99 + b"\n") * 180_000)
    assert longest_line(path) == 0


def test_large_rows_are_in_the_tables_and_what_does_not_fit_is_named(
    store, outcome, tmp_path, monkeypatch
):
    texts = {3: "y" * 14_000_000} | dict.fromkeys(range(10, 60), "lorem ipsum " * 8000)
    outcomes = []
    for n in range(60):
        text = texts.get(n, "short")
        raw = msgspec.Raw(json.dumps({"t": text}).encode()) if n != 3 else msgspec.Raw(b"{}")
        outcomes.append(outcome(n, text=text, output=raw))
    store.write(*outcomes)
    monkeypatch.setattr(build, "most_memory_mb", lambda: 150)
    make_tables(store.path, TableOptions(), store.reports.append)
    with duckdb.connect(store.path / "run.duckdb", read_only=True) as connection:
        rows = connection.execute("select row, length(text) from results order by row").fetchall()
    assert rows == [(n, None if n == 3 else len(texts.get(n, "short"))) for n in range(60)]
    (note,) = store.reports
    assert note == (
        '1 rows stand without their long texts, which do not fit into 150 MB: row 3 ("r3")'
    )
    store.reports.clear()
    monkeypatch.setattr(build, "most_memory_mb", lambda: 2000)
    make_tables(store.path, TableOptions(), store.reports.append)
    with duckdb.connect(store.path / "run.duckdb", read_only=True) as connection:
        longest = connection.execute("select max(length(text)) from results").fetchall()
    assert longest == [(14_000_000,)]
    assert store.reports == []
