"""Which endpoints of a hostfile a job or a stage may use: ``select: {role: critic}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from bagent.errors import UsageError
from bagent.fleet.hostfile import HostEntry
from bagent.text.suggest import describe_value, did_you_mean
from bagent.types import Json

_PLACES = ("index", "slice", "sample", "seed")


def select_hosts(
    hosts: Sequence[HostEntry], selection: Mapping[str, Json] | None
) -> list[HostEntry]:
    """The endpoints of ``hosts`` that ``selection`` names, in their order.

    Tags go first: ``{role: critic}``, or a list of values of which one must fit. Then, over what
    is left, ``index`` (a place from 0, or a list of them; negative ones count from the end),
    ``slice`` (``"0:8"``, ``"::2"``, as in Python), and ``sample`` (so many of them). Which ones a
    sample takes depends on ``seed`` (default 0) and the addresses alone, so it changes little when
    endpoints join or leave. Nothing selected is an error.

    Raises:
        UsageError: a tag or its value is on no endpoint, a place does not exist, or a value is of
            the wrong kind.
    """
    found = list(hosts)
    given = dict(selection or {})
    if "seed" in given and "sample" not in given:
        raise _wrong("seed stands without sample", "select: {sample: 4, seed: 1}")
    for tag, value in given.items():
        if tag not in _PLACES:
            found = _tagged(found, hosts, tag, value)
    if "index" in given:
        found = _indexed(found, given["index"])
    if "slice" in given:
        found = found[_slice_of(given["slice"])]
    if "sample" in given:
        found = _sampled(found, given["sample"], given.get("seed", 0))
    if not found:
        raise _wrong("no endpoint is left", "")
    return found


def _wrong(words: str, hint: str) -> UsageError:
    return UsageError(f"select: {words}", hint=hint)


def _tagged(
    found: list[HostEntry], hosts: Sequence[HostEntry], tag: str, value: Json
) -> list[HostEntry]:
    wanted = {_as_tag(tag, one) for one in (value if isinstance(value, list) else [value])}
    left = [host for host in found if host.tags.get(tag) in wanted]
    if left:
        return left
    there = dict.fromkeys(host.tags[tag] for host in hosts if tag in host.tags)
    if not there:
        tags = dict.fromkeys(name for host in hosts for name in host.tags)
        hint = did_you_mean(tag, [*tags, *_PLACES]) or f"tags there: {_some(tags)}"
        raise _wrong(f"no endpoint has the tag {tag}", hint)
    words = f"no endpoint has {tag}={' or '.join(sorted(wanted))}"
    if not wanted.isdisjoint(there):
        raise _wrong(f"{words} and the other tags", "")
    raise _wrong(words, f"{tag} there: {_some(there)}")


def _as_tag(tag: str, value: Json) -> str:
    """A tag's value as a hostfile writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise _wrong(
        f"{tag}: expected a tag's value or a list of them, got {describe_value(value)}", ""
    )


def _some(names: Mapping[str, object]) -> str:
    listed = list(names)[:8]
    return (", ".join(listed) + (", ..." if len(names) > len(listed) else "")) or "none"


def _indexed(found: list[HostEntry], value: Json) -> list[HostEntry]:
    places: set[int] = set()
    for place in value if isinstance(value, list) else [value]:
        if isinstance(place, bool) or not isinstance(place, int):
            raise _wrong(
                f"index: expected a whole number, got {describe_value(place)}", "0 is the first"
            )
        if not -len(found) <= place < len(found):
            count = "1 endpoint" if len(found) == 1 else f"{len(found)} endpoints"
            raise _wrong(f"index: there is no endpoint {place} of {count}", "0 is the first")
        places.add(place % len(found))
    return [host for number, host in enumerate(found) if number in places]


def _slice_of(value: Json) -> slice:
    parts = value.split(":") if isinstance(value, str) else []
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if not 2 <= len(numbers) <= 3 or (len(numbers) == 3 and (numbers[2] or 1) < 1):
        raise _wrong(
            f"slice: expected first:last or first:last:step, got {describe_value(value)}",
            'slice: "0:8"',
        )
    return slice(*numbers)


def _sampled(found: list[HostEntry], count: Json, seed: Json) -> list[HostEntry]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise _wrong(
            f"sample: expected a whole number of at least 1, got {describe_value(count)}", ""
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise _wrong(f"seed: expected a whole number, got {describe_value(seed)}", "")
    if count > len(found):
        raise _wrong(f"sample: {count} wanted, {len(found)} there", "")

    def rank(host: HostEntry) -> bytes:
        return blake2b(f"{seed} {host.url}".encode(), digest_size=8).digest()

    chosen = {host.url for host in sorted(found, key=rank)[:count]}
    return [host for host in found if host.url in chosen]
