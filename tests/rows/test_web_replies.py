"""Replies of web servers that change a file, send other bytes than asked, or redirect elsewhere."""

from __future__ import annotations

import io
import urllib.request
from http.client import HTTPMessage
from urllib.response import addinfourl

import pytest

from bagent.remote import RemoteError, web
from bagent.remote.storage import RemoteStat
from bagent.remote.web import Redirects, WebStorage

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
