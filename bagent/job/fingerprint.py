"""Hashes of the parts of a job that change its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagent.job.files import reference_closure
from bagent.job.spec.job import Job
from bagent.job.spec.paths import InputPath, PythonFunction, ResolvedPath
from bagent.job.spec.types import Section
from bagent.text.json import decode_json
from bagent.types import Json

PARTS = (
    "prompt",
    "schema",
    "sampling",
    "answers",
    "agent",
    "tools",
    "stages",
    "topology",
    "output",
    "id",
)
"""The names of the parts. The model is not among them: only servers know what ``auto`` is."""

# Where and how fast a part runs, not what it answers; and what may hold secrets.
_PLACES = frozenset({"backend", "hostfile", "select", "limits", "batching", "image_folders"})
_WAYS = frozenset({"timeout", "rate_limit", "cache", "coalesce", "env", "headers", "api_key_env"})

# How an answer is processed.
_JUDGEMENT = frozenset({"truncated"})


def fingerprint_parts(job: Job) -> dict[str, str]:
    """SHA-256 (64 hex digits) of every part of ``job`` that changes answers, by part name.

    Files count by content, not by path; a schema file by its values, not by its spacing, and
    with the files that it refers to. A default written out is the same as one left out. Backend,
    hostfile, limits, batching, results and input are in no part. The field that names the rows is
    one: under other names all rows would be sent again.
    """
    texts = job.source.texts
    agent = _values(job.agent, texts, _WAYS)
    tools = agent.pop("tools", [])
    output = _values(job.output, texts, _JUDGEMENT)
    leave_out = _PLACES | _WAYS | _JUDGEMENT
    stages = [_values(stage, texts, leave_out) for stage in job.stages]
    values: dict[str, Json] = {
        "prompt": _values(job.prompt, texts, _PLACES),
        "schema": output.pop("schema", None),
        "sampling": _values(job.sampling, texts),
        "answers": job.answers,
        "agent": agent,
        "tools": tools,
        "stages": stages,
        "topology": _values(job.topology, texts, leave_out),
        "output": output,
        "id": None if job.id == "id" else job.id,  # the default of rows with that field
    }
    return {part: _sha256(values[part]) for part in PARTS}


def _values(
    section: Section | None, texts: Mapping[Path, str], leave_out: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Only what differs from the defaults, so that a new key with a default changes nothing.

    The contents of files replace their paths.
    """
    result: dict[str, Any] = {}
    for name, info in type(section).model_fields.items() if section else ():
        key, value = info.alias or name, getattr(section, name)
        if key in leave_out or value == info.get_default(call_default_factory=True):
            continue
        if key == "file" and isinstance(value, ResolvedPath):
            result["text"] = texts.get(value.path, "")
        elif key == "schema" and isinstance(value, ResolvedPath):
            result[key] = _schema(value.path, texts)
        else:
            result[key] = _value(value, texts, leave_out)
    return result


def _value(value: Any, texts: Mapping[Path, str], leave_out: frozenset[str]) -> Any:
    if isinstance(value, Section):
        return _values(value, texts, leave_out)
    if isinstance(value, tuple):
        return [_value(item, texts, leave_out) for item in value]
    if isinstance(value, PythonFunction):
        return [value.function, texts.get(value.file.path, "")]
    return value.text if isinstance(value, ResolvedPath | InputPath) else value


def _schema(path: Path, texts: Mapping[Path, str]) -> Json:
    schema = _parsed(texts.get(path, ""))
    others = reference_closure(path, texts) if path in texts else []
    if not others:
        return schema
    return [schema, *([other.name, _parsed(texts[other])] for other in others)]


def _parsed(text: str) -> Json:
    try:
        return decode_json(text)
    except ValueError:
        return text


def _sha256(value: Json) -> str:
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
