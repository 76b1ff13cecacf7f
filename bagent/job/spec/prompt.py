"""Prompts and input: texts, files, messages, images."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from bagent.job.spec.paths import (
    BucketFoldersKind,
    InputPath,
    InputPathsKind,
    PathKind,
    ResolvedPath,
)
from bagent.job.spec.types import TEXT, Choice, Kind, Section, Text, invalid
from bagent.job.validation import LoadContext
from bagent.remote import bucket_folder
from bagent.text.suggest import describe_value
from bagent.types import Json

Role = Literal["system", "user", "assistant", "developer"]


# In a YAML file these can only come from escapes, most often of LaTeX: "\\frac", "\\beta", "\\rho".
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]|\r(?!\n)")


@dataclass(frozen=True)
class PromptText(Kind):
    """Text of a prompt, exactly as written."""

    def read(self, value: Any, context: LoadContext | None) -> str:
        """Return the text; a control character in it is an escape gone wrong."""
        text = getattr(value, "source", value)
        if isinstance(text, bool):
            text = "true" if text else "false"
        if not isinstance(text, str):
            hint = 'quote a text that begins with {: "{ ... }"' if isinstance(value, dict) else ""
            raise invalid(f"expected text, got {describe_value(value)}", hint)
        if match := _CONTROL.search(text):
            raise invalid(
                f"the text holds the control character U+{ord(match[0]):04X}",
                "in \"double quotes\" \\ is special: use 'single quotes', or | and lines below it",
            )
        return str(text)

    def describe(self) -> Json:
        """Text."""
        return TEXT


class TextSpec(Section):
    """A text, or the file that holds it."""

    short_form: ClassVar[list[Json]] = [PromptText().describe()]

    text: Annotated[str | None, PromptText()] = Field(default=None, description="The text itself.")
    file: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="The file that holds it."
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand anything but a mapping to the text."""
        return data if isinstance(data, dict) else {"text": data}

    @model_validator(mode="after")
    def _check_forms(self) -> TextSpec:
        if (self.text is None) == (self.file is None):
            raise invalid("expected a text or {file: PATH}")
        return self


class PartSpec(Section):
    """One part of a message: text or an image."""

    misplaced: ClassVar[dict[str, str]] = {
        "type": "a part is {text: ...} or {image: PATH or URL}",
        "image_url": "write {image: URL}",
    }

    text: Annotated[str | None, PromptText()] = Field(default=None, description="Text.")
    image: Annotated[str | None, PromptText()] = Field(
        default=None,
        description="Path of an image under the job's folder, or its URL, also in a bucket; may use"
        " fields.",
    )

    @model_validator(mode="after")
    def _check_forms(self) -> PartSpec:
        if (self.text is None) == (self.image is None):
            raise invalid("expected {text: ...} or {image: PATH or URL}")
        return self


class ContentSpec(Section):
    """What one message says: a text, a file's text, or parts."""

    text: Annotated[str | None, PromptText()] = Field(default=None, description="The text itself.")
    file: Annotated[ResolvedPath | None, PathKind()] = Field(
        default=None, description="The file that holds it."
    )
    parts: tuple[PartSpec, ...] = Field(default=(), description="Texts and images, in order.")

    @classmethod
    def short_forms(cls, long_form: dict[str, Any]) -> list[Json]:
        """Return a text, or the list of parts."""
        parts = {"type": "array", "items": long_form["properties"]["parts"]["items"]}
        return [PromptText().describe(), {**parts, "minItems": 1}]

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a list to the parts, and anything else but a mapping to the text."""
        if isinstance(data, list):
            return {"parts": data}
        return data if isinstance(data, dict) else {"text": data}

    @model_validator(mode="after")
    def _check_forms(self) -> ContentSpec:
        if sum((self.text is not None, self.file is not None, bool(self.parts))) != 1:
            raise invalid("expected a text, {file: PATH} or a list of parts")
        return self


_FIELD = re.compile(
    r"""(?:\{\{-?\s*(?:row\.|row\[['"])?)?(?P<name>[^{}'"\[\]|]+?)(?:['"]\])?(?:\s*-?\}\})?"""
)
"""The name of a field, alone or as the only tag of a template."""


class MessageSpec(Section):
    """One message of the conversation that a row begins with."""

    role: Annotated[Role, Choice(Role)] = Field(description="Who speaks.")
    content: ContentSpec = Field(description="What is said.")


class PromptSpec(Section):
    """What is said to the model; Jinja in a sandbox fills in the row's fields."""

    short_form: ClassVar[list[Json]] = [PromptText().describe()]

    system: TextSpec | None = Field(default=None, description="The system message.")
    user: TextSpec | None = Field(default=None, description="The user message.")
    messages: tuple[MessageSpec, ...] = Field(default=(), description="All messages, written out.")
    messages_from: Annotated[str | None, Text(empty=False)] = Field(
        default=None,
        description="The field that holds the row's conversation: a list of {role, content}, or"
        " ShareGPT's {from, value}. system comes before it, user after it.",
        examples=["conversations"],
    )
    images_from: Annotated[str | None, Text(empty=False)] = Field(
        default=None,
        description="The field with the images of that conversation, in the places of <image>.",
        examples=["images"],
    )
    image_folders: Annotated[tuple[str, ...], BucketFoldersKind()] = Field(
        default=(),
        description="Folders of buckets in which rows may name images, beside those of input files"
        " that are no patterns and those that an image of the prompt begins with.",
        examples=[["s3://bucket/photos/"]],
    )
    raw: TextSpec | None = Field(
        default=None, description="The whole prompt, without a chat template."
    )

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand anything but a mapping to the user message."""
        if not isinstance(data, dict):
            return {"user": data}
        messages = data.get("messages")
        field = _FIELD.fullmatch(messages.strip()) if isinstance(messages, str) else None
        if field is not None:
            raise invalid(
                f"expected a list, got {describe_value(messages)}",
                f"prompt: {{messages_from: {field['name']}}} sends the conversation in that field",
                key="messages",
            )
        return data

    @model_validator(mode="after")
    def _check_forms(self) -> PromptSpec:
        forms = [
            bool(self.user or self.system) or self.messages_from is not None,
            bool(self.messages),
            self.raw is not None,
        ]
        if sum(forms) > 1:
            raise invalid("messages and raw exclude each other, and system, user and messages_from")
        if not any(forms):
            raise invalid("expected user, messages, messages_from or raw")
        if self.images_from and not self.messages_from:
            raise invalid(
                "there is no messages_from",
                'without it write messages: [{role: user, content: [{image: "{{ field }}"}, ...]}]',
                key="images_from",
            )
        parts = [part for message in self.messages for part in message.content.parts]
        if self.image_folders and not (self.messages_from or any(part.image for part in parts)):
            raise invalid(
                "the prompt has no images",
                'write messages: [{role: user, content: [{image: "{{ field }}"}, ...]}]',
                key="image_folders",
            )
        if self.system and not (self.user or self.messages_from):
            raise invalid("user is missing", "a system message alone asks nothing", key="system")
        return self


class InputSpec(Section):
    """Where rows come from: ``path``, ``files`` or ``sql``, exactly one."""

    short_form: ClassVar[list[Json]] = [InputPathsKind().describe()]

    path: Annotated[tuple[InputPath, ...], InputPathsKind()] = Field(
        default=(), description="A path, a glob, a list of them, or - for stdin."
    )
    files: Annotated[tuple[InputPath, ...], InputPathsKind(stdin=False)] = Field(
        default=(),
        description="Text files; each is a row with path and text.",
        examples=["papers/*.txt"],
    )
    sql: Annotated[str | None, Text(empty=False)] = Field(
        default=None, description="A DuckDB query; paths in it are relative to the job file."
    )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders in buckets of the input's files; those of patterns are not known."""
        files = (item.path for item in self.path if not item.is_glob)
        return tuple(filter(None, map(bucket_folder, files)))

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Expand a text or a list to the path."""
        return data if isinstance(data, dict) else {"path": data}

    @model_validator(mode="after")
    def _check_forms(self) -> InputSpec:
        if sum((bool(self.path), bool(self.files), self.sql is not None)) != 1:
            raise invalid("expected a path, {files: ...} or {sql: ...}")
        return self
