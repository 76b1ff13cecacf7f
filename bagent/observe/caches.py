"""What the endpoints' prefix caches knew of the prompts, by how far their counters grew."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bagent.types import EndpointSample


class CacheRate(msgspec.Struct, frozen=True):
    """Prompt tokens that were looked up, and found, at ``endpoints`` that told so.

    The counters are the engines' own, so they hold other users' requests too. ``silent`` endpoints
    were sent requests and did not tell, or not any more.
    """

    hits: int
    queries: int
    endpoints: int
    silent: int = 0

    @property
    def share(self) -> float:
        """What was found of what was looked up, 0 to 1."""
        return self.hits / self.queries if self.queries else 0.0


class _Counter(msgspec.Struct):
    hits: int
    queries: int
    grown_hits: int = 0
    grown_queries: int = 0


class Caches:
    """Adds up the counters of all endpoints; each one's first reading is where it began."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def add(self, sample: EndpointSample) -> None:
        """Take a sample; one without counters says nothing."""
        hits, queries = sample.cache_hits, sample.cache_queries
        if hits is None or queries is None:
            return
        known = self._counters.get(sample.endpoint)
        if known is None:
            self._counters[sample.endpoint] = _Counter(hits, queries)
            return
        restarted = queries < known.queries or hits < known.hits
        known.grown_hits += hits if restarted else hits - known.hits
        known.grown_queries += queries if restarted else queries - known.queries
        known.hits, known.queries = hits, queries

    def share(self, endpoint: str) -> float | None:
        """The share (0 to 1) that an endpoint's cache knew; None where it did not tell."""
        known = self._counters.get(endpoint)
        if known is None or not known.grown_queries:
            return None
        return known.grown_hits / known.grown_queries

    def rate(self, asked: Iterable[str] = ()) -> CacheRate | None:
        """Of all endpoints together; None where none told.

        Args:
            asked: those that were sent requests.
        """
        grown = {name: one for name, one in self._counters.items() if one.grown_queries}
        if not grown:
            return None
        hits = sum(one.grown_hits for one in grown.values())
        queries = sum(one.grown_queries for one in grown.values())
        silent = sum(1 for name in asked if name not in grown)
        return CacheRate(hits, queries, len(grown), silent)
