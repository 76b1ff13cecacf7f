from __future__ import annotations

import time
from pathlib import Path

import pytest

from bagent.errors import ChangedError, OwnedError, UsageError, WriteError
from bagent.store.lock import RunLock
from bagent.store.run_dir import RunDir, RunInfo, Start, find_run


def info(name: str = "review", **changes) -> RunInfo:
    return RunInfo(name, **{"fingerprints": {"prompt": "a", "model": "m"}, **changes})


def make_run(path: Path, at: float = 1.0) -> RunDir:
    run = RunDir.create(path)
    run.save(info(path.name, starts=[Start(at)]))
    return run


def test_each_part_keeps_its_own_starts_and_the_run_is_as_bad_as_the_worst(tmp_path):
    run = RunDir.create(tmp_path / "r")
    for number, code in ((1, 0), (2, 1), (3, 0)):
        part = f"{number}-of-3"
        run.save(info(starts=[Start(float(number), part, exit_code=code)]), part)
        seen = run.load()
        assert seen.starts[-1].exit_code == code
        assert seen.exit_code == (1 if number == 3 else None)
    assert (tmp_path / "r" / "run.json").exists()
    assert len(seen.starts) == 3


def test_only_the_parts_of_the_last_start_count_for_the_exit_code():
    starts = [Start(1.0, exit_code=75), Start(2.0, exit_code=0)]
    assert info(starts=starts).exit_code == 0
    assert info(starts=[*starts, Start(3.0)]).exit_code is None
    sharded = [Start(4.0, "1-of-2", exit_code=0), Start(5.0, "2-of-2", exit_code=0)]
    assert info(starts=[Start(1.0, exit_code=76), *sharded]).exit_code == 0


def test_a_damaged_run_json_is_told_with_its_name(tmp_path):
    run = make_run(tmp_path / "r")
    (run.path / "run.json").write_text('{"name": "r", ')
    with pytest.raises(UsageError, match=r"run\.json.*--fresh"):
        run.load()


def test_what_changed_is_listed_with_the_three_choices(tmp_path):
    run = make_run(tmp_path / "r")
    now = {"prompt": "b", "model": "m", "schema": "s"}
    with pytest.raises(ChangedError, match="prompt, schema changed") as caught:
        run.check_fingerprint(now, "refuse")
    assert all(choice in str(caught.value) for choice in ("--on-change", "--fresh", "--name"))
    assert run.check_fingerprint(now, "continue") == ["prompt", "schema"]
    assert run.check_fingerprint({"prompt": "a", "model": "m"}, "refuse") == []
    assert run.check_fingerprint({"prompt": "a"}, "refuse") == []  # no server has told it yet
    assert run.check_fingerprint({"prompt": "a", "model": "n"}, "continue") == ["model"]
    assert RunDir(tmp_path / "new").check_fingerprint(now, "refuse") == []


def test_moving_aside_keeps_everything_and_finds_a_free_name(tmp_path):
    at = time.mktime((2026, 11, 28, 1, 2, 3, 0, 0, -1))
    for number in range(2):
        run = make_run(tmp_path / "r")
        (run.journal / "x").parent.mkdir()
        (run.journal / "x").write_text(str(number))
        moved = run.move_aside(lambda: at)
        assert moved.name == "r.20261128-010203" + ("-2" if number else "")
        assert (moved / "journal" / "x").read_text() == str(number)
        assert not run.path.exists()


def test_files_that_are_not_of_the_run_stay_where_they_are(tmp_path):
    run = make_run(tmp_path / "r")
    (run.path / "my-notes.txt").write_text("mine")
    moved = run.move_aside()
    assert (moved / "run.json").exists()
    assert [path.name for path in run.path.iterdir()] == ["my-notes.txt"]


def test_a_run_that_goes_on_is_not_moved(tmp_path):
    run = make_run(tmp_path / "r")
    RunLock.acquire(run.path, "2-of-4")
    with pytest.raises(OwnedError):
        run.move_aside()


def test_a_run_that_is_not_there_is_told_with_what_comes_near(tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(UsageError, match="there is no run under"):
        find_run(None, runs)
    make_run(runs / "gene-review")
    with pytest.raises(UsageError, match=r"gene-reviw.*did you mean gene-review"):
        find_run("gene-reviw", runs)
    with pytest.raises(UsageError, match="is no run directory"):
        find_run(str(tmp_path), runs)


def test_a_directory_that_cannot_be_written_is_a_write_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError):
        RunDir.create(tmp_path / "file" / "r")
    with pytest.raises(WriteError):
        RunDir(tmp_path / "missing").save(info())
