"""Stages that read several others: which rows belong together, and which never can."""

from __future__ import annotations

import pytest

from support.fake_server import FakeServer
from support.stage_jobs import outcomes, run_scripted, run_stages, texts

NOTE = {"kind": "map", "name": "note", "prompt": "note id={{ id }}"}
PIECE = {"kind": "expand", "name": "piece", "split": {"field": "text", "tokens": 8}}
WORK = {"kind": "map", "name": "work", "from": "piece", "prompt": "work id={{ id }} {{ text }}"}
WHOLE = {"kind": "reduce", "name": "whole", "from": "work", "by": "id", "prompt": "whole {{ n }}"}
BOTH = {"kind": "map", "name": "both", "prompt": "both id={{ id }}"}
ROWS = [{"id": name, "text": f"{name} one two three, four five six seven."} for name in "xy"]


def test_reductions_and_pieces_are_joined_to_answers_about_their_input_row(tmp_path):
    both = {**BOTH, "from": ["note", "whole"], "prompt": "<{{ note }}> <{{ whole }}>"}
    each = {**BOTH, "name": "each", "from": ["work", "note"], "prompt": "<{{ note }}> {{ text }}"}
    stages = [NOTE, {**PIECE, "from": "input"}, WORK, WHOLE, both, each]
    run_scripted(tmp_path, ROWS, stages)
    found = texts(tmp_path, "both")
    assert set(found) == {"x", "y"}
    assert all(text.startswith(f"<note id={name}> <whole ") for name, text in found.items())
    assert outcomes(tmp_path, "both")[0]["parents"][1].startswith("whole:")
    pieces = outcomes(tmp_path, "each")
    assert len(pieces) == len(outcomes(tmp_path, "work")) > 2
    assert all(line["text"].startswith(f"<note id={line['id'][0]}> ") for line in pieces)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (["note", "work"], "work may have several rows for one of note"),
        (["note", "all"], "all brought rows together, none of its rows belongs to one"),
    ],
)
def test_rows_that_never_belong_together_are_refused_at_load(tmp_path, sources, words):
    whole = {"kind": "reduce", "name": "all", "from": "note", "prompt": "{{ responses }}"}
    both = {**BOTH, "from": sources}
    with FakeServer() as server:
        stages = [NOTE, {**PIECE, "from": "input"}, WORK, whole, both]
        done = run_stages(tmp_path, server.url, ROWS, stages)
        assert not server.requests
    assert done.code == 2
    assert f"stage both: from: {words}" in done.err
