"""The growth of the engines' cache counters over a run, from the ends of its sample files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bagent.store.inside import open_inside
from bagent.store.segments import list_segments

HEAD = TAIL = 1 << 20
"""Bytes at the begin and the end of each file that are read: thousands of endpoints' samples."""


class _Sample(msgspec.Struct):
    endpoint: str
    at: float
    cache_hits: int | None = None
    cache_queries: int | None = None


_decode = msgspec.json.Decoder(_Sample).decode


def cache_share(run_dir: Path) -> float | None:
    """The share (0 to 1) of prompt tokens that prefix caches knew; None where no endpoint told.

    Each endpoint's first reading is compared with its last; one that was restarted between counts
    from its restart.
    """
    firsts: dict[str, _Sample] = {}
    lasts: dict[str, _Sample] = {}
    for segment in list_segments(run_dir / "journal", "endpoints"):
        for one in _samples(segment.path):
            first, last = firsts.get(one.endpoint), lasts.get(one.endpoint)
            if first is None or one.at < first.at:
                firsts[one.endpoint] = one
            if last is None or one.at > last.at:
                lasts[one.endpoint] = one
    hits = queries = 0
    for name, last in lasts.items():
        first = firsts[name]
        restarted = (last.cache_queries or 0) < (first.cache_queries or 0)
        hits += (last.cache_hits or 0) - (0 if restarted else first.cache_hits or 0)
        queries += (last.cache_queries or 0) - (0 if restarted else first.cache_queries or 0)
    return hits / queries if queries else None


def _samples(path: Path) -> Iterator[_Sample]:
    """Those with counters, of the file's begin and end; a line that is not whole is passed over."""
    with open_inside(path) as file:
        lines = file.read(HEAD).split(b"\n")
        size = file.seek(0, 2)
        if size > HEAD:
            file.seek(max(HEAD, size - TAIL))
            lines += file.read().split(b"\n")
    for line in lines:
        try:
            sample = _decode(line)
        except msgspec.DecodeError:
            continue
        if sample.cache_hits is not None and sample.cache_queries is not None:
            yield sample
