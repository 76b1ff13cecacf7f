"""What a batch job needs, brought together and checked."""

from __future__ import annotations

import pytest

from bagent.errors import JobError, UsageError
from bagent.hpc.script import batch_script
from bagent.hpc.site import load_site, read_site, site_names
from support.submit_plans import CLUSTER, GPUS, plan_of


def test_everything_that_is_missing_is_named_at_once():
    with pytest.raises(JobError) as error:
        plan_of("  nodes: 1\n", "aurora")
    text = str(error.value)
    assert text.startswith("job.yaml:")
    assert "cluster.walltime, cluster.engine, cluster.account" in text


TP = "vllm serve m --tensor-parallel-size"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("  qos: debug\n", "qos is SLURM's"),
        ("  stage: a\n  stage_by: sbcast\n", "sbcast are SLURM's"),
        ("  launcher: srun\n", "srun and sbcast"),
        ("  launcher: ssh\n  stage: a\n  stage_by: mpi\n", "needs an MPI launcher"),
        ("  nodes_per_engine: 4\n", "2 nodes for engines, and one engine spans 4"),
        ("  reserve_node: true\n  nodes_per_engine: 2\n", "1 nodes for engines"),
        ("  engines_per_node: 3\n", "4 GPUs cannot be shared evenly by 3"),
        ("  stage: a\n  stage_by: none\n", r"copies none .*stage_by: copy"),
        ("  ports: [8000, 8000]\n  engines_per_node: 2\n", "1 ports for 2 engines"),
        ("  ports: 65535\n  engines_per_node: 2\n", "2 ports for 2 engines"),
    ],
)
def test_what_does_not_fit_together_is_refused(more, words):
    with pytest.raises(JobError, match=words):
        plan_of(CLUSTER + GPUS + more, scheduler="pbs")


@pytest.mark.parametrize(
    ("cluster", "site", "words"),
    [
        (CLUSTER, "generic", "the job lacks cluster.gpus_per_node, .*gpus_per_node: 4"),
        ("  walltime: 1h\n  engine: python -m sglang.launch_server\n", "generic", "the job lacks"),
        (CLUSTER + "  engines_per_node: 1\n", "aurora", "12 GPUs .* engines_per_node: 3 or 6"),
        (f"  walltime: 1h\n  engine: {TP} 8\n" + GPUS, "generic", "uses 8 GPUs, and gets 4"),
        (f"  walltime: 1h\n  engine: {TP}=8\n", "aurora", "uses 8 GPUs, and gets 4"),
        ("  walltime: 1h\n  engine: e {stage}/m\n", "generic", r"stage: \[PATH\]"),
    ],
)
def test_engines_that_would_lack_gpus_or_files_are_refused(cluster, site, words):
    with pytest.raises(JobError, match=words):
        plan_of(cluster, site, account="a")


@pytest.mark.parametrize(
    ("cluster", "scheduler", "line"),
    [
        (GPUS, "slurm", "#SBATCH --gpus-per-node=4"),
        (GPUS, "pbs", "#PBS -l select=2:ngpus=4"),
        (GPUS + '  directives: ["--gres=gpu:a100:4"]\n', "slurm", None),
        ("  gpus_per_node: 0\n", "slurm", None),
    ],
)
def test_the_gpus_of_nodes_are_requested_unless_directives_do(cluster, scheduler, line):
    script = batch_script(plan_of(CLUSTER + cluster, scheduler=scheduler))
    requests = [one for one in script.splitlines() if "gpus-per-node=" in one or "ngpus=" in one]
    assert requests == ([line] if line else [])


def test_one_port_is_the_first_of_a_node():
    assert plan_of(
        CLUSTER + "  gpus_per_node: 6\n  ports: 9000\n  engines_per_node: 3\n"
    ).ports == (9000, 9001, 9002)
    assert plan_of(CLUSTER + GPUS + "  ports: 9000-9009\n  engines_per_node: 2\n").ports == (
        9000,
        9001,
    )


@pytest.mark.parametrize(
    ("nodes", "hours", "queue"),
    [(1, 1, "debug"), (16, 1, "debug-scaling"), (16, 100, "capacity"), (256, 24, "prod")],
)
def test_the_first_queue_that_takes_the_job_is_chosen(nodes, hours, queue):
    cluster = f"  nodes: {nodes}\n  walltime: {hours}h\n  engine: e\n"
    assert plan_of(cluster, "aurora", account="a").queue == queue


def test_a_named_queue_is_held_to_its_limits_and_an_unknown_one_is_believed():
    cluster = "  nodes: 16\n  walltime: 1h\n  engine: e\n  queue: "
    with pytest.raises(JobError, match="prod 256"):
        plan_of(cluster + "prod\n", "aurora", account="a")
    assert plan_of(cluster + "R123\n", "aurora", account="a").queue == "R123"


def test_the_known_sites_say_what_nobody_could_try():
    for name in site_names():
        site = load_site(name)
        assert site.name == name and site.untried and site.about.endswith("."), name
    assert site_names() == ["aurora", "frontier", "generic", "perlmutter", "polaris"]
    with pytest.raises(UsageError, match=r"no such site .*did you mean aurora\?"):
        load_site("aurorra")


def test_a_site_may_be_a_file_of_ones_own(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text("name: ours\nabout: Ours.\ncluster: {scheduler: pbs, queue: big}\n")
    assert load_site(str(path)).cluster["queue"] == "big"
    with pytest.raises(UsageError, match="cannot be read"):
        load_site(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("about: x\n", "name"),
        ("name: a\nabout: b\ncluser: {}\n", "cluser"),
        ("name: a\nabout: b\ncluster: {nods: 2}\n", "nods"),
        ("name: a\nabout: b\ncluster: {walltime: soon}\n", "walltime"),
        ("name: [", "not a site profile"),
    ],
)
def test_a_wrong_profile_is_named(tmp_path, text, words):
    with pytest.raises(JobError, match=words) as error:
        read_site(text, tmp_path / "ours.yaml")
    assert "ours.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("account: 'proj\\necho injected'", "expected one word without blanks"),
        ("account: proj --uid=0", "expected one word without blanks"),
        ('queue: "q\\nx"', "expected one word without blanks"),
        ('filesystems: "home\\tx"', "expected one word without blanks"),
        ('directives: ["-l a=1\\n#PBS -l b=2"]', "expected single lines"),
        ('setup: ["a\\nb"]', "expected single lines"),
        ('stage_to: "/tmp/x\\ny"', "expected a path on one line"),
        ("env: {'A B': x}", "cannot name a variable"),
        ('engine: "it\'s"', "not a command line"),
    ],
)
def test_a_setting_that_would_become_lines_of_the_script_is_refused(line, message):
    key = line.partition(":")[0]
    kept = [text for text in CLUSTER.splitlines() if text.strip().partition(":")[0] != key]
    line = line.replace("'proj\\n", '"proj\\n').replace("injected'", 'injected"')
    with pytest.raises(JobError, match=message):
        plan_of("\n".join([*kept, f"  {line}", ""]))


def test_an_account_option_is_checked_like_the_key_and_named():
    with pytest.raises(JobError, match=r"--account.*expected one word without blanks"):
        plan_of(account="proj\necho injected")
