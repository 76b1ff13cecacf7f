"""Options that change a job: ``--set KEY=VALUE`` and named options."""

from __future__ import annotations

from typing import Any

from bagent.errors import JobError, Position
from bagent.job.yaml.parser import YamlList, YamlMap, YamlSpot, at_option, child_spot, read_yaml
from bagent.job.yaml.scalars import SourceText, resolve_plain
from bagent.types import Json

_OPTION_OF = {
    "limits.budget_usd": "--budget",
    "input": "--input",
    "results.allow_failures": "--allow-failures",
}
_SHORT_FOR = {"prompt": "user", "backend": "url", "topology": "name"}
_TEXTS = frozenset({"system", "user", "raw", "content"})
_TIMEOUTS = ("connect", "first_token", "idle", "total")


def split_set(option: str) -> tuple[str, Json]:
    """Return the key and the value of one ``--set KEY=VALUE``.

    The value is read as YAML reads one value on a line: a quoted text, a list in ``[ ]``, a
    mapping in ``{ }``, else a number, true, false, null or text. A text may hold colons, and one
    that begins with ``{{`` is text.

    Raises:
        JobError: no ``=``, no key, or a value that is not YAML; it names the option.
    """
    key, equals, text = option.partition("=")
    key = key.strip()
    if not equals or not key:
        raise JobError(
            f"{option!r} is not KEY=VALUE",
            hint="write --set sampling.temperature=0.2",
            at=Position("--set"),
        )
    name = f"--set {key}"
    if text.startswith(('"', "'", "[", "{")) and not text.startswith(("{{", "{%", "{#")):
        try:
            return key, read_yaml(text, name).data
        except JobError as error:
            raise JobError(error.message, hint=error.hint, at=Position(name)) from None
    return key, resolve_plain(text.strip())


def option_name(key: str) -> str:
    """Return the option that sets ``key``: ``--hostfile``, ``--budget``."""
    return _OPTION_OF.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))


def from_command(value: Any) -> Json:
    """Return ``value`` with every text marked as typed on the command line."""
    if isinstance(value, dict):
        return {str(key): from_command(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [from_command(item) for item in value]
    if not isinstance(value, str):
        return value
    from_variable = isinstance(value, SourceText) and value.from_variable
    return SourceText.of(value, from_command=True, from_variable=from_variable)


def put(data: YamlMap, key: str, value: Json, option: str) -> None:
    """Set the dotted ``key`` of ``data`` to ``value`` that came from ``option``.

    Missing mappings on the way are made, a short form (``prompt: TEXT``) becomes its long form,
    and a number leads into a list. ``data`` itself is changed: it must be the caller's own.

    Raises:
        JobError: the key leads through something that has no keys; it names the option.
    """
    marked, spot = at_option(from_command(value), option)
    parts = key.split(".")
    if not all(parts):
        raise JobError(
            f"{key} is no dotted key",
            at=Position(option),
            hint="write keys with dots, such as --set sampling.temperature=0.2",
        )
    target: Json = data
    for depth, part in enumerate(parts[:-1]):
        target = _child(target, part, (parts, depth), option)
    last = parts[-1]
    if isinstance(target, YamlMap):
        target.put(last, marked, spot)
    else:
        index = _index(target, last, parts, option)
        if index == len(target):
            target.put(marked, spot)
        target[index], target.spots[index] = marked, spot


def _child(target: Json, part: str, where: tuple[list[str], int], option: str) -> Json:
    parts, depth = where
    path = parts[: depth + 1]
    key: str | int = part
    if not isinstance(target, YamlMap):
        key = _index(target, part, path, option)
        if key == len(target):
            target.put(YamlMap(), YamlSpot(option))
    spot = child_spot(target, key)
    child = target[key] if spot else None
    if isinstance(child, (YamlMap, YamlList)):
        return child
    if child is None:
        longer: YamlMap | YamlList = YamlList() if parts[depth + 1] == "0" else YamlMap()
    else:
        longer = _long_form(path, child, spot or YamlSpot(option), option)
    target[key] = longer
    target.spots[key] = spot or YamlSpot(option)
    return longer


def _index(target: Json, part: str, path: list[str], option: str) -> int:
    if not isinstance(target, YamlList):
        raise JobError(
            f"{'.'.join(path[:-1])} has no keys of its own",
            at=Position(option),
            hint="set it as a whole: --set KEY=VALUE",
        )
    if not part.isdecimal() or int(part) > len(target):
        raise JobError(
            f"{'.'.join(path[:-1])} is a list of {len(target)}, it has no {part}",
            hint="its items are numbered from 0",
            at=Position(option),
        )
    return int(part)


def _long_form(path: list[str], value: Json, spot: YamlSpot, option: str) -> YamlMap:
    """Return the mapping that a short form stands for; its values keep their place in the file."""
    key = path[-1]
    result = YamlMap()
    if key == "timeout":
        for part in _TIMEOUTS:
            result.put(part, value, spot)
    elif key in _SHORT_FOR and isinstance(value, str):
        result.put(_SHORT_FOR[key], value, spot)
    elif key not in _TEXTS:
        raise JobError(
            f"{'.'.join(path)} has no keys of its own",
            at=Position(option),
            hint="set it as a whole: --set KEY=VALUE",
        )
    return result
