"""Selection of a hostfile's endpoints for a job or a stage: ``select: {role: critic}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from bagent.errors import UsageError
from bagent.fleet.hostfile import HostEntry
from bagent.text.suggest import describe_value, did_you_mean
from bagent.types import Json

_POSITION_KEYS = ("index", "slice", "sample", "seed")


def select_hosts(
    hosts: Sequence[HostEntry], selection: Mapping[str, Json] | None
) -> list[HostEntry]:
    """Return the endpoints of ``hosts`` that ``selection`` names, in their order.

    Tags apply first: ``{role: critic}``, or a list of accepted values. Then, over what remains,
    ``index`` (an index from 0, or a list; negative ones count from the end), ``slice`` (``"0:8"``,
    ``"::2"``, as in Python) and ``sample`` (how many). A sample depends on ``seed`` (default 0) and
    the addresses alone, so it changes little when endpoints join or leave.

    Raises:
        UsageError: a tag or its value is on no endpoint, an index does not exist, a value has the
            wrong type, or nothing is selected.
    """
    selected = list(hosts)
    criteria = dict(selection or {})
    if "seed" in criteria and "sample" not in criteria:
        raise _error("seed stands without sample", "select: {sample: 4, seed: 1}")
    for tag, value in criteria.items():
        if tag not in _POSITION_KEYS:
            selected = _by_tag(selected, hosts, tag, value)
    if "index" in criteria:
        selected = _by_index(selected, criteria["index"])
    if "slice" in criteria:
        selected = selected[_parse_slice(criteria["slice"])]
    if "sample" in criteria:
        selected = _sample(selected, criteria["sample"], criteria.get("seed", 0))
    if not selected:
        raise _error("no endpoint is left")
    return selected


def _error(message: str, hint: str = "") -> UsageError:
    return UsageError(f"select: {message}", hint=hint)


def _by_tag(
    selected: list[HostEntry], hosts: Sequence[HostEntry], tag: str, value: Json
) -> list[HostEntry]:
    accepted = {_as_tag(tag, item) for item in (value if isinstance(value, list) else [value])}
    matching = [host for host in selected if host.tags.get(tag) in accepted]
    if matching:
        return matching
    values = dict.fromkeys(host.tags[tag] for host in hosts if tag in host.tags)
    if not values:
        tags = dict.fromkeys(name for host in hosts for name in host.tags)
        hint = did_you_mean(tag, [*tags, *_POSITION_KEYS]) or f"tags there: {_first_names(tags)}"
        raise _error(f"no endpoint has the tag {tag}", hint)
    message = f"no endpoint has {tag}={' or '.join(sorted(accepted))}"
    if not accepted.isdisjoint(values):
        raise _error(f"{message} and the other tags")
    raise _error(message, f"{tag} there: {_first_names(values)}")


def _as_tag(tag: str, value: Json) -> str:
    """Return a tag's value as a hostfile writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise _error(f"{tag}: expected a tag's value or a list of them, got {describe_value(value)}")


def _first_names(names: Mapping[str, object]) -> str:
    listed = list(names)[:8]
    return (", ".join(listed) + (", ..." if len(names) > len(listed) else "")) or "none"


def _by_index(selected: list[HostEntry], value: Json) -> list[HostEntry]:
    indexes: set[int] = set()
    for index in value if isinstance(value, list) else [value]:
        if isinstance(index, bool) or not isinstance(index, int):
            raise _error(
                f"index: expected a whole number, got {describe_value(index)}", "0 is the first"
            )
        if not -len(selected) <= index < len(selected):
            count = "1 endpoint" if len(selected) == 1 else f"{len(selected)} endpoints"
            raise _error(f"index: there is no endpoint {index} of {count}", "0 is the first")
        indexes.add(index % len(selected))
    return [selected[index] for index in sorted(indexes)]


def _parse_slice(value: Json) -> slice:
    parts = value.split(":") if isinstance(value, str) else []
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 3 or (len(numbers) == 3 and (numbers[2] or 1) < 1):
        raise _error(
            f"slice: expected first:last or first:last:step, got {describe_value(value)}",
            'slice: "0:8"',
        )
    return slice(*numbers)


def _sample(selected: list[HostEntry], count: Json, seed: Json) -> list[HostEntry]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _error(f"sample: expected a whole number of at least 1, got {describe_value(count)}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise _error(f"seed: expected a whole number, got {describe_value(seed)}")
    if count > len(selected):
        raise _error(f"sample: {count} wanted, {len(selected)} there")

    def rank(host: HostEntry) -> bytes:
        return blake2b(f"{seed} {host.url}".encode(), digest_size=8).digest()

    urls = {host.url for host in sorted(selected, key=rank)[:count]}
    return [host for host in selected if host.url in urls]
