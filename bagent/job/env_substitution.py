"""``${VAR}`` and ``${VAR:-default}`` in the values of a job file.

Keys, prompt texts, schemas and tool parameters are left alone. ``$${`` is a literal ``${``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bagent.errors import Position
from bagent.job.validation import LoadContext
from bagent.job.yaml.parser import YamlList, YamlMap, YamlSpot
from bagent.job.yaml.scalars import SourceText, resolve_plain
from bagent.types import Json

_VARIABLE = re.compile(r"\$(\$\{)|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?:(:-)([^}]*))?\})?")
_NEVER_IN = frozenset({"prompt", "schema", "parameters"})


class VariableUse(NamedTuple):
    """One ``${VAR}`` of a job: the variable, its value, and its position."""

    name: str
    value: str
    path: tuple[str | int, ...]


class Substitution:
    """One pass over a job's values; ``uses`` gathers the variables that were replaced."""

    def __init__(self, context: LoadContext, text: str = "") -> None:
        self._env: Mapping[str, str] = context.env
        self._problems = context.problems
        self._text = text
        self.uses: list[VariableUse] = []

    def apply(self, value: Json, spot: YamlSpot, path: tuple[str | int, ...] = ()) -> Json:
        """Replace the variables in ``value`` at ``path``; add errors to the context's problems."""
        if isinstance(value, YamlMap):
            result = YamlMap()
            for key, item in value.items():
                at = value.spots[key]
                result.put(key, self.apply(item, at, (*path, key)), at)
            return result
        if isinstance(value, YamlList):
            items = YamlList()
            for index, item in enumerate(value):
                items.put(self.apply(item, value.spots[index], (*path, index)), value.spots[index])
            return items
        if not isinstance(value, str) or "${" not in value or _is_content(path):
            return value
        return self._scalar(value, spot, path)

    def _scalar(self, value: str, spot: YamlSpot, path: tuple[str | int, ...]) -> Json:
        count = 0

        def replaced(match: re.Match[str]) -> str:
            nonlocal count
            count += 1
            return "${" if match[1] else self._value(match, value, spot, path)

        text = _VARIABLE.sub(replaced, value)
        is_single = (
            count == 1 and _VARIABLE.fullmatch(value) is not None and not value.startswith("$$")
        )
        from_command = isinstance(value, SourceText) and value.from_command
        if spot.style == "plain":
            resolved = resolve_plain(text)
            if not isinstance(resolved, str):
                return resolved
        return SourceText.of(text, from_command=from_command, from_variable=is_single)

    def _value(
        self, match: re.Match[str], value: str, spot: YamlSpot, path: tuple[str | int, ...]
    ) -> str:
        name, has_default, default = match[2], match[3], match[4]
        if name is None:
            token = value[match.start() :].split()[0]
            self._problems.add(
                self._position(spot, token),
                f"{token} is neither ${{NAME}} nor ${{NAME:-default}}",
                "write $${ for a literal ${",
            )
            return ""
        set_to = self._env.get(name)
        if set_to is None or (has_default and not set_to):
            if has_default:
                return default
            self._problems.add(
                self._position(spot, match[0]),
                f"the environment variable {name} is not set",
                f"export it, or write ${{{name}:-default}}",
            )
            return ""
        if set_to:
            self.uses.append(VariableUse(name, set_to, path))
        return set_to

    def _position(self, spot: YamlSpot, piece: str) -> Position:
        """Return the position of ``piece`` in the file, that of the scalar if not found."""
        offset = self._text.find(piece, spot.start, spot.end) if spot.end else -1
        if offset < 0:
            return spot.value_at
        line = self._text.count("\n", 0, offset) + 1
        return Position(spot.file, line, offset - self._text.rfind("\n", 0, offset))


def _is_content(path: tuple[str | int, ...]) -> bool:
    """True inside prompts, inline schemas and the like; a path of a file in them is a setting."""
    if path and isinstance(path[0], str) and path[0].startswith("x-"):
        return True
    if "prompt" in path and path[-1] != "file":
        return True
    return any(part in _NEVER_IN for part in path[:-1]) and path[-1] != "file"
