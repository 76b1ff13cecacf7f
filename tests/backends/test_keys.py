"""Keys that a program prints, and newer ones."""

from __future__ import annotations

import asyncio

import pytest

from bagent.backends.keys import KeySource, run_key_command, with_key
from bagent.errors import UsageError


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


def test_a_key_that_stays_the_same_is_asked_about_once() -> None:
    asked: list[int] = []

    def same() -> str:
        asked.append(1)
        return "old"

    async def main() -> list[bool]:
        source = KeySource("old", same)
        return list(await asyncio.gather(*(source.renew("old") for _ in range(4))))

    assert asyncio.run(main()) == [False] * 4
    assert len(asked) == 1


def test_a_program_that_fails_later_is_told_and_ends_nothing() -> None:
    notices: list[str] = []

    def fails() -> str:
        raise UsageError("api_key_command failed (1): login")

    source = KeySource("old", fails, notices.append)
    assert asyncio.run(source.renew("old")) is False
    assert source.key == "old"
    assert "login" in notices[0]


def test_the_new_key_stands_wherever_the_old_one_stood() -> None:
    headers = {"Authorization": "Bearer old", "x-api-key": "old", "X-Other": "kept"}
    assert with_key(headers, "old", "new") == {
        "Authorization": "Bearer new",
        "x-api-key": "new",
        "X-Other": "kept",
    }
