"""Rows answered by an agent program: a process per row, in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bagent.agents.conversation import Conversation
from bagent.agents.plan import AgentHost, StagePlan
from bagent.answers.evaluate import evaluate
from bagent.answers.retry_prompt import retry_messages
from bagent.backends.openai.chat import content_text
from bagent.clocks import unix
from bagent.fleet.call import Call, Delivery
from bagent.job.spec.agent import PROGRAM_PLACE
from bagent.store.journal.segments import write_error
from bagent.text.unicode import wire_text
from bagent.tools.command_tool import answer_of, without_preamble
from bagent.tools.subprocess_runner import CommandChild, run_child
from bagent.tools.types import ToolFault
from bagent.types import ErrorKind, Failure, Json, Message, Reply, Row, Usage


class ProgramPlan(msgspec.Struct, eq=False):
    """The program of one stage.

    ``argv`` may hold ``{prompt}``, ``{model}``, ``{base_url}``, ``{folder}``, ``{job_folder}`` and
    ``{id}``; without ``{prompt}`` the prompt is its standard input. ``env`` is its whole
    environment but for the key, with the same places other than ``{prompt}``, and ``{key}``:
    ``keys`` names the variables that get the row's key, which ``row_key`` makes of the name by
    which the row's requests are told apart. ``folder`` is where each
    row gets a folder of its own, and ``homes`` where it gets a home, which is gone once the program
    has ended well: some keep megabytes there. ``job_folder`` is where the job's files are. ``most``
    rows run at once, each for at most ``seconds`` (None: no limit). ``usage`` gives the tokens that
    a row's requests took, and how many they were.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    keys: Sequence[str]
    row_key: Callable[[str], str]
    folder: Path
    homes: Path
    job_folder: Path
    most: int
    seconds: float | None
    model: str
    base_url: str
    usage: Callable[[str], tuple[Usage, int]]


class ProgramConversation(Conversation):
    """One (row, answer) of a stage whose rows a program answers."""

    __slots__ = ("_agent_host", "_program")

    def __init__(
        self, plan: StagePlan, program: ProgramPlan, row: Row, answer: int, host: AgentHost
    ) -> None:
        super().__init__(plan, row, answer, host)
        self._program = program
        self._agent_host = host

    def open(self) -> Call | None:
        """None in any case: the program makes its own calls."""
        call = super().open()
        if call is not None:
            self.request_hash = None  # what a program does is not shared
            self._agent_host.spawn(self._answer(call.request.messages or []))
        return None

    async def _answer(self, messages: Sequence[Message]) -> None:
        """Run the program until its answer is valid, or the tries are spent."""
        asked = list(messages)
        while True:
            began = unix()
            self._attempts += 1
            try:
                text = await self._run(prompt_text(asked))
            except ToolFault as fault:
                passing = fault.kind == "timeout"
                self._finish(began, unix())
                kind: ErrorKind = "timeout" if passing else "tool"
                self._end("failed", Failure(kind, fault.message, passing=passing))
                return
            reply = Reply(text, "stop", model=self._program.model)
            verdict = evaluate(reply, self.plan.schema)
            self._last, self._verdict = reply, verdict
            if self.plan.schema is not None and self._first_valid is None:
                self._first_valid = verdict.status == "ok"
            if verdict.status != "invalid" or self._reasks >= self.plan.reasks:
                self._finish(began, unix())
                self._end(verdict.status, None)
                return
            self._reasks += 1
            asked = retry_messages(messages, verdict.text, verdict.violations, self.plan.schema)

    def _finish(self, began: float, ended: float) -> None:
        self._usage, self._turns = self._program.usage(self._name)
        self._note(Delivery("", "", self._started or began, ended, 0.0))

    @property
    def _name(self) -> str:
        return f"{self.key}-{self.answer}"

    async def _run(self, prompt: str) -> str:
        program, name = self._program, self._name
        prompt = wire_text(prompt)
        folder, home = program.folder / name, program.homes / name
        for path in (folder, home):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:  # the disk is full, or not ours: so it will be for every row
                raise write_error(path, error) from error
        told = {
            "model": program.model,
            "base_url": program.base_url,
            "folder": str(folder),
            "job_folder": str(program.job_folder),
            "id": "" if self.row.id is None else wire_text(str(self.row.id)),
        }
        argv = [_filled(word, {**told, "prompt": prompt}) for word in program.argv]
        # Not in argv: other users of the machine can read that.
        key = program.row_key(name)
        env = {"HOME": str(home)} | {
            variable: _filled(word, {**told, "key": key}) for variable, word in program.env.items()
        }
        if any("\0" in word for word in (*argv, *env.values())):
            raise ToolFault("the prompt, or the row's id, holds a NUL character")
        env |= dict.fromkeys((one for one in program.keys if one not in program.env), key)
        stdin = b"" if any("{prompt}" in word for word in program.argv) else prompt.encode()
        try:
            async with asyncio.timeout(self._left()):
                ended = await run_child(CommandChild(argv, stdin, folder, env))
        except TimeoutError:
            raise ToolFault("the program took too long and was stopped", "timeout") from None
        text = without_preamble(answer_of(ended)).strip()
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
        return text

    def _left(self) -> float | None:
        """Seconds that the program may take."""
        if self.give_up_at is None:
            return self._program.seconds
        return max(0.0, self.give_up_at - asyncio.get_running_loop().time())


def prompt_text(messages: Sequence[Message]) -> str:
    """A prompt as one text: system and user by paragraphs, others after who said them."""
    parts = []
    for message in messages:
        text = content_text(message.get("content")) or ""
        said = f"Your last answer was:\n{text}" if message.get("role") == "assistant" else text
        if text.strip():
            parts.append(said)
    return "\n\n".join(parts)


def _filled(word: str, told: Mapping[str, str]) -> str:
    """A word with its places filled; braces around anything else stay as they are."""
    return PROGRAM_PLACE.sub(lambda found: told.get(found[1], found[0]), word)


KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""The variables by which programs are told the key."""

PROVIDER = "bagent"
"""What OpenCode calls the proxy: its models are named ``bagent/NAME``."""

QUIET: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
"""Compute nodes reach no internet: programs that look for updates there wait in vain."""

_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""A server has one model: helpers and small questions go to it too."""

ANSWER_SHARE = 4
"""An answer may take a quarter of the context where the job names no ``max_tokens``."""


class ProxyTarget(msgspec.Struct, frozen=True):
    """The service that a program is pointed at.

    ``base_url`` ends with ``/v1``. ``context`` is the model's context length in tokens, and
    ``max_tokens`` what an answer may take; None where that is not known.
    """

    base_url: str
    model: str
    context: int | None = None
    max_tokens: int | None = None

    @property
    def answer(self) -> int | None:
        """The tokens that an answer may take, None where nothing is known of them."""
        if self.max_tokens is not None or self.context is None:
            return self.max_tokens
        return max(1, self.context // ANSWER_SHARE)


def environment_for(service: ProxyTarget) -> dict[str, str]:
    """The variables by which programs find ``service``, besides the key."""
    found = {
        **QUIET,
        "OPENAI_BASE_URL": service.base_url,
        "OPENAI_API_BASE": service.base_url,
        "OPENAI_MODEL": service.model,
        "ANTHROPIC_BASE_URL": service.base_url.removesuffix("/v1"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OPENCODE_CONFIG_CONTENT": msgspec.json.encode(opencode_config(service)).decode(),
    }
    found |= dict.fromkeys(_CLAUDE_MODELS, service.model)
    if service.context is not None:
        found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(service.context)
    if service.answer is not None:
        found["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(service.answer)
    return found


def opencode_config(service: ProxyTarget) -> dict[str, Json]:
    """OpenCode's configuration: the proxy as its one provider; the key comes from the environment.

    Without the limits OpenCode neither shortens long sessions nor asks for answers that fit.
    """
    model: dict[str, Json] = {"name": service.model}
    if service.context is not None:
        model["limit"] = {"context": service.context, "output": service.answer}
    name = f"{PROVIDER}/{service.model}"
    return {
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": service.base_url, "apiKey": "{env:OPENAI_API_KEY}"},
                "models": {service.model: model},
            }
        },
    }
