"""The messages of a conversation with tools."""

from __future__ import annotations

import pytest

from bagent.agents.tool_turn import assign_call_ids
from bagent.types import Reply, ToolCall


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (("", "call_2_0"), set()),
        (("call_2_1", ""), set()),
        (("", ""), {"call_2_0", "call_2_1"}),
        (("x", "x"), {"call_2_1", "call_2_1_1"}),
    ],
)
def test_every_call_has_an_id_of_its_own_whatever_ids_a_server_makes_up(
    given: tuple[str, ...], used: set[str]
) -> None:
    asked = tuple(ToolCall(name, "add", "{}") for name in given)
    names = [
        call.id for call in assign_call_ids(Reply(None, "tool_calls", tool_calls=asked), 2, used)
    ]
    assert len({*names, *used}) == len(names) + len(used)
