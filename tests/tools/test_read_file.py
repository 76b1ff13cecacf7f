"""Files below one folder, and none outside it."""

from __future__ import annotations

import os
import resource
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bagent.errors import UsageError
from bagent.tools import ToolResult
from support.tool_pools import once


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("the secret")
    folder = tmp_path / "root"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("one\ntwo\nthree\n")
    (folder / "sub" / "b.txt").write_text("bee")
    return folder


def read(root: Path, path: str, **arguments: Any) -> ToolResult:
    entry = {"builtin": "read_file", "root": "root", "max_tokens": 1_000_000}
    return once(root.parent, entry, {"path": path, **arguments})


@pytest.mark.parametrize("path", ["a.txt", "sub/../a.txt", "sub/deep/../../a.txt"])
def test_a_file_below_the_root_is_read(root: Path, path: str) -> None:
    assert read(root, path).text == "one\ntwo\nthree\n"
    assert read(root, str(root / path)).text == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "sub/deep/../../../secret.txt",
        "/etc/passwd",
        "{root}/../secret.txt",
        "{root}2/secret.txt",
        "/proc/self/root/etc/passwd",
        "sub/../" * 600 + "../secret.txt",
    ],
)
def test_no_path_leads_outside(root: Path, path: str) -> None:
    (root.parent / "root2").mkdir()
    (root.parent / "root2" / "secret.txt").write_text("the secret")
    result = read(root, path.replace("{root}", str(root)))
    assert result.error == "failed"
    assert "outside the folder" in result.text
    assert "secret\n" not in result.text


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("out", "../secret.txt"),
        ("out", "/etc/passwd"),
        ("up", ".."),
        ("abs", "/"),
        ("magic", "/proc/self/root"),
        ("chain", "sub/second"),
    ],
)
def test_no_link_leads_outside(root: Path, link: str, target: str) -> None:
    (root / "sub" / "second").symlink_to("../third")
    (root / "third").symlink_to(root.parent / "secret.txt")
    (root / link).symlink_to(target)
    tail = {"up": "/secret.txt", "abs": "/etc/passwd", "magic": "/etc/passwd"}.get(link, "")
    result = read(root, link + tail)
    assert result.error == "failed"
    assert "outside the folder" in result.text


def test_links_that_stay_below_the_root_are_followed(root: Path) -> None:
    (root / "near").symlink_to("sub/b.txt")
    (root / "whole").symlink_to(root / "sub")
    (root / "sub" / "back").symlink_to("../a.txt")
    assert read(root, "near").text == "bee"
    assert read(root, "whole/b.txt").text == "bee"
    assert read(root, "whole/back").text.startswith("one")
    (root / "loop").symlink_to("loop")
    assert "symbolic links" in read(root, "loop").text


def test_a_root_that_is_a_link_itself_may_be_read(root: Path) -> None:
    root.rename(root.parent / "real")
    root.symlink_to("real")
    assert read(root, "a.txt").text.startswith("one")
    assert read(root, str(root / "a.txt")).text.startswith("one")
    assert "outside" in read(root, "../secret.txt").text


def test_pipes_and_devices_are_not_read_and_hold_nobody(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)  # a socket's path may not be long
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    names = ["pipe", "socket"]
    with suppress(PermissionError):  # some containers make none
        os.mknod(root / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
        names.append("zero")
    for name in names:
        result = read(root, name)
        assert result.error == "failed"
        assert "no file" in result.text


def files_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_path_that_goes_in_and_out_holds_few_files_open(root: Path) -> None:
    before, limits = files_open(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, limits[1]))
    try:
        assert read(root, "sub/deep/../../" * 1000 + "a.txt").text.startswith("one")
        for path in ("sub/" * 1000 + "a.txt", "nope", "sub/../..", "sub/nope/.."):
            assert read(root, path).error == "failed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert files_open() <= before


@pytest.mark.parametrize("path", ["nope.txt", "a.txt/b", "", "x\0y", "n" * 5000])
def test_what_is_not_there_is_a_fault_or_the_root(root: Path, path: str) -> None:
    result = read(root, path)
    assert (result.error == "failed") == (path != "")
    assert str(root) not in result.text


def test_a_folder_gives_its_names(root: Path) -> None:
    assert read(root, ".").text == "a.txt\nsub/"
    assert read(root, "sub/deep").text == "[an empty folder]"


def test_part_of_a_file_is_read_by_lines(root: Path) -> None:
    assert read(root, "a.txt", first_line=2).text == "two\nthree\n"
    assert read(root, "a.txt", first_line=2, lines=1).text == "two\n"
    assert read(root, "a.txt", first_line=9).text == ""


def test_a_large_file_is_read_up_to_a_bound(root: Path) -> None:
    with (root / "big").open("wb") as file:
        file.write(b"x" * 1000 + b"\n")
        file.write(b"y" * (4 << 20))
    text = read(root, "big").text
    assert text.startswith("x" * 1000 + "\ny")
    assert len(text) == pytest.approx(1 << 20, rel=0.001)
    assert text.endswith("[cut: line 2 is not whole; go on with first_line]")


def test_binary_files_are_not_text(root: Path) -> None:
    (root / "bin").write_bytes(b"\x7fELF\0\0")
    (root / "latin").write_bytes("café".encode("latin-1"))
    (root / "mark").write_bytes(b"\xef\xbb\xbfhi")
    assert "not text" in read(root, "bin").text
    assert read(root, "latin").text == "caf\ufffd"
    assert read(root, "mark").text == "hi"


def test_a_root_must_be_given_and_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs root"):
        once(tmp_path, {"builtin": "read_file"}, {})
    with pytest.raises(UsageError, match="no such folder"):
        once(tmp_path, {"builtin": "read_file", "root": "nope"}, {})
