"""Server-sent events, in whatever pieces they come."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bagent.backends.http.sse import InvalidEvent, SSEDecoder
from support.strategies import CUTS, json_objects, pieces

ENDS = st.sampled_from(["\n", "\r\n", "\r"])
NOISE = st.sampled_from(["", ": ping", "event: message", "id: 7", "retry: 10", "data: [DONE]"])


def decode(stream: list[bytes]) -> tuple[list[dict[str, Any]], bytes, str | None]:
    """Return the events of a stream, its other lines, and the first event that is no JSON."""
    decoder, events = SSEDecoder(), []
    try:
        for piece in stream:
            events += decoder.feed(piece)
        events += decoder.finish()
    except InvalidEvent as error:
        return [], b"", str(error)
    return events, decoder.stray, None


@given(
    st.lists(st.tuples(json_objects(), NOISE, st.sampled_from([None, 1])), max_size=4), ENDS, CUTS
)
def test_any_cut_of_a_stream_gives_its_events(events, end, cuts):
    stream = ""
    for event, noise, indent in events:
        data = json.dumps(event, indent=indent)
        lines = [noise, "", *(f"data: {line}" for line in data.split("\n")), "", ""]
        stream += end.join(lines)
    decoded = decode(pieces(stream.encode(), cuts))
    assert decoded == ([event for event, _, _ in events], b"", None)


@given(
    st.lists(
        st.sampled_from(["data:", "data: {}", '{"a":1}', "[", "é", " ", "event:x", "<p>", ""])
    ),
    ENDS,
    CUTS,
)
def test_any_cut_of_what_is_no_stream_is_read_alike(parts, end, cuts):
    stream = end.join(parts).encode()
    assert decode(pieces(stream, cuts)) == decode([stream])
