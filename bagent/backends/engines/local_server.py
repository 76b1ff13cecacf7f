"""Child process that serves a GGUF model with llama.cpp's HTTP server.

Started as ``python -m bagent.backends.engines.local_server``. It reads one JSON line (the fields of
:class:`ServerSettings`) from stdin, writes one JSON line to stdout, ``{"address": ...}`` when it is
ready or ``{"error": ...}``, and serves until SIGTERM or until stdin closes. llama.cpp logs to
stderr.
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
"""llama.cpp's log level; its default logs five lines a request."""

_SPARE_HTTP_THREADS = 8

_DEFAULT_CONTEXT = 4096
_MOST_SLOTS = 16
_MOST_THREADS = 16
_MEMORY_SHARE = 0.25
"""Part of the free memory for the KV cache."""

_UNKNOWN_KV_BYTES = 131_072
"""KV cache bytes a token if the file does not say: those of an 8B model."""


class ServerSettings(msgspec.Struct, frozen=True):
    """Settings of the child process."""

    model: str
    name: str
    api_key: str
    parent: int
    context: int
    """Tokens of each slot."""
    parallel: int
    """Slots."""
    threads: int
    connections: int
    """Concurrent HTTP connections; each holds a thread, even when idle."""
    template: str = ""
    """A chat template's name or text, empty for the model's own."""
    cache_mib: int = 0
    """Host memory for prompts of earlier requests."""


@dataclass(frozen=True, slots=True)
class RequestedSettings:
    """Settings that the user chose; None lets the machine decide."""

    context: int | None = None
    """Tokens of each slot."""
    parallel: int | None = None
    threads: int | None = None
    template: str | None = None
    """A chat template's name or text."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The CPUs and the free memory (bytes) of this process."""

    cpus: int
    memory: int


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The header of a GGUF file."""

    name: str
    context: int
    """The trained context."""
    kv_bytes: int
    """KV cache bytes a token."""


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
    """Read the header of a GGUF file (format versions 2 and 3).

    Raises:
        UsageError: it is not such a file, or it ends too early.
    """
    head: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(
                    f"{path} is no GGUF model file", hint="name a file that ends with .gguf"
                )
            _version, _tensors, entries = struct.unpack("<IQQ", _exactly(file, 20))
            for _ in range(entries):
                key = _text(file)
                value = _value(file, *struct.unpack("<I", _exactly(file, 4)))
                if key.startswith("tokenizer.") and _enough(head):
                    break  # long lists follow
                head[key] = value
    except (struct.error, KeyError, UnicodeDecodeError, EOFError):
        raise UsageError(
            f"{path} is a broken GGUF model file", hint="download the file again"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return _described(path, head)


def _enough(head: Mapping[str, Any]) -> bool:
    kind = head.get("general.architecture", "")
    names = ("block_count", "attention.head_count", "embedding_length", "context_length")
    return all(f"{kind}.{name}" in head for name in names)


def _described(path: Path, head: Mapping[str, Any]) -> ModelFile:
    """Compute the KV cache: layers times KV heads times key and value sizes, 2 bytes (f16) each."""
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
    """Return the CPUs by affinity and cgroup quota, and the free memory by cgroup limit.

    Args:
        root: where /proc and /sys are.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cgroup = root / "sys/fs/cgroup"
    quota, _, period = _read_text(cgroup / "cpu.max").partition(" ")
    if not quota:
        quota = _read_text(cgroup / "cpu/cpu.cfs_quota_us")
        period = _read_text(cgroup / "cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):
        cpus = min(cpus, max(1, math.ceil(int(quota) / int(period))))
    free = [4 << 30]
    for line in _read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = [int(line.split()[1]) * 1024]
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, now = _read_text(cgroup / most), _read_text(cgroup / used)
        if limit.isdigit():
            free.append(int(limit) - (int(now) if now.isdigit() else 0))
    return Machine(cpus, max(0, min(free)))


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def fit_settings(
    requested: RequestedSettings, path: Path, model: ModelFile, machine: Machine
) -> ServerSettings:
    """Choose slots, context and threads for the machine; ``requested`` values are kept.

    Two slots a CPU, between 4 and 16, of 4096 tokens each. Slots are dropped, then shortened, where
    the KV cache would exceed a quarter of the free memory.
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
    """Let the kernel kill this process when ``parent`` ends (Linux; elsewhere stdin closes).

    Exits at once if the parent is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end(_number: int, _frame: FrameType | None) -> None:
    # There is no state to save, and llama.cpp's own shutdown waits for requests.
    os._exit(0)


def _watch_stdin() -> None:
    """Exit when stdin closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def _write_message(message: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def main() -> NoReturn:
    """Serve until killed."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerSettings)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with(settings.parent)
    threading.Thread(target=_watch_stdin, daemon=True).start()
    try:
        import xllamacpp
    except ImportError as error:  # a shared library such as libgomp is missing
        _write_message({"error": f"xllamacpp cannot be loaded: {error}"})
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
        _write_message({"error": str(error)})
        sys.exit(1)
    _write_message({"address": server.listening_address})
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
