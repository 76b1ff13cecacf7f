"""Which nodes get engines, and which one this is."""

from __future__ import annotations

import pytest

from bagent.errors import UsageError
from bagent.hpc.__main__ import main
from bagent.hpc.allocation import engine_nodes, position_of, read_names

NODES = ["x1.site.org", "x2.site.org", "x3.site.org"]


def test_a_bad_node_is_left_out_with_or_without_its_domain():
    assert engine_nodes(NODES, ["x2", "x3.other.org"]) == ["x1.site.org"]


def test_a_node_finds_itself_by_name_before_rank():
    assert position_of(NODES, ["x2", "localhost"], rank=0) == 1
    assert position_of(NODES, ["localhost", "x3.hsn.org"], rank=0) == 2
    assert position_of(NODES, ["localhost"], rank=2) == 2
    with pytest.raises(UsageError, match="not in the list"):
        position_of(NODES, ["localhost"], rank=3)


def test_a_file_of_names_may_have_comments(tmp_path):
    path = tmp_path / "bad"
    path.write_text("# broken\n\nx1 # fan\n  x2\n")
    assert read_names(path) == ["x1", "x2"]
    with pytest.raises(UsageError, match="no such file"):
        read_names(tmp_path / "none")


def test_the_step_reads_the_node_file_of_the_job(tmp_path, monkeypatch, capsys):
    (tmp_path / "nodes").write_text("a1.x\na1.x\na2.x\na3.x\n")
    (tmp_path / "bad").write_text("a3\n")
    monkeypatch.setenv("PBS_JOBID", "1.s")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert main(["nodes", "--exclude", "a9", "--exclude-file", str(tmp_path / "bad")]) == 0
    assert capsys.readouterr().out == "a1.x\na2.x\n"


def test_an_unknown_step_is_an_error_that_names_the_steps(capsys):
    assert main(["wiat"]) == 2
    assert "supervise" in capsys.readouterr().err
