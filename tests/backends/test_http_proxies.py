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
        (NODE, "ite.gov", False),
        (NODE, "x4309c4s0b0n0.*", True),
        (NODE, "x4309*.site.gov", True),
        ("http://10.20.30.40:8000/v1", "10.0.0.0/8", True),
        ("http://11.20.30.40:8000/v1", "10.0.0.0/8", False),
        ("http://10.20.30.40:8000/v1", "10.20.30.40", True),
        ("http://10.20.30.40:8000/v1", "10.20.*", True),
        ("https://api.example.org/v1", "api.example.org:443", True),
        ("https://api.example.org./v1", "api.example.org", True),
        ("https://api.example.org/v1", "a.b, *", True),
        ("https://api.example.org/v1", "a.b example.org", True),
        ("https://api.example.org/v1", "10.0.0.0/8,nonsense/64,::1/zz", False),
        ("https://api.example.org/v1", " , ,. ,*. ", False),
        ("http://[fd00::1]:8000/v1", "[fd00::]/8", True),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8000", True),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8001", False),
        ("http://[::ffff:10.1.2.3]:8000/v1", "10.0.0.0/8", True),
    ],
)
def test_no_proxy_counts_in_every_form_in_use(url, no_proxy, is_direct):
    assert direct(url, no_proxy) is is_direct


@pytest.mark.parametrize("host", ["LOCALHOST", "a.localhost", "127.8.9.1", "[::1]", "0.0.0.0"])
def test_this_machine_is_always_reached_directly(host):
    assert proxy_for(f"http://{host}:8000/v1", {"http_proxy": PROXY, "all_proxy": PROXY}) is None


@pytest.mark.parametrize(
    ("env", "proxy"),
    [
        ({"http_proxy": "http://plain:1", "https_proxy": PROXY}, PROXY),
        ({"http_proxy": PROXY}, None),
        ({"all_proxy": PROXY}, PROXY),
        ({"HTTPS_PROXY": PROXY}, PROXY),
        ({"HTTPS_PROXY": PROXY, "NO_PROXY": "api.example.org"}, None),
        ({"https_proxy": PROXY, "HTTPS_PROXY": "http://other:1"}, PROXY),
        ({"https_proxy": "", "HTTPS_PROXY": PROXY}, None),
        ({"https_proxy": "proxy.site:3128"}, PROXY),
    ],
)
def test_the_variable_of_the_addresses_own_scheme_counts_in_lower_case_first(env, proxy):
    assert proxy_for("https://api.example.org/v1", env) == proxy


@pytest.mark.parametrize("scheme", ["socks5h", "ftp"])
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
        ("user:secret@proxy:3128", "proxy:3128"),
    ],
)
def test_names_and_passwords_in_addresses_are_not_shown(url, shown):
    assert without_userinfo(url) == shown
