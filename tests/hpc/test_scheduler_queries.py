"""What the scheduler's own programs are asked."""

from __future__ import annotations

import json
import time
from datetime import datetime

import pytest

from bagent.hpc.allocation import Allocation, ask, job_end, node_names
from bagent.runs.deadline import read_deadline

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
        "{}",
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


def test_slurm_spells_out_its_own_node_list():
    programs = Programs(scontrol="n1\nn2\nn4\n")
    assert node_names(SLURM, programs) == ["n1", "n2", "n4"]
    assert programs.asked == [["scontrol", "show", "hostnames", "n[1-2,4]"]]


def test_without_a_job_there_are_no_nodes(tmp_path):
    assert node_names(Allocation(), Programs()) == []
    assert node_names(Allocation("pbs", "9", node_file=tmp_path / "gone"), Programs()) == []


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
