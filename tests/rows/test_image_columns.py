"""Images in columns of Parquet files, as the prompt sends them."""

from __future__ import annotations

import base64

import duckdb
import pytest

from support.jobs import write_job
from support.replies import ok

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(200))
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(200))


def url(content: bytes, mime: str) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    "prompt",
    [
        {"messages": [{"role": "user", "content": [
            {"image": "{{ photo }}"}, {"image": "{{ scan.bytes }}"}, {"text": "id=r1"}]}]},
        {"messages_from": "turns", "images_from": "images"},
    ],
)  # fmt: skip
def test_images_in_columns_of_bytes_are_sent(fs, job_dir, bagent, prompt):
    fs.set_script({"*": [ok("fine")]})
    with duckdb.connect() as connection:
        connection.execute(
            "COPY (SELECT 'r1' AS id, $1::BLOB AS photo, {'bytes': $2::BLOB, 'path': 'a.jpg'} AS"
            " scan, [$1::BLOB, $2::BLOB] AS images, [{'from': 'human', 'value':"
            f" '<image><image>id=r1'}}] AS turns) TO '{job_dir}/rows.parquet'",
            [PNG, JPEG],
        )
    write_job(job_dir, fs.url, 0, prompt=prompt, input="rows.parquet")
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    assert done.code == 0, done.err
    [message] = fs.of("r1")[0].body["messages"]
    *images, text = message["content"]
    assert [image["image_url"]["url"] for image in images] == [
        url(PNG, "image/png"),
        url(JPEG, "image/jpeg"),
    ]
    assert text == {"type": "text", "text": "id=r1"}
