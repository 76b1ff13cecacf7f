"""The files that a schema may read.

A schema may refer to files in its own folder and below, by relative path. Other folders, absolute
paths, ``file:`` and, unless allowed, ``http:`` and ``https:`` are refused before they are opened.
"""

from __future__ import annotations

import codecs
import json
import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from bagent.errors import Position, SchemaError
from bagent.text.unicode import MAX_DEPTH, clean_json, nested_deeper
from bagent.types import Json

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_FETCH_SECONDS = 20.0
_FETCH_BYTES = 10_000_000
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
