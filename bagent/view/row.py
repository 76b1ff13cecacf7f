"""Everything about one row: result, prompt, attempts, tool calls, relatives, and the transcript.

The prompt is rendered again from the job and compared with the hash of what was sent.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bagent.answers.messages import add_schema_instruction
from bagent.answers.schema.schema import OutputSchema
from bagent.backends.request import encode_payload
from bagent.errors import BagentError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.stages import StageSpec
from bagent.job.templates.prompt import Prompt
from bagent.job.templates.template import TemplateFailure
from bagent.report.queries import ReportDb
from bagent.stages.prepare import load_schema, prepare_stages
from bagent.stages.row import FIELDS, Response, responses
from bagent.store.journal.turns import turns_of_row
from bagent.store.run_dir import RunDir
from bagent.types import Json, Message, Turn
from bagent.view.rows import RowKey

MOST_ATTEMPTS = 200
MOST_RELATIVES = 100
DEEPEST = 12
"""Generations of parents that are read."""

_JSON = ("output", "input", "logprobs")
_RELATIVE = "row, stage, answer, id, status, error_kind, error, text, output, parents"


class TranscriptCall(msgspec.Struct, frozen=True):
    """One tool call with its result."""

    name: str
    arguments: str
    result: str | None
    ms: float | None = None
    error: str | None = None
    cached: bool = False


class TranscriptTurn(msgspec.Struct, frozen=True):
    """One turn: what the model wrote, which tools it called, and other messages added."""

    number: int
    at: float | None
    text: str
    reasoning: str
    calls: list[TranscriptCall]
    others: list[tuple[str, str]] = []


def read_transcript(
    run: RunDir, key: RowKey, tool_calls: list[dict[str, Any]]
) -> list[TranscriptTurn]:
    """Return the turns with tools of a row; the last answer is the row's own text.

    Args:
        run: the run directory.
        key: the row.
        tool_calls: its rows of ``tool_calls``, in order.
    """
    by_key = turns_of_row(run.path, key.row, key.stage, key.answer)
    if len(by_key) != 1:  # several rows of one input row cannot be told apart without their key
        return _from_calls(tool_calls)
    (turns,) = by_key.values()
    times = list(tool_calls)
    return [_turn(turn, times) for turn in turns if turn.messages]


def _turn(turn: Turn, times: list[dict[str, Any]]) -> TranscriptTurn:
    results = {
        str(message.get("tool_call_id")): content_text(message)
        for message in turn.messages
        if message.get("role") == "tool"
    }
    texts, reasoning, calls, others = [], [], [], []
    for message in turn.messages:
        role = str(message.get("role"))
        if role == "assistant":
            texts.append(content_text(message))
            reasoning.append(str(message.get("reasoning_content") or ""))
            made = message.get("tool_calls") or ()
            calls += [_call(call, results, turn.turn, times) for call in made]
        elif role != "tool":
            others.append((role, content_text(message)))
    return TranscriptTurn(
        turn.turn, turn.at, "\n".join(filter(None, texts)), "\n".join(reasoning), calls, others
    )


def _call(
    call: Message, results: dict[str, str], turn: int, times: list[dict[str, Any]]
) -> TranscriptCall:
    function = call.get("function") or {}
    name, arguments = str(function.get("name") or ""), str(function.get("arguments") or "")
    record = next((r for r in times if r["turn"] == turn and r["name"] == name), None)
    if record is not None:
        times.remove(record)
    return TranscriptCall(
        name,
        arguments,
        results.get(str(call.get("id"))),
        record["latency_ms"] if record else None,
        record["error"] if record else None,
        bool(record and record["cached"]),
    )


def _from_calls(tool_calls: list[dict[str, Any]]) -> list[TranscriptTurn]:
    """Return the calls alone, without messages and results."""
    turns: dict[int, list[TranscriptCall]] = {}
    for record in tool_calls:
        call = TranscriptCall(
            record["name"],
            record["arguments"],
            None,
            record["latency_ms"],
            record["error"],
            bool(record["cached"]),
        )
        turns.setdefault(record["turn"], []).append(call)
    return [TranscriptTurn(number, None, "", "", calls) for number, calls in turns.items()]


def content_text(message: Message) -> str:
    """Return the text of a message; parts that are no text are named."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return msgspec.json.encode(content).decode()
    parts = []
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, dict):
            parts.append(f"[{part.get('type') or 'part'}]")
    return "\n".join(parts)


class RowDetails(msgspec.Struct, frozen=True):
    """One row of ``results`` with all that belongs to it."""

    key: RowKey
    result: dict[str, Any]
    attempts: list[dict[str, Any]]
    tool_calls: list[dict[str, Any]]
    parents: list[dict[str, Any]]
    """The results that it was made of, and theirs; ``depth`` is 1 for the nearest."""

    children: list[dict[str, Any]]
    more_parents: int = 0


def find_row(db: ReportDb, key: RowKey) -> RowDetails | None:
    """Return a row; None if it is not there."""
    condition, parameters = key.sql()
    results = _select(db, f"select * from results where {condition} limit 1", parameters)
    if not results:
        return None
    result = results[0]
    attempts = _select(
        db,
        f"select * from attempts where {condition} order by turn, try, sent limit {MOST_ATTEMPTS}",
        parameters,
    )
    tools = _select(
        db,
        f"select * from tool_calls where {condition} order by turn, started limit {MOST_ATTEMPTS}",
        parameters,
    )
    names = result["parents"] or []
    parents = list(_ancestors(db, names))
    own = f"{key.stage}:{key.id}:{key.answer}"
    children = _select(
        db,
        f"select {_RELATIVE} from results where list_contains(parents, ?)"
        f" order by row, stage, answer, id limit {MOST_RELATIVES}",
        [own],
    )
    more = max(0, len(names) - MOST_RELATIVES)
    return RowDetails(key, result, attempts, tools, parents, children, more)


def find_same(db: ReportDb, key: RowKey) -> dict[str, Any] | None:
    """Return the result of another run with the same stage, id and answer.

    A row without an id is compared by its number.
    """
    rows = _select(
        db,
        "select * from results where stage = ? and answer = ? and id is not distinct from ?"
        " and (id is not null or row = ?) limit 1",
        [key.stage, key.answer, key.id, key.row],
    )
    return rows[0] if rows else None


def _ancestors(db: ReportDb, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for depth in range(1, DEEPEST + 1):
        names = [name for name in names[:MOST_RELATIVES] if name not in seen]
        following: list[str] = []
        for name in names:
            seen.add(name)
            parent = _find_parent(db, name)
            if parent is not None:
                parent["depth"] = depth
                following += parent["parents"] or []
                yield parent
        names = following
        if not names:
            return


def _find_parent(db: ReportDb, name: str) -> dict[str, Any] | None:
    stage, _, rest = name.partition(":")
    row_id, _, answer = rest.rpartition(":")
    if not answer.isdecimal():
        return None
    rows = _select(
        db,
        f"select {_RELATIVE} from results where stage = ? and id = ? and answer = ? limit 1",
        [stage, row_id, int(answer)],
    )
    return rows[0] if rows else None


def _select(db: ReportDb, sql: str, parameters: list[Any]) -> list[dict[str, Any]]:
    cursor = db.connection.execute(sql, parameters)
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    for row in rows:
        for name in _JSON:
            if isinstance(row.get(name), str):
                row[name] = _decoded(row[name])
    return rows


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


class PromptMessage(msgspec.Struct, frozen=True):
    """One message as text, with its pictures as data URLs."""

    role: str
    text: str
    images: list[str] = []


class SentPrompt(msgspec.Struct, frozen=True):
    """The prompt of one row."""

    messages: list[PromptMessage] = []
    exact: bool = False
    """Whether it has the hash of what was sent."""

    problem: str = ""
    """Why it is not shown, or may differ from what was sent."""


class _Template(msgspec.Struct, frozen=True):
    prompt: Prompt
    schema: OutputSchema | None


class PromptRenderer:
    """Renders prompts of one run. The job is loaded at first use.

    Args:
        run: the run directory. Of another user's run nothing is rendered, since its job names
            files.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._templates: dict[str, list[_Template]] | None = None
        self._problem = ""
        self._lock = threading.Lock()

    def render(self, result: Mapping[str, Any], parents: list[dict[str, Any]]) -> SentPrompt:
        """Return the prompt of a row.

        Args:
            result: its row of ``results``, with values of JSON columns decoded.
            parents: the results that it was made of, and theirs, nearest first.
        """
        data = result["input"]
        body = data.get("body") if isinstance(data, dict) else None
        if isinstance(body, dict) and _hash(body) == result["prompt_sha256"]:
            return _own_body(body)
        stages = self._stages()
        templates = stages.get(result["stage"], [])
        if not templates:
            return SentPrompt(problem=self._problem or "this stage sends no request")
        if data is None and not parents:
            return SentPrompt(problem="the input of this row was not kept")
        rendered, problem = None, ""
        for messages, failure in _attempts(templates, result, parents):
            if messages is None:
                problem = failure
            elif _hash(messages) == result["prompt_sha256"]:
                return SentPrompt(_messages(messages), exact=True)
            elif rendered is None:
                rendered = messages
        if rendered is None:
            return SentPrompt(problem=problem)
        reason = "rendered again; it differs from what was sent, since the job or a file changed"
        if result["prompt_sha256"] is None:
            reason = "rendered again; nothing was sent for this row"
        return SentPrompt(_messages(rendered), problem=reason)

    def _stages(self) -> dict[str, list[_Template]]:
        """Return the templates of each stage; threads wait for the one that loads the job."""
        with self._lock:
            if self._templates is None:
                self._templates = self._load()
            return self._templates

    def _load(self) -> dict[str, list[_Template]]:
        templates: dict[str, list[_Template]] = {}
        try:
            info = self._run.load()
            if info is None or not self._run.is_own(info):
                self._problem = "the prompt is rendered only for runs that you made here"
                return templates
            text = msgspec.json.encode(_without_defaults(info.job)).decode()
            request = JobRequest(text=text, cwd=self._run.path.absolute(), needs_input=False)
            job = load_job(request)
            stages = prepare_stages(job)
            if not stages:
                template = _Template(Prompt.from_job(job), load_schema(job))
                templates = {name: [template] for name in info.stages or ["main"]}
            for stage in stages:
                templates[stage.name] = [
                    _Template(request.prompt, request.schema)
                    for request in stage.requests
                    if request.prompt is not None
                ]
        except (BagentError, ValueError, TypeError) as error:
            self._problem = f"the job cannot be loaded again: {error}"
        return templates


def _without_defaults(job: dict[str, Json]) -> dict[str, Json]:
    """Return a stored job without the defaults of its stages: some belong to one kind only."""
    stages = job.get("stages")
    if not isinstance(stages, list):
        return job
    defaults = StageSpec.model_construct(kind="map").model_dump(mode="json", by_alias=True)
    defaults.pop("kind")
    changed = [
        {name: value for name, value in stage.items() if value != defaults.get(name)}
        for stage in stages
    ]
    return {**job, "stages": changed}


def _own_body(body: dict[str, Any]) -> SentPrompt:
    """Return the prompt of a line of a batch file that was sent as it is."""
    messages = body.get("messages")
    if isinstance(messages, list) and all(isinstance(message, dict) for message in messages):
        return SentPrompt(_messages(messages), exact=True)
    value = body.get("prompt", body.get("input"))
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return SentPrompt([PromptMessage("prompt", text)], exact=True)


Rendered = list[Message] | str


def _attempts(
    templates: list[_Template], result: Mapping[str, Any], parents: list[dict[str, Any]]
) -> Iterator[tuple[Rendered | None, str]]:
    """Yield what may have been sent: each template, without and with the schema's text."""
    data = result["input"] if isinstance(result["input"], dict) else {}
    for extra in _variables(parents):
        for template in templates:
            try:
                if template.prompt.raw:
                    yield template.prompt.render_raw(data, extra), ""
                    continue
                messages = template.prompt.render(data, extra)
            except TemplateFailure as failure:
                yield None, str(failure)
                continue
            yield messages, ""
            if template.schema is not None:
                yield add_schema_instruction(messages, template.schema), ""


def _variables(parents: list[dict[str, Any]]) -> Iterator[dict[str, Json] | None]:
    """Yield the variables of earlier stages: of one parent by name, of several as responses."""
    if not parents:
        yield None
        return
    direct = [parent for parent in parents if parent.get("depth") == 1]
    values = {parent["stage"]: _value(parent) for parent in reversed(parents)}
    if len(direct) <= 1:
        yield values
    answers = responses([_response(parent) for parent in direct])
    yield {**values, "responses": answers, "n": len(direct), "level": 1}


def _response(parent: Mapping[str, Any]) -> Response:
    return Response((name, parent[name]) for name in FIELDS)


def _value(parent: Mapping[str, Any]) -> Json:
    if parent["status"] != "ok":
        return _response(parent)
    return parent["output"] if parent["output"] is not None else parent["text"]


def _hash(payload: Json) -> str:
    return hashlib.sha256(encode_payload(payload)).hexdigest()


def _messages(messages: Rendered) -> list[PromptMessage]:
    if isinstance(messages, str):
        return [PromptMessage("prompt", messages)]
    return [
        PromptMessage(str(message.get("role")), content_text(message), list(_images(message)))
        for message in messages
    ]


def _images(message: Message) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        url = part.get("image_url") if isinstance(part, dict) else None
        if isinstance(url, dict) and str(url.get("url", "")).startswith("data:image/"):
            yield str(url["url"])
