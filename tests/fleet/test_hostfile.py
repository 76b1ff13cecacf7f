"""Hostfiles that are read and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.errors import HostfileError
from bagent.fleet.hostfile import hostfile_text, parse_hostfile, read_hostfile, write_hostfile


def urls(text: str) -> list[str]:
    return [host.url for host in parse_hostfile(text)]


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("node1", "http://node1:8000/v1"),
        ("node1:9000", "http://node1:9000/v1"),
        ("node1 9000", "http://node1:9000/v1"),
        ("[::1]:9000", "http://[::1]:9000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("[::1] 9000", "http://[::1]:9000/v1"),
        ("http://node1:9000/", "http://node1:9000/v1"),
        ("HTTPS://node1/base/v2/", "https://node1/base/v2"),
        ("http://[::1]:9000/v1", "http://[::1]:9000/v1"),
        ("http://\u00e9t\u00e9.test:9000", "http://\u00e9t\u00e9.test:9000/v1"),
    ],
)
def test_each_way_to_write_an_endpoint(line: str, url: str) -> None:
    assert urls(line) == [url]


def test_ranges_of_hosts_and_ports_expand_in_order() -> None:
    found = [host.name for host in parse_hostfile("node[008-010,2]:8000-8001 role=critic")]
    assert found == [
        f"{node}:{port}" for node in ("node008", "node009", "node010", "node2")
        for port in (8000, 8001)
    ]  # fmt: skip


def test_ranges_expand_in_a_url_too() -> None:
    assert urls("https://node[01-02].test:8443-8444/base") == [
        f"https://{node}.test:{port}/base" for node in ("node01", "node02") for port in (8443, 8444)
    ]
    assert urls("http://node[1-2]") == ["http://node1/v1", "http://node2/v1"]


@pytest.mark.parametrize(
    "text",
    [
        "node1\nNODE1",
        "node1\nnode1.",
        "http://node1\nhttp://node1:80",
        "https://node1/v1\nhttps://node1:443",
        "http://[::1]:80\nhttp://[0:0:0:0:0:0:0:1]:80\nhttp://[::1]",
    ],
)
def test_one_address_written_in_several_ways_counts_once(text: str) -> None:
    """As two endpoints it would get twice what it can take."""
    assert len(parse_hostfile(text)) == 1


def test_two_addresses_that_would_have_one_name_are_an_error() -> None:
    """All that a run knows of an endpoint, it knows by its name."""
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("node1:9000\nhttps://node1:9000/v1", "h")
    assert str(caught.value).startswith(
        "h:2: node1:9000 stands in line 1 as http://node1:9000/v1 (keep one"
    )


def test_a_node_file_of_a_batch_system_counts_each_host_once() -> None:
    text = "x1921c0s0b0n0.hsn\nx1921c0s0b0n0.hsn\nx1921c0s1b0n0.hsn slots=4\n"
    assert urls(text) == ["http://x1921c0s0b0n0.hsn:8000/v1", "http://x1921c0s1b0n0.hsn:8000/v1"]


def test_tags_are_kept_and_the_scheduler_s_own_passed_over() -> None:
    (host,) = parse_hostfile("node1 role=critic rack=a=b weight=0.5 slots=8 cpus=4")
    assert dict(host.tags) == {"role": "critic", "rack": "a=b", "weight": "0.5"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node1:0", "port 0 is not between"),
        ("node1:", "port (empty)"),
        ("node1:" + "9" * 5000, "is no number"),
        ("node1:9-8", "runs backwards"),
        ("node[1-" + "9" * 5000 + "]", "is no range"),
        ("node1 8000-", "is no number"),
        ("node1:80 81", "two ports"),
        ("node1:4", "node1:4: 4 is a number of slots, not a port (node1 slots=4; a port below"),
        ("node1 4", "node1 4: 4 is a number of slots, not a port (node1 slots=4"),
        ("node[1-2]:80", "needs a URL: http://node[1-2]:80)"),
        ("node1 critic", "neither a port nor"),
        ("node1 8000 critic", "no key=value tag"),
        ("node1 role=a role=b", "stands twice"),
        ("node1 weight=0", "not a number above 0"),
        ("node1 gpus=1.5", "not a number above 0"),
        ("node[3-1]", "runs backwards"),
        ("node[a]", "no host name"),
        ("role=critic", "is no host"),
        ("node1 weight=1e308", "not between 1e-06 and 1e+06"),
        ("node1 model=", "model= names nothing"),
        ("node1..test", "no host name"),
        ("node1:8000/v1", "is no host (write http://HOST:PORT/PATH"),
        ("http://*:8000", "no host name"),
        ("http://node1:port/v1", "port port is no number"),
        ("http:///v1", "names no host"),
        ("http://node1:80/v1?key=hidden", "has more after its path"),
        ("http://node1 8000", "names its port itself"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(f"# hosts\n\n{line}\n", "hosts.txt")
    assert str(caught.value).startswith("hosts.txt:3: ")
    assert words in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_login_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("http://me:hidden@node1:8000/v1")
    assert "login" in str(caught.value) and "hidden" not in str(caught.value)


def test_an_endpoint_twice_with_other_tags_names_both_lines() -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile("node1:8000 role=a\nnode2\nhttp://node1:8000/v1 role=b\n", "h")
    assert str(caught.value).startswith("h:3: node1:8000 stands in line 1 with other tags")


def test_more_endpoints_than_any_fleet_has_are_an_error() -> None:
    with pytest.raises(HostfileError, match="more than 100000"):
        parse_hostfile("node[1-99999]:8000-8001")


@pytest.mark.parametrize("content", [b"", b"# nothing\n\n", b"\xff\xfen\x00o\x00"])
def test_a_file_without_endpoints_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(content)
    with pytest.raises(HostfileError, match=r"no endpoint in it|not UTF-8"):
        read_hostfile(path)


def test_a_byte_order_mark_and_foreign_line_ends_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xef\xbb\xbfnode1\r\nnode2:9000\r\n")
    assert [host.name for host in read_hostfile(path)] == ["node1:8000", "node2:9000"]


# --- hostfiles that are written

SOURCE = """\
# the fleet
node[1-3]:8000 role=worker   # rack a
node4 9000 gpus=4
https://far.example/api weight=2
[::1]:7000 rack=a=b
node4 9000 gpus=4
"""
HOSTS = parse_hostfile(SOURCE)


def test_lines_stay_as_written_where_all_their_endpoints_are_kept() -> None:
    text = hostfile_text(HOSTS, {host.url for host in HOSTS}, SOURCE)
    assert text.splitlines() == SOURCE.splitlines()[1:5]
    assert [host.url for host in parse_hostfile(text)] == [host.url for host in HOSTS]


def test_a_range_that_lost_an_endpoint_is_written_out() -> None:
    kept = {host.url for host in HOSTS if host.name not in ("node2:8000", "node4:9000")}
    text = hostfile_text(HOSTS, kept, SOURCE)
    assert text.splitlines() == [
        "node1:8000 role=worker",
        "node3:8000 role=worker",
        "https://far.example/api weight=2",
        "[::1]:7000 rack=a=b",
    ]


def test_the_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "ready.txt"
    path.write_text("old\n")
    write_hostfile(path, "node1\n")
    assert path.read_text() == "node1\n"
    assert [found.name for found in tmp_path.iterdir()] == ["ready.txt"]
