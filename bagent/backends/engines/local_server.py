"""The server behind ``backend: local``: what fits this machine, and the child that serves it.

The child runs llama.cpp's own HTTP server on a loopback port. It is started as
``python -m bagent.backends.engines.local_server``, reads one JSON line (the fields of
:class:`ServerSettings`) from stdin, writes one JSON line ``{"address": ...}`` to stdout when it
can be sent to, or ``{"error": ...}``, and then serves until SIGTERM or until stdin closes, which
it does when the parent is gone. llama.cpp's words go to stderr.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import msgspec

from bagent.errors import UsageError

_PR_SET_PDEATHSIG = 1
_ERRORS_AND_WARNINGS = 2
"""llama.cpp's log level; at its default every request leaves five lines."""

_SPARE_HTTP_THREADS = 8

_DEFAULT_CONTEXT = 4096
_MOST_SLOTS = 16
_MOST_THREADS = 16
_MEMORY_SHARE = 0.25
"""Part of the free memory that the KV cache may take; the model and the job need the rest."""

_UNKNOWN_KV_BYTES = 131_072
"""Bytes of KV cache a token where the file does not tell: those of an 8B model."""


class ServerSettings(msgspec.Struct, frozen=True):
    """What the child is told.

    ``context`` is in tokens for each of ``parallel`` slots; ``template`` is a chat template's
    name or text, empty for the model's own; ``connections`` is how many HTTP connections it
    serves at once (each holds a thread, also while it is idle); ``cache_mib`` bounds the host
    memory for prompts of earlier requests.
    """

    model: str
    name: str
    api_key: str
    parent: int
    context: int
    parallel: int
    threads: int
    connections: int
    template: str = ""
    cache_mib: int = 0


@dataclass(frozen=True, slots=True)
class RequestedSettings:
    """What a user asked for; None lets the machine decide.

    ``context`` is in tokens for each of ``parallel`` slots, ``template`` the name or text of a
    chat template.
    """

    context: int | None = None
    parallel: int | None = None
    threads: int | None = None
    template: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use: ``cpus`` and free ``memory`` in bytes."""

    cpus: int
    memory: int


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What the head of a GGUF file tells: name, trained context, bytes of KV cache a token."""

    name: str
    context: int
    kv_bytes: int


_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


def read_model(path: Path) -> ModelFile:
    """Read the head of a GGUF file (the format's specification, versions 2 and 3).

    Raises:
        UsageError: it is not such a file, or it ends too early.
    """
    head: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(f"{path} is no GGUF model file")
            _version, _tensors, entries = struct.unpack("<IQQ", _exactly(file, 20))
            for _ in range(entries):
                key = _text(file)
                value = _value(file, *struct.unpack("<I", _exactly(file, 4)))
                if key.startswith("tokenizer.") and _enough(head):
                    break  # long lists follow
                head[key] = value
    except (struct.error, KeyError, UnicodeDecodeError, EOFError):
        raise UsageError(f"{path} is a broken GGUF model file") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return _described(path, head)


def _enough(head: Mapping[str, Any]) -> bool:
    kind = head.get("general.architecture", "")
    names = ("block_count", "attention.head_count", "embedding_length", "context_length")
    return all(f"{kind}.{name}" in head for name in names)


def _described(path: Path, head: Mapping[str, Any]) -> ModelFile:
    """Layers times KV heads times sizes of a key and a value, two bytes (f16) each."""
    kind = head.get("general.architecture", "")
    layers, heads, width = (
        head.get(f"{kind}.{name}", 0)
        for name in ("block_count", "attention.head_count", "embedding_length")
    )
    heads = max(heads) if isinstance(heads, list) else heads
    kv_heads = head.get(f"{kind}.attention.head_count_kv", heads)
    kv_heads = max(kv_heads) if isinstance(kv_heads, list) else kv_heads
    size = width // heads if heads else 0
    key = head.get(f"{kind}.attention.key_length", size)
    value = head.get(f"{kind}.attention.value_length", size)
    return ModelFile(
        name=path.stem,
        context=head.get(f"{kind}.context_length", _DEFAULT_CONTEXT),
        kv_bytes=layers * kv_heads * (key + value) * 2 or _UNKNOWN_KV_BYTES,
    )


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _text(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", _exactly(file, 8))
    return _exactly(file, min(size, 1 << 24)).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind == 9:
        inner, count = struct.unpack("<IQ", _exactly(file, 12))
        return [_value(file, inner) for _ in range(count)]
    form = "<" + _SCALARS[kind]
    return struct.unpack(form, _exactly(file, struct.calcsize(form)))[0]


def this_machine(root: Path = Path("/")) -> Machine:
    """CPUs by affinity and cgroup quota, memory by what is free and the cgroup's limit.

    Args:
        root: where /proc and /sys are.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cgroup = root / "sys/fs/cgroup"
    quota, _, period = _words(cgroup / "cpu.max").partition(" ")
    if not quota:
        quota = _words(cgroup / "cpu/cpu.cfs_quota_us")
        period = _words(cgroup / "cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):
        cpus = min(cpus, max(1, math.ceil(int(quota) / int(period))))
    free = [4 << 30]
    for line in _words(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = [int(line.split()[1]) * 1024]
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, now = _words(cgroup / most), _words(cgroup / used)
        if limit.isdigit():
            free.append(int(limit) - (int(now) if now.isdigit() else 0))
    return Machine(cpus, max(0, min(free)))


def _words(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def fit_settings(
    requested: RequestedSettings, path: Path, model: ModelFile, machine: Machine
) -> ServerSettings:
    """Slots, context and threads that fit the machine; what is ``requested`` stands as it is.

    Two slots a CPU, at least 4 and at most 16, with 4096 tokens each; fewer slots, then shorter
    ones, where the KV cache would take more than a quarter of the free memory.
    """
    context = requested.context or min(model.context, _DEFAULT_CONTEXT)
    tokens = int(machine.memory * _MEMORY_SHARE) // model.kv_bytes
    slots = min(max(2 * machine.cpus, 4), _MOST_SLOTS)
    parallel = requested.parallel or max(1, min(slots, tokens // context))
    if requested.context is None:
        context = max(min(context, tokens // parallel), min(context, 512))
    template = requested.template
    if template is None:
        # SmolLM2's own template makes worse text than the plain one.
        template = "chatml" if "smollm2" in model.name.lower() else ""
    return ServerSettings(
        model=str(path),
        name=model.name,
        api_key=secrets.token_urlsafe(24),
        parent=os.getpid(),
        context=context,
        parallel=parallel,
        threads=requested.threads or min(machine.cpus, _MOST_THREADS),
        connections=max(32, 2 * parallel),
        template=template,
        cache_mib=min(256, machine.memory >> 24),
    )


def die_with(parent: int) -> None:
    """Let the kernel end this process when ``parent`` does (Linux; elsewhere stdin tells).

    Exits at once where the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end(_number: int, _frame: FrameType | None) -> None:
    # The model holds nothing that must be saved, and llama.cpp's own ending waits for requests.
    os._exit(0)


def _watch_stdin() -> None:
    """End when the other end of stdin closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _tell(message: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def main() -> NoReturn:
    """Serve; never returns."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerSettings)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    die_with(settings.parent)
    threading.Thread(target=_watch_stdin, daemon=True).start()
    try:
        import xllamacpp
    except ImportError as error:  # a library that the wheel needs, such as libgomp, is missing
        _tell({"error": f"xllamacpp cannot be loaded: {error}"})
        sys.exit(1)
    params = xllamacpp.CommonParams()
    params.model.path = settings.model
    params.model_alias = {settings.name}
    params.api_keys = [settings.api_key]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = settings.parallel
    params.n_ctx = settings.context * settings.parallel
    params.n_threads_http = settings.connections + _SPARE_HTTP_THREADS
    params.use_jinja = True
    params.chat_template = settings.template
    params.endpoint_metrics = True
    params.endpoint_slots = False
    params.ui = False
    params.offline = True
    params.fit_params = False
    params.cache_ram_mib = settings.cache_mib
    params.verbosity = _ERRORS_AND_WARNINGS
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = settings.threads
        cpu.poll = 0
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        _tell({"error": str(error)})
        sys.exit(1)
    _tell({"address": server.listening_address})
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
