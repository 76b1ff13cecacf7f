"""Which request goes wrong, and how: drawn from the seed, one draw per kind and request."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bagent.sim.config import FaultConfig

KINDS = ("rate_429", "stall", "cut", "malformed", "disorder")
_RATES = {
    "rate_429": "rate_429",
    "stall": "stall_rate",
    "cut": "cut_rate",
    "malformed": "malformed_rate",
    "disorder": "disorder_rate",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one request; a 429 and a dead server leave no room for the others."""

    dead: bool = False
    limited: bool = False
    stall: bool = False
    cut: bool = False
    malformed: bool = False
    disorder: bool = False


NO_FAULT = Fault()


class Faults:
    """Draws the faults of one replica, request by request.

    The draws of a kind depend only on the seed, the replica and how many requests came before, so
    a run goes wrong in the same places each time.

    Args:
        config: rates.
        seed: the fleet's seed.
        replica: number of the replica, from 0.
    """

    def __init__(self, config: FaultConfig, seed: int, replica: int) -> None:
        self.config = config
        self.counts: dict[str, int] = dict.fromkeys((*KINDS, "overload", "dead"), 0)
        self.requests = 0
        self._draws = {
            kind: (rate, random.Random(f"{seed}/{replica}/{kind}"))
            for kind in KINDS
            if (rate := getattr(config, _RATES[kind])) > 0
        }

    def next(self) -> Fault:
        """The fault of the next generation request."""
        self.requests += 1
        if self.config.dead_after is not None and self.requests > self.config.dead_after:
            return Fault(dead=True)
        if not self._draws:
            return NO_FAULT
        hit = {kind for kind, (rate, rng) in self._draws.items() if rng.random() < rate}
        if "rate_429" in hit:
            return Fault(limited=True)
        return Fault(
            stall="stall" in hit,
            cut="cut" in hit,
            malformed="malformed" in hit and "cut" not in hit,
            disorder="disorder" in hit,
        )

    def shown(self, kind: str) -> None:
        """Count a fault that a client has met."""
        self.counts[kind] += 1
