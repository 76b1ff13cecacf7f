"""The prompt of a row, rendered again from the job and compared with the hash of what was sent."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
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
from bagent.stages.prepare import load_schema, prepare_stages
from bagent.stages.row import FIELDS, Response, responses
from bagent.store.run_dir import RunDir
from bagent.types import Json, Message
from bagent.view.row import content_text


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
