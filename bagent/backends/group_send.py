"""One request for several calls: its body, and what its answer means for each of them."""

from __future__ import annotations

from collections.abc import Sequence

from bagent.backends.chat_template import thinks
from bagent.backends.chat_wire import BodyWriter
from bagent.backends.endpoint import Endpoint
from bagent.backends.group_wire import GroupAnswer
from bagent.backends.grouping import Groups, Learned, Way
from bagent.backends.request import Request, encode_payload
from bagent.types import Failure, Reply

PATHS: dict[Way, str] = {
    "prompts": "/completions",
    "templated": "/completions",
    "chats": "/chat/completions/batch",
}
"""Where each way leads, below an endpoint's base address."""

_TOKEN_IDS = b',"return_token_ids":true'
_NO_SPECIAL = b',"add_special_tokens":false'


def group_body(
    writer: BodyWriter,
    way: Way,
    group: Sequence[Request],
    learned: Learned | None,
    token_ids: bool,
) -> bytes:
    """The JSON body of one request for ``group``.

    Args:
        learned: the template, for the way ``templated``.
        token_ids: whether to ask for token ids: they are the only counts by the call.
    """
    extra = _TOKEN_IDS if token_ids else b""
    if learned is None or learned.template is None:
        key = "messages" if way == "chats" else "prompt"
        return writer.group_body(group[0], key, [request.payload for request in group], extra)
    render = learned.template.render
    payloads = [encode_payload(render(request.messages or ())) for request in group]
    # The template writes the tokens at the beginning itself; the server would add them again.
    return writer.group_body(group[0], "prompt", payloads, _NO_SPECIAL + extra)


def take_answer(
    groups: Groups, endpoint: Endpoint, way: Way, request: Request, answer: GroupAnswer
) -> tuple[list[Reply | Failure], bool]:
    """The results of a group, and whether its calls are to go again, alone, at no cost.

    They are where the endpoint answered all calls as one, or not as it answers chats.
    """
    size = len(answer.results)
    if answer.answered <= 1:
        groups.one_answer(endpoint, way)
        return answer.results, True
    why = ""
    if way == "templated":
        if answer.strange_prompt:
            why = "the prompts did not begin as chats do"
        elif any(isinstance(result, Reply) and thinks(result.text) for result in answer.results):
            why = "the model thinks before it answers"
    if why:
        groups.distrust(endpoint, request, why)
        failure = Failure("bad_response", f"not as chats are answered: {why}", True, 200)
        return [failure] * size, True
    groups.confirmed(endpoint, way)
    return answer.results, False
