"""Images: which files may be sent, and as what."""

from __future__ import annotations

import base64
import os

import pytest

from bagent.job.templates.prompt import MAX_BYTES, ImageError, image_url

TYPES = [
    (b"\x89PNG\r\n\x1a\n....", "image/png"),
    (b"\xff\xd8\xff\xe0....", "image/jpeg"),
    (b"GIF89a....", "image/gif"),
    (b"RIFF\x10\x00\x00\x00WEBPVP8 ", "image/webp"),
    (b"II*\x00....", "image/tiff"),
    (b"\x00\x00\x00\x20ftypavif....", "image/avif"),
]


def refused(source, folder):
    with pytest.raises(ImageError) as caught:
        image_url(source, folder)
    return str(caught.value)


@pytest.mark.parametrize(("content", "mime"), TYPES)
def test_the_content_tells_the_type_not_the_name(tmp_path, content, mime):
    (tmp_path / "a.txt").write_bytes(content)
    found = image_url(" a.txt\n", tmp_path)
    assert found == f"data:{mime};base64,{base64.b64encode(content).decode()}"


def test_a_folder_named_through_a_link_is_all_right(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a").write_bytes(TYPES[0][0])
    (tmp_path / "link").symlink_to("real")
    assert image_url("a", tmp_path / "link").startswith("data:image/png")


@pytest.mark.parametrize("source", ["../out.png", "sub/../../out.png", "link.png", "dir/out.png"])
def test_files_outside_the_folder_are_refused(tmp_path, source):
    folder = tmp_path / "job"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "out.png").write_bytes(TYPES[0][0])
    (folder / "link.png").symlink_to("../out.png")
    (folder / "dir").symlink_to("..")
    assert refused(source, folder) == f"{source} is outside the job's folder"
    assert "outside" in refused(str(tmp_path / "out.png"), folder)


def test_what_is_no_image_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"words")
    assert refused("a.png", tmp_path) == (
        "a.png is no PNG, JPEG, GIF, WebP, BMP, TIFF or AVIF image"
    )
    (tmp_path / "d.png").mkdir()
    os.mkfifo(tmp_path / "p.png")
    for name in ("d.png", "p.png", "zz.png"):
        assert refused(name, tmp_path) == f"no such image: {name}"
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert refused("a.png", tmp_path) == "a.png is larger than 64 MB"
    assert "is no path" in refused("a\0b", tmp_path)
    assert len(refused("x" * 5000, tmp_path)) < 400


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the image's path is empty"),
        (
            "file:///etc/passwd",
            "file:///etc/passwd is neither a path nor the URL of a web server or bucket",
        ),
    ],
)
def test_other_sources_are_refused(tmp_path, source, message):
    assert refused(source, tmp_path) == message


def test_base64_of_an_image_is_sent_as_its_url(tmp_path):
    text = base64.b64encode(TYPES[0][0] + bytes(50)).decode()
    assert image_url(text, tmp_path) == f"data:image/png;base64,{text}"
    with pytest.raises(ImageError, match="larger than 64 MB"):
        image_url(text[:64] + "A" * (MAX_BYTES // 3 * 4 + 4), tmp_path)
