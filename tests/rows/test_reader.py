import json
import threading

import duckdb
import pytest

from bagent.rows import RowsConfig, open_rows


def test_peek_loses_no_row_and_close_ends_the_batches(source_of):
    source = source_of("\n".join(f'{{"id":{n}}}' for n in range(5000)))
    assert [row.id for row in source.peek(3)] == [0, 1, 2]
    assert [row.id for row in source.peek(600)] == list(range(600))
    batches = source.batches()
    assert [row.id for row in next(batches)] == list(range(512))
    source.close()
    assert sum(map(len, batches)) < 600


def test_close_ends_a_query_that_runs(tmp_path):
    endless = "range(10000000) a(i), range(10000000) b(j)"
    query = f"select 1 as id union all select sum(i * j) from {endless}"
    source = open_rows(RowsConfig(({"sql": query},), tmp_path))
    ended = threading.Event()

    def read():
        assert all(len(batch) == 1 for batch in source.batches())
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    while not ended.wait(0.05):  # until the query has begun, closing has nothing to interrupt
        source.close()
    reader.join(20)
    assert not reader.is_alive()


@pytest.mark.parametrize("plain", [True, False])
def test_the_position_follows_the_rows_and_not_the_blocks_that_are_read(source_of, plain):
    text = "".join(f'{{"id":{n:05d}1}}\n'.replace(":0", ":1") for n in range(5000))
    source = source_of(text)
    if plain:
        source.take_notes()
    rows = 0
    for batch in source.batches():
        rows += len(batch)
        position, size = source.progress()
        assert position == pytest.approx(size * rows / 5000, rel=0.02)
    assert (rows, position) == (5000, size)


def test_rows_of_all_formats_have_the_same_keys(tmp_path):
    rows = [{"id": "a", "t": "x"}, {"id": "b", "t": "ü"}]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "2.json").write_text(json.dumps(rows, indent=2, ensure_ascii=False))
    (tmp_path / "3.csv").write_text("id,t\na,x\nb,ü\n")
    (tmp_path / "4.tsv").write_text("t\tid\nx\ta\nü\tb\n")
    table = duckdb.sql("from (values ('a','x'),('b','ü')) t(id,t)")
    table.write_parquet(str(tmp_path / "5.parquet"))
    keys = set()
    for path in sorted(tmp_path.iterdir()):
        source = open_rows(RowsConfig((path.name,), tmp_path))
        keys.add(tuple(row.key for batch in source.batches() for row in batch))
    assert len(keys) == 1
