"""Hostfiles: any text, and lines that are written and read again."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from bagent.errors import HostfileError
from bagent.fleet.hostfile import (
    HostEntry,
    host_line,
    hostfile_text,
    hosts_in,
    parse_hostfile,
)
from support.strategies import ODD_TEXT, texts_of

HOSTS = st.sampled_from(
    [
        "node1", "NODE1", "node1.", "node[1-3]", "n[01-02,7]x", "n[1-2][1-2]", "10.0.0.1", "::1",
        "[::1]", "fe80::1%eth0", "[fe80::1%a_b]", "été.test", "a-b.c_d", "1",
    ]
)  # fmt: skip
PORTS = st.sampled_from(["", ":8000", ":9000-9002", " 7000", "\t7000-7001", ":1023", ":65535"])
URLS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["http://", "https://", "HTTP://"]),
    HOSTS,
    st.sampled_from(["", ":80", ":443", ":8000", ":1-3"]),
    st.sampled_from(["", "/", "/v1", "/v1/", "/base/v2", "//", "/a=b", "/é"]),
)
TAGS = st.dictionaries(
    st.sampled_from(["role", "weight", "gpus", "model", "slots", "rack", "max_concurrency", "a.b"]),
    st.sampled_from(["1", "2", "a=b", "x#y", "é", "0.5", "'", '"', "http://x"]),
    max_size=3,
).map(lambda tags: "".join(f" {key}={value}" for key, value in tags.items()))
LINES = st.builds(
    "{}{}{}".format,
    st.builds("{}{}".format, HOSTS, PORTS) | URLS,
    TAGS,
    st.sampled_from(["", "  # comment", "\t"]),
)
NOISE = texts_of(
    "[", "]", "-", ":", "/", "http://", "%", "=", "@", "#", " ", "\n", "9", "::1", "ſ", "½", "℀",
    "\x0b", "\x1c", "\u2028", "²", "۳", odd=ODD_TEXT,
)  # fmt: skip
FILES = st.lists(LINES, max_size=6).map("\n".join) | st.lists(LINES | NOISE, max_size=4).map(
    "\n".join
)


def parsed(text: str) -> list[HostEntry]:
    try:
        return parse_hostfile(text, "hosts.txt")
    except HostfileError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("hosts.txt:")
        assert error.at is not None
        assert 1 <= error.at.line <= len(text.splitlines())
        return []


def facts(hosts: list[HostEntry]) -> list[tuple[str, str, dict[str, str]]]:
    return [(host.name, host.url, dict(host.tags)) for host in hosts]


@given(FILES)
@example("::1%℀")
@example("node1 weight=2\n[fe80::1%eth0]:9000 role=a")
def test_any_text_is_endpoints_that_are_read_again_or_an_error_with_its_line(text):
    hosts = parsed(text)
    lines = "".join(f"{host_line(host)}\n" for host in hosts)
    assert facts(parsed(lines)) == facts(hosts)
    assert len({host.name for host in hosts}) == len(hosts)


@given(FILES, st.sets(st.integers(0, 20)))
def test_a_hostfile_of_some_endpoints_is_read_as_these(text, numbers):
    hosts = parsed(text)
    chosen = [host for number, host in enumerate(hosts) if number in numbers]
    written = hostfile_text(hosts, {host.url for host in chosen}, text)
    again = facts(parsed(written))
    assert sorted(again, key=str) == sorted(facts(chosen), key=str)


@given(st.binary(max_size=30) | FILES.map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_are_endpoints_or_an_error_of_one_line(content):
    try:
        assert hosts_in(content, "hosts.txt")
    except HostfileError as error:
        assert "\n" not in str(error)
