"""The messages of a row: rendered templates, conversations and images."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bagent.errors import JobError
from bagent.job.spec.job import Job, JobSource
from bagent.job.spec.prompt import ContentSpec, PartSpec, PromptSpec, TextSpec
from bagent.job.templates.bucket_images import (
    MAX_BYTES,
    BucketImages,
    ImageError,
    cut,
)
from bagent.job.templates.conversations import (
    ConversationFault,
    is_conversation,
    read_conversation,
)
from bagent.job.templates.template import Template, TemplateFailure
from bagent.job.validation import Origin
from bagent.remote import bucket_folder, in_bucket
from bagent.remote.drivers import check_driver
from bagent.remote.urls import scheme_of, with_lower_scheme
from bagent.text.suggest import describe_value, did_you_mean, dotted
from bagent.types import Json, Message, Row

IMAGE_MARK = "<image>"
"""Stands for an image in a text of ShareGPT's form."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")
"""The text of a column of bytes that are no UTF-8; paths are shorter or have other characters."""

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


_NO_BUCKETS = BucketImages()


class UnreadImage(TemplateFailure):
    """An image of the row could not be read for a passing reason."""

    kind = "connect"


def image_url(source: str, folder: Path, images: BucketImages = _NO_BUCKETS) -> str:
    """Return the URL to send for ``source``.

    ``http:``, ``https:`` and ``data:`` URLs are passed on; base64 of an image, as columns of bytes
    have it, becomes a URL; the URL of a bucket is read through ``images``; anything else is the
    path of a file in ``folder`` or below it, also after links are followed.

    Raises:
        ImageError: no such file, a file outside the folders, no known image type, too large.
    """
    text = source.strip()
    if _BASE64.fullmatch(text) and (mime := _mime(base64.b64decode(text[:64]))) is not None:
        if len(text) * 3 // 4 > MAX_BYTES:
            raise ImageError("the image is larger than 64 MB")
        return f"data:{mime};base64,{text}"
    if text.lower().startswith(("http://", "https://", "data:image/")):
        return text
    if not text:
        raise ImageError("the image's path is empty")
    if in_bucket(text):
        content = images.read(text)
    elif "://" in text:
        raise ImageError(f"{cut(text)} is neither a path nor the URL of a web server or bucket")
    else:
        content = _read(text, folder)
    mime = _mime(content)
    if mime is None:
        raise ImageError(f"{cut(text)} is no PNG, JPEG, GIF, WebP, BMP, TIFF or AVIF image")
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


def _read(text: str, folder: Path) -> bytes:
    try:
        base = folder.resolve()
        path = (base / text).resolve()
        if not path.is_relative_to(base):
            raise ImageError(f"{cut(text)} is outside the job's folder")
        if not path.is_file():
            raise ImageError(f"no such image: {cut(text)}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ImageError(f"cannot read {cut(text)}: {reason}") from None
    except (ValueError, RuntimeError) as error:
        raise ImageError(f"{cut(text)} is no path: {error}") from None
    if len(content) > MAX_BYTES:
        raise ImageError(f"{cut(text)} is larger than 64 MB")
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


__all__ = ["Prompt", "TemplateFailure"]

_FIELD = re.compile(r"\{\{-?\s*(\w+)\s*-?\}\}")
"""A place in a template that is nothing but a field."""

KeyPath = tuple[str | int, ...]
Data = Mapping[str, Any]
_Render = Callable[[Data, Data | None], Message]


class Prompt:
    """The templates of one prompt.

    ``raw`` says that the prompt is one text without a chat template. ``fields`` are the fields
    of the row that it uses, None where it uses the row as a whole.
    """

    def __init__(self, spec: PromptSpec, source: JobSource, path: KeyPath = ("prompt",)) -> None:
        """Compile ``spec`` from ``path`` in the file of ``source``.

        Raises:
            JobError: a template is wrong, or an image that is no template cannot be used.
            MissingPackage: the driver of a bucket with images is not installed.
        """
        for folder in spec.image_folders:
            check_driver(scheme_of(folder))
        self._images = BucketImages((*source.input_folders, *spec.image_folders))
        self._builder = _Builder(source, self._images)
        self.raw = spec.raw is not None
        self._raw: Template | None = None
        self._column = spec.messages_from
        self._images_column = spec.images_from
        self._folder = source.folder
        self._column_spot = (source, (*path, "messages_from"))
        self._plan: list[Message | _Render] = []
        if spec.raw is not None:
            self._raw = self._builder.text(spec.raw, (*path, "raw"))
        else:
            self._plan = [*self._builder.plan(spec, path)]
        self._templates = self._builder.templates
        self.fields = _all_fields(self._templates)
        if self._column is not None and self.fields is not None:
            self.fields |= {name for name in (self._column, self._images_column) if name}

    @property
    def in_braces(self) -> frozenset[str]:
        """The names in single braces, which a warning is about where they are fields."""
        return frozenset(name for item in self._templates for name in item.in_braces)

    @property
    def tested(self) -> frozenset[str]:
        """The fields on which conditions of the templates depend."""
        return frozenset(name for item in self._templates for name in item.names.tested)

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
        messages = [step if isinstance(step, dict) else step(data, extra) for step in self._plan]
        if self._column is None:
            return messages
        return _around(messages, self._conversation(self._column, data, extra, self._image_url))

    def load_images(self, row: Row) -> list[str]:
        """Read the images in buckets that a row names, so that :meth:`render` need not wait.

        Return their URLs for :meth:`release_images`. It may be called in any thread.
        """
        return self._images.load(self._bucket_urls(row))

    def release_images(self, urls: Sequence[str]) -> None:
        """Drop images whose prompts were rendered."""
        self._images.release(urls)

    def _bucket_urls(self, row: Row) -> list[str]:
        sources: list[str] = []

        def collect(source: str) -> str:
            sources.append(source.strip())
            return source

        with suppress(TemplateFailure):  # rendering reports it
            for template in self._builder.image_templates:
                collect(template.render(row.data, row.extra))
            if self._column is not None:
                self._conversation(self._column, row.data, row.extra, collect)
        return [source for source in sources if in_bucket(source)]

    @property
    def reads_buckets(self) -> bool:
        """Whether rows may name images in buckets."""
        names_images = bool(self._builder.image_templates) or self._column is not None
        return names_images and bool(self._images.folders)

    def _image_url(self, source: str) -> str:
        return image_url(source, self._folder, self._images)

    def _checked_image(self, source: str) -> str:
        """Return the URL of an image; one in a bucket is not read."""
        text = source.strip()
        return self._images.check(text) if in_bucket(text) else self._image_url(source)

    def _conversation(
        self, column: str, data: Data, extra: Data | None, url_of: Callable[[str], str]
    ) -> list[Message]:
        value = _field(column, data, extra)
        try:
            messages = read_conversation(value)
        except ConversationFault as fault:
            raise ConversationFault(f"{column}: {fault}") from None
        images = self._images_column
        if images is not None:
            messages = _place_images(messages, images, _field(images, data, extra))
        return [_with_image_urls(message, column, url_of) for message in messages]

    def _check_column(self, column: str, sample: Sequence[Data]) -> list[str]:
        """Return a warning where some of the first rows have no conversation.

        Raises:
            JobError: none has one.
        """
        faults = []
        for number, row in enumerate(sample, 1):
            try:
                self._conversation(column, row, None, self._checked_image)
            except TemplateFailure as fault:
                faults.append(f"row {number}: {fault}")
        if not faults:
            return []
        source, path = self._column_spot
        if len(faults) < len(sample):
            return [
                f"{dotted(path)}: {len(faults)} of the first {len(sample)} rows cannot be sent;"
                f" {faults[0]}"
            ]
        names = list(dict.fromkeys(name for row in sample for name in row))
        near = did_you_mean(column, names) if column not in names else ""
        raise JobError(
            f"{dotted(path)}: none of the first {len(sample)} rows has a conversation: {faults[0]}",
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
            column called row, which the whole row hides; conversations that would be sent as text;
            rows without the conversation that is to be sent.

        Raises:
            JobError: at the first unknown name; none of the rows has a conversation.
        """
        for template in self._templates:
            template.check(sample, extra or {})
        faults = []
        if self._column is not None and sample and self._column not in (extra or {}):
            faults = self._check_column(self._column, sample)
        hidden = faults + [
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


def _field(name: str, data: Data, extra: Data | None) -> Any:
    if extra and name in extra:
        return extra[name]
    if name not in data:
        raise ConversationFault(f"the row has no field {name}")
    return data[name]


def _around(messages: list[Message], conversation: list[Message]) -> list[Message]:
    """Return a row's conversation behind the job's system message and before its user message.

    A system message of the row's own continues that of the job: many chat templates take one only.
    """
    if not messages:
        return conversation
    before = [message for message in messages if message["role"] == "system"]
    after = [message for message in messages if message["role"] != "system"]
    first = conversation[0]
    if before and first["role"] in ("system", "developer") and isinstance(first["content"], str):
        text = f"{before[0]['content']}\n\n{first['content']}"
        return [{**first, "content": text}, *conversation[1:], *after]
    return [*before, *conversation, *after]


def _place_images(messages: list[Message], column: str, value: Json) -> list[Message]:
    """Put the images of a column in the places of ``<image>`` in the user's texts.

    Without such marks they come before the first user's text.

    Raises:
        ConversationFault: there are more or fewer marks than images.
    """
    images = value if isinstance(value, list) else [] if value is None else [value]
    texts = {
        index: message["content"]
        for index, message in enumerate(messages)
        if message["role"] == "user" and isinstance(message["content"], str)
    }
    marks = sum(text.count(IMAGE_MARK) for text in texts.values())
    if not marks and texts:
        first = min(texts)
        marks, texts[first] = len(images), IMAGE_MARK * len(images) + texts[first]
    if marks != len(images):
        raise ConversationFault(
            f"{column}: {IMAGE_MARK} stands {marks} times, and the images are {len(images)}"
        )
    parts = iter([_image(_source_of(image, column)) for image in images])
    return [
        {**message, "content": _with_parts(texts[index], parts)} if index in texts else message
        for index, message in enumerate(messages)
    ]


def _with_parts(text: str, images: Iterator[Message]) -> Json:
    """Return a text with the next images in the places of its marks."""
    first, *others = text.split(IMAGE_MARK)
    if not others:
        return text
    parts: list[Message] = [{"type": "text", "text": first}]
    for piece in others:
        parts += [next(images), {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text", IMAGE_MARK).strip()]


def _source_of(image: Json, column: str) -> str:
    """Return the text of an image in a row: a path, a URL, base64, or ``{bytes, path}``."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path") or image.get("url")
    if not isinstance(image, str):
        raise ConversationFault(f"{column}: {describe_value(image)} is no image")
    return image


def _with_image_urls(message: Message, column: str, url_of: Callable[[str], str]) -> Message:
    """Return a message whose images are URLs, in OpenAI's form.

    Data sets also write ``{type: image, image: SOURCE}`` or ``{type: image, url: SOURCE}``.
    """
    content = message["content"]
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return message
    try:
        parts = [_image_of(part, column, url_of) if _is_image(part) else part for part in content]
    except ImageError as error:
        kind = UnreadImage if error.passing else ConversationFault
        raise kind(f"{column}: {error}") from None
    return {**message, "content": parts}


def _is_image(part: dict[str, Json]) -> bool:
    return part["type"] in ("image", "image_url")


def _image_of(part: dict[str, Any], column: str, url_of: Callable[[str], str]) -> Message:
    value = part.get("image_url") or part.get("image") or part.get("url")
    details = value if isinstance(value, dict) and "url" in value else {}
    url = url_of(_source_of(details.get("url", value), column))
    return {"type": "image_url", "image_url": {**details, "url": url}}


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

    def __init__(self, source: JobSource, images: BucketImages) -> None:
        self._source = source
        self._images = images
        self.templates: list[Template] = []
        self.image_templates: list[Template] = []
        """Those of images that differ from row to row."""

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
            self.image_templates.append(template)
            beginning = template.text.partition("{")[0].strip()
            if bucket_folder(beginning):
                self._images.allow(with_lower_scheme(beginning))
            return _image_part(template, self._source.folder, self._images)
        text = template.constant.strip()
        try:
            return _image(image_url(text, self._source.folder, BucketImages((text,))))
        except ImageError as error:
            at = self._source.position((*path, key))
            raise JobError(f"{dotted(short_path)}: {error}", at=at) from None


def _with_text(message: Message, key: str, template: Template) -> Message | _Render:
    """Return ``message`` with the template's text under ``key``, or what renders it."""
    if template.constant is not None:
        return {**message, key: template.constant}
    render = template.render
    return lambda data, extra: {**message, key: render(data, extra)}


def _image_part(template: Template, folder: Path, images: BucketImages) -> _Render:
    def render(data: Data, extra: Data | None) -> Message:
        try:
            return _image(image_url(template.render(data, extra), folder, images))
        except ImageError as error:
            kind = UnreadImage if error.passing else TemplateFailure
            raise kind(f"{template.where}: {error}") from None

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
