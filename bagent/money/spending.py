"""A run's money: what is spent, what is in flight, and whether one more call fits the budget.

A pure object: it knows no network and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Spending:
    """Lets calls begin only as long as all of them together cannot pass the budget.

    Args:
        budget: dollars.
        exhausted: called once, with words for people, when nothing is in flight any more and
            the next call might pass the budget.
    """

    def __init__(self, budget: float, exhausted: Callable[[str], None]) -> None:
        self._budget = budget
        self._exhausted: Callable[[str], None] | None = exhausted
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._calls = 0
        self.spent = 0.0
        self.reserved = 0.0

    def ask(self, most: float, begin: Callable[[], None]) -> None:
        """Call ``begin`` as soon as a call of at most ``most`` dollars fits; first come, first
        served. Once the budget is exhausted it is never called."""
        self._waiting.append((most, begin))
        self._admit()

    def withdraw(self, begin: Callable[[], None]) -> None:
        """Whoever asked no longer waits."""
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not begin)
        self._admit()

    def settle(self, most: float, actual: float) -> None:
        """A call that was let in with ``most`` is over and cost ``actual``."""
        self._calls -= 1
        self.reserved = self.reserved - most if self._calls else 0.0
        self.spent += actual
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            most, begin = self._waiting[0]
            if self.spent + self.reserved + most > self._budget:
                break
            self._waiting.popleft()
            self._calls += 1
            self.reserved += most
            begin()
        if self._waiting and not self._calls and self._exhausted is not None:
            told, self._exhausted = self._exhausted, None
            told(
                f"${self.spent:.4f} of the budget of ${self._budget:g} is spent, and the next"
                f" call may cost ${self._waiting[0][0]:.4f}"
            )
