"""Settings from the environment, under today's names and the old ones."""

from __future__ import annotations

import pytest

from bagent.errors import UsageError
from bagent.runs.environment import Environment, read_environment
from support.jobs import write_job
from support.replies import ok

ALL = {
    "HOSTFILE": "hosts.txt",
    "MAX_TOKENS": "512",
    "MODEL_MAX_CONTEXT": "131072",
    "TIMEOUT_PER_SEQUENCE": "60.5",
    "PROXY_URL": "http://login:8080/",
}
READ = Environment("hosts.txt", 512, 131072, 60.5, "http://login:8080")


OLD = {f"AURORA_SWARM_{name}": value for name, value in ALL.items()}


@pytest.mark.parametrize(
    ("env", "settings", "notices"),
    [
        ({}, Environment(), 0),
        ({"BAGENT_MAX_TOKENS": " "}, Environment(), 0),
        ({f"BAGENT_{name}": value for name, value in ALL.items()}, READ, 0),
        (OLD, READ, len(ALL)),
        (
            {"BAGENT_MAX_TOKENS": "0", "AURORA_SWARM_MAX_TOKENS": "512"},
            Environment(max_tokens=0),
            0,
        ),
        ({"BAGENT_TIMEOUT_PER_SEQUENCE": "0"}, Environment(timeout_per_sequence=0.0), 0),
    ],
    ids=["nothing", "blank", "all", "old names", "both names", "zero"],
)
def test_settings_are_read_and_old_names_bring_a_notice(env, settings, notices) -> None:
    messages: list[str] = []
    assert read_environment(env, messages.append) == settings
    assert len(messages) == notices
    if env is OLD:
        assert "AURORA_SWARM_HOSTFILE is read; its name is BAGENT_HOSTFILE now" in messages


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BAGENT_MAX_TOKENS", "many"),
        ("AURORA_SWARM_MODEL_MAX_CONTEXT", "\u00b2"),
        ("BAGENT_TIMEOUT_PER_SEQUENCE", "1m"),
        ("BAGENT_PROXY_URL", "login:8080"),
        ("BAGENT_PROXY_URL", "http://me:hidden@host:port"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_environment({name: value})
    assert str(caught.value).startswith(f"{name}: ")
    assert "hidden" not in str(caught.value)


def test_presets_fill_what_the_job_leaves_open_and_nothing_else(fs, job_dir, bagent):
    fs.set_script({"*": [ok()]})
    env = {"AURORA_SWARM_MAX_TOKENS": "99", "AURORA_SWARM_PROXY_URL": ""}
    write_job(job_dir, fs.url, 1, sampling={"temperature": 0})
    done = bagent(["run", "job.yaml"], env=env)
    assert done.code == 0, done.err
    assert "AURORA_SWARM_MAX_TOKENS is read; its name is BAGENT_MAX_TOKENS now" in done.err
    write_job(job_dir, fs.url, 1, sampling={"max_tokens": 7}, name="own")
    assert bagent(["run", "job.yaml"], env=env).code == 0
    write_job(job_dir, fs.url, 1, backend=None, name="front")
    assert bagent(["run", "job.yaml"], env={"BAGENT_PROXY_URL": fs.url}).code == 0
    assert [seen.body["max_tokens"] for seen in fs.requests] == [99, 7, 64]
