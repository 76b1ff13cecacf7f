"""Prefix-cache share and tool-call counts of a run, from its journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bagent.files import open_regular
from bagent.store.journal.segments import list_segments, whole_lines

HEAD = TAIL = 1 << 20
"""Bytes read at the start and the end of each file: samples of thousands of endpoints."""


class _Sample(msgspec.Struct):
    endpoint: str
    at: float
    cache_hits: int | None = None
    cache_queries: int | None = None


_decode_sample = msgspec.json.Decoder(_Sample).decode


def cache_share(run_dir: Path) -> float | None:
    """Return the share (0 to 1) of prompt tokens found in prefix caches; None if not reported.

    It compares the first and last sample of each endpoint; a restarted one counts from its restart.
    """
    firsts: dict[str, _Sample] = {}
    lasts: dict[str, _Sample] = {}
    for segment in list_segments(run_dir / "journal", "endpoints"):
        for sample in _samples(segment.path):
            first, last = firsts.get(sample.endpoint), lasts.get(sample.endpoint)
            if first is None or sample.at < first.at:
                firsts[sample.endpoint] = sample
            if last is None or sample.at > last.at:
                lasts[sample.endpoint] = sample
    hits = queries = 0
    for name, last in lasts.items():
        first = firsts[name]
        restarted = (last.cache_queries or 0) < (first.cache_queries or 0)
        hits += (last.cache_hits or 0) - (0 if restarted else first.cache_hits or 0)
        queries += (last.cache_queries or 0) - (0 if restarted else first.cache_queries or 0)
    return hits / queries if queries else None


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield samples with counters from the start and end of a file; partial lines are skipped."""
    with open_regular(path) as file:
        lines = file.read(HEAD).split(b"\n")
        size = file.seek(0, 2)
        if size > HEAD:
            file.seek(max(HEAD, size - TAIL))
            lines += file.read().split(b"\n")
    for line in lines:
        try:
            sample = _decode_sample(line)
        except msgspec.DecodeError:
            continue
        if sample.cache_hits is not None and sample.cache_queries is not None:
            yield sample


class ToolCount(msgspec.Struct):
    """Calls of one tool, how many failed, and the last error."""

    calls: int = 0
    failed: int = 0
    error: str | None = None


class _Call(msgspec.Struct):
    name: str
    error: str | None = None


_decode_call = msgspec.json.Decoder(_Call).decode


def count_tools(run_dir: Path, part: str | None = None) -> dict[str, ToolCount]:
    """Return the counts of each called tool, by name.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
    """
    counts: dict[str, ToolCount] = {}
    for segment in list_segments(run_dir / "journal", "tools", part):
        with segment.path.open("rb") as handle:
            for _, line in whole_lines(handle, 0, segment.path.stat().st_size):
                try:
                    call = _decode_call(line)
                except msgspec.DecodeError:
                    continue
                count = counts.setdefault(call.name, ToolCount())
                count.calls += 1
                if call.error is not None:
                    count.failed += 1
                    count.error = call.error
    return counts
