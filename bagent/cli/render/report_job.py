"""The job on the page of a run: its prompts and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from bagent.job.redaction import mask_text
from bagent.job.spec.job import Job
from bagent.types import Json

NOT_OWN = "not read, since you did not make this run here"
NOT_KEPT = "what it held then is not kept"


def prompts_of(job: Json, owner: str = "", *, unread: str = "") -> Iterator[tuple[str, str]]:
    """Yield the owner and the text of each prompt; files are read as they are now.

    Args:
        job: the resolved job of ``run.json``, or a part of it.
        owner: the stage, step or section of the part.
        unread: why the files that it names are not read, which may be any of this user; empty
            where they are.
    """
    if isinstance(job, list):
        for part in job:
            yield from prompts_of(part, owner, unread=unread)
    elif isinstance(job, Mapping):
        owner = str(job.get("name") or owner) if owner else owner
        for key, value in job.items():
            if key == "prompt" and isinstance(value, Mapping):
                yield from _parts(value, owner, unread)
            else:
                yield from prompts_of(value, owner or str(key), unread=unread)


def _parts(prompt: Mapping[str, Json], owner: str, unread: str) -> Iterator[tuple[str, str]]:
    messages = prompt.get("messages") or []
    contents = [(str(message.get("role")), message.get("content")) for message in messages]
    contents += [(name, prompt.get(name)) for name in ("system", "user", "raw")]
    for role, content in contents:
        for part in content if isinstance(content, list) else [content]:
            title, text = _title_and_text(part, unread)
            if text:
                yield " ".join(part for part in (owner, role, title) if part), text


def _title_and_text(part: Json, unread: str) -> tuple[str, str]:
    """Return the file of a text, empty where it is in the job, and the text."""
    if not isinstance(part, Mapping):
        return "", "" if part is None else str(part)
    if isinstance(part.get("file"), str):
        if unread:
            return "", f"({part['file']}: {unread})"
        try:
            text = Path(part["file"]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            text = f"the file cannot be read now: {error}"
        return f"({part['file']}, as it is now)", mask_text(text)
    fields = {key: value for key, value in part.items() if value is not None}
    return "", str(part.get("text") or (yaml.safe_dump(fields) if fields else ""))


def settings_of(job: Mapping[str, Json]) -> str:
    """Return the settings that differ from their defaults as YAML, without prompts."""
    defaults: dict[str, Json] = {}
    for name, field in Job.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", by_alias=True)
        defaults[field.alias or name] = value
    changed = _changed(dict(job), defaults)
    if not changed:
        return ""
    text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _changed(value: dict[str, Json], defaults: Any) -> dict[str, Json]:
    changed: dict[str, Json] = {}
    for name, item in value.items():
        default = defaults.get(name) if isinstance(defaults, Mapping) else None
        if name == "prompt" or item == default or item is None:
            continue
        trimmed = _without_defaults(item, default)
        if trimmed not in (None, {}, []):
            changed[name] = trimmed
    return changed


def _without_defaults(value: Json, default: Json) -> Json:
    if isinstance(value, dict):
        return _changed(value, default)
    return [_without_defaults(item, None) for item in value] if isinstance(value, list) else value
