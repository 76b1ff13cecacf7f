"""Which proxy an address is reached through."""

from __future__ import annotations

import pytest

from bagent.backends.http.proxies import proxy_for, without_userinfo
from bagent.errors import UsageError

PROXY = "http://proxy.site:3128"
NODE = "http://x4309c4s0b0n0.hsn.cm.aurora.site.gov:8000/v1"


def direct(url: str, no_proxy: str) -> bool:
    return proxy_for(url, {"http_proxy": PROXY, "https_proxy": PROXY, "no_proxy": no_proxy}) is None


@pytest.mark.parametrize(
    ("url", "no_proxy", "is_direct"),
    [
        (NODE, "localhost,127.0.0.1", False),
        (NODE, "*.site.gov", True),
        (NODE, ".site.gov", True),
        (NODE, "site.gov", True),
        (NODE, "SITE.GOV", True),
        (NODE, "ite.gov", False),
        (NODE, "x4309c4s0b0n0.*", True),
        (NODE, "x4309*.site.gov", True),
        (NODE, "y4309*.site.gov", False),
        ("http://x4309c4s0b0n0:8000/v1", "x4309c4s0b0n0", True),
        ("http://x4309c4s0b0n0:8000/v1", "*.site.gov", False),
        ("http://10.20.30.40:8000/v1", "10.0.0.0/8", True),
        ("http://11.20.30.40:8000/v1", "10.0.0.0/8", False),
        ("http://10.20.30.40:8000/v1", "10.20.30.40", True),
        ("http://10.20.30.40:8000/v1", "20.30.40", False),
        ("http://10.20.30.40:8000/v1", "10.20.*", True),
        ("http://10.20.30.40:8000/v1", "10.20.30.40:8000", True),
        ("http://10.20.30.40:8000/v1", "10.20.30.40:8001", False),
        ("http://api.example.org/v1", "api.example.org:80", True),
        ("https://api.example.org/v1", "api.example.org:443", True),
        ("https://api.example.org/v1", "api.example.org:80", False),
        ("https://api.example.org./v1", "api.example.org", True),
        ("https://api.example.org/v1", "*", True),
        ("https://api.example.org/v1", "a.b, *", True),
        ("https://api.example.org/v1", "a.b example.org", True),
        ("https://api.example.org/v1", "10.0.0.0/8,nonsense/64,::1/zz", False),
        ("https://api.example.org/v1", "", False),
        ("https://api.example.org/v1", " , ,. ,*. ", False),
        ("http://[fd00::1]:8000/v1", "fd00::/8", True),
        ("http://[fd00::1]:8000/v1", "[fd00::]/8", True),
        ("http://[fd00::1]:8000/v1", "fd00:0:0::1", True),
        ("http://[fd00::1]:8000/v1", "[fd00::1]", True),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8000", True),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8001", False),
        ("http://[fd00::1]:8000/v1", "10.0.0.0/8", False),
        ("http://[::ffff:10.1.2.3]:8000/v1", "10.0.0.0/8", True),
    ],
)
def test_no_proxy_counts_in_every_form_in_use(url, no_proxy, is_direct):
    assert direct(url, no_proxy) is is_direct


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.8.9.1", "[::1]", "a.localhost", "LOCALHOST", "0.0.0.0"]
)
def test_this_machine_is_always_reached_directly(host):
    assert proxy_for(f"http://{host}:8000/v1", {"http_proxy": PROXY, "all_proxy": PROXY}) is None


def test_the_proxy_of_the_addresses_own_scheme_counts():
    env = {"http_proxy": "http://plain:1", "https_proxy": "http://secure:2"}
    assert proxy_for("http://api.example.org/v1", env) == "http://plain:1"
    assert proxy_for("https://api.example.org/v1", env) == "http://secure:2"
    assert proxy_for("https://api.example.org/v1", {"http_proxy": PROXY}) is None
    assert proxy_for("https://api.example.org/v1", {"all_proxy": PROXY}) == PROXY


def test_variables_in_upper_case_count_after_those_in_lower_case():
    env = {"HTTPS_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8"}
    assert proxy_for("https://api.example.org/v1", env) == PROXY
    assert proxy_for("https://10.1.1.1/v1", env) is None
    env["https_proxy"] = "http://other:1"
    assert proxy_for("https://api.example.org/v1", env) == "http://other:1"


def test_an_empty_variable_in_lower_case_turns_its_twin_off():
    env = {"https_proxy": "", "HTTPS_PROXY": PROXY}
    assert proxy_for("https://api.example.org/v1", env) is None


def test_a_proxy_without_scheme_is_an_http_proxy():
    assert proxy_for("http://a.b/v1", {"http_proxy": "proxy:3128"}) == "http://proxy:3128"


@pytest.mark.parametrize("scheme", ["socks", "socks4", "socks5", "socks5h", "ftp"])
def test_another_kind_of_proxy_is_refused_in_words_that_name_the_variable(scheme):
    env = {"ALL_PROXY": f"{scheme}://user:secret@proxy:1080"}
    with pytest.raises(UsageError) as error:
        proxy_for("https://api.example.org/v1", env)
    assert "ALL_PROXY" in str(error.value)
    assert scheme in str(error.value)
    assert "https_proxy" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:se%40cret@proxy:3128", "http://proxy:3128"),
        ("http://user:a@b@proxy:3128/x@y", "http://proxy:3128/x@y"),
        ("http://proxy:3128/path", "http://proxy:3128/path"),
        ("user:secret@proxy:3128", "proxy:3128"),
    ],
)
def test_names_and_passwords_in_addresses_are_not_shown(url, shown):
    assert without_userinfo(url) == shown
