"""Rows that an agent program answers: one process per row, in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bagent.agents.conversation import Conversation
from bagent.backends.openai.chat import content_text
from bagent.clocks import unix
from bagent.fleet.call import Call, CallResult, Delivery
from bagent.job.spec.agent import PROGRAM_PLACE
from bagent.store.journal.segments import write_error
from bagent.text.unicode import wire_text
from bagent.tools.command_tool import CommandChild, answer_of, run_child, without_preamble
from bagent.tools.types import ToolFault
from bagent.types import ErrorKind, Failure, Json, Message, Outcome, Reply, Usage


class ProgramPlan(msgspec.Struct, eq=False):
    """The program of one stage."""

    argv: Sequence[str]
    """May hold ``{prompt}``, ``{model}``, ``{base_url}``, ``{folder}``, ``{job_folder}`` and
    ``{id}``; without ``{prompt}`` the prompt is the program's standard input."""
    env: Mapping[str, str]
    """Its environment without the key, with the same placeholders and ``{key}``, not
    ``{prompt}``."""
    keys: Sequence[str]
    """The variables that get the row's key."""
    row_key: Callable[[str], str]
    """Makes the key from the name that identifies a row's requests."""
    folder: Path
    """Each row gets a folder of its own below it."""
    homes: Path
    """Each row gets a home below it, which is removed once the program has ended well."""
    job_folder: Path
    most: int
    """Rows that run at once."""
    seconds: float | None
    """Time limit of a row; None: no limit."""
    model: str
    base_url: str
    usage: Callable[[str], tuple[Usage, int]]
    """Returns the tokens and the number of a row's requests."""


class ProgramRow:
    """One (row, answer) of a stage that a program answers; the program sends its own requests."""

    def __init__(self, conversation: Conversation, program: ProgramPlan) -> None:
        self._conversation = conversation
        self._program = program

    async def run(self, call: Call) -> Outcome:
        """Run the program until its answer is valid, or no attempt remains."""
        conversation, step = self._conversation, call
        while True:
            began = unix()
            result: Reply | Failure
            try:
                text = await self._run(prompt_text(step.request.messages or []))
            except ToolFault as fault:
                kind: ErrorKind = "timeout" if fault.kind == "timeout" else "tool"
                result = Failure(kind, fault.message, passing=kind == "timeout")
            else:
                result = Reply(text, "stop", model=self._program.model)
            step.attempts = 1
            delivery = Delivery("", "", began, unix())
            if isinstance(result, Reply):
                result = conversation.evaluate(step, result, delivery) or result
            conversation.usage, conversation.turns = self._program.usage(self._name)
            next_step = conversation.handle(step, CallResult(result, delivery))
            if isinstance(next_step, Outcome):
                return next_step
            step = next_step

    @property
    def _name(self) -> str:
        return f"{self._conversation.key}-{self._conversation.answer}"

    async def _run(self, prompt: str) -> str:
        program, name, row = self._program, self._name, self._conversation.row
        prompt = wire_text(prompt)
        folder, home = program.folder / name, program.homes / name
        for path in (folder, home):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:  # every row would fail alike
                raise write_error(path, error) from error
        values = {
            "model": program.model,
            "base_url": program.base_url,
            "folder": str(folder),
            "job_folder": str(program.job_folder),
            "id": "" if row.id is None else wire_text(str(row.id)),
        }
        argv = [_fill(word, {**values, "prompt": prompt}) for word in program.argv]
        # The key is not in argv, which other users of the machine can read.
        key = program.row_key(name)
        env = {"HOME": str(home)} | {
            variable: _fill(word, {**values, "key": key}) for variable, word in program.env.items()
        }
        if any("\0" in word for word in (*argv, *env.values())):
            raise ToolFault("the prompt, or the row's id, holds a NUL character")
        env |= dict.fromkeys((own for own in program.keys if own not in program.env), key)
        stdin = b"" if any("{prompt}" in word for word in program.argv) else prompt.encode()
        try:
            async with asyncio.timeout(self._remaining_seconds()):
                ended = await run_child(CommandChild(argv, stdin, folder, env))
        except TimeoutError:
            raise ToolFault("the program took too long and was stopped", "timeout") from None
        text = without_preamble(answer_of(ended)).strip()
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
        return text

    def _remaining_seconds(self) -> float | None:
        """Return the seconds that the program may take."""
        give_up_at = self._conversation.give_up_at
        if give_up_at is None:
            return self._program.seconds
        return max(0.0, give_up_at - asyncio.get_running_loop().time())


def prompt_text(messages: Sequence[Message]) -> str:
    """Return a prompt as one text: a paragraph for each message."""
    parts = []
    for message in messages:
        text = content_text(message.get("content")) or ""
        part = f"Your last answer was:\n{text}" if message.get("role") == "assistant" else text
        if text.strip():
            parts.append(part)
    return "\n\n".join(parts)


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Return a word with its placeholders filled; other braces stay."""
    return PROGRAM_PLACE.sub(lambda match: values.get(match[1], match[0]), word)


KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""The variables from which programs read the key."""

PROVIDER = "bagent"
"""OpenCode's name for the proxy: its models are named ``bagent/NAME``."""

QUIET: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DO_NOT_TRACK": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
}
"""Variables that turn off updates: compute nodes do not reach the internet."""

_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Variables for all models of Claude Code: the server has one."""

ANSWER_SHARE = 4
"""The part of the context that an answer may take where the job sets no ``max_tokens``."""


class ProxyTarget(msgspec.Struct, frozen=True):
    """The service that a program sends its requests to."""

    base_url: str
    """Ends with ``/v1``."""
    model: str
    context: int | None = None
    """The model's context length in tokens, if it is known."""
    max_tokens: int | None = None
    """Tokens that an answer may take, if the job sets them."""

    @property
    def answer(self) -> int | None:
        """Tokens that an answer may take, if a limit is known."""
        if self.max_tokens is not None or self.context is None:
            return self.max_tokens
        return max(1, self.context // ANSWER_SHARE)


def environment_for(service: ProxyTarget) -> dict[str, str]:
    """Return the variables by which programs find ``service``, besides the key."""
    variables = {
        **QUIET,
        "OPENAI_BASE_URL": service.base_url,
        "OPENAI_API_BASE": service.base_url,
        "OPENAI_MODEL": service.model,
        "ANTHROPIC_BASE_URL": service.base_url.removesuffix("/v1"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "OPENCODE_CONFIG_CONTENT": msgspec.json.encode(opencode_config(service)).decode(),
    }
    variables |= dict.fromkeys(_CLAUDE_MODELS, service.model)
    if service.context is not None:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(service.context)
    if service.answer is not None:
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(service.answer)
    return variables


def opencode_config(service: ProxyTarget) -> dict[str, Json]:
    """Return OpenCode's configuration with the proxy as its one provider.

    Without limits OpenCode neither shortens long sessions nor requests answers that fit.
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
