"""One reader of what schedulers and launchers put into the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.errors import UsageError
from bagent.hpc.allocation import Allocation, LauncherPlace, auto_shard, read_allocation

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def test_a_slurm_job():
    env = {
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_JOB_END_TIME": "1700003600",
    }
    assert read_allocation(env) == Allocation(
        "slurm", "123", node_list="n[1-3]", restarts=2, end=1_700_003_600.0
    )


def test_a_pbs_job_loses_the_name_of_its_server():
    env = {"PBS_JOBID": "3905960.aurora-pbs-0001.host", "PBS_NODEFILE": "/var/spool/nodes"}
    found = read_allocation(env)
    assert found == Allocation("pbs", "3905960", node_file=Path("/var/spool/nodes"))


def test_a_task_of_a_pbs_array_keeps_its_brackets():
    found = read_allocation({"PBS_JOBID": "12[3].server", "PBS_ARRAY_INDEX": "3"})
    assert (found.job_id, found.task) == ("12[3]", LauncherPlace(3, None))


@pytest.mark.parametrize("text", ["", "Unknown", "nan", "-5", "1e9", "٣"])
def test_a_value_that_is_no_number_counts_as_not_set(text):
    found = read_allocation({"SLURM_JOB_END_TIME": text, "SLURM_RESTART_COUNT": text})
    assert (found.end, found.restarts) == (None, 0)


GAPS = {"COUNT": "3", "MIN": "1", "MAX": "7", "STEP": "1"}


@pytest.mark.parametrize(
    ("env", "shard"),
    [
        ({}, (1, 1)),
        (STEP | {"SLURM_PROCID": "0"}, (1, 4)),
        (STEP | {"SLURM_PROCID": "3"}, (4, 4)),
        (STEP | {"PMIX_RANK": "2", "SLURM_PROCID": "2"}, (3, 4)),
        (STEP | {"PMI_RANK": "2", "PMI_SIZE": "4"}, (3, 4)),
        ({"PALS_RANKID": "5", "PMI_SIZE": "6"}, (6, 6)),
        ({"PALS_RANKID": "5", "PMIX_RANK": "5", "BAGENT_SHARDS": "6"}, (6, 6)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (2, 2)),
        ({"PBS_ARRAY_INDEX": "0", "BAGENT_SHARDS": "10"}, (1, 10)),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "8"}, (8, 8)),
    ],
)
def test_the_part_of_a_process_is_its_rank_or_its_place_in_an_array(env, shard):
    assert auto_shard(env) == shard


@pytest.mark.parametrize(
    ("shards", "expected"),
    [("8", [(2, 8), (4, 8), (8, 8)]), ("1-8", [(1, 8), (3, 8), (7, 8)]), ("1-9:2", None)],
)
def test_an_array_with_gaps_is_part_of_the_one_that_bagent_shards_names(shards, expected):
    gaps = {f"SLURM_ARRAY_TASK_{name}": text for name, text in GAPS.items()}
    tasks = [gaps | {"SLURM_ARRAY_TASK_ID": index} for index in ("1", "3", "7")]
    for env in tasks:
        with pytest.raises(UsageError, match="an array with gaps"):
            auto_shard(env)
    parts = [auto_shard(env | {"BAGENT_SHARDS": shards}) for env in tasks]
    assert parts == (expected or [(1, 5), (2, 5), (4, 5)])


@pytest.mark.parametrize("shards", ["7", "8-9", "0-14:2"])
def test_an_index_that_the_named_array_lacks_is_refused(shards):
    env = {f"SLURM_ARRAY_TASK_{name}": text for name, text in GAPS.items()}
    with pytest.raises(UsageError, match="and this is number 7 of"):
        auto_shard(env | {"SLURM_ARRAY_TASK_ID": "7", "BAGENT_SHARDS": shards})


def test_a_contiguous_array_needs_no_name_and_a_part_of_one_may_have_it():
    env = {
        "SLURM_ARRAY_TASK_ID": "6",
        "SLURM_ARRAY_TASK_MIN": "5",
        "SLURM_ARRAY_TASK_MAX": "7",
        "SLURM_ARRAY_TASK_COUNT": "3",
    }
    assert auto_shard(env) == (2, 3)
    assert auto_shard(env | {"BAGENT_SHARDS": "3"}) == (2, 3)
    assert auto_shard(env | {"BAGENT_SHARDS": "8"}) == (7, 8)


def test_the_batch_script_itself_is_no_rank_of_the_job():
    env = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert auto_shard(env) == (1, 1)


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
