"""Stages before anything is sent: names that are not there, and short names written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.job import Job
from bagent.stages.prepare import prepare_stages
from bagent.stages.topologies import expand_topology, topology_yaml
from bagent.stages.validate import check_stages, check_vote
from bagent.types import Row

Look = Callable[..., list[str]]

HEAD = "backend: vllm://host\nmodel: m\ninput: rows.jsonl\n"
RATED = (
    "{kind: map, name: rate, prompt: '{{ text }}', output: {schema: {type: object,"
    " properties: {score: {type: integer}, tags: {type: array, items: {type: string}}}}}}"
)
ROWS: list[dict[str, Any]] = [
    {"id": "a", "text": "x", "topic": "t", "year": 2020, "meta": {"pages": 3}},
    {"id": "b", "text": "y", "topic": "u", "note": None, "day": "2024-01-01"},
]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """``look(TEXT, rows=...)`` checks the job TEXT against rows; gives its warnings."""

    def looking(text: str, rows: list[dict[str, Any]] = ROWS) -> list[str]:
        (tmp_path / "job.yaml").write_text(HEAD + text)
        job = load_job(JobRequest(path=Path("job.yaml"), cwd=tmp_path))
        stages = prepare_stages(job)
        check_vote(job, stages)
        sample = [
            Row(index=n, key=n, id=data.get("id"), data=data, source="", line=n)
            for n, data in enumerate(rows)
        ]
        return check_stages(stages, sample, job.source)

    return looking


def refused(look: Look, marked: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """What a job is refused with: at the place of ``§`` in ``marked``; the place is taken off."""
    before = (HEAD + marked[: marked.index("§")]).split("\n")
    place = f"job.yaml:{len(before)}:{len(before[-1]) + 1}: "
    with pytest.raises(JobError) as caught:
        look(marked.replace("§", ""), rows)
    message = str(caught.value)
    assert message.startswith(place), message
    return message.removeprefix(place)


def ask(query: str, more: str = "") -> str:
    return f"stages:\n- {RATED}\n- kind: sql\n  name: best\n  query: {query}\n{more}"


RATE = f"stages:\n- {RATED}\n"
REDUCE = RATE + "- {kind: reduce, by: %s, prompt: '{{ responses }}'}\n"
SAY = "- {kind: map, name: say, prompt: '{{ %s }} of {{ best.winner }}'}\n"
WINNER = ask("select id, tags as winner from rate", SAY)
BEST = ask("select id, tags as winner from rate", "- {kind: map, prompt: '{{ %s }}'}\n")
ANSWERS = RATE + "- {kind: map, prompt: 'of {{ %s }}'}\n"
EXPAND = RATE + "- {kind: expand, items: %s}\n"
SPLIT = "stages: [{kind: expand, split: {field: %s, tokens: 9}}]\n"
BOARD = (
    "stages: [{kind: loop, name: talk, until: '%s', sections: [{name: pro, prompt: '{{ board }}',"
    " output: {schema: {type: object, properties: {done: {type: boolean}}}}},"
    " {name: con, prompt: no}]}]\n"
)
VOTE = (
    "prompt: x\noutput: {schema: {type: object, properties: {label: {type: string}}}}\n"
    "topology: {name: self_consistency, vote: %s}\n"
)
PLAIN_VOTE = "prompt: x\ntopology: {name: self_consistency, vote: %s}\n"
BLACKBOARD = "prompt: x\ntopology:\n  name: blackboard\n  sections: [a, b]\n  until: %s\n"
PLAIN = "stages:\n- {kind: map, name: plain, prompt: x}\n- {kind: expand, items: %s}\n"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select §scre from rate", "there is no column scre (did you mean score?)"),
        ("select id from §raet", "there is no table raet (did you mean rate?)"),
        ("select id from §sums", "there is no table sums (there are input, rate)"),
        ("select id form §rate where x", 'syntax error at or near "rate"'),
        ("select §lengt(text) from rate", "Scalar Function with name lengt does not exist"),
        ("select §unnest(text) as t from rate", "UNNEST() can only be applied to lists"),
        ("select §id, count(*) from rate", 'column "id" must appear in the GROUP BY'),
        (
            "§select 1; select 2",
            "a query is one statement, these are 2 (join them by WITH name AS (...))",
        ),
        ("§delete from rate", "a query is a SELECT, this is DELETE"),
        ("§with x as (copy rate to 'x.csv') select 1", "a query only reads, this holds COPY"),
        ("pivot rate on §idd using sum(score)", "there is no column idd (did you mean id?)"),
    ],
)
def test_a_query_that_cannot_be_asked_is_refused_at_its_word(look, query, message):
    assert refused(look, ask(query)).startswith(f"stage best: query: {message}")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (WINNER, "§winer", "did you mean winner?"),
        (ANSWERS, "§rate.scroe", "stages[1].prompt.user: there is no rate.scroe (did you mean"),
        (BEST, "§best.winer", "did you mean winner?"),
        (EXPAND, "§tgs", "stages[1].items: there is no tgs (did you mean tags?)"),
        (EXPAND, "§rat.tags", "stages[1].items: there is no rat (did you mean rate?)"),
        (EXPAND, "§row.tags", "stages[1].items: there is no row"),
        (EXPAND, "rate.§tgs", "stages[1].items: there is no rate.tgs (did you mean tags?)"),
        (PLAIN, "§tags", "stages[1].items: there is no tags (there are answer, day, id"),
        (REDUCE, "[topic, §scre]", "by: there is no field scre (did you mean score?)"),
        (REDUCE, "§rate.scre", "by: there is no field rate.scre (did you mean score?)"),
        (SPLIT, "§txt", "split.field: there is no field txt (did you mean text?)"),
        (BOARD, "round > 2 or §dones", "stages[0].until: there is no dones (did you mean done?)"),
        (VOTE, "§lable", "topology.vote: answers have no property lable (did you mean label?)"),
        (PLAIN_VOTE, "§label", "without vote the whole answer votes"),
        (BLACKBOARD, "§c == 'yes'", "topology.until: there is no c"),
    ],
)
def test_a_name_that_is_not_there_is_refused_at_its_place(look, text, name, message):
    assert message in refused(look, text % name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (WINNER, ["winner"]),
        (ANSWERS, ["rate.score", "rate.error", "rate.items()", "rate", "rate.more | default(0)"]),
        (BEST, ["best.winner"]),
        (EXPAND, ["tags", "rate.tags", "answer.tags", "answer.keys()", "meta.pages"]),
        (EXPAND, ["rate.values()", "more.tags if more is defined else tags"]),
        (REDUCE, ["topic", "score", "rate.score", "[topic, year]", "id", "meta.pages"]),
        (SPLIT, ["text"]),
        (SPLIT.replace("[{kind: exp", f"[{RATED}, {{kind: exp"), ["rate"]),
        (BOARD, ["done", "round >= 3", "pro.done and con", "year > 2000"]),
        (VOTE, ["label"]),
        (BLACKBOARD, ["a == 'yes'"]),
    ],
)
def test_a_name_that_may_be_there_is_allowed(look, text, names):
    for name in names:
        look(text % name)


@pytest.mark.parametrize(
    "query",
    [
        "select id, score + 1 as more, unnest(tags) as tag from rate",
        "select output.anything, error_kind from rate where answer = 0",
        "select i.year, i.meta.pages, i.day - i.day from rate join input i using (id)",
        "select sum(note) from input",  # its type is not known from rows that have none
        "pivot rate on id using sum(score)",
        "from RATE select id -- all of them",
        "select * from read_csv('made-by-an-earlier-step.csv')",
    ],
)
def test_a_query_that_may_be_right_is_allowed(look, query):
    look(ask(f'"{query}"'))


def test_a_query_over_input_without_rows_is_left_to_the_run(look):
    look(ask("select whatever from input"), rows=[])
    assert "no column x" in refused(look, ask("select §x from rate"), rows=[])


@pytest.mark.parametrize(
    "written",
    [
        "query: |\n    select id,\n      'é' as e, §scre\n    from rate",
        "query: >\n    select id, 'scre'\n      as e,\n      §scre from rate\n",
        'query: "select id, §scre from rate"',
        'query: §"select \\u0073cre from rate"',  # not in the file as such: the query's place
    ],
)
def test_the_word_is_found_however_yaml_writes_the_query(look, written):
    message = refused(look, f"{RATE}- kind: sql\n  name: best\n  {written}\n")
    assert "no column scre" in message


PLANNED = (
    "prompt: '%s'\ntopology: {name: plan_map_reduce, reduce: {prompt: '{{ responses }}'},"
    " plan: {prompt: x, output: {schema: {type: object, properties: {items: {type: array,"
    " items: %s}}}}}}\n"
)
ITEM = "{type: object, properties: {title: {type: string}}}"


@pytest.mark.parametrize(
    ("prompt", "items"),
    [
        ("{{ §item.titel }}", ITEM),
        ("{{ item.title }} {{ §titel }}", ITEM),
        ("{{ item }} of {{ §topc }}", "{type: string}"),
    ],
)
def test_a_prompt_about_the_items_of_a_plan_is_checked_before_the_plan_is_paid(look, prompt, items):
    right = prompt.replace("titel", "title").replace("topc", "topic").replace("§", "")
    look(PLANNED % (right, items))
    look(PLANNED % (prompt.replace("§", ""), "{}"))  # whatever the plan says
    assert "did you mean" in refused(look, PLANNED % (prompt, items))


def test_what_a_schema_leaves_open_is_not_refused(look):
    first = "stages:\n- {kind: map, name: rate, prompt: x, output: {schema: {type: object}}}\n"
    look(f"{first}- {{kind: expand, items: anything}}\n")
    look(f"{first}- {{kind: reduce, by: anything, prompt: '{{{{ responses }}}}'}}\n")


def test_after_a_reduction_only_what_it_was_grouped_by_is_left_of_the_fields(look):
    text = (
        "stages:\n- {kind: reduce, name: all, by: topic, prompt: '{{ topic }}: {{ responses }}'}\n"
        "- {kind: map, prompt: '{{ topic }} {{ all }} {{ %s }}'}\n"
    )
    look(text % "topic")
    refused(look, text.replace("{{ %s", "{{ §%s") % "text")


def test_a_reduction_of_each_row_may_name_its_fields_and_what_is_one_for_all_of_it(look):
    text = (
        "stages:\n- {kind: map, name: draft, prompt: x}\n"
        "- {kind: map, name: judge, answers: 3, prompt: '{{ draft }}'}\n"
        "- {kind: reduce, by: id, prompt: '{{ responses }} {{ §%s }}'}\n"
    )
    for name in ("text", "draft", "n"):
        look(text.replace("§", "") % name)
    for name in ("txt", "judge"):
        refused(look, text % name)
    after = text.replace(" {{ §%s }}", "") + "- {kind: map, prompt: '{{ reduce3 }} {{ §%s }}'}\n"
    look(after.replace("§", "") % "draft")
    refused(look, after % "judge")
    everything = text.replace("by: id", "fanin: 9")
    for name in ("text", "draft", "judge"):
        refused(look, everything % name)


BASE = "backend: vllm://host\nmodel: m\ninput: rows.jsonl\n"
PROMPT = (
    'prompt: "say {{ text }}"\noutput: {schema: {type: object, properties: {a: {type: string}}}}\n'
)
TOPOLOGIES = {
    "broadcast": "broadcast",
    "broadcast and reduce": "{name: broadcast, reduce: {prompt: 'all {{ responses }}'}}",
    "reduce": "{name: reduce, fanin: 4, by: [text]}",
    "map_reduce": "{name: map_reduce, reduce: {prompt: '{{ responses }}', model: big}}",
    "tree_reduce": "{name: tree_reduce, reduce: {prompt: '{{ responses }}'}}",
    "plan": "{name: plan_map_reduce, plan: {prompt: p}, reduce: {prompt: '{{ responses }}'}}",
    "pipeline": "{name: pipeline, steps: [{prompt: a}, {prompt: '{{ step1 }}', model: n}]}",
    "blackboard": "{name: blackboard, sections: [a, {name: b, prompt: c}], until: 'round > 2'}",
    "vote": "{name: self_consistency, vote: a}",
    "judge": "{name: judge, judge: {prompt: '{{ answer }}', backend: vllm://other:1}}",
}


def load(text: str) -> Job:
    return load_job(JobRequest(text=text, cwd=Path("/tmp")))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_a_topology_written_out_is_the_same_stages(topology):
    job = load(f"{BASE}{PROMPT}topology: {topology}\n")
    laid = expand_topology(job)
    text = topology_yaml(laid, job)
    again = expand_topology(load(BASE + text))
    assert topology_yaml(again, job) == text
    for one, other in zip(laid.stages, again.stages, strict=True):
        before, after = laid.base.for_stage(one.spec), again.base.for_stage(other.spec)
        for key in ("prompt", "model", "backend", "answers", "output", "sampling", "agent"):
            assert getattr(before, key) == getattr(after, key), key


def test_the_schema_of_the_rows_is_not_asked_of_the_reducer():
    stages = prepare_stages(load(f"{BASE}{PROMPT}topology: {TOPOLOGIES['map_reduce']}\n"))
    assert [stage.requests[0].schema is not None for stage in stages] == [True, False]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("topology: tree_reduce", "topology tree_reduce needs a prompt for its reduce stage"),
        ("topology: judge", "topology judge needs a prompt for its judge stage"),
        ("topology: pipeline", "topology pipeline needs steps"),
        ("topology: blackboard", "topology blackboard needs sections"),
        ("stages: [{kind: reduce, until: 'n < 3'}]", "until of a reduce stage is how many rows"),
        ("stages: [{kind: map, name: a}, {kind: expand, items: 'a b'}]", r"stages\[1\]\.items"),
        ("stages: [{kind: map, select: {role: a}}]", "select chooses among the endpoints of a"),
    ],
)
def test_what_lacks_something_or_is_no_expression_is_refused(keys, words):
    with pytest.raises(JobError, match=words):
        prepare_stages(load(f"{BASE}{PROMPT}{keys}\n"))
