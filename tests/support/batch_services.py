"""OpenAI's and Anthropic's batch services as scripted servers: every state that they can take."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import unquote

from aiohttp import web

Json = Any
Answer = Callable[[Json], Json]
"""From a line of a batch's file to a line of an answer file; None: there is none."""


def chat_body(text: str) -> Json:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "model": "m-1-served",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


def _line(asked: Json, response: Json, error: Json = None) -> Json:
    return {"id": "r", "custom_id": asked["custom_id"], "response": response, "error": error}


def _answered(status: int, body: Json) -> Answer:
    response = {"status_code": status, "request_id": "req-1", "body": body}
    return lambda asked: _line(asked, response)


def good(text: str = "fine") -> Answer:
    """An answer with HTTP 200."""
    return _answered(200, chat_body(text))


def refused(status: int, message: str, code: str = "") -> Answer:
    """An HTTP failure: the error stands in the response's body."""
    return _answered(status, {"error": {"message": message, "code": code, "type": ""}})


def never_asked(code: str) -> Answer:
    """A request that was never made, such as ``batch_expired``."""
    error = {"code": code, "message": f"This request was not executed: {code}"}
    return lambda asked: _line(asked, None, error)


def nothing(asked: Json) -> Json:
    """No line at all."""


@dataclass
class Course:
    """How one batch goes: a word for each look, the last repeating, and its answers in the end.

    ``faults`` are those of a failed one. ``create`` answers the making of it instead: a status and
    an error; with ``made`` the batch is there all the same.
    """

    words: Sequence[str] = ("validating", "in_progress", "finalizing", "completed")
    answer: Answer = field(default_factory=lambda: good())
    faults: Sequence[Json] = ()
    create: tuple[int, Json] | None = None
    made: bool = False


class BatchServer:
    """Follows the courses of ``script`` batch by batch, the last one repeating.

    Attributes:
        made: the batches that were made, with the requests of each.
        tries: how often one was asked for.
        cancels: how many were cancelled.
        complaints: what the API would have refused.
    """

    ENDED: ClassVar[tuple[str, ...]]
    """The status words of a batch that has ended."""
    CANCELLED: ClassVar[tuple[str, ...]]
    """Those of one that is cancelled, look by look."""

    def __init__(self, script: Sequence[Any], default: Any) -> None:
        self.script = list(script) or [default]
        self.made: list[Json] = []
        self.tries = 0
        self.cancels = 0
        self.complaints: list[str] = []
        self._looks: Counter[str] = Counter()

    def app(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        self.add_routes(app.router)
        return app

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the routes of the service."""
        raise NotImplementedError

    def next_course(self) -> Any:
        """The course of the batch that is asked for now."""
        self.tries += 1
        return self.script[min(self.tries, len(self.script)) - 1]

    def status_of(self, batch: Json) -> str:
        """The status word that the next look at the batch sees."""
        words = batch["course"].words
        return str(words[min(self._looks[batch["id"]], len(words) - 1)])

    def batch_of(self, request: web.Request) -> Json:
        """The batch that a request names."""
        name = unquote(request.match_info["id"])
        (batch,) = [one for one in self.made if one["id"] == name]
        return batch

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m-1"}]})

    async def _get(self, request: web.Request) -> web.Response:
        batch = self.batch_of(request)
        shown = self._shown(batch)
        self._looks[batch["id"]] += 1
        return web.json_response(shown)

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        course = self.next_course()
        if course.create is None or course.made:
            self.made.append({**self._make(asked), "course": course})
        if course.create is not None:
            status, error = course.create
            return web.json_response({"type": "error", "error": error}, status=status)
        return web.json_response(self._shown(self.made[-1]))

    async def _cancel(self, request: web.Request) -> web.Response:
        """The second half of the batch gets no answers."""
        batch = self.batch_of(request)
        if self.status_of(batch) in self.ENDED:
            error = {"type": "invalid_request_error", "message": "it has ended"}
            return web.json_response({"type": "error", "error": error}, status=409)
        self.cancels += 1
        answer, lines = batch["course"].answer, batch["lines"]
        late = {line["custom_id"] for line in lines[len(lines) // 2 :]}
        batch["course"] = Course(
            self.CANCELLED,
            lambda asked: (self._unanswered if asked["custom_id"] in late else answer)(asked),
        )
        self._looks[batch["id"]] = 0
        return web.json_response(self._shown(batch))

    def _make(self, asked: Json) -> Json:
        """The batch that a request asks for: its ``id``, its ``lines``, and what is shown of it."""
        raise NotImplementedError

    def _unanswered(self, asked: Json) -> Json:
        """The line of a request that was cancelled."""
        raise NotImplementedError

    def _shown(self, batch: Json) -> Json:
        raise NotImplementedError


class OpenAIServer(BatchServer):
    """OpenAI's files and batches.

    Attributes:
        uploads: how many files came.
        looks: how often anybody asked for a batch.
    """

    ENDED = ("completed", "expired", "failed", "cancelled")
    CANCELLED = ("cancelling", "cancelling", "cancelled")

    def __init__(self, *script: Course) -> None:
        super().__init__(script, Course())
        self.uploads = 0
        self.looks = 0
        self.down = 0
        self.keeps_metadata = True
        self.list_troubles: list[int] = []  # statuses of the first lists; 200 is an empty list
        self.files: dict[str, str] = {}

    def app(self) -> web.Application:
        """The server as an application, which is down for some requests."""
        app = super().app()
        app.middlewares.append(self._gate)
        return app

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add files and batches."""
        router.add_post("/v1/files", self._upload)
        router.add_get("/v1/files/{id}/content", self._content)
        router.add_post("/v1/batches", self._create)
        router.add_get("/v1/batches", self._list)
        router.add_get("/v1/batches/{id}", self._get)
        router.add_post("/v1/batches/{id}/cancel", self._cancel)

    def _unanswered(self, asked: Json) -> Json:
        return None

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.down > 0:
            self.down -= 1
            return web.json_response({"error": {"message": "try later"}}, status=503)
        found: web.StreamResponse = await handler(request)
        return found

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        if form.get("purpose") != "batch":
            self.complaints.append("purpose is not batch")
        self.uploads += 1
        self.files[f"file-{self.uploads}"] = file.file.read().decode()
        return web.json_response({"id": f"file-{self.uploads}", "object": "file"})

    def _make(self, asked: Json) -> Json:
        text = self.files[asked["input_file_id"]]
        lines = [json.loads(line) for line in text.split("\n") if line]
        self._check(asked, lines)
        names = ("input_file_id", "endpoint", "completion_window")
        return {
            "id": f"batch_{len(self.made) + 1}",
            "object": "batch",
            "created_at": 1_000_000,
            "metadata": asked["metadata"] if self.keeps_metadata else None,
            **{name: asked[name] for name in names},
            "lines": lines,
        }

    def _check(self, asked: Json, lines: list[Json]) -> None:
        names = [line["custom_id"] for line in lines]
        if len(set(names)) != len(names):
            self.complaints.append("a custom_id is there twice")
        if asked["completion_window"] != "24h":
            self.complaints.append("no such window")
        models = {line["body"].get("model") for line in lines}
        if len(models) != 1:
            self.complaints.append(f"several models: {models}")
        for line in lines:
            if line["method"] != "POST" or line["url"] != asked["endpoint"]:
                self.complaints.append(f"a line for {line['url']}")
            if line["body"].get("stream"):
                self.complaints.append("a line wants to stream")

    def _shown(self, batch: Json) -> Json:
        course: Course = batch["course"]
        word = self.status_of(batch)
        shown = {k: v for k, v in batch.items() if k not in ("lines", "course")}
        shown |= {"status": word, "errors": None, "output_file_id": None, "error_file_id": None}
        count = len(batch["lines"])
        if word in ("completed", "expired", "cancelled"):
            answers = [one for line in batch["lines"] if (one := course.answer(line)) is not None]
            answers.reverse()  # no order is promised
            ok = [a for a in answers if a["response"] and a["response"]["status_code"] == 200]
            bad = [a for a in answers if a not in ok]
            for key, found in (("output_file_id", ok), ("error_file_id", bad)):
                if found:
                    shown[key] = f"{batch['id']}-{key}"
                    text = "\n".join(json.dumps(one) for one in found)
                    self.files[shown[key]] = text
            shown["request_counts"] = {"total": count, "completed": len(ok), "failed": len(bad)}
        elif word == "failed":
            shown["errors"] = {"object": "list", "data": list(course.faults)}
            shown["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        else:
            done = 0 if word == "validating" else count // 2
            shown["request_counts"] = {"total": count, "completed": done, "failed": 0}
        return shown

    async def _get(self, request: web.Request) -> web.Response:
        self.looks += 1
        return await super()._get(request)

    async def _list(self, request: web.Request) -> web.Response:
        found = [self._shown(batch) for batch in reversed(self.made)]
        if self.list_troubles:
            status = self.list_troubles.pop(0)
            if status != 200:
                return web.json_response({"error": {"message": "no"}}, status=status)
            found = []
        return web.json_response({"object": "list", "data": found, "has_more": False})

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(text=self.files[request.match_info["id"]])


def message(text: str = "fine", stop: str = "end_turn") -> Answer:
    """An Anthropic success."""

    def line(asked: Json) -> Json:
        found = {
            "type": "message",
            "role": "assistant",
            "model": "m-1-served",
            "content": [{"type": "text", "text": text}],
            "stop_reason": stop,
            "usage": {"input_tokens": 7, "output_tokens": 3},
        }
        result = {"type": "succeeded", "message": found}
        return {"custom_id": asked["custom_id"], "result": result}

    return line


def ended_as(kind: str, error: Json = None) -> Answer:
    """An Anthropic result of another type: ``errored``, ``canceled`` or ``expired``."""

    def line(asked: Json) -> Json:
        result: Json = {"type": kind}
        if error is not None:
            result["error"] = {"type": "error", "error": error}
        return {"custom_id": asked["custom_id"], "result": result}

    return line


class AnthropicServer(BatchServer):
    """Message Batches; ``length`` is the told length of the last body."""

    ENDED = ("ended",)
    CANCELLED = ("canceling", "canceling", "ended")
    length: int | None = None

    def __init__(self, *script: Course) -> None:
        super().__init__(script, Course(("in_progress", "ended"), message()))

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add batches and their results."""
        router.add_post("/v1/messages/batches", self._create)
        router.add_get("/v1/messages/batches", self._list)
        router.add_get("/v1/messages/batches/{id}", self._get)
        router.add_get("/v1/messages/batches/{id}/results", self._results)
        router.add_post("/v1/messages/batches/{id}/cancel", self._cancel)

    async def _create(self, request: web.Request) -> web.Response:
        self.length = request.content_length
        return await super()._create(request)

    def _make(self, asked: Json) -> Json:
        for line in asked["requests"]:
            if set(line) != {"custom_id", "params"} or "stream" in line["params"]:
                self.complaints.append("no request")
            if not line["params"].get("max_tokens"):
                self.complaints.append("no max_tokens")
        return {"id": f"msgbatch_{len(self.made) + 1}", "lines": asked["requests"]}

    def _unanswered(self, asked: Json) -> Json:
        return ended_as("canceled")(asked)

    def add_foreign(self, count: int, *words: str) -> None:
        """A batch of another program in the same account."""
        lines = [{"custom_id": f"other-{n}", "params": {}} for n in range(count)]
        course = Course(words, message("not yours"))
        self.made.append({"id": f"foreign_{len(self.made)}", "lines": lines, "course": course})

    def _shown(self, batch: Json) -> Json:
        word, count = self.status_of(batch), len(batch["lines"])
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        if word == "ended":
            for line in self._answers(batch):
                counts[line["result"]["type"]] += 1
        else:
            counts["processing"] = count
        return {
            "id": batch["id"],
            "type": "message_batch",
            "processing_status": word,
            "request_counts": counts,
            "created_at": "2026-11-28T10:00:00.123Z",
            "ended_at": "2026-11-28T11:00:00Z" if word == "ended" else None,
            "results_url": "http://192.0.2.1/never" if word == "ended" else None,
        }

    def _answers(self, batch: Json) -> list[Json]:
        return [batch["course"].answer(line) for line in reversed(batch["lines"])]

    async def _list(self, request: web.Request) -> web.Response:
        found = [self._shown(batch) for batch in reversed(self.made)]
        return web.json_response({"data": found, "has_more": False})

    async def _results(self, request: web.Request) -> web.Response:
        lines = [json.dumps(one) for one in self._answers(self.batch_of(request))]
        return web.Response(text="\n".join(lines) + "\n")


def row_of(asked: Json) -> str:
    """The row id in the first message of a request in a batch."""
    content = (asked.get("body") or asked["params"])["messages"][0]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    return text.partition("id=")[2].partition(" ")[0]


def by_row(default: Answer, **others: Answer) -> Answer:
    """Answers by the id in the prompt."""
    return lambda asked: others.get(row_of(asked), default)(asked)
