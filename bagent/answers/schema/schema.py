"""A user's JSON Schema: loaded, checked, self-contained.

jsonschema-rs validates, with formats; it has no access to the network or to files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec

from bagent.answers.messages import pointer, shorten, validation_messages
from bagent.answers.schema.bundle import Bundler, SchemaFiles
from bagent.answers.schema.columns import columns_of
from bagent.answers.schema.dialects import (
    DEFAULT,
    DIALECTS,
    SchemaDialect,
    dialect_of,
    impossible_requirement,
    keeps_strict_rules,
    misspelled_keyword,
    no_schema,
    unknown_keywords,
    walk,
    with_types,
)
from bagent.errors import Position, SchemaError
from bagent.text.unicode import MAX_DEPTH, clean_json, nested_deeper
from bagent.types import Json

FORMATS = (
    *("date", "time", "date-time", "duration"),
    *("email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
"""The values of ``format`` that are checked, in every draft."""

_LARGE = 50_000


@dataclass(frozen=True)
class OutputSchema:
    """The JSON Schema of answers.

    Attributes:
        document: the self-contained JSON Schema, all references of the form ``#/...``.
        text: ``document`` as compact JSON, for servers; an ``enum`` or ``const`` has a ``type``.
        pretty: ``document`` as indented JSON, for prompts.
        warnings: what is doubtful about the schema, one line each.
        strict: whether OpenAI's strict mode takes ``text``.
        columns: ``(name, DuckDB type)`` of the typed columns of the answers table.
        column_properties: for each column the property that it holds; None for the column
            ``value`` of a schema that is not for objects.
    """

    document: dict[str, Any]
    text: bytes
    pretty: str
    warnings: tuple[str, ...]
    strict: bool
    columns: list[tuple[str, str]]
    column_properties: list[str | None]
    _validator: jsonschema_rs.Validator

    @classmethod
    def load(
        cls,
        spec: Mapping[str, Any] | bool | Path,
        *,
        base: Path,
        allow_remote: bool = False,
        allow_misspelled: bool = False,
    ) -> OutputSchema:
        """Load a schema: a file (relative to ``base``), or the schema itself.

        References are followed now: to places in the schema, and to files in its folder (that of
        an inline schema is ``base``) or below. With ``allow_remote`` those to http(s) addresses
        are fetched, once; without it nothing but such files is ever touched. A word near a keyword
        is an error; with ``allow_misspelled`` it is a warning, as words far from any are.

        Raises:
            SchemaError: not JSON (with file, line, column), no usable JSON Schema (with the place
                in it), or a reference that leads nowhere or where it may not.
        """
        at, name, folder = None, "", base
        if isinstance(spec, Path):
            at, name, folder = Position(base / spec), spec.name, (base / spec).parent
        files = SchemaFiles(folder, allow_remote=allow_remote)
        root = _read(files, name, at) if isinstance(spec, Path) else _plain(spec)
        dialect = _dialect(root, at)

        def check(value: Json, source: Position | None) -> None:
            _check(value, dialect, source)
            if isinstance(value, dict) and _dialect(value, source, dialect) != dialect:
                files.warnings.append(f"{source}: read as {dialect.uri}, the draft of the schema")

        hint = no_schema(root)
        if hint is not None:
            message = "not a JSON Schema: no word in it asks for anything"
            raise SchemaError(message, hint=hint, at=at)
        check(root, at)
        if isinstance(root, bool):
            root = {} if root else {"not": {}}
        document = Bundler(files, dialect, check).bundle(root, name, at)
        impossible = impossible_requirement(document)
        if impossible is not None:
            hint = "write the same name under required and under properties"
            raise SchemaError(impossible, hint=hint, at=at)
        misspelled = None if allow_misspelled else misspelled_keyword(document)
        if misspelled is not None:
            message, hint = misspelled
            raise SchemaError(message, hint=hint, at=at)
        validator = _compile(document, dialect, at)
        columns = columns_of(document)
        typed = with_types(document)
        return cls(
            document,
            text=msgspec.json.encode(typed),
            pretty=json.dumps(document, indent=2, ensure_ascii=False),
            warnings=(*files.warnings, *_unknown_formats(document), *unknown_keywords(document)),
            strict=keeps_strict_rules(typed),
            columns=[*columns.columns],
            column_properties=columns.properties,
            _validator=validator,
        )

    def accepts(self, value: Json) -> bool:
        """Return whether a JSON value is valid; never raises for JSON values.

        NaN, infinities and lone surrogates count as the text that stands for them. A value nested
        deeper than MAX_DEPTH is not accepted.
        """
        return not nested_deeper(value) and self._validator.is_valid(clean_json(value))

    def accepts_clean(self, value: Json) -> bool:
        """As ``accepts``, for a value that ``extract_json`` or ``clean_json`` made: faster."""
        return self._validator.is_valid(value)

    def explain(self, value: Json, limit: int = 5) -> list[str]:
        """Return up to ``limit`` messages about ``value``; none if it is valid.

        A line is ``POINTER: WORDS``, at most 200 characters, for example
        ``/findings/0/severity: "hgih" is not one of ["low", "high"]``. In a value of more than
        50 kB only the first fault is looked for.
        """
        if nested_deeper(value):
            return [f"/: nested deeper than {MAX_DEPTH} levels"]
        value = clean_json(value)
        try:
            size = len(msgspec.json.encode(value))
        except ValueError:
            return ["/: a number of more than 4300 digits"]
        if size <= _LARGE:
            return validation_messages(self._validator.iter_errors(value), limit)
        # The library collects all errors before the first is returned: a minute for a million.
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            return validation_messages([error], limit)
        return []


def _read(files: SchemaFiles, name: str, at: Position | None) -> Json:
    try:
        return files.read(name, confined=False)
    except ValueError as error:
        raise SchemaError(f"the schema file {error}", at=at) from None


def _plain(spec: Mapping[str, Any] | bool) -> Json:
    """Return an inline schema as JSON values."""
    if isinstance(spec, bool):
        return spec
    spec = dict(spec)
    if nested_deeper(spec):
        raise SchemaError(
            f"the output schema is nested deeper than {MAX_DEPTH} levels",
            hint="write a flatter schema",
        )
    for location, key in _bad_keys(spec):
        raise SchemaError(f"{location}: the key {key!r} is not text", hint="put it in quotes")
    try:
        return clean_json(msgspec.to_builtins(spec))
    except TypeError as error:
        raise SchemaError(f"the output schema is not JSON: {error}") from None


def _bad_keys(value: Json, location: str = "#") -> list[tuple[str, Json]]:
    if isinstance(value, list):
        items = list(enumerate(value))
    elif isinstance(value, dict):
        wrong = [(location, key) for key in value if not isinstance(key, str)]
        if wrong:
            return wrong
        items = list(value.items())
    else:
        return []
    return [bad for key, item in items for bad in _bad_keys(item, f"{location}/{key}")]


def _dialect(schema: Json, at: Position | None, default: SchemaDialect = DEFAULT) -> SchemaDialect:
    if not isinstance(schema, dict) or "$schema" not in schema:
        return default
    dialect = dialect_of(schema["$schema"])
    if dialect is None:
        uris = ", ".join(uris.uri for uris in DIALECTS.values())
        raise SchemaError(f"#/$schema: unknown {schema['$schema']!r}", hint=f"known: {uris}", at=at)
    return dialect


def _check(schema: Json, dialect: SchemaDialect, at: Position | None) -> None:
    """Raise SchemaError where ``schema`` breaks the rules of its draft."""
    if not isinstance(schema, dict | bool):
        raise SchemaError(
            "a schema is an object, or true or false",
            at=at,
            hint="write schema: {type: object, properties: {...}}",
        )
    if not _rules(dialect.uri).is_valid(schema):
        raise SchemaError(
            f"not a JSON Schema: #{_explain_invalid(schema, dialect)}",
            at=at,
            hint="correct that key; json-schema.org explains them",
        )


def _explain_invalid(schema: Json, dialect: SchemaDialect) -> str:
    """Say where ``schema`` breaks the rules of its draft, and how.

    ``jsonschema`` takes seconds to import, so only a broken schema imports it.
    """
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    draft = validator_for({"$schema": dialect.uri})
    errors = list(draft(draft.META_SCHEMA, registry=REGISTRY).iter_errors(schema))
    error = best_match([error for error in errors if error.path] or errors)
    if error is None:  # jsonschema-rs alone refuses it
        return validation_messages(_rules(dialect.uri).iter_errors(schema), 1)[0]
    while error.context:
        error = max(error.context, key=lambda inner: len(inner.path))
    return f"{pointer(error.absolute_path) or '/'}: {shorten(error.message)}"


@cache
def _rules(uri: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for({"$schema": uri, "$ref": uri}, offline=True)


@cache
def _formats() -> dict[str, Callable[[str], bool]]:
    """Checks by format, for the drafts that do not know all of FORMATS."""
    return {name: _validator({"format": name}).is_valid for name in FORMATS}


def _validator(
    schema: dict[str, Any], formats: dict[str, Callable[[str], bool]] | None = None
) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(schema, formats=formats, validate_formats=True, offline=True)


def _compile(
    document: dict[str, Any], dialect: SchemaDialect, at: Position | None
) -> jsonschema_rs.Validator:
    written = {**document, "$schema": dialect.uri}
    formats = _formats() if dialect.ref_alone else None
    try:
        return _validator(written, formats)
    except jsonschema_rs.ValidationError as error:
        location = pointer(error.instance_path)
        raise SchemaError(f"#{location}: {shorten(error.message)}", at=at) from None
    except ValueError as error:
        raise SchemaError(f"not a usable JSON Schema: {shorten(str(error))}", at=at) from None


def _unknown_formats(document: dict[str, Any]) -> list[str]:
    first_use: dict[str, str] = {}
    for location, schema in walk(document):
        name = schema.get("format")
        if isinstance(name, str) and name not in FORMATS:
            first_use.setdefault(name, pointer(location))
    return [
        f'format "{shorten(name, 60)}" is unknown and not checked (#{location})'
        for name, location in first_use.items()
    ]
