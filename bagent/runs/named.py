"""A backend named by an option, for commands that have no job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bagent.errors import UsageError
from bagent.job.load import JobRequest, load_job
from bagent.runs.endpoints import Servers, plain_servers


def named_servers(
    backend: str,
    model: str | None,
    env: Mapping[str, str],
    notice: Callable[[str], None] = lambda _: None,
) -> Servers:
    """The server that ``--backend`` names; its key is in the endpoint's headers and nowhere else.

    Args:
        model: what ``--model`` names; hosted models need one.
        env: the environment, which holds keys.

    Raises:
        UsageError: the name is wrong, a key or the model is missing, or it is a backend that runs
            inside a command.
    """
    options = {"backend": backend, "model": model}
    request = JobRequest(
        text="prompt: none", options=options, env=env, cwd=Path.cwd(), needs_input=False
    )
    job = load_job(request)
    ref = job.backend
    if ref is None or (ref.kind in ("local", "sim") and ref.base is None):
        raise UsageError(
            f"--backend {backend}: it runs inside bagent run, there is nothing to reach",
            hint="name a server, such as openai, anthropic or vllm://HOST:PORT",
        )
    return plain_servers(job, ref, env, notice)
