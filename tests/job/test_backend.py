"""Backend names, URLs and mappings."""

from __future__ import annotations

import pytest

CASES = [
    ("anthropic://", "anthropic", None),
    ("vllm", "vllm", None),
    ("vllm://host", "vllm", "http://host:8000"),
    ("sglang://host", "sglang", "http://host:30000"),
    ("dynamo://host/", "dynamo", "http://host:8000"),
    ("vllm://host:8000/base/", "vllm", "http://host:8000/base"),
    ("vllm+https://host:8443/x", "vllm", "https://host:8443/x"),
    ("VLLM://Host:1", "vllm", "http://Host:1"),
    ("vllm://[::1]:8000", "vllm", "http://[::1]:8000"),
    ("vllm://node_1.cluster-a:9", "vllm", "http://node_1.cluster-a:9"),
    ("https://api.example.org/v1", "compatible", "https://api.example.org/v1"),
    ("https://x.org/openai/v1/chat/completions", "compatible", "https://x.org/openai/v1"),
    ("openai://gateway.example.org/v1", "openai", "https://gateway.example.org/v1"),
    ("bedrock", "bedrock", None),
]


@pytest.mark.parametrize(("written", "kind", "base"), CASES)
def test_a_name_or_url_gives_kind_and_base(load, minimal, written, kind, base):
    backend = load(minimal + f"backend: '{written}'\n").backend
    assert (backend.kind, backend.base) == (kind, base)


def test_sim_takes_options_and_a_model_name(load, minimal):
    url = load(minimal + "backend: sim://some/model?replicas=2&decode=50\n").backend.url
    assert (url.kind, url.base, url.replicas) == ("sim", None, 2)
    assert url.options == {"replicas": "2", "decode": "50"}
    assert url.text == "sim://some/model?replicas=2&decode=50"


def test_local_names_a_file_relative_to_the_job_or_the_current_folder(load, minimal, tmp_path):
    text, env = minimal + "backend: local://", {"HOME": "/home/u"}
    for written, path in [
        ("../m.gguf", tmp_path / "sub/../m.gguf"),
        ("/m.gguf", "/m.gguf"),
        ("~/m.gguf", "/home/u/m.gguf"),
    ]:
        url = load(text + written + "\n", name="sub/job.yaml", env=env).backend.url
        assert str(url.file.path) == str(path)
    options = {"backend": "local://m.gguf?context=4096"}
    url = load(minimal, name="sub/job.yaml", options=options).backend.url
    assert (url.file.path, url.options) == (tmp_path / "m.gguf", {"context": "4096"})


def test_a_query_of_the_url_and_of_the_mapping_are_sent(load, minimal):
    text = "backend: {url: 'https://x.org/v1?api-version=1&b=2', query: {b: 3}}\n"
    assert load(minimal + text).backend.all_query == {"api-version": "1", "b": "3"}


def test_a_user_and_password_become_a_header(load, minimal):
    backend = load(minimal + "backend: https://me:p%40ss@x.org/v1\n").backend
    assert backend.base == "https://x.org/v1"
    assert backend.all_headers == {"Authorization": "Basic bWU6cEBzcw=="}


def test_a_written_authorization_comes_before_that_of_the_url(load, minimal):
    text = "backend: {url: 'https://me:pw@x.org/v1', headers: {authorization: mine}}\n"
    assert load(minimal + text).backend.all_headers == {"authorization": "mine"}


def test_a_mapping_has_all_ways_to_reach_a_server(load, minimal, tmp_path):
    text = """\
backend:
  url: https://x.org/v1
  api_key_env: MY_KEY
  headers: {X-Team: 08, X-B: c}
  query: {v: 1}
  ca_file: certs/ca.pem
  proxy: http://proxy:3128/
"""
    backend = load(minimal + text).backend
    assert backend.api_key_env == "MY_KEY"
    assert backend.headers == {"X-Team": "08", "X-B": "c"}
    assert backend.query == {"v": "1"}
    assert backend.ca_file.path == tmp_path / "certs/ca.pem"
    assert backend.proxy == "http://proxy:3128"


def test_headers_are_not_in_what_is_printed_of_a_job(load, minimal):
    job = load(minimal + "backend: {url: 'http://u:geheim@x', headers: {X-Key: hidden}}\n")
    assert "hidden" not in repr(job)
    assert "Basic" not in repr(job)


@pytest.mark.parametrize(
    ("written", "command"), [("pass show k", ("pass show k",)), ("[pass, show]", ("pass", "show"))]
)
def test_a_key_may_come_from_a_program(load, minimal, written, command):
    text = f"backend: {{url: openai, api_key_command: {written}}}\n"
    assert load(minimal + text).backend.api_key_command == command


REFUSED = [
    ("vlm", "unknown backend vlm (did you mean vllm?)"),
    (
        "gpt",
        "unknown backend gpt (known: vllm sglang dynamo openai anthropic bedrock local sim, "
        "or a URL)",
    ),
    (
        "ftp://host",
        "unknown scheme ftp:// (known: vllm sglang dynamo openai anthropic bedrock "
        "local sim http https)",
    ),
    (
        "localhost:8000",
        "localhost:8000 is neither a backend's name nor a URL (write vllm://localhost:8000)",
    ),
    ("vllm:host", "vllm:host lacks the two slashes of a URL (write vllm://host:8000)"),
    ("https:/host/v1", "https:/host/v1 lacks the two slashes of a URL (write https://host/v1)"),
    ("vllm:8000", "vllm:8000 is neither a backend's name nor a URL (write vllm://vllm:8000)"),
    ("vllm://host:0", "port 0 is not between 1 and 65535"),
    ("vllm://host:80a", "port 80a is no number"),
    ("vllm://host:", "port (empty) is no number"),
    ("http://host:٨٠", "port ٨٠ is no number"),
    ("vllm://", "the URL names no host (write vllm://localhost:8000)"),
    ("vllm://::1:8000", "::1:8000 is no host (an IPv6 address stands in brackets: [::1]:8000)"),
    ("vllm://[::x]:1", "[::x] is no IPv6 address"),
    ("vllm://ho st:1", "a URL holds no blanks"),
    ("vllm://ho$t:1", "ho$t is no host name"),
    ("http://host/v1#x", "a backend's URL has no #fragment"),
    ("http://host/?a=1&a=2", "a stands twice in the URL"),
    ("bedrock://us", "us is no AWS region (write bedrock://us-east-1)"),
    ("sim://?replicas=0", "must be at least 1, got 0"),
    ("sim://?replicas=two", 'replicas: expected a whole number, got the text "two"'),
]


@pytest.mark.parametrize(("written", "message"), REFUSED)
def test_a_wrong_name_or_url_is_refused(fault, minimal, written, message):
    assert fault(minimal + f"backend: '{written}'\n") == f"job.yaml:3:10: backend: {message}"


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            "api_key_env: A, api_key_command: b",
            "backend.api_key_command: api_key_env and api_key_command exclude each other",
        ),
        ("headers: {'a b': c}", "backend.headers.a b: a b is no header name"),
        ("headers: [a]", "backend.headers: expected a mapping of text to text, got a list"),
        ("headers: {a: }", "backend.headers.a: a: expected text, got nothing"),
        (
            'headers: {a: "b\\r\\nc: d"}',
            "backend.headers.a: the value of header a holds characters not allowed",
        ),
        ("proxy: host", 'backend.proxy: expected http://HOST:PORT or none, got the text "host"'),
        (
            "proxy: 'socks5://h:1'",
            "backend.proxy: a proxy speaks http or https, not socks5 (http://HOST:PORT)",
        ),
        ("proxy: 'http://h:0'", "backend.proxy: port 0 is not between 1 and 65535"),
    ],
)
def test_a_wrong_mapping_is_refused(fault, minimal, inside, message):
    assert fault(minimal + f"backend: {{url: vllm, {inside}}}\n").partition(": ")[2] == message
