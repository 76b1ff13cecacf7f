"""The signatures and docstrings of Python functions: JSON Schema and argument binding.

pydantic reads the types: unions, literals, enums, containers, dataclasses, typed dictionaries and
its own models.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import PydanticSerializationError, PydanticUndefined, to_json

from bagent.types import Json

_KINDS = inspect.Parameter
_OWN_NAMES = "argument_{}"


_QUALIFIERS: Mapping[Any, bool] = {typing.Required: True, typing.NotRequired: False}


class SignatureFault(ValueError):
    """A signature that cannot be a tool's."""


class ArgumentsFault(ValueError):
    """Arguments that the schema accepts and the function's types refuse."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's parameters.

    Attributes:
        schema: the JSON Schema of its arguments.
        bind: converts a JSON object to positional and keyword arguments; raises ArgumentsFault.
        lists: the parameters that are lists.
    """

    schema: dict[str, Json]
    bind: Callable[[Mapping[str, Json]], tuple[list[Any], dict[str, Any]]]
    lists: frozenset[str]


def read_signature(function: Callable[..., Any], described: Mapping[str, str]) -> Signature:
    """Read a function's signature.

    Args:
        function: the function; ``async`` ones and callable objects too.
        described: descriptions of parameters whose annotations have none.

    Raises:
        SignatureFault: a parameter has no annotation, or one that has no JSON form.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing_extensions.get_type_hints(_annotated(function), include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise SignatureFault(f"its annotations cannot be read: {error}") from None
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        if parameter.kind is _KINDS.VAR_POSITIONAL or parameter.kind is _KINDS.VAR_KEYWORD:
            raise SignatureFault(f"*{parameter.name}: a tool has named parameters only")
        if parameter.name not in hints:
            raise SignatureFault(f"its parameter {parameter.name} has no annotation")
        # A parameter may have a name that a model's field may not have, such as `schema` or `_x`.
        fields[_OWN_NAMES.format(index)] = _field(parameter, hints[parameter.name], described)
    model = _model(fields)
    names = {field.alias or name: name for name, field in model.model_fields.items()}
    only = {parameter.name: parameter.kind is _KINDS.POSITIONAL_ONLY for parameter in parameters}

    def bind(arguments: Mapping[str, Json]) -> tuple[list[Any], dict[str, Any]]:
        try:
            values = model.model_validate(arguments)
        except ValidationError as error:
            raise ArgumentsFault(_validation_message(error)) from None
        keywords = {
            name: getattr(values, field)
            for name, field in names.items()
            if field in values.model_fields_set or only[name]
        }
        positional = [keywords.pop(name) for name, first in only.items() if first]
        return positional, keywords

    lists = frozenset(name for name in only if _is_list(hints[name]))
    return Signature(_schema(model), bind, lists)


def result_text(value: Any) -> str:
    """Return a function's result as text: a text as it is, everything else as JSON.

    Raises:
        ValueError: it has no JSON form.
    """
    if isinstance(value, str):
        return value
    try:
        return to_json(value, inf_nan_mode="strings", bytes_mode="utf8").decode("utf-8", "replace")
    except (PydanticSerializationError, UnicodeError) as error:
        raise ValueError(f"what it returned has no JSON form: {error}") from None


def _annotated(function: Callable[..., Any]) -> Any:
    """Return the holder of the annotations; of a callable object it is a method."""
    function = inspect.unwrap(function)
    if inspect.isroutine(function):
        return function
    return inspect.unwrap(type(function).__call__)


def _field(
    parameter: inspect.Parameter, hint: Any, described: Mapping[str, str]
) -> tuple[Any, FieldInfo]:
    annotation = portable(hint)
    description = _annotated_description(annotation) or described.get(parameter.name) or None
    default = PydanticUndefined if parameter.default is _KINDS.empty else parameter.default
    if isinstance(default, FieldInfo):
        raise SignatureFault(f"{parameter.name}: put Field(...) in Annotated[...]")
    field: Any = Field(default=default, alias=parameter.name, description=description)
    return annotation, field


def _annotated_description(annotation: Any) -> str:
    """Return the description in ``Annotated``: a text, ``Doc``, or a pydantic field."""
    if get_origin(annotation) is not Annotated:
        return ""
    for note in get_args(annotation)[1:]:
        text = note if isinstance(note, str) else getattr(note, "documentation", None)
        text = text or getattr(note, "description", None)
        if isinstance(text, str):
            return text
    return ""


def portable(annotation: Any) -> Any:
    """Return the annotation with ``typing_extensions.TypedDict``, as pydantic needs before 3.12."""
    if sys.version_info >= (3, 12):
        return annotation
    return _portable(annotation, {})


def _portable(annotation: Any, made: dict[type, Any]) -> Any:
    if typing.is_typeddict(annotation) and type(annotation).__module__ == "typing":
        return made.get(annotation) or _typed_dict(annotation, made)
    origin, inner = get_origin(annotation), get_args(annotation)
    if not inner or origin is typing.Literal:
        return annotation
    if origin is Annotated:
        return Annotated[(_portable(inner[0], made), *inner[1:])]
    changed = tuple(item if item is ... else _portable(item, made) for item in inner)
    if changed == inner:
        return annotation
    if origin in (typing.Union, UnionType):
        return reduce(or_, changed)
    if isinstance(annotation, typing._GenericAlias):  # type: ignore[attr-defined]
        return annotation.copy_with(changed)
    return origin[changed]


def _typed_dict(annotation: Any, made: dict[type, Any]) -> Any:
    hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    # A recursive one stays as it is inside; pydantic then reports it.
    made[annotation] = annotation
    fields = {}
    for name, hint in hints.items():
        needed = name in annotation.__required_keys__
        # Python does not resolve the qualifiers of postponed annotations.
        while get_origin(hint) in _QUALIFIERS:
            needed = _QUALIFIERS[get_origin(hint)]
            (hint,) = get_args(hint)
        inner = _portable(hint, made)
        fields[name] = (
            typing_extensions.Required[inner] if needed else typing_extensions.NotRequired[inner]
        )
    made[annotation] = typing_extensions.TypedDict(annotation.__name__, fields)  # type: ignore[operator]
    made[annotation].__doc__ = annotation.__doc__
    return made[annotation]


def _model(fields: dict[str, Any]) -> type[BaseModel]:
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        made: type[BaseModel] = create_model("Arguments", __config__=config, **fields)
        made.model_json_schema(schema_generator=_Plain)
    except (PydanticUserError, TypeError, NameError) as error:
        message = str(error).partition("\n")[0]
        raise SignatureFault(f"an annotation has no JSON form: {message}") from None
    return made


class _Plain(GenerateJsonSchema):
    """Schema generator without titles, which cost tokens and repeat the names."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {  # noqa: RUF012 (pydantic's own form)
        "skipped-choice",
        "non-serializable-default",
    }

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema(model: type[BaseModel]) -> dict[str, Json]:
    schema = model.model_json_schema(schema_generator=_Plain)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _is_list(hint: Any) -> bool:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return inner is list or get_origin(inner) is list


def _validation_message(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(
        f"{'/'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in faults[:5]
    )


_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):\s*")
_OTHER = re.compile(
    r"(?:Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|Warns|See Also|References|Attributes"
    r"|Todo|Side Effects):?\s*"
)
_NAMED = re.compile(r"(?P<name>\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<words>.*)")
_NUMPY = re.compile(r"(?P<names>\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_SPHINX = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?P<names>[^:]+):\s*")
_SPHINX_ANY = re.compile(r":\w+[^:]*:")
_RULE = re.compile(r"-{3,}\s*")


@dataclass(slots=True)
class Described:
    """The text of a docstring before its sections, and its parameters by name."""

    text: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(docstring: str | None) -> Described:
    """Read a docstring in Google, NumPy or Sphinx style; any other is all text."""
    described = Described()
    lines = inspect.cleandoc(docstring or "").split("\n")
    text: list[str] = []
    index = 0
    in_text = True
    while index < len(lines):
        line = lines[index]
        ruled = index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1].strip()) is not None
        if _SPHINX_ANY.match(line):
            index, in_text = _sphinx(lines, index, described), False
        elif ruled and line.strip():
            is_parameters = line.strip() in ("Parameters", "Other Parameters")
            index = _numpy(lines, index + 2, described if is_parameters else Described())
            in_text = False
        elif _GOOGLE.fullmatch(line):
            index, in_text = _google(lines, index + 1, described), False
        else:
            in_text = in_text and not _OTHER.fullmatch(line)
            if in_text:
                text.append(line)
            index += 1
    described.text = "\n".join(text).strip()
    return described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _google(lines: list[str], index: int, into: Described) -> int:
    """Read ``name (type): text`` with deeper lines; the section ends with its indentation."""
    depth, name = 0, ""
    while index < len(lines):
        line = lines[index]
        if line.strip():
            if not _indent(line):
                break
            depth = depth or _indent(line)
            match = _NAMED.fullmatch(line.strip()) if _indent(line) == depth else None
            if match:
                name = match["name"].lstrip("*")
                into.parameters[name] = match["words"].strip()
            elif name:
                into.parameters[name] = f"{into.parameters[name]} {line.strip()}".strip()
        index += 1
    return index


def _numpy(lines: list[str], index: int, into: Described) -> int:
    """Read ``name : type`` with its text indented below; the next ruled line ends it."""
    names: list[str] = []
    while index < len(lines):
        line = lines[index]
        following = lines[index + 1].strip() if index + 1 < len(lines) else ""
        if line.strip() and _RULE.fullmatch(following):
            break
        if line.strip() and not _indent(line):
            match = _NUMPY.fullmatch(line.strip())
            names = (
                [name.strip().lstrip("*") for name in match["names"].split(",")] if match else []
            )
            into.parameters.update(dict.fromkeys(names, ""))
        else:
            for name in names:
                into.parameters[name] = f"{into.parameters[name]} {line.strip()}".strip()
        index += 1
    return index


def _sphinx(lines: list[str], index: int, into: Described) -> int:
    """Read one ``:param type name: text`` with deeper lines."""
    match = _SPHINX.match(lines[index])
    parts = [lines[index][match.end() :].strip()] if match else []
    index += 1
    while index < len(lines) and lines[index].strip() and _indent(lines[index]):
        parts.append(lines[index].strip())
        index += 1
    if match:
        into.parameters[match["names"].split()[-1].lstrip("*")] = " ".join(parts).strip()
    return index
