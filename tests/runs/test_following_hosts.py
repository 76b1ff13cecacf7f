"""A hostfile that changes while there is work: what joins and leaves, and what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from bagent.backends.endpoint import Endpoint
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.limits.concurrency import InFlightLimit
from bagent.runs.hostfile_reload import HostfileFollower


class Seen:
    """Takes who joins and leaves."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.notices: list[str] = []
        self.changed = asyncio.Event()

    def join(self, states: Sequence[EndpointState]) -> None:
        """Note it."""
        self.told += [f"+{state.name}" for state in states]
        self.changed.set()

    def leave(self, names: Sequence[str]) -> None:
        """Note it."""
        self.told += [f"-{name}" for name in names]

    def notice(self, words: str) -> None:
        """Note it."""
        self.notices.append(words)
        self.changed.set()

    async def something(self) -> None:
        """Wait for a change or a notice."""
        self.changed.clear()
        await asyncio.wait_for(self.changed.wait(), 20)


def states(endpoints: Sequence[Endpoint]) -> list[EndpointState]:
    return [EndpointState(endpoint, InFlightLimit(1, 1)) for endpoint in endpoints]


def test_a_list_with_a_key_that_is_not_set_counts_for_nothing_until_it_is_mended(
    tmp_path: Path,
) -> None:
    async def main() -> Seen:
        hosts = tmp_path / "hosts.txt"
        hosts.write_text("a\nb\n")
        seen = Seen()
        used = [Endpoint(f"{name}:8000", f"http://{name}:8000/v1") for name in "ab"]
        follower = HostfileFollower(hosts, None, {}, seen.notice, used)
        following = asyncio.create_task(follower.follow(seen, states))
        await asyncio.sleep(0)
        hosts.write_text("a\nc api_key_env=NOT_SET\n")
        await seen.something()
        assert seen.told == []
        hosts.write_text("a\nc\n")
        await seen.something()
        following.cancel()
        return seen

    seen = asyncio.run(main())
    assert seen.told == ["-b:8000", "+c:8000"]
    assert "NOT_SET is not set; the 2 endpoints stay as they were" in seen.notices[0]
    assert seen.notices[1:] == ["hosts.txt changed: 1 joined, 1 left"]
