"""A hostfile that changes: what counts, when, and what is kept."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import pytest

from bagent.fleet.hostfile import HostChanges, HostfileWatch, parse_hostfile
from bagent.servers.host_selection import select_hosts
from bagent.types import Json

OLD = b"a\nb role=x\n"


class Watched:
    """A watch with a clock that is set by hand."""

    def __init__(self, select: dict[str, Json] | None = None) -> None:
        self.now = 100.0
        self.notices: list[str] = []
        choose = partial(select_hosts, selection=select)
        hosts = choose(parse_hostfile(OLD.decode()))
        self.watch = HostfileWatch(
            Path("h.txt"), hosts, lambda: self.now, self.notices.append, choose
        )

    def on_content(self, content: bytes | OSError, after: float = 1.0) -> HostChanges | None:
        self.now += after
        return self.watch.on_content(content)

    @property
    def names(self) -> list[str]:
        return [host.name.split(":")[0] for host in self.watch.hosts]


def names(hosts: object) -> list[str]:
    assert isinstance(hosts, tuple)
    return [host.name.split(":")[0] for host in hosts]


def test_a_new_list_counts_once_it_was_seen_twice_a_second_apart() -> None:
    w = Watched()
    new = b"b role=y\nc\n"
    assert w.on_content(new) is None
    assert w.on_content(new, 0.5) is None
    changes = w.on_content(new, 0.5)
    assert changes is not None
    assert [names(changes.joined), names(changes.removed), names(changes.changed)] == [
        ["c"],
        ["a"],
        ["b"],
    ]
    assert changes.changed[0].tags == {"role": "y"}
    assert w.names == ["b", "c"]
    assert w.on_content(new) is None
    assert w.notices == []


def test_a_file_that_still_grows_is_waited_for() -> None:
    w = Watched()
    for lines in range(1, 6):
        assert w.on_content(b"c\nd\ne\nf\ng\n"[: 2 * lines], 5.0) is None
    assert w.names == ["a", "b"]
    changes = w.on_content(b"c\nd\ne\nf\ng\n")
    assert changes is not None and names(changes.joined) == ["c", "d", "e", "f", "g"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no endpoint in it"),
        (b"# all gone\n", "no endpoint in it"),
        (b"a\nb:no", "h.txt:2: port no is no number"),
        (b"a\x00\x00", "no host name"),
        (OSError(errno.ENOENT, "No such file or directory"), "no such file or directory"),
    ],
)
def test_what_is_no_hostfile_keeps_the_list_with_one_notice(
    content: bytes | OSError, words: str
) -> None:
    w = Watched()
    for _ in range(5):
        assert w.on_content(content) is None
    assert w.names == ["a", "b"]
    (notice,) = w.notices
    assert words in notice
    assert notice.endswith("the 2 endpoints stay as they were")


def test_comments_and_order_are_no_change() -> None:
    w = Watched()
    content = b"# sorted\nb role=x\na\n"
    w.on_content(content)
    assert w.on_content(content) is None
    assert w.names == ["b", "a"]


def test_a_list_of_which_nothing_is_selected_is_not_used() -> None:
    w = Watched({"role": "x"})
    for _ in range(3):
        assert w.on_content(b"a role=y\n") is None
    assert w.names == ["b"]
    assert w.notices == [
        "h.txt: select: no endpoint has role=x (role there: y); the endpoint stays as it was"
    ]
