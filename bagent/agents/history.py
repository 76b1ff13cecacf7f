"""The messages of a conversation with tools: calls with ids of their own, each with its answer."""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from bagent.backends.json_text import decode_json, encode_json
from bagent.backends.turns import assistant_message
from bagent.types import Json, Message, Reply, ToolCall

MOST_CALLS = 64
"""Most tool calls of one turn that are run; the others are answered with a fault."""


def own_calls(reply: Reply, turn: int, used: Container[str]) -> tuple[ToolCall, ...]:
    """The calls of ``reply``, each with an id that no other call of the conversation has.

    Some servers send no ids, the same one for all, or start again with ``call_0`` each turn. Where
    the turn is given back in the provider's own form its ids stand there, and stay.
    """
    if reply.blocks is not None:
        return reply.tool_calls
    found: list[ToolCall] = []
    taken: set[str] = set()
    for place, call in enumerate(reply.tool_calls):
        name = call.id
        again = 0
        while not name or name in taken or name in used:
            name = f"call_{turn}_{place}" + (f"_{again}" if again else "")
            again += 1
        taken.add(name)
        found.append(msgspec.structs.replace(call, id=name))
    return tuple(found)


def turn_message(reply: Reply, calls: Sequence[ToolCall]) -> Message:
    """The assistant's message of a turn that asks for ``calls``, as every server takes it.

    Arguments are the JSON text of one object: servers parse them to fill in their templates.
    """
    wired = tuple(
        msgspec.structs.replace(call, arguments=object_text(call.arguments)) for call in calls
    )
    return assistant_message(msgspec.structs.replace(reply, tool_calls=wired))


def begun_message(calls: Sequence[ToolCall]) -> Message:
    """The assistant's message for calls whose own turn was lost before it was whole."""
    return turn_message(Reply(None, "tool_calls"), calls)


def answer_message(call: ToolCall, text: str) -> Message:
    """The message that answers a call."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def object_text(arguments: str) -> str:
    """``arguments`` as JSON text that decodes once, to an object.

    Text within text is taken out of it, nothing is an empty object, and what is no object stands
    under the key ``arguments``, so that the model sees what it wrote.
    """
    value: Json = arguments
    layers = 0
    while isinstance(value, str) and layers < 2:
        layers += 1
        try:
            value = decode_json(value) if value.strip() else None
        except ValueError:
            return encode_json({"arguments": value})
    if isinstance(value, dict):
        return arguments if layers == 1 else encode_json(value)
    return "{}" if value is None else encode_json({"arguments": value})


def calls_of(message: Message) -> list[ToolCall]:
    """The calls of an assistant's message in OpenAI form."""
    found = []
    for entry in message.get("tool_calls") or ():
        function = entry.get("function") or {}
        found.append(
            ToolCall(str(entry.get("id")), str(function.get("name")), str(function["arguments"]))
        )
    return found


def call_key(call: ToolCall) -> tuple[str, str]:
    """What two equal calls have in common: the name, and the arguments however they are spaced."""
    try:
        value = decode_json(call.arguments)
        return call.name, msgspec.json.encode(value, order="deterministic").decode()
    except (ValueError, OverflowError, RecursionError):
        return call.name, call.arguments
