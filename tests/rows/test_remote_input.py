"""Rows from buckets and web servers: the same rows as from local files, by ranges."""

from __future__ import annotations

import gzip
import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPMessage
from urllib.response import addinfourl

import duckdb
import pytest

from bagent.errors import InputError
from bagent.remote import RemoteError, check_url, files, storage, web
from bagent.remote.drivers import DriverStorage
from bagent.remote.files import ThreadSafeFile
from bagent.remote.storage import RemoteStat
from bagent.remote.web import Redirects, WebStorage
from bagent.rows import RowsConfig, open_rows
from support.remote_files import serving_buckets

LINES = b"".join(b'{"id": %d, "text": "row %d"}\n' % (n, n) for n in range(3000))


@pytest.fixture
def site():
    with serving_buckets() as server:
        yield server


@pytest.fixture(params=["s3", "http"])
def url(request, site):
    """Where the files of the bucket ``b`` are; ``BUCKET`` is enough for what both have alike."""
    return BUCKET if request.param == "s3" else f"{site.url}/b"


BUCKET = "s3://b"


def parquet_bytes(tmp_path, query, options=""):
    path = tmp_path / "made.parquet"
    duckdb.sql(f"COPY ({query}) TO '{path}' (FORMAT parquet {options})")
    return path.read_bytes()


def rows_of(tmp_path, *inputs, **settings):
    reader = open_rows(RowsConfig(inputs, tmp_path, **settings))
    return [row for batch in reader.batches() for row in batch]


def test_every_format_gives_the_rows_of_the_local_file(site, url, tmp_path):
    contents = {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES),
        "a.csv": b"id,text\n" + b"".join(b"%d,row %d\n" % (n, n) for n in range(3000)),
        "a.json": json.dumps([json.loads(line) for line in LINES.splitlines()]).encode(),
        "a.parquet": parquet_bytes(
            tmp_path, "select range as id, 'row ' || range as text from range(3000)"
        ),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        site.files[f"b/{name}"] = content
        local = rows_of(tmp_path, str(tmp_path / name))
        remote = rows_of(tmp_path, f"{url}/{name}")
        assert len(remote) == 3000
        assert [(r.key, r.index, r.line, r.data) for r in remote] == [
            (r.key, r.index, r.line, r.data) for r in local
        ]
        assert remote[0].source == f"{url}/{name}"


def test_patterns_match_as_on_a_disk(site, tmp_path):
    site.page = 2
    names = ["x/b.jsonl", "x/a.jsonl", "x/sub/c.jsonl", "x/.hidden.jsonl", "x/a.json", "y/z.jsonl"]
    site.files |= {f"b/{name}": json.dumps({"id": name}).encode() for name in names}
    site.files["b/x/"] = b""

    def ids(pattern):
        return [row.id for row in rows_of(tmp_path, f"s3://b/{pattern}")]

    assert ids("x/*.jsonl") == ["x/a.jsonl", "x/b.jsonl"]
    assert ids("**/*.jsonl") == ["x/a.jsonl", "x/b.jsonl", "x/sub/c.jsonl", "y/z.jsonl"]
    assert ids("x/**") == ["x/a.json", "x/a.jsonl", "x/b.jsonl", "x/sub/c.jsonl"]
    assert ids("[!x]/?.jsonl") == ["y/z.jsonl"]
    assert len(rows_of(tmp_path, "S3://b/x/*.jsonl")) == 2
    with pytest.raises(InputError, match=r"no file matches s3://b/q/\*"):
        ids("q/*.jsonl")


def test_a_large_file_comes_by_ranges_and_a_limit_reads_its_start(site, url, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "AHEAD", 1 << 16)
    monkeypatch.setattr(files, "LEAST", 1 << 12)
    site.files["b/a.jsonl"] = b"".join(
        b'{"id": %d, "text": "%s"}\n' % (n, b"x" * 400) for n in range(8000)
    )
    assert len(rows_of(tmp_path, f"{url}/a.jsonl", limit=3)) == 3
    assert site.read < 1 << 20
    site.requests.clear()
    assert len(rows_of(tmp_path, f"{url}/a.jsonl")) == 8000
    assert site.read < 1.1 * len(site.files["b/a.jsonl"])


def test_what_is_cut_off_is_read_on_where_it_ended(site, url, tmp_path):
    site.files["b/a.jsonl"] = LINES
    site.faults = ["ok", "cut", 503, "cut", "ok", 500]
    assert [row.id for row in rows_of(tmp_path, f"{url}/a.jsonl")] == list(range(3000))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([403], "403"),
        ([404], "there is no such file"),
        ([503] * 4, "503"),
        (["ok", *[500] * 4], "500"),
    ],
)
def test_a_refusal_is_one_clear_error(site, url, tmp_path, faults, message):
    site.files["b/a.jsonl"] = LINES
    site.faults = list(faults)
    with pytest.raises(InputError, match=message) as caught:
        rows_of(tmp_path, f"{url}/a.jsonl")
    assert f"{url}/a.jsonl" in str(caught.value)


def test_a_file_that_changes_while_it_is_read_is_an_error(site, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "AHEAD", 1 << 12)
    monkeypatch.setattr(files, "LEAST", 1 << 12)
    site.files["b/a.csv"] = b"id\n" + b"".join(b"%d\n" % n for n in range(100_000))
    reader = open_rows(RowsConfig((f"{BUCKET}/a.csv",), tmp_path))
    reader.peek(1)
    site.files["b/a.csv"] = site.files["b/a.csv"].replace(b"9", b"8")
    with pytest.raises(InputError, match="changed while it was read"):
        list(reader.batches())


def test_a_server_without_ranges_gives_small_files_only(site, tmp_path, monkeypatch):
    site.ranges = False
    site.files["b/a.jsonl"] = LINES
    assert len(rows_of(tmp_path, f"{site.url}/b/a.jsonl")) == 3000
    monkeypatch.setattr(files, "AHEAD", 1 << 12)
    site.files["b/a.jsonl"] = LINES * 20
    with pytest.raises(InputError, match="sends no byte ranges: download the file first"):
        rows_of(tmp_path, f"{site.url}/b/a.jsonl")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://user:secret@host.example/a.jsonl", "may not hold a user or a password"),
        ("https://host.example/a.jsonl?X-Amz-Signature=1", "holds a key or a signature"),
        ("https://host.example/*.jsonl", "does not list its files"),
        ("s3://", "names no bucket"),
        ("s3://b*/x.jsonl", "cannot be a pattern"),
        ("s3://b/[z-a].jsonl", "the pattern is wrong"),
        ("http://[::1/a.jsonl", "host or the port of the URL is wrong"),
        ("http://host.example:abc/a.jsonl", "host or the port of the URL is wrong"),
        ("http://:80/a.jsonl", "host or the port of the URL is wrong"),
    ],
)
def test_urls_that_cannot_be_read_are_refused(tmp_path, url, message):
    with pytest.raises(InputError, match=message) as caught:
        open_rows(RowsConfig((url,), tmp_path))
    assert "secret" not in str(caught.value).replace("password", "")


def test_secrets_in_a_query_are_refused_whatever_their_name():
    for name in [
        "apikey",
        "accessToken",
        "someKey",
        "accesskey",
        "X-Api-Key",
        "auth",
        "pwd",
        "passwd",
        "code",
        "sig",
    ]:
        url = f"https://host.example/a.jsonl?{name}=hush"
        assert "holds a key" in (check_url(url) or ""), name


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1]:9/rows.jsonl",
        "https://host.example/a.jsonl?page=2&monkey=no&zipCode=8001",
        "https://host.example/\u00e9 b.jsonl",
        "s3://b/[ab].jsonl",
    ],
)
def test_urls_that_can_be_read_are_accepted(url):
    assert check_url(url) is None


def test_a_missing_driver_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    storage.storage_of.cache_clear()
    message = r"gs:// needs gcsfs \(pip install 'bagent-batch\[remote\]'"
    with pytest.raises(InputError.__base__, match=message):
        open_rows(RowsConfig(("gs://b/a.jsonl",), tmp_path))


def test_a_file_that_a_driver_has_not_listed_before_is_found():
    import fsspec

    class Listed(fsspec.AbstractFileSystem):
        """A store whose driver keeps its listings."""

        protocol = "listed"
        names = ("b/1.jsonl",)

        def ls(self, path, detail=True, **options):
            if path not in self.dircache:
                self.dircache[path] = [{"name": n, "size": 1, "type": "file"} for n in self.names]
            return self.dircache[path]

        def invalidate_cache(self, path=None):
            self.dircache.clear()

    fsspec.register_implementation("listed", Listed, clobber=True)
    driver = DriverStorage("listed")
    assert [stat.url for stat in driver.find("listed://b/")] == ["listed://b/1.jsonl"]
    Listed.names = ("b/1.jsonl", "b/2.jsonl")
    assert len(list(driver.find("listed://b/"))) == 2


def test_only_the_row_groups_that_are_needed_are_read(site, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "AHEAD", 1 << 16)
    monkeypatch.setattr(files, "LEAST", 1 << 12)
    query = "select range as id, repeat(md5(range::text), 20) as text from range(300000)"
    content = parquet_bytes(tmp_path, query, ", row_group_size 8192, compression zstd")
    site.files["b/a.parquet"] = content
    assert len(rows_of(tmp_path, f"{BUCKET}/a.parquet", limit=10)) == 10
    assert site.read < len(content) / 4


WIDE = (
    "select range as id, 'row ' || range as Text, range % 7 as \"Day\","
    " repeat(md5(range::text), 40) as photo from range(2400)"
)


@pytest.mark.parametrize(
    ("settings", "columns"),
    [
        ({"fields": ("Text",)}, ["id", "Text"]),
        ({"fields": ("Text",), "where": "day = 3"}, ["id", "Text", "Day"]),
        ({"fields": ("Text",), "id_field": "Day", "sample": 50}, ["id", "Text", "Day"]),
    ],
)
def test_only_the_columns_that_a_job_uses_are_read(site, tmp_path, monkeypatch, settings, columns):
    monkeypatch.setattr(files, "AHEAD", 1 << 16)
    monkeypatch.setattr(files, "LEAST", 1 << 12)
    content = site.files["b/a.parquet"] = parquet_bytes(
        tmp_path, WIDE, ", compression uncompressed"
    )
    config = RowsConfig((f"{BUCKET}/a.parquet",), tmp_path, **settings)
    narrow = [r for rows in open_rows(config, columns=frozenset()).batches() for r in rows]
    assert site.read < len(content) / 3
    whole = rows_of(tmp_path, f"{BUCKET}/a.parquet", **settings)
    assert [(r.key, r.index, r.id) for r in narrow] == [(r.key, r.index, r.id) for r in whole]
    assert [r.data for r in narrow] == [{n: r.data[n] for n in columns} for r in whole]


@pytest.mark.parametrize("settings", [{}, {"fields": ()}, {"fields": ("txet",)}])
def test_rows_are_whole_where_all_or_an_unknown_column_is_used(site, tmp_path, settings):
    site.files["b/a.parquet"] = parquet_bytes(tmp_path, WIDE)
    config = RowsConfig(("s3://b/a.parquet",), tmp_path, **settings)
    row = next(open_rows(config, columns=frozenset()).batches())[0]
    assert list(row.data) == ["id", "Text", "Day", "photo"]


def test_a_file_for_duckdb_has_a_position_for_each_thread(site, tmp_path):
    site.files["b/a.jsonl"] = LINES
    file = ThreadSafeFile(files.open_remote("s3://b/a.jsonl"))
    file.seek(100)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: (file.seek(7), file.read(5))).result() == (7, LINES[7:12])
    assert file.read(5) == LINES[100:105]


URL = "https://host.example/a.jsonl"


@pytest.fixture
def replies(monkeypatch):
    """Replies by URL, each a status and headers, and the URLs that were asked for."""

    class Web(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
        def http_open(self, request):
            urls.append(request.full_url)
            status, headers = answers[request.full_url]
            message = HTTPMessage()
            for name, value in headers.items():
                message[name] = value
            reply = addinfourl(io.BytesIO(b"0123456789"), message, request.full_url, status)
            reply.msg = "Reason"
            return reply

        https_open = http_open

    answers, urls = {}, []
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(web, "_opener", lambda: urllib.request.build_opener(Web, Redirects))
    return answers, urls


def ranged(start=10, total="100", **headers):
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return 206, {"Content-Range": f"bytes {start}-{start + 9}/{total}", **names}


SUNDAY, MONDAY = "Sun, 29 Nov 2026 12:00:00 GMT", "Mon, 30 Nov 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("version", "reply", "same"),
    [
        ('W/"a"', ranged(ETag='W/"b"'), False),
        ('"a"', ranged(ETag='"b"', Last_Modified=SUNDAY), False),
        (SUNDAY, ranged(Last_Modified=MONDAY), False),
        ('"a"', ranged(total="101", ETag='"a"'), False),
        ('W/"a"', ranged(ETag='"a"'), True),
        ('"a"', ranged(), True),
        ("", ranged(ETag='"a"'), True),
        ('"a"', ranged(total="*", ETag='"a"'), True),
    ],
)
def test_a_reply_of_another_version_is_an_error(replies, version, reply, same):
    replies[0][URL] = reply
    stat = RemoteStat(URL, 100, version)
    if same:
        assert WebStorage().read(stat, 10, 20) == b"0123456789"
    else:
        with pytest.raises(RemoteError, match="changed while it was read"):
            WebStorage().read(stat, 10, 20)


@pytest.mark.parametrize("reply", [ranged(start=9), ranged(start=0), (206, {})])
def test_another_range_than_asked_is_an_error(replies, reply):
    replies[0][URL] = reply
    with pytest.raises(RemoteError, match="another range") as caught:
        WebStorage().read(RemoteStat(URL, 100), 10, 20)
    assert not caught.value.passing


@pytest.mark.parametrize(
    "reply", [ranged(total="9" * 5000), (200, {"Content-Length": "9" * 5000}), ranged(total="*")]
)
def test_a_size_that_is_no_size_is_an_error(replies, reply):
    replies[0][URL] = reply
    with pytest.raises(RemoteError, match="does not report its size"):
        WebStorage().stat(URL)


@pytest.mark.parametrize(
    "target",
    ["ftp://user:hush@host.example/x", "file:///etc/passwd", "http://host.example/a.jsonl", URL],
)
def test_a_redirect_elsewhere_or_in_a_loop_is_one_error(replies, target):
    answers, urls = replies
    answers[URL] = (302, {"Location": target})
    with pytest.raises(RemoteError, match="redirects in a loop, or to an address") as caught:
        WebStorage().stat(URL)
    assert not caught.value.passing
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)
    assert set(urls) == {URL}


def test_a_redirect_to_https_is_followed(replies):
    replies[0]["http://host.example/a.jsonl"] = (302, {"Location": URL})
    replies[0][URL] = ranged(start=0)
    assert WebStorage().stat("http://host.example/a.jsonl").size == 100


def test_other_characters_of_a_path_are_percent_encoded(replies):
    answers, urls = replies
    answers["https://host.example/%C3%A9%20b%20c.jsonl?q=%C3%A9"] = ranged(start=0)
    WebStorage().stat("https://host.example/\u00e9%20b c.jsonl?q=\u00e9")
    assert urls == ["https://host.example/%C3%A9%20b%20c.jsonl?q=%C3%A9"]


def test_a_redirect_to_a_wrong_port_is_not_retried(monkeypatch):
    with pytest.raises(RemoteError, match="the URL, or one") as caught:
        WebStorage().stat("http://127.0.0.1:abc/a.jsonl")
    assert not caught.value.passing
