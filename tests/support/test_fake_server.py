"""The scripted server itself: what other tests rely on."""

from __future__ import annotations

import asyncio
import ssl
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import time
from typing import Any

import aiohttp
import jsonschema
import pytest

from support import replies
from support.fake_server import FakeProcess, FakeServer
from support.forward_proxy import ForwardProxy
from support.replies import ok, status
from support.schema_values import instance
from support.tls import site_authority

Json = Any


def chat(row: str, **fields: Json) -> dict[str, Json]:
    return {"model": "m", "messages": [{"role": "user", "content": f"id={row} text"}], **fields}


async def post(url: str, *bodies: Json, path: str = "/chat/completions") -> list[tuple[int, Json]]:
    """Send the bodies at once; -1 stands for a connection that was dropped."""
    async with aiohttp.ClientSession() as session:

        async def one(body: Json) -> tuple[int, Json]:
            try:
                async with session.post(url + path, json=body) as answer:
                    return answer.status, await answer.json(content_type=None)
            except aiohttp.ClientError:
                return -1, None

        return await asyncio.gather(*map(one, bodies))


def send(url: str, *bodies: Json, path: str = "/chat/completions") -> list[tuple[int, Json]]:
    return asyncio.run(post(url, *bodies, path=path))


def text_of(answer: tuple[int, Json]) -> str:
    return answer[1]["choices"][0]["message"]["content"]


async def read_stream(url: str, body: Json) -> tuple[bytes, bool]:
    """Return the bytes of a streamed answer, and whether it ended well."""
    got = b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/chat/completions", json=body | {"stream": True}) as answer,
    ):
        try:
            async for piece in answer.content.iter_any():
                got += piece
        except aiohttp.ClientError:
            return got, False
    return got, True


def test_each_row_walks_through_its_own_replies_and_stays_at_the_last() -> None:
    with FakeServer({"r1": [status(503), ok("yes")], "*": [replies.echo()]}) as fs:
        first = send(fs.url, chat("r1"))
        later = send(fs.url, chat("r1"), chat("r1"), chat("r2"))
        assert first[0][0] == 503
        assert [text_of(answer) for answer in later] == ["yes", "yes", "id=r2 text"]
        assert (fs.count("r1"), fs.count("r2")) == (3, 1)
        assert fs.of("r2")[0].body["messages"][0]["content"] == "id=r2 text"


def test_a_list_call_answers_each_prompt_with_its_own_text_in_the_scripted_order() -> None:
    script = {f"r{n}": [ok(f"text {n}")] for n in range(3)}
    body = {"model": "m", "prompt": [f"id=r{n}" for n in range(3)], "max_tokens": 5}
    with FakeServer(script, order=[2, 0, 1]) as fs:
        ((code, answer),) = send(fs.url, body, path="/completions")
    assert code == 200
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (2, "text 2"),
        (0, "text 0"),
        (1, "text 1"),
    ]


def test_one_bad_row_fails_a_list_call_and_costs_the_others_no_reply() -> None:
    script = {"r1": [ok("first"), ok("second")], "r2": [status(400), ok("good")]}
    body = {"model": "m", "prompt": ["id=r1", "id=r2"]}
    with FakeServer(script) as fs:
        ((bad, _),) = send(fs.url, body, path="/completions")
        ((good, answer),) = send(fs.url, body, path="/completions")
    assert (bad, good) == (400, 200)
    assert [choice["text"] for choice in answer["choices"]] == ["first", "good"]


def test_samples_of_a_list_call_are_numbered_prompt_by_prompt() -> None:
    script = {"r1": [ok(texts=["a", "b"])], "r2": [ok(texts=["c", "d"])]}
    body = {"model": "m", "prompt": ["id=r1", "id=r2"], "n": 2}
    with FakeServer(script) as fs:
        ((_, answer),) = send(fs.url, body, path="/completions")
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b", "c", "d"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_the_batch_route_is_served_by_the_vllm_flavour_alone() -> None:
    body = {"model": "m", "messages": [[{"role": "user", "content": "id=r1"}]] * 2}
    with FakeServer({"r1": [ok("a"), ok("b")]}, flavour="vllm") as fs:
        ((code, answer),) = send(fs.url, body, path="/chat/completions/batch")
    assert code == 200
    assert len(answer["choices"]) == 2
    with FakeServer() as fs:
        assert send(fs.url, body, path="/chat/completions/batch")[0][0] == 404


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not a list with entries"),
        ([{"role": "robot", "content": "id=r1"}], "no known role"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "assistant", "tool_calls": [replies.tool_call("f", {"a": 1})]}], "not a string"),
        ([{"role": "assistant", "tool_calls": [replies.tool_call("f", '"{}"')]}], "to an object"),
        ([{"role": "tool", "tool_call_id": "x", "content": "1"}], "was not made"),
    ],
)
def test_a_malformed_conversation_is_refused_and_remembered(messages: Json, words: str) -> None:
    with FakeServer(allow_faults=True) as fs:
        assert send(fs.url, {"model": "m", "messages": messages})[0][0] == 400
        assert words in fs.faults[0]


def test_a_row_that_the_script_does_not_know_fails_the_test() -> None:
    with (
        pytest.raises(AssertionError, match="no reply is scripted"),
        FakeServer({"r1": [ok()]}) as fs,
    ):
        send(fs.url, chat("r2"))


def test_the_callback_of_a_test_can_refuse_and_edit() -> None:
    with FakeServer(allow_faults=True) as fs:
        fs.server.check = lambda seen: None if "seed" in seen.body else "no seed"
        fs.server.edit = lambda body, seen: body | {"choices": []}
        assert send(fs.url, chat("r1"))[0][0] == 400
        assert send(fs.url, chat("r1", seed=1))[0][1]["choices"] == []


def test_rate_and_capacity_refuse_what_is_above_them() -> None:
    bodies = [chat(f"r{n}") for n in range(8)]
    with FakeServer(rate=5, rate_headers={"Retry-After": "1"}) as fs:
        assert sorted(code for code, _ in send(fs.url, *bodies)) == [200] * 5 + [429] * 3
    with FakeServer({"*": [replies.gated(ok())]}, capacity=3) as fs:

        async def main() -> list[tuple[int, Json]]:
            task = asyncio.create_task(post(fs.url, *bodies))
            await asyncio.to_thread(fs.wait_for, 5, "finished")
            await asyncio.to_thread(fs.release)
            return await task

        assert sorted(code for code, _ in asyncio.run(main())) == [200] * 3 + [503] * 5


def test_a_barrier_opens_once_enough_requests_are_in_flight() -> None:
    with FakeServer({"*": [replies.at_barrier(8, ok())]}) as fs:
        answers = send(fs.url, *[chat(f"r{n}") for n in range(8)])
        assert [code for code, _ in answers] == [200] * 8
        assert fs.peak_in_flight == 8


def test_a_gate_holds_replies_back_until_it_is_released() -> None:
    with FakeServer({"*": [replies.gated(ok("late"))]}) as fs:

        async def main() -> list[tuple[int, Json]]:
            task = asyncio.create_task(post(fs.url, chat("r1"), chat("r2")))
            await asyncio.to_thread(fs.wait_for, 2, "in_flight")
            assert not task.done()
            await asyncio.to_thread(fs.release)
            return await task

        assert [text_of(answer) for answer in asyncio.run(main())] == ["late", "late"]


def test_faults_of_the_connection_reach_the_client() -> None:
    script = {
        "closed": [replies.close()],
        "reset": [replies.close(reset=True)],
        "cut": [replies.cut_body(ok("a long enough answer"))],
        "odd": [replies.wire(b"nonsense\r\n\r\n")],
        "hang": [replies.hang(0.05)],
    }
    with FakeServer(script) as fs:
        answers = send(fs.url, *[chat(row) for row in script])
        assert [code for code, _ in answers] == [-1] * 5
        assert {seen.row_id: seen.answered for seen in fs.requests}["closed"] is None


def test_a_client_that_goes_away_is_noted() -> None:
    with FakeServer({"*": [replies.hang()]}) as fs:

        async def main() -> None:
            task = asyncio.create_task(post(fs.url, chat("r1")))
            await asyncio.to_thread(fs.wait_for, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(fs.wait_for, 1, "finished")

        asyncio.run(main())
        assert fs.requests[0].cancelled


def test_a_good_answer_is_streamed_where_the_client_asks_for_a_stream() -> None:
    body = chat("r1", stream_options={"include_usage": True})
    with FakeServer({"r1": [ok("two words")]}) as fs:
        got, well = asyncio.run(read_stream(fs.url, body))
    assert well
    assert b'"content":"two"' in got
    assert b'"content":" words"' in got
    assert b'"choices":[],"usage":' in got
    assert got.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("end", "well", "tail"),
    [("done", True, b"data: [DONE]\n\n"), ("close", True, b"}\n\n"), ("cut", False, b'{"cho')],
)
def test_a_scripted_stream_ends_as_told(end: Any, well: bool, tail: bytes) -> None:
    chunks = [replies.delta("a"), replies.delta("b")] + (['data: {"cho'] if end == "cut" else [])
    with FakeServer({"*": [replies.stream(chunks, end, split=7)]}) as fs:
        got, ended_well = asyncio.run(read_stream(fs.url, chat("r1")))
    assert ended_well is well
    assert got.endswith(tail)


def test_equal_prompts_get_equal_answers_and_a_schema_is_kept() -> None:
    schema = {"type": "object", "properties": {"label": {"enum": ["yes", "no"]}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with FakeServer() as fs:
        one, same, other, fit = send(
            fs.url, chat("r1"), chat("r1"), chat("r2"), chat("r1", response_format=wanted)
        )
    assert text_of(one) == text_of(same) != text_of(other)
    assert text_of(fit) in ('{"label":"yes"}', '{"label":"no"}')


def test_headers_can_name_a_date_after_the_answer() -> None:
    reply = status(429, headers={"Retry-After": replies.http_date_in(30)})
    with FakeServer({"*": [reply]}) as fs:

        async def main() -> str:
            async with (
                aiohttp.ClientSession() as session,
                session.post(fs.url + "/chat/completions", json=chat("r1")) as answer,
            ):
                return answer.headers["Retry-After"]

        told = parsedate_to_datetime(asyncio.run(main())).timestamp()
    assert 27 < told - time() <= 30


def test_the_server_comes_back_on_its_port_with_its_counts() -> None:
    with FakeServer({"r1": [ok("a"), ok("b")]}) as fs:
        assert text_of(send(fs.url, chat("r1"))[0]) == "a"
        fs.stop()
        assert send(fs.url, chat("r1"))[0][0] == -1
        fs.restart()
        assert text_of(send(fs.url, chat("r1"))[0]) == "b"
        assert fs.count("r1") == 2


def test_the_second_request_of_a_connection_can_be_dropped() -> None:
    async def main(url: str) -> list[int]:
        codes = []
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                async with session.post(url + "/chat/completions", json=chat("r1")) as answer:
                    await answer.read()
                    codes.append(answer.status)
        return codes

    with FakeServer(drop_reused=True) as fs:
        with pytest.raises(aiohttp.ClientError):
            asyncio.run(main(fs.url))
        assert [seen.reused for seen in fs.requests][:2] == [False, True]


def test_models_tokens_and_metrics_are_probes_not_requests() -> None:
    async def main(fs: FakeServer) -> tuple[Json, Json, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}
        async with aiohttp.ClientSession() as session:
            models = await (await session.get(fs.url + "/models")).json()
            tokens = await (await session.post(fs.base + "/tokenize", json=body)).json()
            metrics = await (await session.get(fs.base + "/metrics")).text()
        return models, tokens, metrics

    with FakeServer(flavour="vllm", metrics={"vllm:num_requests_waiting": 7.0}) as fs:
        models, tokens, metrics = asyncio.run(main(fs))
        assert models["data"][0]["max_model_len"] == 32768
        assert bytes(tokens["tokens"]).decode().startswith("<|im_start|>user\nhé")
        assert 'vllm:num_requests_waiting{model_name="fake-model",engine="0"} 7.0' in metrics
        assert (len(fs.probes), len(fs.requests)) == (3, 0)


def test_the_proxy_records_what_it_is_asked_and_forwards_by_its_routes() -> None:
    async def main(proxy: ForwardProxy) -> list[int]:
        codes = []
        async with aiohttp.ClientSession() as session:
            for host in ("outside.test", "nowhere.test"):
                url = f"http://{host}/v1/chat/completions"
                async with session.post(url, json=chat("r1"), proxy=proxy.url) as answer:
                    codes.append(answer.status)
        return codes

    with FakeServer() as fs, ForwardProxy({"outside.test:80": fs.address}) as proxy:
        assert asyncio.run(main(proxy)) == [200, 502]
        assert fs.count("r1") == 1
        assert proxy.seen[0] == "POST http://outside.test/v1/chat/completions"


def test_https_is_trusted_by_the_site_authority_alone(tmp_path: Path) -> None:
    async def main(url: str, trust: ssl.SSLContext | bool) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/chat/completions", json=chat("r1"), ssl=trust) as answer,
        ):
            return answer.status

    site = site_authority(tmp_path)
    with FakeServer(ssl_context=site.context) as fs:
        trusted = ssl.create_default_context(cafile=str(site.ca_file))
        assert asyncio.run(main(fs.url, trusted)) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            asyncio.run(main(fs.url, True))


def test_the_process_plays_a_script_and_logs_requests(tmp_path: Path) -> None:
    with FakeProcess(tmp_path, {"r1": [status(503), ok("yes")], "*": [replies.canned()]}) as fs:
        codes = [send(fs.url, chat("r1"))[0][0] for _ in range(2)]
        port = fs.port
        fs.kill()
        assert codes == [503, 200]
        assert [line["status"] for line in fs.requests()] == [503, 200]
        assert fs.requests()[1]["rows"] == ["r1"]
        fs.start()
        assert fs.port == port


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 4}}},
        {
            "type": "array",
            "minItems": 2,
            "items": {"$ref": "#/$defs/p"},
            "$defs": {"p": {"enum": [1]}},
        },
        {"anyOf": [{"type": "string", "minLength": 12}, {"type": "null"}]},
        {"type": ["string", "null"], "format": "date-time"},
        {"allOf": [{"type": "number"}, {"minimum": 5}]},
    ],
)
def test_made_up_answers_are_valid_under_their_schema(schema: Json) -> None:
    for seed in range(5):
        jsonschema.validate(instance(schema, seed), schema)
