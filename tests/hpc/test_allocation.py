"""One reader of what schedulers, launchers and node files say of a job."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from bagent.errors import UsageError
from bagent.hpc.__main__ import main
from bagent.hpc.allocation import (
    Allocation,
    LauncherPlace,
    ask,
    auto_shard,
    engine_nodes,
    job_end,
    node_names,
    position_of,
    read_allocation,
    read_names,
)
from bagent.runs.deadline import read_deadline
from support.jobs import results_by_id, rows, write_job
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN

SLURM_ENV = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_END_TIME": "1700003600",
}
PBS_ENV = {"PBS_JOBID": "3905960.aurora-pbs-0001.host", "PBS_NODEFILE": "/var/spool/nodes"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (SLURM_ENV, Allocation("slurm", "123", node_list="n[1-3]", restarts=2, end=1_700_003_600)),
        (PBS_ENV, Allocation("pbs", "3905960", node_file=Path("/var/spool/nodes"))),
        (
            {"PBS_JOBID": "12[3].server", "PBS_ARRAY_INDEX": "3"},
            Allocation("pbs", "12[3]", task=LauncherPlace(3, None)),
        ),
    ],
)
def test_a_job_is_read_from_the_variables_of_its_scheduler(env, expected):
    assert read_allocation(env) == expected


@pytest.mark.parametrize("text", ["", "Unknown", "-5", "٣"])
def test_a_value_that_is_no_number_counts_as_not_set(text):
    found = read_allocation({"SLURM_JOB_END_TIME": text, "SLURM_RESTART_COUNT": text})
    assert (found.end, found.restarts) == (None, 0)


# --- the part of a process ------------------------------------------------------------------------


def array(index, least, most, count, step=1):
    """The variables of a task of a SLURM array."""
    values = {"ID": index, "MIN": least, "MAX": most, "COUNT": count, "STEP": step}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("env", "shard"),
    [
        ({}, (1, 1)),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (1, 1)),  # the script
        (STEP | {"SLURM_PROCID": "3"}, (4, 4)),
        (STEP | {"PMIX_RANK": "2", "SLURM_PROCID": "2"}, (3, 4)),
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"}, (3, 4)),
        ({"PALS_RANKID": "5", "PMI_SIZE": "6"}, (6, 6)),
        ({"PALS_RANKID": "5", "PMIX_RANK": "5", "BAGENT_SHARDS": "6"}, (6, 6)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (2, 2)),
        ({"PBS_ARRAY_INDEX": "0", "BAGENT_SHARDS": "10"}, (1, 10)),
        (array(6, 5, 7, 3), (2, 3)),
        (array(6, 5, 7, 3) | {"BAGENT_SHARDS": "3"}, (2, 3)),
        (array(6, 5, 7, 3) | {"BAGENT_SHARDS": "8"}, (7, 8)),
    ],
)
def test_the_part_of_a_process_is_its_rank_or_its_place_in_an_array(env, shard):
    assert auto_shard(env) == shard


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        ("8", [(2, 8), (4, 8), (8, 8)]),
        ("1-8", [(1, 8), (3, 8), (7, 8)]),
        ("1-9:2", [(1, 5), (2, 5), (4, 5)]),
    ],
)
def test_an_array_with_gaps_is_part_of_the_one_that_bagent_shards_names(shards, expected):
    tasks = [array(index, 1, 7, 3) for index in (1, 3, 7)]
    for env in tasks:
        with pytest.raises(UsageError, match="an array with gaps"):
            auto_shard(env)
    assert [auto_shard(env | {"BAGENT_SHARDS": shards}) for env in tasks] == expected


@pytest.mark.parametrize("shards", ["7", "8-9", "0-14:2"])
def test_an_index_that_the_named_array_lacks_is_refused(shards):
    with pytest.raises(UsageError, match="and this is number 7 of"):
        auto_shard(array(7, 1, 7, 3) | {"BAGENT_SHARDS": shards})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PMIX_RANK": "1"}, "not told"),
        ({"PBS_ARRAY_INDEX": "1"}, "not told"),
        ({"PBS_ARRAY_INDEX": "10", "BAGENT_SHARDS": "10"}, "10, and this is number 10"),
    ],
)
def test_a_number_of_parts_that_is_not_told_is_asked_for(env, words):
    with pytest.raises(UsageError, match=words) as error:
        auto_shard(env)
    assert "BAGENT_SHARDS=N" in str(error.value)


def test_each_rank_of_a_launch_does_its_part_and_together_they_do_all(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 40, results=NO_TABLES)
    sent = []
    for rank in ("0", "1", "2"):
        done = bagent([*RUN, "--shard", "auto"], env={"PMI_RANK": rank, "PMI_SIZE": "3"})
        assert done.code == 0, done.err
        sent.append(len(fs.requests))
    assert 0 < sent[0] < sent[1] < sent[2] == 40
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(40))


# --- what the scheduler's own programs are asked --------------------------------------------------

SLURM = Allocation("slurm", "7", node_list="n[1-2,4]")
PBS = Allocation("pbs", "9")
STARTED = "Fri Nov 28 07:30:00 2025"
STARTED_AT = datetime(2025, 11, 28, 7, 30).timestamp()
QSTAT_TEXT = f"""Job Id: 9.server
    Job_Name = engines
    resources_used.walltime = 00:10:00
    Resource_List.walltime = 26:00:00
    stime = {STARTED}
"""


class Programs:
    """Answers by the name of the program; remembers what was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def __call__(self, command):
        self.asked.append(list(command))
        answer = self.answers.get(command[0], "")
        return answer(command) if callable(answer) else answer


@pytest.mark.parametrize("silent", ["", "N/A\n", "Unknown", "NONE"])
def test_scontrol_is_asked_where_squeue_does_not_tell(silent):
    shown = "JobId=7 JobName=x\n   StartTime=2026-01-31T17:00:00 EndTime=2026-01-31T18:00:00 A=b=c"
    programs = Programs(squeue=silent, scontrol=shown)
    assert job_end(SLURM, programs) == datetime(2026, 1, 31, 18).timestamp()
    assert programs.asked[-1] == ["scontrol", "show", "job", "7"]


def test_a_qstat_without_json_is_read_as_text():
    def qstat(command):
        return "qstat: illegal option" if "json" in command else QSTAT_TEXT

    assert job_end(PBS, Programs(qstat=qstat)) == STARTED_AT + 26 * 3600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"Jobs": {}}',
        '{"Jobs": {"9": {"stime": 5, "Resource_List": {"walltime": "1:0:0"}}}}',
        json.dumps({"Jobs": {"9": {"stime": STARTED, "Resource_List": {}}}}),
        json.dumps({"Jobs": {"9": {"stime": STARTED, "Resource_List": {"walltime": "soon"}}}}),
        QSTAT_TEXT.replace("stime", "qtime"),
    ],
)
def test_an_answer_without_start_or_walltime_is_no_end(text):
    assert job_end(PBS, Programs(qstat=text)) is None


def test_a_program_that_is_missing_or_fails_tells_nothing():
    assert ask(["/nonexistent/squeue"]) == ""
    assert ask(["sh", "-c", "echo no; exit 3"]) == ""
    assert ask(["sh", "-c", "echo yes"]) == "yes\n"


def test_an_automatic_deadline_asks_about_the_job_it_runs_in():
    asked = []

    def end(here):
        asked.append(here.job_id)
        return 5000.0

    found = read_deadline("auto", {"SLURM_JOB_ID": "7"}, time.time(), margin=20, job_end=end)
    assert found is not None
    assert (found.at, found.stop_feeding_at, asked) == (5000.0, 4980.0, ["7"])
    assert read_deadline("none", {"SLURM_JOB_ID": "7"}, 0.0, job_end=end) is None
    named = {"SLURM_JOB_ID": "7", "BAGENT_DEADLINE": "@9"}
    assert read_deadline("auto", named, 0.0, job_end=end) is not None
    assert asked == ["7"]


# --- nodes ----------------------------------------------------------------------------------------

NODES = ["x1.site.org", "x2.site.org", "x3.site.org"]


def test_slurm_spells_out_its_own_node_list_and_without_a_job_there_are_no_nodes(tmp_path):
    programs = Programs(scontrol="n1\nn2\nn4\n")
    assert node_names(SLURM, programs) == ["n1", "n2", "n4"]
    assert programs.asked == [["scontrol", "show", "hostnames", "n[1-2,4]"]]
    assert node_names(Allocation(), Programs()) == []
    assert node_names(Allocation("pbs", "9", node_file=tmp_path / "gone"), Programs()) == []


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
