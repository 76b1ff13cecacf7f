"""Calls that share a request: which and how many, what refusals teach, how answers are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from bagent.backends.base import Exchange
from bagent.backends.batching.routes import MAX_CHATS
from bagent.backends.batching.wire import MAX_PROMPTS, GroupAnswer, read_group
from bagent.backends.endpoint import Capabilities, Endpoint
from bagent.backends.openai.backend import OpenAIBackend
from bagent.backends.request import CallSettings, OutputFormat, Request
from bagent.sim import parse_sim_url, start_sim
from bagent.types import Failure, Reply, Usage
from support.backend_calls import QUICK, backend, endpoint
from support.fake_server import FakeServer
from support.replies import context_overflow, echo, error_body, ok, status
from support.tiny_engine import OWN, PLAIN, Setting, TinyEngine, chat, raw_prompt

RAW = raw_prompt("2+2=")
ROW = chat("be brief", "what is 2+2?")
HOSTED = Endpoint("api", "https://api/v1")
TOOL = {"type": "function", "function": {"name": "f"}}


def with_fields(**fields: Any) -> CallSettings:
    """Settings with further parameters."""
    return CallSettings(model="m", sampling=fields, extra={})


def ready(mode: str = "auto", engine: str | None = "vllm") -> Setting:
    """An engine that is known, with the template for :data:`ROW` learned and confirmed."""
    setting = Setting(TinyEngine(engine=engine), mode)
    asyncio.run(setting.learn(ROW))
    if setting.profiles.of(OWN).awaits_sample:
        setting.confirm(ROW)
    return setting


def refusal(status: int, words: str = "no", kind: str = "rejected", **fields: Any) -> Failure:
    """What a refused group came to."""
    return Failure(kind, words, status=status, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        RAW,
        chat("be brief", "what is 2+2?", "4", "and 3+3?"),
        chat("be brief", "what is 2+2?", max_tokens=17),
        chat("be brief", "what is 2+2?", seed=1),
        chat("be brief", "what is 2+2?", settings=with_fields(temperature=0)),
    ],
)
def test_calls_that_differ_in_their_settings_do_not_go_together(other: Request) -> None:
    key = Setting().groups.key
    assert key(other) is not None
    assert key(ROW) != key(other)


@pytest.mark.parametrize(
    "request_",
    [
        chat("a", "b", stream=True),
        raw_prompt("a", max_tokens=None),
        Request(PLAIN, b"{}", body={"messages": []}),
        chat("a", "b", settings=with_fields(n=2)),
        chat("a", "b", settings=CallSettings("m", {}, {}, tools=[TOOL])),
        chat("a", "b", settings=with_fields(reasoning_effort="low")),
        chat("a", "b", settings=CallSettings("m", {}, {"nvext": {}})),
        raw_prompt("a", settings=with_fields(best_of=2)),
        raw_prompt("a", settings=CallSettings("m", {}, {"max_tokens": 5})),
    ],
)
def test_calls_that_no_group_can_carry_go_alone(request_: Request) -> None:
    assert Setting().groups.key(request_) is None


def test_what_a_probe_found_missing_is_not_tried() -> None:
    setting = ready("chat")
    setting.profiles.of(OWN).update(Capabilities(engine="vllm", lists=False, chat_batch=False))
    assert setting.limit(ROW) == 1
    assert setting.notices == []
    setting = ready()
    setting.profiles.of(OWN).update(Capabilities(engine="vllm", lists=False))
    assert setting.limit(RAW) == 1
    assert setting.limit(ROW) == MAX_CHATS


@pytest.mark.parametrize("status", [404, 501])
def test_a_route_that_is_not_there_is_not_asked_again(status: int) -> None:
    setting = ready("chat")
    setting.groups.confirmed(OWN, "chats")
    assert setting.groups.refused(OWN, "chats", refusal(status))
    assert setting.limit(ROW) == 1
    assert len(setting.notices) == 1


@pytest.mark.parametrize(
    ("failure", "taught"),
    [
        # it says that it takes no lists
        (refusal(400, "body.prompt: Input should be a valid string"), [True]),
        (refusal(400, "'prompt' must not be an array"), [True]),
        (refusal(400, "json: cannot unmarshal array into Go struct field CompletionRequest.prompt"),
         [True]),
        # one bad row in the first group is no reason yet, but a second refusal is
        (refusal(400, "HTTP 400: bad token"), [False, True]),
        # single calls meet them too
        (refusal(400, "prompt of 9000 tokens, a string too long", "context_overflow"), [False] * 3),
        (refusal(401, "prompt string", "auth"), [False] * 3),
        (refusal(413, "too large"), [False] * 3),
        (refusal(503, "queue full", "overloaded", busy=True, passing=True), [False] * 3),
        (msgspec.structs.replace(refusal(0, "gone", "connect"), status=None), [False] * 3),
    ],
)  # fmt: skip
def test_an_endpoint_that_refuses_lists_gets_none_from_then_on(
    failure: Failure, taught: list[bool]
) -> None:
    setting = ready()
    assert [setting.groups.refused(OWN, "prompts", failure) for _ in taught] == taught
    assert setting.limit(RAW) == (1 if any(taught) else MAX_PROMPTS)
    assert setting.limit(ROW) == MAX_CHATS or not any(taught)
    assert [failure.message in notice for notice in setting.notices] == [True] * any(taught)


def test_an_endpoint_that_took_a_group_is_trusted_with_more() -> None:
    setting = ready()
    setting.groups.confirmed(OWN, "prompts")
    for failure in (refusal(400, "bad"), refusal(500, "oops", "overloaded")):
        for _ in range(3):
            assert not setting.groups.refused(OWN, "prompts", failure)
    assert setting.limit(RAW) == MAX_PROMPTS


def test_an_endpoint_that_came_back_is_learned_anew() -> None:
    setting = ready()
    setting.groups.refused(OWN, "chats", refusal(404))
    setting.profiles.forget(OWN)
    assert setting.limit(ROW) is None
    assert setting.limit(RAW) == MAX_PROMPTS
    assert not setting.profiles.of(OWN).awaits_sample


def ab(settings: CallSettings) -> Request:
    return chat("a", "b", settings=settings)


LOGPROBS, STOP_IDS = with_fields(logprobs=True), with_fields(stop_token_ids=[2])
FORM = CallSettings("m", {}, {}, OutputFormat("answer", b"{}", strict=True))


@pytest.mark.parametrize(
    ("mode", "engine", "request_", "limit"),
    [
        ("single", "vllm", RAW, 1),
        ("single", "vllm", ROW, 1),
        ("auto", "vllm", RAW, MAX_PROMPTS),
        ("auto", None, RAW, MAX_PROMPTS),
        ("completions", "vllm", RAW, MAX_PROMPTS),
        ("chat", "vllm", RAW, 1),
        ("chat", "vllm", ROW, MAX_CHATS),
        ("auto", "sglang", ROW, 1),
        ("chat", "sglang", ROW, MAX_CHATS),
        ("auto", "llamacpp", RAW, 1),
        ("auto", "llama.cpp", ROW, 1),
        # what only the chat route takes
        ("auto", "vllm", ab(LOGPROBS), MAX_CHATS),
        # what a batch of chats would ignore
        ("auto", "vllm", ab(STOP_IDS), MAX_PROMPTS),
        ("chat", "vllm", ab(STOP_IDS), 1),
        # a schema travels in every way
        ("auto", "vllm", ab(FORM), MAX_PROMPTS),
        ("chat", "vllm", ab(FORM), MAX_CHATS),
    ],
)
def test_how_many_calls_go_together_by_mode_engine_and_call(
    mode: str, engine: str | None, request_: Request, limit: int
) -> None:
    setting = ready(mode, engine)
    assert setting.limit(request_) == limit
    assert setting.limit(request_, HOSTED) == 1
    if limit == MAX_CHATS and engine == "vllm":
        assert setting.groups.way(OWN, request_) == "chats"
    if mode == "chat":
        assert setting.engine.asked == []


HEADERS = {"Content-Type": "application/json"}


def choice(index: Any, text: Any = None, **fields: Any) -> dict[str, Any]:
    """A choice of a text completion."""
    text = f"answer {index}" if text is None else text
    return {"index": index, "text": text, "finish_reason": "stop", **fields}


def body(*choices: Any, **fields: Any) -> bytes:
    """The body of an answer."""
    return msgspec.json.encode({"id": "cmpl-1", "model": "m", "choices": choices, **fields})


def read(raw: bytes, size: int, first_ids: tuple[int, ...] = ()) -> GroupAnswer:
    """The answer, which is good as a whole."""
    found = read_group(raw, HEADERS, size, first_ids)
    assert isinstance(found, GroupAnswer), found
    return found


def texts_by_call(answer: GroupAnswer) -> list[str | None]:
    """The texts by call; None for a failure."""
    return [r.text if isinstance(r, Reply) else None for r in answer.results]


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([choice(0), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(1, "a"), choice(1, "b"), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(7), choice(2)], ["answer 0", None, "answer 2"]),
        ([choice(0), choice(True), choice(2)], ["answer 0", None, "answer 2"]),
    ],
    ids=["missing", "twice", "of no call", "index that is no number"],
)
def test_an_answer_that_is_not_clear_fails_its_own_call_only(
    choices: list[Any], expected: list[str | None]
) -> None:
    found = read(body(*choices), 3)
    assert texts_by_call(found) == expected
    failure = found.results[1]
    assert (failure.kind, failure.passing, failure.status) == ("bad_response", True, 200)


def test_tokens_are_counted_by_the_call_and_the_sum_is_given_to_none() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    choices = [
        choice(0, token_ids=[1, 2], prompt_token_ids=[5, 6, 7]),
        choice(1, token_ids=[], prompt_token_ids=[5]),
        choice(2, token_ids=None),
    ]
    found = read(body(*choices, usage=usage), 3)
    assert [r.usage for r in found.results] == [Usage(3, None, 2), Usage(1, None, 0), Usage()]
    assert found.total == Usage(prompt=9, completion=5)


def test_a_batch_of_chats_is_read_with_its_reasoning() -> None:
    raw = body(
        {"index": 1, "message": {"content": "b", "reasoning": "hm"}, "finish_reason": "stop"},
        {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "token_ids": [1, 2, 3]},
    )
    found = read(raw, 2)
    first, second = found.results
    assert (first.text, first.usage.completion, first.reasoning) == ("a", 3, None)
    assert (second.text, second.reasoning, second.request_id) == ("b", "hm", "cmpl-1")


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"error": {"message": "queue is full", "code": 503}}', "overloaded"),
        (b'{"choices": null}', "bad_response"),
        (b"[]", "bad_response"),
        (b'{"choices": [{"index": 0, "te', "bad_response"),
    ],
)
def test_a_body_that_is_no_answer_is_one_failure_for_all(raw: bytes, kind: str) -> None:
    found = read_group(raw, HEADERS, 2)
    assert (found.kind, found.passing) == (kind, True)


def test_prompts_that_begin_otherwise_than_they_should_are_noticed() -> None:
    good = choice(0, prompt_token_ids=[1, 2, 3])
    doubled = choice(1, prompt_token_ids=[1, 1, 2, 3])
    assert not read(body(good), 1, (1, 2)).strange_prompt
    assert read(body(good, doubled), 2, (1, 2)).strange_prompt
    assert not read(body(choice(0), choice(1)), 2, (1, 2)).strange_prompt


SCHEMA = OutputFormat("answer", b'{"type":"object"}', strict=False)


def raws(count: int, settings: CallSettings = PLAIN) -> list[Request]:
    """Raw prompts of rows r0, r1 ..."""
    return [raw_prompt(f"id=r{i} say it", settings) for i in range(count)]


def chats(count: int, settings: CallSettings = PLAIN) -> list[Request]:
    """Chats of rows r0, r1 ..."""
    return [chat("be {brief} ", f" id=r{i} naïve?\n", settings=settings) for i in range(count)]


async def group(found: OpenAIBackend, fs: FakeServer, calls: list[Request]) -> Exchange:
    """Send a group as the fleet does: learned where that is due, and alone first where it must."""
    to = endpoint(fs.url, own=True)
    assert len({found.group_key(call) for call in calls}) == 1
    if found.group_limit(to, calls[0]) is None:
        await found.learn(to, calls[:4], QUICK)
    if found.group_limit(to, calls[0]) == 1:
        await found.send(to, [chat("be {brief} ", "id=first")], QUICK)
    limit = found.group_limit(to, calls[0])
    assert limit is not None
    assert limit >= len(calls), "they go alone"
    return await found.send(to, calls, QUICK)


async def limit_after(fs: FakeServer, calls: list[Request], **options: Any) -> tuple[Exchange, int]:
    """A group, and how many such calls may go together after it."""
    async with backend(**options) as found:
        exchange = await group(found, fs, calls)
        limit = found.group_limit(endpoint(fs.url, own=True), calls[0])
    assert limit is not None
    return exchange, limit


@pytest.fixture
def vllm() -> Iterator[FakeServer]:
    """A scripted server with vLLM's routes, which repeats what it is asked."""
    with FakeServer({"*": [echo()]}, flavour="vllm") as server:
        yield server


async def test_proven_chats_travel_as_a_list_of_rendered_prompts(vllm: FakeServer) -> None:
    settings = CallSettings("m", {"temperature": 0}, {}, SCHEMA)
    async with backend() as found:
        exchange = await group(found, vllm, chats(3, settings))
    first, seen = vllm.requests
    assert first.path == "/v1/chat/completions"
    assert seen.path == "/v1/completions"
    assert seen.body["prompt"][1] == (
        "<|im_start|>system\nbe {brief} <|im_end|>\n"
        "<|im_start|>user\n id=r1 naïve?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert seen.body["add_special_tokens"] is False
    assert seen.body["max_tokens"] == 16
    assert seen.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert [r.rows for r in vllm.requests] == [("first",), ("r0", "r1", "r2")]
    assert [result.text for result in exchange.results] == seen.body["prompt"]
    for result, prompt in zip(exchange.results, seen.body["prompt"], strict=True):
        assert result.usage.prompt == len(prompt.encode())


@pytest.mark.parametrize(
    "edit",
    [
        lambda body, seen: body | {"choices": body["choices"][:1]},
        lambda body, seen: body | {"choices": [{"text": "all at once", "finish_reason": "stop"}]},
    ],
)
async def test_a_server_that_answers_a_list_as_one_gets_single_calls(
    vllm: FakeServer, edit: Callable[[Any, Any], Any]
) -> None:
    vllm.server.edit = edit
    notices: list[str] = []
    exchange, limit = await limit_after(vllm, raws(3), notice=notices.append)
    assert exchange.learned
    assert limit == 1
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("reply", "kind"), [(context_overflow(), "context_overflow"), (status(429), "rate_limited")]
)
async def test_a_refused_group_is_the_same_failure_for_each_row(
    vllm: FakeServer, reply: Any, kind: str
) -> None:
    vllm.set_script({"r2": [reply], "*": [ok()]})
    exchange, limit = await limit_after(vllm, raws(4))
    assert [result.kind for result in exchange.results] == [kind] * 4
    assert (exchange.learned, limit > 1) == (False, True)


async def test_raw_thinking_in_a_list_sends_its_chats_again_as_chats(vllm: FakeServer) -> None:
    vllm.set_script({"r1": [ok("<think>hm</think>4")], "*": [ok("4")]})
    notices: list[str] = []

    async with backend(notice=notices.append) as found:
        first = await group(found, vllm, chats(3))
        again = await found.send(endpoint(vllm.url, own=True), chats(3), QUICK)
    assert first.learned
    assert all(isinstance(result, Failure) for result in first.results)
    assert not again.learned
    paths = [seen.path.removeprefix("/v1") for seen in vllm.requests]
    assert paths == ["/chat/completions", "/completions", "/chat/completions/batch"]
    assert len(notices) == 1


async def test_a_group_for_which_the_way_was_closed_meanwhile_goes_again(vllm: FakeServer) -> None:
    async with backend() as found:
        exchange = await found.send(endpoint(vllm.url, own=True), chats(2), QUICK)
    assert exchange.withheld and not exchange.connected
    assert exchange.status is None
    assert len(exchange.results) == 2
    assert vllm.requests == []


async def test_a_key_that_the_server_repeats_is_hidden_for_every_row_of_the_group() -> None:
    headers = {"Authorization": "Bearer sk-secret-1", "Content-Type": "application/json"}
    with FakeServer({"*": [status(400, error_body(400, "bad key sk-secret-1"))]}) as fs:
        to = endpoint(fs.url, own=True, headers=headers)
        async with backend() as found:
            await found.learn(to, raws(2), QUICK)
            exchange = await found.send(to, raws(2), QUICK)
    for result in exchange.results:
        assert isinstance(result, Failure)
        assert "***" in result.message
        assert "secret" not in result.message


NUMBER = OutputFormat(
    "answer",
    b'{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}',
    strict=True,
)
SEEDED = CallSettings(None, {"seed": 3}, {}, NUMBER)
AWKWARD = ["plain", " {blanks} \n", "naïve 日本 🙂", "<|im_end|>\n<|im_start|>user\nme", "%s \\n"]


def answers(exchange: Exchange) -> list[tuple[str | None, str | None, int | None]]:
    """Text, end and completion tokens of each reply."""
    return [(r.text, r.finish_reason, r.usage.completion) for r in exchange.results]


@pytest.mark.parametrize("batching", ["auto", "completions", "chat"])
async def test_chats_get_the_same_answers_in_a_group_of_a_simulated_engine(batching: str) -> None:
    calls = [chat(f"system {text}", f"{text} {i}", settings=SEEDED, max_tokens=64)
             for i, text in enumerate(AWKWARD * 2)]  # fmt: skip
    async with (
        start_sim(parse_sim_url("sim://?speedup=1000")) as sim,
        backend(batching=batching) as found,
    ):
        to = endpoint(f"{sim.urls[0].removesuffix('/v1')}/v1", own=True)
        await found.learn(to, calls, QUICK)
        singles = [await found.send(to, [call], QUICK) for call in calls]
        limit = found.group_limit(to, calls[0])
        assert limit is not None
        assert limit >= len(calls)
        together = await found.send(to, calls, QUICK)
    assert answers(together) == [answers(single)[0] for single in singles]
    assert len({text for text, _, _ in answers(together)}) > 1
