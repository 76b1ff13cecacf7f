"""Images: which files may be sent, and as what; in buckets only those in folders of the job."""

from __future__ import annotations

import base64
import os

import pytest

from bagent.errors import BagentError
from bagent.job.load import JobRequest, load_job
from bagent.job.templates import bucket_images
from bagent.job.templates.prompt import MAX_BYTES, ImageError, Prompt, image_url
from bagent.job.templates.template import TemplateFailure
from bagent.types import Row
from support.remote_files import serving_buckets

PNG = b"\x89PNG\r\n\x1a\n...."
JPEG = b"\xff\xd8\xff\xe0...."


@pytest.fixture
def site():
    with serving_buckets() as server:
        server.files |= {"b/in/1.png": PNG, "b/in/sub/2.jpg": JPEG, "b/out/3.png": PNG}
        yield server


def prompt_of(tmp_path, prompt, source="rows.jsonl"):
    job = load_job(JobRequest(text=f"input: {source}\nprompt: {prompt}\n", cwd=tmp_path))
    return Prompt.from_job(job)


PHOTO = '{messages: [{role: user, content: [{image: "{{ photo }}"}, {text: What}]}], %s}'


def url_of(prompt, **data):
    return prompt.render(data)[0]["content"][0]["image_url"]["url"]


def data_url(content, mime):
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("keys", "source"),
    [
        ("image_folders: s3://b/in", "rows.jsonl"),
        ("image_folders: [s3://other/x/, S3://b/in/]", "rows.jsonl"),
        ("", "s3://b/in/rows.jsonl"),
        ("", "[rows.jsonl, s3://b/in/rows.parquet]"),
    ],
)
def test_rows_name_images_in_folders_that_the_job_names(site, tmp_path, keys, source):
    prompt = prompt_of(tmp_path, PHOTO % keys, source)
    assert url_of(prompt, photo=" s3://b/in/1.png") == data_url(PNG, "image/png")
    assert url_of(prompt, photo="S3://b/in/sub/2.jpg") == data_url(JPEG, "image/jpeg")
    for other in ("s3://b/out/3.png", "s3://b/in/../out/3.png", "s3://bb/in/1.png", "gs://b/in/1"):
        with pytest.raises(TemplateFailure, match=r"in no folder of a bucket|has \. or \.\."):
            url_of(prompt, photo=other)
    assert [path for _, path, _ in site.requests if "out" in path] == []


@pytest.mark.parametrize("source", ["s3://b/*.jsonl", "s3://b/in/*.jsonl", "s3://b/i?/rows.jsonl"])
def test_a_pattern_of_the_input_lets_rows_name_no_image(site, tmp_path, source):
    prompt = prompt_of(tmp_path, PHOTO % "", source)
    message = r"in no folder of a bucket that the job names \(image_folders: \[s3://b/in/\] lets"
    with pytest.raises(TemplateFailure, match=message):
        url_of(prompt, photo="s3://b/in/1.png")
    assert site.requests == []


def test_the_beginning_of_an_image_is_a_folder_that_the_job_names(site, tmp_path):
    prompt = prompt_of(
        tmp_path, '{messages: [{role: user, content: [{image: "s3://b/in/{{ name }}"}]}]}'
    )
    assert url_of(prompt, name="1.png") == data_url(PNG, "image/png")
    with pytest.raises(TemplateFailure, match=r"has \. or \.\. in its path"):
        url_of(prompt, name="../out/3.png")


def test_a_beginning_inside_a_name_lets_rows_name_nothing_beside_it(site, tmp_path):
    image = '{image: "S3://b/in/su{{ name }}"}, {image: "{{ photo }}"}'
    prompt = prompt_of(tmp_path, f"{{messages: [{{role: user, content: [{image}]}}]}}")
    photo = "https://host.example/a.png"
    assert url_of(prompt, name="b/2.jpg", photo=photo) == data_url(JPEG, "image/jpeg")
    with pytest.raises(TemplateFailure, match="in no folder of a bucket that the job names"):
        url_of(prompt, name="b/2.jpg", photo="s3://b/in/1.png")


def test_an_image_of_the_job_itself_lets_rows_name_no_other(site, tmp_path):
    content = '[{image: s3://b/in/1.png}, {image: "{{ photo }}"}]'
    prompt = prompt_of(tmp_path, f"{{messages: [{{role: user, content: {content}}}]}}")
    assert url_of(prompt, photo="https://host.example/a.png") == data_url(PNG, "image/png")
    with pytest.raises(TemplateFailure, match="in no folder of a bucket that the job names"):
        url_of(prompt, photo="s3://b/in/sub/2.jpg")


def test_conversations_name_images_in_buckets_too(site, tmp_path):
    prompt = prompt_of(
        tmp_path, "{messages_from: talk, images_from: images, image_folders: [s3://b/in/]}"
    )
    turns = [{"from": "human", "value": "What is <image>?"}]
    content = prompt.render({"talk": turns, "images": ["s3://b/in/1.png"]})[0]["content"]
    assert content[1]["image_url"]["url"] == data_url(PNG, "image/png")
    with pytest.raises(TemplateFailure, match=r"talk: s3://b/out/3\.png is in no folder") as caught:
        prompt.render({"talk": turns, "images": ["s3://b/out/3.png"]})
    assert caught.value.kind == "bad_input"


def test_the_check_of_the_first_rows_reads_no_image_from_a_bucket(site, tmp_path):
    prompt = prompt_of(tmp_path, "{messages_from: talk, images_from: i, image_folders: s3://b/in}")
    rows = [{"talk": [{"from": "human", "value": "?"}], "i": "s3://b/in/1.png"}] * 3
    assert prompt.check(rows) == []
    assert site.requests == []


@pytest.mark.parametrize(
    ("faults", "kind", "message"),
    [
        ([404], "template", "cannot read s3://b/in/1.png: there is no such file"),
        ([503] * 4, "connect", "cannot read s3://b/in/1.png: the bucket answers 503"),
        ([], "template", "larger than 64 MB"),
    ],
)
def test_an_image_that_cannot_be_read_fails_its_row(
    site, tmp_path, monkeypatch, faults, kind, message
):
    if not faults:
        monkeypatch.setattr(bucket_images, "MAX_BYTES", 4)
    site.faults = faults
    prompt = prompt_of(tmp_path, PHOTO % "image_folders: s3://b/in")
    with pytest.raises(TemplateFailure, match=message) as caught:
        url_of(prompt, photo="s3://b/in/1.png")
    assert caught.value.kind == kind


def test_images_that_were_loaded_are_not_read_again_until_they_are_released(site, tmp_path):
    prompt = prompt_of(tmp_path, PHOTO % "image_folders: s3://b/in")
    rows = [{"photo": f"s3://b/in/{name}"} for name in ("1.png", "sub/2.jpg", "none.png")]
    urls = [prompt.load_images(Row(n, n, n, data, "", 0)) for n, data in enumerate(rows)]
    before = len(site.requests)
    assert url_of(prompt, **rows[0]) == data_url(PNG, "image/png")
    assert url_of(prompt, **rows[1]) == data_url(JPEG, "image/jpeg")
    with pytest.raises(TemplateFailure, match="no such file"):
        url_of(prompt, **rows[2])
    assert len(site.requests) == before
    prompt.release_images([url for row_urls in urls for url in row_urls])
    url_of(prompt, **rows[0])
    assert len(site.requests) > before


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("https://host.example/photos/", "expected a folder of a bucket"),
        ("s3://b/*/", "name a folder, no pattern"),
        ("s3://", "names no bucket"),
        ("s3://user@b/x", "may not hold a user"),
    ],
)
def test_folders_that_are_none_are_refused(tmp_path, folder, message):
    with pytest.raises(BagentError, match=message):
        prompt_of(tmp_path, PHOTO % f'image_folders: ["{folder}"]')
    with pytest.raises(BagentError, match="the prompt has no images"):
        prompt_of(tmp_path, '{user: "{{ photo }}", image_folders: s3://b/in}')


def test_a_missing_driver_is_an_error_before_any_row(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(BagentError, match=r"gs:// needs gcsfs \(pip install"):
        prompt_of(tmp_path, PHOTO % "image_folders: gs://b/in")


def test_a_url_that_no_store_can_read_fails_its_row_only(site, tmp_path):
    prompt = prompt_of(tmp_path, PHOTO % "image_folders: s3://b/in")
    for photo in ("s3://b/in/\ud800.png", "s3://b/in/\x00.png"):
        row = Row(0, 0, 0, {"photo": photo}, "", 0)
        prompt.release_images(prompt.load_images(row))
        with pytest.raises(TemplateFailure, match="cannot read s3://b/in/"):
            url_of(prompt, photo=photo)
    assert url_of(prompt, photo="s3://b/in/1.png") == data_url(PNG, "image/png")


TYPES = [
    (PNG, "image/png"),
    (JPEG, "image/jpeg"),
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
    assert image_url(" a.txt\n", tmp_path) == data_url(content, mime)


def test_a_folder_named_through_a_link_is_all_right(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a").write_bytes(PNG)
    (tmp_path / "link").symlink_to("real")
    assert image_url("a", tmp_path / "link").startswith("data:image/png")


@pytest.mark.parametrize("source", ["../out.png", "sub/../../out.png", "link.png", "dir/out.png"])
def test_files_outside_the_folder_are_refused(tmp_path, source):
    folder = tmp_path / "job"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "out.png").write_bytes(PNG)
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
    text = base64.b64encode(PNG + bytes(50)).decode()
    assert image_url(text, tmp_path) == f"data:image/png;base64,{text}"
    with pytest.raises(ImageError, match="larger than 64 MB"):
        image_url(text[:64] + "A" * (MAX_BYTES // 3 * 4 + 4), tmp_path)
