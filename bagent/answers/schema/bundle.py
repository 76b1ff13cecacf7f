"""One self-contained document out of schema files that refer to each other.

A schema may refer to files in its own folder and below, by relative path. Other folders, absolute
paths, ``file:`` and, unless allowed, ``http:`` and ``https:`` are refused before they are opened.

All references are resolved at load and written as ``#/POINTER``, the only form that every
validator and inference server knows. Parts of other files are copied into ``$defs``
(``definitions`` up to draft 7). Names that only serve references (inner ``$id``, ``$anchor``,
``$dynamicAnchor``) are dropped.

A ``$dynamicRef`` whose anchor exists once becomes a plain reference. Where the same dynamic anchor
exists several times, a single file is kept as it is, and several files are refused.
"""

from __future__ import annotations

import codecs
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from bagent.answers.messages import pointer as pointer_text
from bagent.answers.messages import shorten
from bagent.answers.schema.dialects import Pointer, SchemaDialect, children
from bagent.errors import Position, SchemaError
from bagent.text.unicode import MAX_DEPTH, clean_json, nested_deeper
from bagent.types import Json

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_FETCH_SECONDS = 20.0
_FETCH_BYTES = 10_000_000
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_REFS = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_NAMES = frozenset({*_ANCHORS, "$recursiveAnchor"})
_DEFINITIONS = ("$defs", "definitions")
_POINTER_SAFE = "/~!$&'()*+,;=:@"


def parse_schema(data: bytes, at: str | Path, warnings: list[str]) -> Json:
    """Return the JSON value of a schema file's bytes; a repeated key is added to ``warnings``.

    Raises:
        SchemaError: with file, line and column where the bytes are not UTF-8 JSON.
    """
    if data.startswith(_UTF16) or b"\0" in data[:64]:
        raise SchemaError("the file is UTF-16", hint="save it as UTF-8", at=Position(at))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        message = f"not UTF-8 (byte 0x{data[error.start]:02x})"
        raise SchemaError(message, hint="save it as UTF-8", at=Position(at, line, column)) from None
    if not text.strip():
        raise SchemaError(
            "the file is empty",
            at=Position(at),
            hint='write a JSON Schema into it, such as {"type": "object"}',
        )

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            names = [name for name, _ in items]
            twice = sorted({name for name in names if names.count(name) > 1})
            warnings.append(f"{at}: repeated key {', '.join(twice)}: the last one holds")
        return values

    def constant(word: str) -> float:
        raise SchemaError(f"{word} is not JSON", at=Position(at), hint="write null instead")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = Position(at, error.lineno, error.colno)
        raise SchemaError(f"not JSON: {error.msg}", at=where) from None
    except ValueError as error:
        raise SchemaError(f"not JSON: {error}", at=Position(at)) from None
    except RecursionError:
        raise SchemaError(_TOO_DEEP, at=Position(at), hint="write a flatter schema") from None
    if nested_deeper(value):
        raise SchemaError(_TOO_DEEP, at=Position(at), hint="write a flatter schema")
    return clean_json(value)


class SchemaFiles:
    """Reads the files of one schema from ``folder`` (and the web, only if ``allow_remote``).

    A file goes by its name: its path relative to ``folder``, or its URL.
    """

    def __init__(self, folder: Path, *, allow_remote: bool = False) -> None:
        self.folder = folder
        self.allow_remote = allow_remote
        self.warnings: list[str] = []

    def display_name(self, name: str) -> str | Path:
        """Return the name of a file as people should read it."""
        return name if _is_url(name) else self.folder / name

    def name_of(self, reference: str, *, inside: str) -> str:
        """Return the name of the file that ``reference`` (no fragment) in file ``inside`` means.

        Raises:
            ValueError: with the reason, where such a file may not be read. Nothing was touched.
        """
        parts = urlsplit(urljoin(inside, reference) if _is_url(inside) else reference)
        if parts.scheme in ("http", "https"):
            if self.allow_remote or _official_metaschema(parts.geturl()) is not None:
                return parts.geturl()
            raise ValueError("would be fetched from the network")
        if parts.scheme or parts.netloc:
            raise ValueError("is not a relative path")
        path = unquote(parts.path)
        if parts.query or "\0" in path or "\\" in path or path.startswith("/"):
            raise ValueError("is not a relative path")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(inside), path))
        if name == ".." or name.startswith("../"):
            raise ValueError(f"is outside the folder {self.folder}")
        return name

    def read(self, name: str, *, confined: bool = True) -> Json:
        """Return the JSON value of the file ``name``.

        Links to outside the folder are followed only where not ``confined``.

        Raises:
            ValueError: it cannot be read, or is a link to outside the folder.
            SchemaError: it is not UTF-8 JSON.
        """
        if _is_url(name):
            metaschema = _official_metaschema(name)
            if metaschema is not None:
                return metaschema
            return parse_schema(_fetch(name), name, self.warnings)
        path = self.folder / name
        try:
            if confined and not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"is a link to outside the folder {self.folder}")
            if not path.is_file():
                raise ValueError("is not a file" if path.exists() else "is not there")
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from None
        except RuntimeError:  # how Python 3.11 and 3.12 tell of links in a circle
            raise ValueError("is a link to itself") from None
        return parse_schema(data, path, self.warnings)


def _official_metaschema(url: str) -> Json:
    """Return the metaschema that ``url`` names, from the installed package; None for others."""
    if not url.removeprefix("http").lstrip("s").startswith("://json-schema.org/draft"):
        return None
    from jsonschema_specifications import REGISTRY

    resource = REGISTRY.get(url) or REGISTRY.get(f"{url}#")
    if resource is None:
        return None
    root = url.partition("/meta/")[0] + ("/schema" if "/meta/" in url else "")
    return _static(resource.contents, root)


_DYNAMIC = ("$dynamicAnchor", "$recursiveAnchor", "$vocabulary")


def _static(schema: Json, root: str) -> Json:
    """Return a metaschema without dynamic references: nothing here extends it."""
    if isinstance(schema, list):
        return [_static(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _static(item, root) for key, item in schema.items() if key not in _DYNAMIC}
    for key in ("$dynamicRef", "$recursiveRef"):
        if isinstance(changed.get(key), str):
            del changed[key]
            changed["$ref"] = root
    return changed


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _fetch(url: str) -> bytes:
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=_FETCH_SECONDS) as answer:  # nosec B310 # http(s)
            data: bytes = answer.read(_FETCH_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be fetched: {error}") from None
    if len(data) > _FETCH_BYTES:
        raise ValueError(f"is larger than {_FETCH_BYTES} bytes")
    return data


@dataclass(slots=True)
class _Site:
    """An object schema: the base URI of its references and its resource's place."""

    schema: dict[str, Any]
    base: str
    resource: Pointer


@dataclass(slots=True)
class _Document:
    """One file: ``sites`` are its schemas by place, ``anchors`` go by (resource, name)."""

    name: str
    data: Json
    sites: dict[Pointer, _Site] = field(default_factory=dict)
    anchors: dict[tuple[Pointer, str], Pointer] = field(default_factory=dict)


_Target = tuple[str, Pointer]

SchemaCheck = Callable[[Json, Position | None], None]
"""Raises SchemaError for a value, and where it is from, that is no schema."""


class Bundler:
    """Makes one document of the schema file ``name`` with value ``root`` and what it refers to.

    ``check`` is called with each value read and where it is from; it raises SchemaError for what
    is no schema. ``files`` says what may be read.
    """

    def __init__(self, files: SchemaFiles, dialect: SchemaDialect, check: SchemaCheck) -> None:
        self._files = files
        self._dialect = dialect
        self._check = check
        self._documents: dict[str, _Document] = {}
        self._ids: dict[str, _Target] = {}
        self._targets: dict[tuple[str, Pointer, str], _Target] = {}
        self._dynamic: Counter[str] = Counter()
        self._todo: list[tuple[_Document, Pointer]] = []

    def bundle(self, root: dict[str, Any], name: str, at: Position | None) -> dict[str, Any]:
        """Return the self-contained document.

        Raises:
            SchemaError: a reference leads nowhere or where it may not.
        """
        self._root = name
        self._at = at
        self._open(name, root)
        while self._todo:
            document, location = self._todo.pop()
            self._follow(document, location)
        self._refuse_loops()
        if self._is_dynamic():
            if len(self._documents) == 1:
                return root
            raise SchemaError(
                "a $dynamicAnchor is there more than once, in schemas of several files",
                hint="put them in one file",
                at=at,
            )
        return _Writer(self._documents, self._targets, self._dialect, name).write()

    def _is_dynamic(self) -> bool:
        used = {key for _, _, key in self._targets}
        if "$recursiveRef" in used and self._dynamic["$recursiveAnchor"] > 1:
            return True
        return "$dynamicRef" in used and any(count > 1 for count in self._dynamic.values())

    def _open(self, name: str, data: Json) -> _Document:
        document = _Document(name, data)
        self._documents[name] = document
        self._index(document, (), _Site({}, name, ()))
        return document

    def _index(self, document: _Document, start: Pointer, around: _Site) -> None:
        """Note all schemas from ``start`` on: their bases, names and references."""
        stack = [(start, _at(document.data, start), around.base, around.resource)]
        while stack:
            location, schema, base, resource = stack.pop()
            if not isinstance(schema, dict) or location in document.sites:
                continue
            ident = schema.get(self._dialect.id_key)
            if isinstance(ident, str) and not (self._dialect.ref_alone and "$ref" in schema):
                if ident.startswith("#"):
                    document.anchors.setdefault((resource, ident[1:]), location)
                else:
                    base, resource = _join(base, ident).rstrip("#"), location
                    self._ids.setdefault(base, (document.name, location))
            self._note_anchors(document, schema, resource, location)
            document.sites[location] = _Site(schema, base, resource)
            self._todo.append((document, location))
            stack.extend((location + at, child, base, resource) for at, child in children(schema))

    def _note_anchors(
        self, document: _Document, schema: dict[str, Any], resource: Pointer, location: Pointer
    ) -> None:
        for key in _ANCHORS:
            if isinstance(schema.get(key), str):
                document.anchors.setdefault((resource, schema[key]), location)
        if isinstance(schema.get("$dynamicAnchor"), str):
            self._dynamic[schema["$dynamicAnchor"]] += 1
        if schema.get("$recursiveAnchor") is True:
            self._dynamic["$recursiveAnchor"] += 1

    def _follow(self, document: _Document, location: Pointer) -> None:
        site = document.sites[location]
        for key in _REFS:
            if key not in site.schema:
                continue
            reference = site.schema[key]
            if not isinstance(reference, str):
                raise self._error(document, location, key, reference, "is not text")
            try:
                target = self._resolve(document, site, reference)
            except ValueError as error:
                raise self._error(document, location, key, reference, str(error)) from None
            self._targets[document.name, location, key] = target
            there = self._documents[target[0]]
            if target[1] not in there.sites:
                self._index(there, target[1], _enclosing(there, target[1]))

    def _resolve(self, document: _Document, site: _Site, reference: str) -> _Target:
        uri, _, fragment = reference.partition("#")
        name, resource = document.name, site.resource
        if uri:
            named = self._ids.get(_join(site.base, uri).rstrip("#"))
            name, resource = named or (self._load(uri, document).name, ())
        return name, _fragment(self._documents[name], resource, unquote(fragment))

    def _load(self, uri: str, inside: _Document) -> _Document:
        name = self._files.name_of(uri, inside=inside.name)
        if name in self._documents:
            return self._documents[name]
        data = self._files.read(name)
        self._check(data, Position(self._files.display_name(name)))
        return self._open(name, data)

    def _refuse_loops(self) -> None:
        """Refuse circular references: validators accept anything there."""
        ended: set[tuple[str, Pointer]] = set()
        for name, location, key in self._targets:
            chain: dict[tuple[str, Pointer], None] = {}
            step = (name, location)
            while step not in ended and (*step, key) in self._targets:
                if step in chain:
                    reference = self._documents[name].sites[location].schema[key]
                    raise self._error(self._documents[name], location, key, reference, "is a loop")
                chain[step] = None
                step = self._targets[(*step, key)]
            ended.update(chain)

    def _error(
        self, document: _Document, location: Pointer, key: str, reference: Json, reason: str
    ) -> SchemaError:
        at = (
            self._at
            if document.name == self._root
            else Position(self._files.display_name(document.name))
        )
        quoted = shorten(repr(reference), 120)
        return SchemaError(
            f"#{pointer_text((*location, key))}: {quoted} {reason}",
            hint="refer to #/... in this schema or to a file in its folder, by relative path",
            at=at,
        )


class _Writer:
    """Rewrites the root document with references as pointers into it."""

    def __init__(
        self,
        documents: dict[str, _Document],
        targets: dict[tuple[str, Pointer, str], _Target],
        dialect: SchemaDialect,
        root: str,
    ) -> None:
        self._documents = documents
        self._targets = targets
        self._dialect = dialect
        self._root = root
        self._names: dict[_Target, str] = {}
        self._todo: list[_Target] = []

    def write(self) -> dict[str, Any]:
        written: dict[str, Any] = self._copy(self._documents[self._root], ())
        while self._todo:
            target = self._todo.pop(0)
            copied = self._copy(self._documents[target[0]], target[1])
            written.setdefault(self._dialect.defs_key, {})[self._names[target]] = copied
        return written

    def _copy(self, document: _Document, location: Pointer) -> Any:
        return self._copied(document, location, _at(document.data, location))

    def _copied(self, document: _Document, location: Pointer, value: Json) -> Any:
        if isinstance(value, list):
            items = enumerate(value)
            return [self._copied(document, (*location, str(i)), item) for i, item in items]
        if not isinstance(value, dict):
            return value
        is_schema = location in document.sites
        is_root = document.name == self._root and not location
        copied: dict[str, Any] = {}
        for key, item in value.items():
            if is_schema and (document.name, location, key) in self._targets:
                new = self._pointer(self._targets[document.name, location, key])
                copied["$ref" if "$ref" not in value else key] = new
            elif not (is_schema and self._is_dropped(key, document.name, is_root)):
                copied[key] = self._copied(document, (*location, key), item)
        return copied

    def _is_dropped(self, key: str, name: str, is_root: bool) -> bool:
        if key in _DEFINITIONS:
            return name != self._root  # those in use are copied one by one
        return key in _NAMES or (key in (self._dialect.id_key, "$schema") and not is_root)

    def _pointer(self, target: _Target) -> str:
        if target[0] == self._root:
            location = target[1]
        else:
            if target not in self._names:
                self._names[target] = self._new_name(target)
                self._todo.append(target)
            location = (self._dialect.defs_key, self._names[target])
        return "#" + quote(pointer_text(location), safe=_POINTER_SAFE)

    def _new_name(self, target: _Target) -> str:
        taken = {*self._names.values()}
        taken.update(self._documents[self._root].data.get(self._dialect.defs_key, ()))
        word = target[1][-1] if target[1] else target[0].rpartition("/")[2].partition(".")[0]
        word = re.sub(r"[^A-Za-z0-9_.-]", "_", word) or "schema"
        name, number = word, 2
        while name in taken:
            name, number = f"{word}_{number}", number + 1
        return name


def _join(base: str, uri: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:
        raise ValueError("is not a URI reference") from None


def _at(data: Json, location: Pointer) -> Json:
    """Return the value at ``location``; raise ValueError where there is none."""
    for part in location:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            raise ValueError("leads nowhere")
    return data


def _fragment(document: _Document, resource: Pointer, fragment: str) -> Pointer:
    if not fragment:
        return resource
    if not fragment.startswith("/"):
        anchor = document.anchors.get((resource, fragment))
        if anchor is None:
            raise ValueError("leads nowhere")
        return anchor
    parts = fragment[1:].split("/")
    location = (*resource, *(part.replace("~1", "/").replace("~0", "~") for part in parts))
    if not isinstance(_at(document.data, location), dict | bool):
        raise ValueError("does not lead to a schema")
    return location


def _enclosing(document: _Document, location: Pointer) -> _Site:
    for length in range(len(location), -1, -1):
        if location[:length] in document.sites:
            return document.sites[location[:length]]
    return _Site({}, document.name, ())
