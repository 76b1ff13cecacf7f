"""The shape of stages that take the rows of one stream as they come."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bagent.stages.items import Item, stage_item
from bagent.stages.stage import Entrance, World
from bagent.stages.tickets import AsTheyCome, Reader, Stream, Ticket


class RowStage(ABC):
    """Reads one stream; rows that its entrance does not admit leave nothing behind."""

    def __init__(self, name: str, entrance: Entrance) -> None:
        self.name = name
        self.out = Stream()
        self._entrance = entrance

    def readers(self) -> list[Reader]:
        """Reads one stream, as rows come."""
        return [AsTheyCome(self._arrive, self._all_taken, self.out)]

    def _arrive(self, item: Item, ticket: Ticket) -> None:
        if not self._entrance.admits(item):
            ticket.split(0)
        elif item.void:
            ticket.fill(stage_item(item, item.row, *self._entrance.unasked(item)))
        else:
            self._take(item, ticket)

    @abstractmethod
    def _take(self, item: Item, ticket: Ticket) -> None:
        """Work on one row; what comes of it goes to its ticket."""

    def _all_taken(self) -> None:
        """No more rows come."""
        self._entrance.tell()

    def _was_finished(self, world: World, item: Item, ticket: Ticket) -> bool:
        """Fill the ticket with what an earlier start made of the row, if it did."""
        found = world.records.finished(item.row.key, self.name, 0, (item,))
        if found is None:
            return False
        ticket.fill(stage_item(item, item.row, *found))
        return True
