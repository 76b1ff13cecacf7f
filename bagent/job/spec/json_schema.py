"""The JSON Schema of job files, generated from the models."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from bagent.job.spec.job import Job
from bagent.job.spec.paths import AllowFailures, AllowFailuresKind, ResolvedPath
from bagent.types import Json

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_NULL: Json = {"type": "null"}
_OUTSIDE = ("description", "examples", "default")


def job_schema() -> dict[str, Json]:
    """Return the schema (draft 2020-12): closed objects, every key described, null allowed."""
    schema = Job.model_json_schema(by_alias=True, mode="validation", schema_generator=_Generator)
    _polish(schema)
    schema["patternProperties"] = {"^x-": {"description": "A place for YAML anchors; not read."}}
    return {
        "$schema": DIALECT,
        "title": "bagent job",
        "description": "A job file of bagent: rows through prompts to validated answers.",
        **{key: value for key, value in schema.items() if key not in ("title", "description")},
    }


def job_schema_text() -> str:
    """Return the schema as the text of ``schemas/job.schema.json``."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


class _Generator(GenerateJsonSchema):
    """Leaves out titles, which repeat the key, and writes defaults as a job file has them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, ResolvedPath):
            return dft.text
        if isinstance(dft, AllowFailures):
            return AllowFailuresKind().dump(dft)
        return super().encode_default(dft)


def _polish(value: Any) -> None:
    """Let every optional key of a closed object be blank; drop titles that repeat a name."""
    if isinstance(value, list):
        for item in value:
            _polish(item)
        return
    if not isinstance(value, dict):
        return
    properties = value.get("properties")
    if isinstance(properties, dict) and value.get("additionalProperties") is False:
        value.pop("title", None)
        required = value.get("required", ())
        for key, item in properties.items():
            if key not in required:
                properties[key] = _or_blank(item)
    for item in list(value.values()):
        _polish(item)


def _or_blank(schema: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema``, or null; descriptions stay outside, where editors show them."""
    result: dict[str, Any] = {key: schema[key] for key in _OUTSIDE if key in schema}
    inside = {key: item for key, item in schema.items() if key not in _OUTSIDE}
    if not inside:
        return schema
    if result.get("default", 0) is None:
        del result["default"]
    choices = inside["anyOf"] if list(inside) == ["anyOf"] else [inside]
    blank = [] if _NULL in choices else [_NULL]
    result["anyOf"] = [*choices, *blank]
    return result
