"""What a simulated endpoint answers: free text, schemas, tools, whole and streamed."""

from __future__ import annotations

import json

from support.sim_client import on_sim, play

FAST = "speedup=1000"
SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["a", "b"]}, "score": {"type": "integer", "maximum": 9}},
    "required": ["label", "score"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@on_sim(FAST)
async def test_chat_answers_in_openai_form(client) -> None:
    reply = await client.chat("hello " * 40, max_tokens=500)
    (choice,) = reply["choices"]
    assert (reply["object"], reply["model"]) == ("chat.completion", "simulated-8b")
    assert reply["id"].startswith("chatcmpl-")
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert choice["message"]["content"].endswith(".")
    usage = reply["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    again = await client.chat("hello " * 40, max_tokens=500)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    assert again["choices"] == reply["choices"]


def test_same_request_same_answer_in_another_fleet_and_seeds_differ() -> None:
    seen: list[list[str]] = []

    async def scene(client) -> None:
        asked = [{}, {"seed": 1}, {"seed": 2}, {"seed": 1, "n": 2}]
        seen.append(
            [
                choice["message"]["content"]
                for fields in asked
                for choice in (await client.chat("tell me", **fields))["choices"]
            ]
        )

    play(FAST, scene)
    play(FAST + "&replicas=2", scene)
    play(FAST + "&seed=5", scene)
    assert seen[0] == seen[1]
    assert not set(seen[0]) & set(seen[2])
    assert seen[0][1] == seen[0][3]
    assert len(set(seen[0])) == 4


@on_sim(FAST + "&output_tokens=40&output_spread=fixed")
async def test_length_limits_of_free_answers(client) -> None:
    cut = await client.chat(max_tokens=5)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 5
    assert len(cut["choices"][0]["message"]["content"]) == 20
    forced = await client.chat(max_tokens=300, ignore_eos=True)
    assert forced["usage"]["completion_tokens"] == 300
    assert forced["choices"][0]["finish_reason"] == "length"
    least = await client.chat(max_tokens=300, min_tokens=200)
    assert least["usage"]["completion_tokens"] == 200
    assert least["choices"][0]["finish_reason"] == "stop"
    default = await client.completion("once")
    assert default["usage"]["completion_tokens"] == 16
    newer = await client.chat(max_tokens=50, max_completion_tokens=3)
    assert newer["usage"]["completion_tokens"] == 3


@on_sim(FAST + "&output_spread=fixed")
async def test_stop_strings_end_the_answer(client) -> None:
    whole = (await client.chat(max_tokens=100))["choices"][0]["message"]["content"]
    word = whole.split()[4]
    choice = (await client.chat(max_tokens=100, stop=[word]))["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)


@on_sim(FAST)
async def test_schema_answers_are_valid_on_every_route(client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}

    def check(text: str) -> None:
        value = json.loads(text)
        assert set(value) == {"label", "score"}
        assert value["label"] in ("a", "b")
        assert isinstance(value["score"], int)

    for i in range(10):
        reply = await client.chat(f"row {i}", response_format=form)
        check(reply["choices"][0]["message"]["content"])
        assert reply["choices"][0]["finish_reason"] == "stop"
    reply = await client.completion(["a", "b"], response_format=form, max_tokens=50)
    for choice in reply["choices"]:
        check(choice["text"])
    reply = await client.chat(structured_outputs={"json": SCHEMA})
    check(reply["choices"][0]["message"]["content"])
    reply = await client.chat(response_format={"type": "json_object"})
    assert isinstance(json.loads(reply["choices"][0]["message"]["content"]), dict)
    reply = await client.chat(structured_outputs={"choice": ["yes", "no"]})
    assert reply["choices"][0]["message"]["content"] in ("yes", "no")
    reply = await client.chat(structured_outputs={"regex": "[a-c]{5}"})
    assert len(reply["choices"][0]["message"]["content"]) == 5
    cut = await client.chat(response_format=form, max_tokens=2)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert len(cut["choices"][0]["message"]["content"]) == 8


@on_sim(FAST)
async def test_tool_calls_required_named_and_none(client) -> None:
    for i in range(8):
        reply = await client.chat(f"row {i}", tools=TOOLS, tool_choice="required")
        choice = reply["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        if call["function"]["name"] == "get_weather":
            assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    named = {"type": "function", "function": {"name": "now"}}
    reply = await client.chat(tools=TOOLS, tool_choice=named)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    reply = await client.chat(tools=TOOLS, tool_choice="none")
    assert reply["choices"][0]["message"]["tool_calls"] == []


@on_sim("speedup=20")
async def test_chat_stream_adds_up_to_the_whole_answer(client) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
    whole = (await client.post("/v1/chat/completions", body))[1]
    events = await client.events(
        "/v1/chat/completions",
        {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    chunks = events[1:-2]
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(set(counts))
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole["choices"][0]["finish_reason"]]
    assert {e["model"] for e in events[:-1]} == {"simulated-8b"}


@on_sim("speedup=5")
async def test_streamed_characters_are_never_cut(client) -> None:
    schema = {"const": "naïve — 数据数据 🙂🙂 é"}
    body = {"messages": [{"role": "user", "content": "x"}]}
    body["structured_outputs"] = {"json": schema}
    events = await client.events("/v1/chat/completions", body)
    text = "".join(e["choices"][0]["delta"]["content"] for e in events[:-1])
    assert json.loads(text) == schema["const"]
    assert "\ufffd" not in text
