"""The base model of all sections: unknown keys, blank keys, short forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic_core import core_schema

from bagent.errors import Position
from bagent.job.spec.types import invalid
from bagent.job.validation import LoadContext
from bagent.job.yaml.parser import YamlMap
from bagent.text.suggest import describe_value, did_you_mean
from bagent.types import Json


class Section(BaseModel):
    """A frozen mapping of known keys.

    A blank key (``model:``) means its default. An unknown key is a fault with position and the
    near name; ``misplaced`` gives better hints for keys that people often try.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    misplaced: ClassVar[Mapping[str, str]] = {}
    short_form: ClassVar[list[Json]] = []

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Return the long form of a short one, such as ``prompt: TEXT``; other data as they are."""
        return data

    @classmethod
    def known_keys(cls) -> list[str]:
        """Return the keys as the user writes them."""
        return [item.alias or name for name, item in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(data, BaseModel):
            return data
        data = cls.expand(data)
        if not isinstance(data, dict):
            raise invalid(f"expected a mapping of keys, got {describe_value(data)}")
        known_keys = cls.known_keys()
        values: dict[str, Any] = {}
        for key, value in data.items():
            if key in known_keys:
                if value is not None:
                    values[key] = value
            elif not cls._note_unknown(data, key, info.context):
                values[key] = value
        return values

    @classmethod
    def _note_unknown(cls, data: Any, key: str, context: LoadContext | None) -> bool:
        """Add the error at its own position; return False without a context."""
        if context is None:
            return False
        at = data.spots[key].key_at if isinstance(data, YamlMap) else Position(context.folder)
        hint = cls.misplaced.get(key) or did_you_mean(key, cls.known_keys())
        context.problems.add(at, f"unknown key {key}", hint or f"known: {cls._known_text()}")
        return True

    @classmethod
    def _known_text(cls) -> str:
        return " ".join(cls.known_keys())

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> Json:
        described = handler(schema)
        # The definition itself is changed, so that every reference to it allows both forms.
        target = handler.resolve_ref_schema(described)
        short = cls.short_forms(target)
        if short:
            long_form = dict(target)
            target.clear()
            target["anyOf"] = [*short, long_form]
        return described

    @classmethod
    def short_forms(cls, long_form: dict[str, Any]) -> list[Json]:
        """Return the JSON Schemas of the short forms, beside ``long_form``."""
        return list(cls.short_form)
