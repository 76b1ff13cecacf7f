"""What the page of a run says of its job: the texts of its prompts, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from bagent.job.redaction import mask_text
from bagent.job.spec.job import Job
from bagent.types import Json


def prompts_of(job: Json, owner: str = "", *, files: bool) -> Iterator[tuple[str, str]]:
    """Whose each text of a prompt is, and the text; files are read as they are now.

    Args:
        job: the resolved job as ``run.json`` holds it, or a part of it.
        files: whether to read files that it names, which may be any of this user.
        owner: the stage, step or section that the part belongs to.
    """
    if isinstance(job, list):
        for one in job:
            yield from prompts_of(one, owner, files=files)
    elif isinstance(job, Mapping):
        owner = str(job.get("name") or owner) if owner else owner
        for key, value in job.items():
            if key == "prompt" and isinstance(value, Mapping):
                yield from _parts(value, owner, files)
            else:
                yield from prompts_of(value, owner or str(key), files=files)


def _parts(prompt: Mapping[str, Json], owner: str, files: bool) -> Iterator[tuple[str, str]]:
    messages = prompt.get("messages") or []
    spoken = [(str(one.get("role")), one.get("content")) for one in messages]
    spoken += [(name, prompt.get(name)) for name in ("system", "user", "raw")]
    for role, content in spoken:
        for said in content if isinstance(content, list) else [content]:
            title, text = _told(said, files)
            if text:
                yield " ".join(word for word in (owner, role, title) if word), text


def _told(said: Json, files: bool) -> tuple[str, str]:
    """The file of a text, empty where it stands in the job; and the text."""
    if not isinstance(said, Mapping):
        return "", "" if said is None else str(said)
    if isinstance(said.get("file"), str):
        if not files:
            return "", f"({said['file']}: not read, since you did not make this run here)"
        try:
            text = Path(said["file"]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            text = f"the file cannot be read now: {error}"
        return f"({said['file']}, as it is now)", mask_text(text)
    shown = {key: value for key, value in said.items() if value is not None}
    return "", str(said.get("text") or (yaml.safe_dump(shown) if shown else ""))


def settings_of(job: Mapping[str, Json]) -> str:
    """The settings that differ from their defaults as YAML, prompts left out."""
    defaults: dict[str, Json] = {}
    for name, field in Job.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", by_alias=True)
        defaults[field.alias or name] = value
    shown = _changed(dict(job), defaults)
    if not shown:
        return ""
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _changed(value: dict[str, Json], defaults: Any) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, one in value.items():
        usual = defaults.get(name) if isinstance(defaults, Mapping) else None
        if name == "prompt" or one == usual or one is None:
            continue
        kept = _kept(one, usual)
        if kept not in (None, {}, []):
            found[name] = kept
    return found


def _kept(value: Json, usual: Json) -> Json:
    if isinstance(value, dict):
        return _changed(value, usual)
    return [_kept(one, None) for one in value] if isinstance(value, list) else value
