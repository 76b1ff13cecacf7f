"""Hostfiles that are written."""

from __future__ import annotations

from pathlib import Path

from bagent.fleet.hostfile import hostfile_text, parse_hostfile, write_hostfile

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
