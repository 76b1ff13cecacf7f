"""Keys that a program prints, and newer ones."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from bagent.backends.endpoint import Endpoint
from bagent.backends.keys import KeySource, run_key_command
from bagent.errors import UsageError
from support.cli import Completed
from support.jobs import parquet, write_job
from support.provider_bedrock import BedrockWire
from support.provider_calls import SECRET
from support.provider_protocols import AnthropicWire, ModelAnswer, OpenAIWire
from support.provider_server import Fault, serve_in_thread


def test_a_key_is_what_the_program_prints() -> None:
    assert run_key_command(["printf", "%s\\n", "abc"]) == "abc"
    assert run_key_command(["echo ' abc '"]) == "abc"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["true"], "it printed no key"),
        (["echo s3cret; echo no login >&2; exit 3"], "no login"),
        (["/no/such/program", "x"], "No such file"),
    ],
)
def test_a_program_that_fails_is_named_and_its_output_is_not(
    command: list[str], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        run_key_command(command)
    assert "s3cret" not in str(caught.value).replace(command[0], "")


async def test_a_key_that_stays_the_same_is_asked_about_once() -> None:
    keys = iter(["old"])
    source = KeySource("old", lambda: next(keys))
    renewed = await asyncio.gather(*(source.renew("old") for _ in range(4)))
    assert renewed == [False] * 4


def test_a_program_that_fails_later_is_told_and_ends_nothing() -> None:
    notices: list[str] = []

    def fails() -> str:
        raise UsageError("api_key_command failed (1): login")

    source = KeySource("old", fails, notices.append)
    assert asyncio.run(source.renew("old")) is False
    assert source.key == "old"
    assert "login" in notices[0]


Bagent = Callable[..., Completed]


def shows_nothing(job_dir: Path, bagent: Bagent, done: Completed) -> None:
    """The secret is neither in a file of the run nor in what commands say."""
    commands = [bagent([command, "job"]) for command in ("results", "report", "status")]
    assert all(SECRET not in each.out + each.err for each in (done, *commands))
    refusals = [row["error"] for row in parquet(job_dir / "runs/job", "attempts") if row["error"]]
    # The server repeated the secret in each.
    assert refusals and all("***" in text and SECRET not in text for text in refusals)
    files = [file for file in job_dir.rglob("*") if file.is_file()]
    assert any(file.suffix == ".html" for file in files)
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file


WITH_SECRETS: dict[str, dict[str, Any]] = {
    "query": {"url": "openai+HERE/v1", "query": {"code": "${VALUE}"}},
    "URL": {"url": "openai+HERE/v1?sig=${VALUE}"},
    "login": {"url": "openai+LOGIN/v1"},
    "header": {"url": "anthropic+HERE/v1", "headers": {"X-Auth": "${VALUE}"}},
    "proxy": {"url": "openai+http://api.outside.test/v1", "proxy": "LOGIN"},
    "key": {"url": "bedrock://us-east-1?endpoint=HERE", "api_key_env": "VALUE"},
}
WIRES = {"header": AnthropicWire, "key": BedrockWire}


@pytest.mark.slow  # five commands each
@pytest.mark.parametrize("where", WITH_SECRETS)
def test_a_secret_is_in_no_file_and_no_message_wherever_a_backend_has_it(
    where: str, job_dir: Path, bagent: Bagent
) -> None:
    wire = WIRES.get(where, OpenAIWire)()
    with serve_in_thread(
        wire, ModelAnswer(text="fine"), Fault("bad_key"), ModelAnswer(text="fine")
    ) as server:
        login = server.url.replace("http://", "http://user:${VALUE}@")
        text = json.dumps(WITH_SECRETS[where])
        backend = json.loads(text.replace("HERE", server.url).replace("LOGIN", login))
        write_job(job_dir, "x", 3, backend=backend, model="m-1", limits={"concurrency": 1})
        # A name that does not tell of a secret: what is hidden is hidden for where it stands.
        env = {"VALUE": SECRET, "OPENAI_API_KEY": "another", "ANTHROPIC_API_KEY": "another"}
        done = bagent(["run", "job.yaml", "--progress", "plain"], env=env)
        checked = bagent(["check", "job.yaml"], env=env)
    assert SECRET not in checked.out + checked.err
    shows_nothing(job_dir, bagent, done)


HIDDEN = "s3cr+t/k=y-5up3r"
LOGIN = base64.b64encode(f"user:{HIDDEN}".encode()).decode()
PROXY = f"http://user:{quote(HIDDEN, safe='')}@proxy:8080"
KEY = {"headers": {"x-api-key": HIDDEN}}


@pytest.mark.parametrize(
    ("fields", "text", "shown"),
    [
        ({"headers": {"Authorization": f"Bearer {HIDDEN}"}}, f"k={HIDDEN} and", "k=*** and"),
        (KEY, f"k={HIDDEN} and", "k=*** and"),
        ({"headers": {"X-Auth": HIDDEN}}, f"k={HIDDEN} and", "k=*** and"),
        ({"headers": {"Ocp-Apim-Subscription-Key": HIDDEN}}, f"k={HIDDEN} and", "k=*** and"),
        ({"headers": {"Authorization": f"Basic {LOGIN}"}}, f"k={HIDDEN} and", "k=*** and"),
        ({"query": {"api-key": HIDDEN}}, f"k={HIDDEN} and", "k=*** and"),
        ({"query": {"code": HIDDEN}}, f"k={HIDDEN} and", "k=*** and"),
        ({"proxy": PROXY}, f"k={HIDDEN} and", "k=*** and"),
        # as URLs and headers write it
        (KEY, f"/v1?k={quote(HIDDEN)}", "/v1?k=***"),
        (KEY, f"/v1?k={quote(HIDDEN, safe='')}", "/v1?k=***"),
        ({"proxy": PROXY}, f"Basic {LOGIN}", "Basic ***"),
        ({"headers": {"Authorization": LOGIN}}, f"Basic {LOGIN}", "Basic ***"),
        # what is left where it was cut with the words
        (KEY, f"x: {HIDDEN[:9]}… through a proxy", "x: ***… through a proxy"),
        (KEY, "x: s3c…", "x: s3c…"),
        # words without a secret
        ({"query": {"api-version": "2026-10-21"}, "headers": {"User-Agent": "blueprint"}},
         "blueprint has no api-version 2026-10-21…", "blueprint has no api-version 2026-10-21…"),
    ],
)  # fmt: skip
def test_a_secret_is_hidden_wherever_an_endpoint_has_it(
    fields: dict[str, Any], text: str, shown: str
) -> None:
    assert Endpoint("here", "http://here/v1", **fields).without_secrets(text) == shown
