"""Scalars by the core schema of YAML 1.2, which remember how they were written.

Source of the rules: YAML 1.2.2, section 10.3.2 (https://yaml.org/spec/1.2.2/#1032-tag-resolution).
A number keeps its source text, so that a key which takes text gives ``08`` back as ``08``.
"""

from __future__ import annotations

import re

from bagent.types import Json

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
# Python refuses to read integers of more than 4,300 digits; no setting comes near this.
_MOST_DIGITS = 1000


class SourceInt(int):
    """A whole number and its ``source`` text."""

    source: str

    @classmethod
    def of(cls, value: int, source: str) -> SourceInt:
        """Return the number ``value`` as written in ``source``."""
        number = cls(value)
        number.source = source
        return number


class SourceFloat(float):
    """A number with a fraction or exponent, and its ``source`` text."""

    source: str

    @classmethod
    def of(cls, value: float, source: str) -> SourceFloat:
        """Return the number ``value`` as written in ``source``."""
        number = cls(value)
        number.source = source
        return number


class SourceText(str):
    """A text with the two facts that change how it is read.

    ``from_command``: it was typed on the command line, so a path in it is relative to the
    current folder. ``from_variable``: it is as a whole the value of one ``${VAR}``, so a key
    that takes a number may read it as one.
    """

    from_command: bool = False
    from_variable: bool = False

    @classmethod
    def of(
        cls, text: str, *, from_command: bool = False, from_variable: bool = False
    ) -> SourceText:
        """Return ``text`` with these facts."""
        marked = cls(text)
        marked.from_command = from_command
        marked.from_variable = from_variable
        return marked


def resolve_plain(text: str) -> Json:
    """Return the value of a plain (unquoted) scalar: None, bool, number with source, or text."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    number = parse_number(text)
    return text if number is None else number


def parse_number(text: str) -> SourceInt | SourceFloat | None:
    """Return the number that the core schema reads in ``text``, or None where it reads text."""
    if len(text) > _MOST_DIGITS or not text or text[0] not in "+-.0123456789":
        return None
    if _INT.fullmatch(text):
        return SourceInt.of(int(text), text)
    if _OCTAL.fullmatch(text):
        return SourceInt.of(int(text[2:], 8), text)
    if _HEX.fullmatch(text):
        return SourceInt.of(int(text[2:], 16), text)
    if _FLOAT.fullmatch(text):
        return SourceFloat.of(float(text), text)
    if _INFINITE.fullmatch(text):
        return SourceFloat.of(float(text.replace(".", "")), text)
    if text in _NAN:
        return SourceFloat.of(float("nan"), text)
    return None


def plain(value: Json) -> Json:
    """Return ``value`` made of the builtin types only, deeply: what JSON encoders want."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    return value
