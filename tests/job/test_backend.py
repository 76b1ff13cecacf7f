"""Backend names, URLs and mappings."""

from __future__ import annotations

import pytest

CASES = [
    ("anthropic://", "anthropic", None),
    ("vllm://host", "vllm", "http://host:8000"),
    ("sglang://host", "sglang", "http://host:30000"),
    ("vllm://host:8000/base/", "vllm", "http://host:8000/base"),
    ("vllm+https://host:8443/x", "vllm", "https://host:8443/x"),
    ("VLLM://Host:1", "vllm", "http://Host:1"),
    ("vllm://[::1]:8000", "vllm", "http://[::1]:8000"),
    ("https://api.example.org/v1", "compatible", "https://api.example.org/v1"),
    ("https://x.org/openai/v1/chat/completions", "compatible", "https://x.org/openai/v1"),
    ("openai://gateway.example.org/v1", "openai", "https://gateway.example.org/v1"),
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
    job, env = {"name": "sub/job.yaml"}, {"HOME": "/home/u"}
    written = load(minimal + "backend: local://../m.gguf\n", **job).backend.url
    assert written.file.path == tmp_path / "sub/../m.gguf"
    home = load(minimal + "backend: local://~/m.gguf\n", env=env, **job).backend.url
    assert str(home.file.path) == "/home/u/m.gguf"
    option = load(minimal, options={"backend": "local://m.gguf?context=4096"}, **job).backend.url
    assert (option.file.path, option.options) == (tmp_path / "m.gguf", {"context": "4096"})


def test_a_url_and_a_mapping_say_together_how_to_reach_a_server(load, minimal, tmp_path):
    text = """\
backend:
  url: 'https://me:p%40ss@x.org/v1?api-version=1&v=2'
  api_key_command: pass show k
  headers: {X-Team: 08, X-Key: hidden}
  query: {v: 3}
  ca_file: certs/ca.pem
  proxy: http://proxy:3128/
"""
    backend = load(minimal + text).backend
    assert (backend.base, backend.proxy) == ("https://x.org/v1", "http://proxy:3128")
    assert backend.all_query == {"api-version": "1", "v": "3"}
    assert backend.api_key_command == ("pass show k",)
    assert backend.ca_file.path == tmp_path / "certs/ca.pem"
    headers = {"X-Team": "08", "X-Key": "hidden"}
    assert backend.all_headers == {**headers, "Authorization": "Basic bWU6cEBzcw=="}
    assert "hidden" not in repr(backend)
    assert "Basic" not in repr(backend)
    own = load(minimal + text.replace("X-Key: hidden", "authorization: mine")).backend
    assert own.all_headers == {"X-Team": "08", "authorization": "mine"}


REFUSED = [
    ("vlm", "unknown backend vlm (did you mean vllm?)"),
    ("ftp://host", "unknown scheme ftp:// (known: vllm sglang dynamo openai "),
    ("localhost:8000", "localhost:8000 is neither a backend's name nor a URL (write vllm://local"),
    ("vllm:host", "vllm:host lacks the two slashes of a URL (write vllm://host:8000)"),
    ("vllm://host:0", "port 0 is not between 1 and 65535"),
    ("vllm://host:", "port (empty) is no number"),
    ("vllm://", "the URL names no host (write vllm://localhost:8000)"),
    ("vllm://::1:8000", "::1:8000 is no host (an IPv6 address stands in brackets: [::1]:8000)"),
    ("vllm://[::x]:1", "[::x] is no IPv6 address"),
    ("vllm://ho st:1", "a URL holds no blanks"),
    ("vllm://ho$t:1", "ho$t is no host name"),
    ("http://host/v1#x", "a backend's URL has no #fragment"),
    ("http://host/?a=1&a=2", "a stands twice in the URL"),
    ("bedrock://us", "us is no AWS region (write bedrock://us-east-1)"),
    ("sim://?replicas=two", 'replicas: expected a whole number, got the text "two"'),
    ("sim://?replicas=0", "must be at least 1, got 0"),
]


@pytest.mark.parametrize(("written", "message"), REFUSED)
def test_a_wrong_name_or_url_is_refused(fault, minimal, written, message):
    text = f"backend: '{written}'\n"
    assert fault(minimal + text).startswith(f"job.yaml:3:10: backend: {message}")


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            "api_key_env: A, api_key_command: b",
            "api_key_env and api_key_command exclude each other",
        ),
        ("headers: [a]", "expected a mapping of text to text, got a list"),
        ("headers: {a: }", "a: expected text, got nothing"),
        ("headers: {'a b': c}", "a b is no header name"),
        ('headers: {a: "b\\r\\nc: d"}', "the value of header a holds characters not allowed"),
        ("proxy: host", 'expected http://HOST:PORT or none, got the text "host"'),
        ("proxy: 'socks5://h:1'", "a proxy speaks http or https, not socks5 (http://HOST:PORT)"),
    ],
)
def test_a_wrong_mapping_is_refused(fault, minimal, inside, message):
    assert fault(minimal + f"backend: {{url: vllm, {inside}}}\n").endswith(f": {message}")
