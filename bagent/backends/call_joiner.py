"""Streamed tool calls put together from their pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagent.backends.json_text import decode_json, encode_json
from bagent.types import Json, ToolCall


class ToolCallJoiner:
    """Joins streamed tool calls: by index, but a new non-empty id starts a new call.

    Servers without useful indexes or ids start a new call with a name once the call before has
    its arguments. Empty names and ids never overwrite what came before (some servers repeat them
    empty in the last chunk), and several entries in one chunk are taken in order.

    Args:
        on_call: gets each call once, as soon as its arguments are a whole JSON object: nothing
            that follows could change it.
    """

    def __init__(self, on_call: Callable[[ToolCall], None] | None = None) -> None:
        self._calls: list[dict[str, str]] = []
        self._by_index: dict[int, int] = {}
        self._on_call = on_call
        self._told: set[int] = set()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, entries: Json) -> None:
        """Take the ``tool_calls`` of one delta."""
        if isinstance(entries, dict):
            entries = [entries]
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict):
                function = entry.get("function")
                self._add(entry, function if isinstance(function, dict) else entry)

    def _add(self, entry: dict[str, Any], function: dict[str, Any]) -> None:
        index = entry.get("index")
        if not isinstance(index, int):
            index = 0
        call_id, name = str(entry.get("id") or ""), str(function.get("name") or "")
        arguments = function.get("arguments")
        if not (call_id or name or arguments):
            return
        place = self._by_index.get(index)
        if place is None or self._is_new(self._calls[place], call_id, name, bool(arguments)):
            place = self._by_index[index] = len(self._calls)
            self._calls.append({"id": "", "name": "", "arguments": ""})
        call = self._calls[place]
        call["id"] = call_id or call["id"]
        call["name"] = _joined_name(call, name)
        if isinstance(arguments, str):
            if arguments != call["arguments"] or not self._is_whole(place):
                call["arguments"] += arguments  # else all of it once more, at the end
        elif arguments:
            call["arguments"] = encode_json(arguments)
        if self._on_call is not None and arguments and call["arguments"].rstrip().endswith("}"):
            self._look(place)

    def _look(self, place: int) -> None:
        """Tell of a call whose arguments are whole."""
        if self._is_whole(place):
            self._tell(place)

    def _is_whole(self, place: int) -> bool:
        try:
            return isinstance(decode_json(self._calls[place]["arguments"]), dict)
        except ValueError:
            return False

    def _tell(self, place: int) -> None:
        if self._on_call is not None and place not in self._told and self._calls[place]["name"]:
            self._told.add(place)
            self._on_call(self._call(place))

    def tell_rest(self) -> None:
        """Tell of the calls that were not told yet: the answer has ended well."""
        for place in range(len(self._calls)):
            self._tell(place)

    @staticmethod
    def _is_new(call: dict[str, str], call_id: str, name: str, more: bool) -> bool:
        if call_id:
            return call["id"] not in ("", call_id)
        if not name or not call["name"] or not (more or name != call["name"]):
            return False
        try:
            decode_json(call["arguments"])
        except ValueError:
            return False
        return True

    def result(self) -> tuple[ToolCall, ...]:
        """The calls, in the order in which they began."""
        return tuple(self._call(place) for place in range(len(self._calls)))

    def _call(self, place: int) -> ToolCall:
        call = self._calls[place]
        return ToolCall(call["id"] or f"call_{place}", call["name"], call["arguments"] or "{}")


def _joined_name(call: dict[str, str], piece: str) -> str:
    """The name with its next piece: some servers send it in pieces, some repeat it with each."""
    before = call["name"]
    if not piece or piece == before:
        return before
    if call["arguments"] or piece.startswith(before):
        return piece
    return before + piece
