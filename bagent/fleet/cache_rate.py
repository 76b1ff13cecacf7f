"""How much of the prompts an endpoint took from its prefix cache, since the run began."""

from __future__ import annotations

from bagent.backends.engine_metrics import EngineLoad
from bagent.fleet.load_signal import grown
from bagent.types import Usage


class CacheRate:
    """The hit rate of one endpoint in one run, in tokens.

    Two sources: the usage of our own answers, where the server tells ``cached_tokens``, and the
    engine's counters, which hold the requests of others too. Neither guesses: what was not told
    is None, not 0.

    Attributes:
        hits: prompt tokens found in the cache by the engine's counters since the first look,
            None before a second look that told.
        queries: prompt tokens looked up, likewise.
    """

    def __init__(self) -> None:
        self._last: EngineLoad | None = None
        self._prompt = 0
        self._cached: int | None = None
        self.hits: int | None = None
        self.queries: int | None = None

    def saw(self, load: EngineLoad) -> None:
        """A look at the engine. Counters that fell began at 0 again: the engine was restarted."""
        if load.cache_hits is None or load.cache_queries is None:
            return
        last, self._last = self._last, load
        if last is None or last.cache_queries is None or last.cache_hits is None:
            return
        restarted = load.cache_queries < last.cache_queries or load.cache_hits < last.cache_hits
        before = None if restarted else last
        hits = grown(before.cache_hits if before else 0, load.cache_hits)
        queries = grown(before.cache_queries if before else 0, load.cache_queries)
        self.hits = (self.hits or 0) + (hits or 0)
        self.queries = (self.queries or 0) + (queries or 0)

    def answered(self, usage: Usage) -> None:
        """The token counts of an answer. One without ``cached`` or ``prompt`` says nothing."""
        if usage.prompt is None or usage.cached is None:
            return
        self._prompt += usage.prompt
        self._cached = (self._cached or 0) + usage.cached

    @property
    def of_answers(self) -> float | None:
        """The share of our own prompts that was cached, 0 to 1; None = the server does not tell."""
        return None if self._cached is None or not self._prompt else self._cached / self._prompt

    @property
    def of_engine(self) -> float | None:
        """The share by the engine's counters, of everybody's prompts; None = not told."""
        return None if self.hits is None or not self.queries else self.hits / self.queries

    @property
    def value(self) -> float | None:
        """The rate of our own answers where it is known, else the engine's; None = unknown."""
        own = self.of_answers
        return self.of_engine if own is None else own
