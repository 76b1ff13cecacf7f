"""What every stage that asks a model has: rows in, outcomes out, what is finished not asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagent.agents.plan import StagePlan
from bagent.stages.engine import Engine
from bagent.stages.inbox import Gate, Inbox
from bagent.stages.items import Item
from bagent.stages.records import Emit, Records
from bagent.types import Outcome, Row

Then = Callable[[Outcome, int], None]
"""What goes on with an outcome and its place."""

MakeEngine = Callable[[Emit], Engine]


class Asker:
    """Asks about rows in the order given, and says what came of each.

    Args:
        plan: the stage's prompt and settings.
        records: where outcomes are.
        gate: the backpressure on the input.
        make_engine: makes the engine, given what takes its outcomes.
    """

    def __init__(
        self, plan: StagePlan, records: Records, gate: Gate, make_engine: MakeEngine
    ) -> None:
        self.plan = plan
        self._records = records
        self._inbox = Inbox(gate)
        self._waiting: dict[tuple[int, int], list[Then]] = {}
        self.engine = make_engine(self._ended)

    def ask(
        self,
        unit: tuple[int, int],
        made_of: Sequence[Item],
        make: Callable[[], Row],
        then: Then,
    ) -> None:
        """Have one answer for a row; ``then`` may be called at once.

        Args:
            unit: the row's key, and the number of the answer.
            made_of: what the row is made of.
            make: makes the row, with all that its prompt needs, just before it is sent.
        """
        key, answer = unit
        found = self._records.finished(key, self.plan.name, answer, made_of)
        if found is not None:
            then(*found)
            return
        waiting = self._waiting.setdefault(unit, [])
        waiting.append(then)
        if len(waiting) == 1:
            self._inbox.put(make, answer)

    def _ended(self, outcome: Outcome, place: int, row: Row) -> None:
        self._records.note(outcome, place, row)
        for then in self._waiting.pop((row.key, outcome.answer), ()):
            then(outcome, place)

    def close(self) -> None:
        """No more rows come."""
        self._inbox.close()

    async def run(self) -> None:
        """Send what comes until it is closed and everything has ended."""
        await self.engine.run(self._inbox)
