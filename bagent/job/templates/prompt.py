"""The messages of a row: rendered templates, conversations and images."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagent.errors import JobError
from bagent.job.source_map import Origin
from bagent.job.spec.job import Job, JobSource
from bagent.job.spec.prompt import ContentSpec, PartSpec, PromptSpec, TextSpec
from bagent.job.templates.template import Template, TemplateFailure
from bagent.text.json import decode_json
from bagent.text.suggest import describe_value, did_you_mean, dotted
from bagent.types import Json, Message

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
}
"""Who speaks in a ShareGPT turn, as the role of a message."""


class ConversationFault(TemplateFailure):
    """The column of a row holds no conversation."""

    kind = "bad_input"


def read_conversation(value: Json) -> list[Message]:
    """Return the messages in a row's column, in OpenAI's form.

    Takes a list of ``{role, content}`` or of ``{from, value}``, or its JSON text, as tables have
    it.

    Raises:
        ConversationFault: it is no such list; the text says which turn is wrong.
    """
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except ValueError:
            raise ConversationFault("a text, no list of messages") from None
    if not isinstance(value, list):
        raise ConversationFault(f"{describe_value(value)}, no list of messages")
    if not value:
        raise ConversationFault("a list without messages")
    return [_message(turn, number) for number, turn in enumerate(value, 1)]


def is_conversation(value: Json) -> bool:
    """Return whether a value is a list of messages; a text is not taken for one."""
    try:
        return isinstance(value, list) and bool(read_conversation(value))
    except ConversationFault:
        return False


def _message(turn: Json, number: int) -> Message:
    if not isinstance(turn, dict):
        raise ConversationFault(
            f"message {number} is {describe_value(turn)}, not {{role, content}}"
        )
    if turn.get("role") is None and turn.get("from") is not None:
        return _from_turn(turn, number)
    role, content = turn.get("role"), turn.get("content")
    if role not in _ROLES:
        raise ConversationFault(f"message {number} has the role {describe_value(role)}")
    # Tables fill in the fields that only other messages have.
    message: Message = {name: field for name, field in turn.items() if field is not None}
    if isinstance(content, str) or (isinstance(content, list) and _all_parts(content)):
        return message
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {"content": None, **message}
    raise ConversationFault(f"message {number} has the content {describe_value(content)}")


def _all_parts(content: list[Any]) -> bool:
    return bool(content) and all(isinstance(part, dict) and "type" in part for part in content)


def _from_turn(turn: dict[str, Json], number: int) -> Message:
    role = _SPEAKERS.get(str(turn["from"]).lower())
    if role is None:
        speakers = ", ".join(_SPEAKERS)
        raise ConversationFault(
            f"turn {number} is from {describe_value(turn['from'])}, not {speakers}"
        )
    if not isinstance(turn.get("value"), str):
        raise ConversationFault(f"turn {number} has the value {describe_value(turn.get('value'))}")
    return {"role": role, "content": turn["value"]}


MAX_BYTES = 64 * 1024 * 1024
"""Largest image file, before encoding."""

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


class ImageError(Exception):
    """An image cannot be used; the text says why."""


def image_url(source: str, folder: Path) -> str:
    """Return the URL to send for ``source``.

    ``http:``, ``https:`` and ``data:`` URLs are passed on; anything else is the path of a file
    in ``folder`` or below it, also after links are followed.

    Raises:
        ImageError: no such file, a file outside the folder, no known image type, too large.
    """
    text = source.strip()
    if text.lower().startswith(("http://", "https://", "data:image/")):
        return text
    if not text:
        raise ImageError("the image's path is empty")
    if "://" in text:
        raise ImageError(f"{_cut(text)} is neither a path nor an http(s) URL")
    content = _read(text, folder)
    mime = _mime(content)
    if mime is None:
        raise ImageError(f"{_cut(text)} is no PNG, JPEG, GIF, WebP, BMP, TIFF or AVIF image")
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


def _read(text: str, folder: Path) -> bytes:
    try:
        base = folder.resolve()
        path = (base / text).resolve()
        if not path.is_relative_to(base):
            raise ImageError(f"{_cut(text)} is outside the job's folder")
        if not path.is_file():
            raise ImageError(f"no such image: {_cut(text)}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ImageError(f"cannot read {_cut(text)}: {reason}") from None
    except (ValueError, RuntimeError) as error:
        raise ImageError(f"{_cut(text)} is no path: {error}") from None
    if len(content) > MAX_BYTES:
        raise ImageError(f"{_cut(text)} is larger than 64 MB")
    return content


def _mime(content: bytes) -> str | None:
    """Detect the media type from the first bytes, as browsers do.

    Source: https://mimesniff.spec.whatwg.org/#matching-an-image-type-pattern
    """
    for signature, mime in _SIGNATURES:
        if content.startswith(signature):
            return mime
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    if content[4:12] in (b"ftypavif", b"ftypavis"):
        return "image/avif"
    return None


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


__all__ = ["Prompt", "TemplateFailure"]

_FIELD = re.compile(r"\{\{-?\s*(\w+)\s*-?\}\}")
"""A place in a template that is nothing but a field."""

KeyPath = tuple[str | int, ...]
Data = Mapping[str, Any]
_Render = Callable[[Data, Data | None], Message]


class Prompt:
    """The templates of one prompt.

    ``raw`` says that the prompt is one text without a chat template. ``fields`` are the fields
    of the row that it uses, None where it uses the row as a whole. ``constant_messages`` are the
    first messages that are the same for every row.
    """

    def __init__(self, spec: PromptSpec, source: JobSource, path: KeyPath = ("prompt",)) -> None:
        """Compile ``spec`` from ``path`` in the file of ``source``.

        Raises:
            JobError: a template is wrong, or an image that is no template cannot be used.
        """
        self._builder = _Builder(source)
        self.raw = spec.raw is not None
        self._raw: Template | None = None
        self._column = spec.messages_from
        self._column_spot = (source, (*path, "messages_from"))
        self._plan: list[Message | _Render] = []
        if spec.raw is not None:
            self._raw = self._builder.text(spec.raw, (*path, "raw"))
        else:
            self._plan = [*self._builder.plan(spec, path)]
        self._templates = self._builder.templates
        self.fields = _all_fields(self._templates)
        if self._column is not None:
            self.fields = frozenset({self._column})
        self.constant_messages = _leading(self._plan)

    @classmethod
    def from_job(cls, job: Job) -> Prompt:
        """Return the job's own prompt.

        Raises:
            JobError: the job has none, or it is wrong.
        """
        if job.prompt is None:
            raise JobError(
                "the job has no prompt",
                at=job.source.root.value_at,
                hint='write prompt: "... {{ field }} ..."',
            )
        return cls(job.prompt, job.source)

    def render(self, data: Data, extra: Data | None = None) -> list[Message]:
        """Return the messages for one row, in OpenAI form.

        Messages without a field are the same objects for every row: do not change them.

        Args:
            data: the row's fields.
            extra: further names, such as what earlier stages answered; they come before fields.

        Raises:
            TemplateFailure: the row lacks a field, cannot be rendered for another reason, or the
                prompt is raw.
        """
        if self._raw is not None:
            raise TemplateFailure("the prompt is raw, it has no messages")
        if self._column is not None:
            return self._conversation(self._column, data, extra)
        return [step if isinstance(step, dict) else step(data, extra) for step in self._plan]

    def _conversation(self, column: str, data: Data, extra: Data | None) -> list[Message]:
        if extra and column in extra:
            data = extra
        if column not in data:
            raise ConversationFault(f"the row has no field {column}")
        try:
            return read_conversation(data[column])
        except ConversationFault as fault:
            raise ConversationFault(f"{column}: {fault}") from None

    def _check_column(self, column: str, sample: Sequence[Data]) -> None:
        """Refuse a column in which none of the first rows has a conversation."""
        first: ConversationFault | None = None
        for row in sample:
            try:
                self._conversation(column, row, None)
            except ConversationFault as fault:
                first = first or fault
            else:
                return
        source, path = self._column_spot
        names = list(dict.fromkeys(name for row in sample for name in row))
        near = did_you_mean(column, names) if column not in names else ""
        raise JobError(
            f"prompt.messages_from: none of the first {len(sample)} rows has a conversation:"
            f" {first}",
            hint=near or "a list of {role, content}, or of {from, value}",
            at=source.position(path),
        )

    def render_raw(self, data: Data, extra: Data | None = None) -> str:
        """Return the text of a raw prompt for one row.

        Raises:
            TemplateFailure: as :meth:`render`, or the prompt is not raw.
        """
        if self._raw is None:
            raise TemplateFailure("the prompt is made of messages, not raw")
        return self._raw.render(data, extra)

    def check(
        self, sample: Sequence[Data], extra: Mapping[str, frozenset[str] | None] | None = None
    ) -> list[str]:
        """See that every name is a field of some row of ``sample``, or guarded, or in ``extra``.

        Args:
            sample: the first rows.
            extra: further names, each with the properties that it may have; None: any.

        Returns:
            Warnings for people: fields in single braces, which are not replaced, and a
            column called row, which the whole row hides; conversations that would be sent as text.

        Raises:
            JobError: at the first unknown name; none of the rows has a conversation.
        """
        for template in self._templates:
            template.check(sample, extra or {})
        if self._column is not None and sample and self._column not in (extra or {}):
            self._check_column(self._column, sample)
        hidden = [
            f"{template.where}: {{{{ row }}}} is the whole row; the column row is {{{{ row.row }}}}"
            for template in self._templates
            if template.names.row
            and template.names.fields is None
            and any("row" in row for row in sample)
        ]
        hidden += _conversations_as_text(self._templates, sample)
        return hidden + [
            f"{template.where}: {{{name}}} is sent as it is; {{{{ {name} }}}} stands for the field"
            for template in self._templates
            for name in template.single_braces(sample)
        ]


def _conversations_as_text(templates: Sequence[Template], sample: Sequence[Data]) -> list[str]:
    """Warnings of lists of messages, and other lists that are a whole prompt, sent as text."""
    warnings = []
    for template in templates:
        for name in dict.fromkeys(_FIELD.findall(template.text)):
            value = next((row[name] for row in sample if row.get(name) is not None), None)
            alone = _FIELD.fullmatch(template.text.strip()) is not None
            if is_conversation(value):
                hint = f"; prompt: {{messages_from: {name}}} sends it as the conversation"
            elif isinstance(value, list) and alone:
                hint = ""
            else:
                continue
            warnings.append(
                f"{template.where}: the list {name} is sent as one message of JSON text{hint}"
            )
    return warnings


class _Builder:
    """Makes templates and message makers, and remembers every template."""

    def __init__(self, source: JobSource) -> None:
        self._source = source
        self.templates: list[Template] = []

    def plan(self, spec: PromptSpec, path: KeyPath) -> Iterable[Message | _Render]:
        if spec.system is not None:
            system = self.text(spec.system, (*path, "system"))
            if system.constant != "":
                yield _with_text({"role": "system"}, "content", system)
        if spec.user is not None:
            yield _with_text({"role": "user"}, "content", self.text(spec.user, (*path, "user")))
        for index, message in enumerate(spec.messages):
            where = (*path, "messages", index, "content")
            yield self._message(message.role, message.content, where)

    def text(self, spec: TextSpec | ContentSpec, path: KeyPath) -> Template:
        if spec.file is not None:
            text = self._source.texts.get(spec.file.path, "")
            origin = Origin(self._source.display_path(spec.file), text, 0, len(text), 1, 1)
            return self._template(text, path, origin)
        return self._template(spec.text or "", path, self._source.origin(path))

    def _template(self, text: str, path: KeyPath, origin: Origin) -> Template:
        template = Template(text, dotted(path), origin)
        self.templates.append(template)
        return template

    def _message(self, role: str, content: ContentSpec, path: KeyPath) -> Message | _Render:
        if not content.parts:
            return _with_text({"role": role}, "content", self.text(content, path))
        makers = [
            self._part(part, (*path, "parts", index)) for index, part in enumerate(content.parts)
        ]
        if all(isinstance(maker, dict) for maker in makers):
            return {"role": role, "content": makers}

        def render(data: Data, extra: Data | None) -> Message:
            parts = [maker if isinstance(maker, dict) else maker(data, extra) for maker in makers]
            return {"role": role, "content": parts}

        return render

    def _part(self, part: PartSpec, path: KeyPath) -> Message | _Render:
        key = "image" if part.text is None else "text"
        # Shown as it is mostly written, without the long form's "parts".
        short_path = (*path[:-2], path[-1], key)
        origin = self._source.origin((*path, key))
        if part.text is not None:
            return _with_text(
                {"type": "text"}, "text", self._template(part.text, short_path, origin)
            )
        template = self._template(part.image or "", short_path, origin)
        if template.constant is None:
            return _image_part(template, self._source.folder)
        try:
            return _image(image_url(template.constant, self._source.folder))
        except ImageError as error:
            at = self._source.position((*path, key))
            raise JobError(f"{dotted(short_path)}: {error}", at=at) from None


def _with_text(message: Message, key: str, template: Template) -> Message | _Render:
    """Return ``message`` with the template's text under ``key``, or what renders it."""
    if template.constant is not None:
        return {**message, key: template.constant}
    render = template.render
    return lambda data, extra: {**message, key: render(data, extra)}


def _image_part(template: Template, folder: Path) -> _Render:
    def render(data: Data, extra: Data | None) -> Message:
        try:
            return _image(image_url(template.render(data, extra), folder))
        except ImageError as error:
            raise TemplateFailure(f"{template.where}: {error}") from None

    return render


def _image(url: str) -> Message:
    return {"type": "image_url", "image_url": {"url": url}}


def _all_fields(templates: Sequence[Template]) -> frozenset[str] | None:
    fields: frozenset[str] = frozenset()
    for template in templates:
        if template.fields is None:
            return None
        fields |= template.fields
    return fields


def _leading(plan: Sequence[Message | _Render]) -> list[Message]:
    messages: list[Message] = []
    for step in plan:
        if not isinstance(step, dict):
            break
        messages.append(step)
    return messages
