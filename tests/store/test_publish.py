"""Published tables: whole for a reader at any moment, and repeated after a failure."""

import hashlib
import json
import re
from contextlib import suppress
from itertools import count

import duckdb
import pytest

from bagent.errors import WriteError
from bagent.remote import storage
from bagent.remote.storage import LocalStorage
from bagent.store.publish import publish_tables
from support.pages import GUIDES
from support.remote_files import file_server


class KilledError(BaseException):
    """Ends the process, as far as a test can."""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "runs" / "review"
    (path / "journal").mkdir(parents=True)
    (path / "journal" / "a.jsonl").write_text("secret")
    write_tables(path, b"first")
    return path


@pytest.fixture
def site(monkeypatch):
    with file_server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(storage, "WAITS", (0.0, 0.0))
        storage.storage_of.cache_clear()
        yield server
        storage.storage_of.cache_clear()


def write_tables(path, content):
    for table in ("results", "answers", "attempts"):
        (path / f"{table}.parquet").write_bytes(table.encode() + content)


def published(read):
    """Return the content of every table that the manifest names, checked, or None."""
    manifest = read("manifest.json")
    if manifest is None:
        return None
    contents = {}
    for table, file in json.loads(manifest)["tables"].items():
        content = read(file["file"])
        assert content is not None, f"the manifest names {file['file']}, which is not there"
        assert len(content) == file["bytes"]
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
        contents[table] = content
    return contents


def in_folder(folder):
    def read(name):
        path = folder / name
        return path.read_bytes() if path.is_file() else None

    return lambda: published(read)


def test_the_program_of_the_guide_reads_a_publication(run, site, tmp_path, monkeypatch, capsys):
    duckdb.sql(f"COPY (SELECT 'TP53' AS id) TO '{run / 'answers.parquet'}'")
    publish_tables(run, "s3://bucket/runs/review")
    guide = (GUIDES / "outputs.md").read_text(encoding="utf-8")
    [program] = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert "TP53" in capsys.readouterr().out


def test_a_failed_publication_is_repeated_without_what_is_there(run, site):
    site.faults = ["ok"] * 4 + [403]
    with pytest.raises(WriteError, match="403") as caught:
        publish_tables(run, "s3://b/out")
    assert "bagent publish review repeats it" in caught.value.hint
    assert "b/out/manifest.json" not in site.files
    site.faults, site.requests = [], []
    publish_tables(run, "s3://b/out")
    puts = [name for method, name, _ in site.requests if method == "PUT"]
    assert len(puts) < 4


def test_a_bucket_gets_the_tables_after_passing_failures_and_never_the_journal(run, site):
    site.faults = ["ok", "ok", 503, "ok", 500]
    publish_tables(run, "s3://b/out")
    tables = published(lambda name: site.files.get(f"b/out/{name}"))
    assert tables == {t: t.encode() + b"first" for t in ("results", "answers", "attempts")}
    assert b"secret" not in b"".join(site.files.values())


def killed_at(step, steps, original):
    """Return ``original`` that ends the process at one step of several functions."""

    def call(*args):
        if next(steps) == step:
            raise KilledError
        original(*args)

    return call


def test_killed_at_any_step_a_reader_sees_one_whole_publication(run, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    read = in_folder(folder)
    write, remove = LocalStorage.write, LocalStorage.remove
    for generation in (b"first", b"second", b"third"):
        write_tables(run, generation)
        whole = {t: t.encode() + generation for t in ("results", "answers", "attempts")}
        before = read()
        for step in range(12):
            steps = count()
            monkeypatch.setattr(LocalStorage, "write", killed_at(step, steps, write))
            monkeypatch.setattr(LocalStorage, "remove", killed_at(step, steps, remove))
            with suppress(KilledError):
                publish_tables(run, str(folder))
            assert read() in (before, whole)
        monkeypatch.undo()
        publish_tables(run, str(folder))
        assert read() == whole
    assert len(list(folder.glob("tables-*"))) <= 2


def test_readers_of_the_manifest_before_still_find_its_files(run, tmp_path):
    folder = tmp_path / "out"
    publish_tables(run, str(folder))
    old = json.loads((folder / "manifest.json").read_bytes())
    write_tables(run, b"second")
    publish_tables(run, str(folder))
    assert (folder / old["tables"]["results"]["file"]).is_file()


@pytest.mark.parametrize(
    "edit",
    [
        {"folder": "../victim"},
        {"previous": ["tables-0123456789abcdef", "../victim"]},
        {"previous": ["tables-0123456789abcdef", "tables-0123456789abcdef/../../victim"]},
        {"previous": ["tables-0123456789abcdef", "tables-0123456789abcdef\n"]},
    ],
)
def test_a_manifest_that_names_other_folders_is_refused(run, tmp_path, edit):
    folder, victim = tmp_path / "out", tmp_path / "victim"
    victim.mkdir()
    (victim / "results.parquet").write_bytes(b"precious")
    publish_tables(run, str(folder))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest | edit))
    for generation in (b"second", b"third"):
        write_tables(run, generation)
        with pytest.raises(WriteError, match=r"manifest\.json is no manifest of bagent"):
            publish_tables(run, str(folder))
    assert (victim / "results.parquet").read_bytes() == b"precious"


def test_only_published_files_are_deleted(run, tmp_path):
    folder = tmp_path / "out"
    publish_tables(run, str(folder))
    [first] = folder.glob("tables-*")
    (first / "notes.txt").write_text("mine")
    for generation in (b"second", b"third"):
        write_tables(run, generation)
        publish_tables(run, str(folder))
    assert [path.name for path in first.iterdir()] == ["notes.txt"]


def test_the_tables_of_another_run_are_not_replaced(run, tmp_path):
    publish_tables(run, str(tmp_path / "out"))
    other = run.rename(run.with_name("other"))
    with pytest.raises(WriteError, match="has the tables of the run review"):
        publish_tables(other, str(tmp_path / "out"))


def test_a_run_without_tables_says_how_to_make_them(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WriteError, match="has no tables to publish"):
        publish_tables(tmp_path / "empty", str(tmp_path / "out"))
