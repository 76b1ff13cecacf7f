"""A server's words without what it was sent in secret."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

import pytest

from bagent.backends.endpoint import Endpoint

SECRET = "s3cr+t/k=y-5up3r"
LOGIN = base64.b64encode(f"user:{SECRET}".encode()).decode()
PROXY = f"http://user:{quote(SECRET, safe='')}@proxy:8080"


def endpoint(**fields: Any) -> Endpoint:
    return Endpoint("here", "http://here/v1", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"headers": {"Authorization": f"Bearer {SECRET}"}},
        {"headers": {"x-api-key": SECRET}},
        {"headers": {"X-Auth": SECRET}},
        {"headers": {"Ocp-Apim-Subscription-Key": SECRET}},
        {"headers": {"Authorization": f"Basic {LOGIN}"}},
        {"query": {"api-key": SECRET}},
        {"query": {"code": SECRET}},
        {"query": {"sig": SECRET}},
        {"proxy": PROXY},
    ],
    ids=lambda fields: "-".join(str(value)[:16] for value in fields),
)
@pytest.mark.parametrize("form", [SECRET, quote(SECRET), quote(SECRET, safe="")])
def test_a_secret_is_hidden_as_it_is_and_as_urls_write_it(
    fields: dict[str, Any], form: str
) -> None:
    found = endpoint(**fields).without_secrets(f"denied: /v1?k={form} and more")
    assert found == "denied: /v1?k=*** and more"


@pytest.mark.parametrize("fields", [{"proxy": PROXY}, {"headers": {"Authorization": LOGIN}}])
def test_a_login_is_hidden_as_headers_write_it(fields: dict[str, Any]) -> None:
    assert endpoint(**fields).without_secrets(f"Basic {LOGIN}") == "Basic ***"


def test_what_is_left_of_a_secret_that_was_cut_with_the_words_is_hidden_too() -> None:
    one = endpoint(headers={"x-api-key": SECRET})
    assert one.without_secrets(f"x: {SECRET[:9]}… through a proxy") == "x: ***… through a proxy"
    assert one.without_secrets("x: s3c…") == "x: s3c…"


def test_words_without_a_secret_stay() -> None:
    one = endpoint(query={"api-version": "2026-10-21"}, headers={"User-Agent": "blueprint"})
    words = "blueprint has no api-version 2026-10-21…"
    assert one.without_secrets(words) == words
