"""Which names and which addresses may be asked."""

from __future__ import annotations

import re

import pytest

from bagent.tools.builtin.http_get import HostAllowlist, as_address, is_public, read_entry

PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "168.63.129.16", "192.0.0.1", "192.0.2.1", "198.18.0.1"),
    *("224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::ffff:0:127.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:a9fe:a9fe::1", "2001:db8::1", "2001:0:7f00:1::"),
]
PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", PRIVATE)
def test_private_addresses_of_every_form_are_not_public(text: str) -> None:
    address = as_address(text)
    assert address is not None
    assert not is_public(address)
    for listed in ("*", "example.org", "8.8.8.8"):
        assert not HostAllowlist.read([listed]).allows_address(text, 80)


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_public(text: str) -> None:
    address = as_address(text)
    assert address is not None
    assert is_public(address)
    assert HostAllowlist.read(["example.org"]).allows_address(text, 80)


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("example.org", "EXAMPLE.org.", 443, True),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "example.org.evil.net", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("example.org:8080", "example.org", 8080, True),
        ("*", "anything.net", 80, True),
        ("10.0.0.0/8", "10.9.8.7", 80, True),
        ("10.0.0.0/8", "ten.example.org", 80, False),
        ("127.0.0.1:81", "127.0.0.1", 81, True),
        ("127.0.0.1:81", "127.0.0.1", 80, False),
        ("[::1]:81", "::1", 81, True),
        ("::1", "::1", 80, True),
    ],
)
def test_names_are_allowed_by_entries(entry: str, host: str, port: int, allowed: bool) -> None:
    assert HostAllowlist.read([entry]).allows_host(host, port) is allowed


@pytest.mark.parametrize(
    ("entry", "address", "port", "allowed"),
    [
        ("127.0.0.1", "::ffff:127.0.0.1", 80, True),
        ("127.0.0.1", "127.0.0.2", 80, False),
        ("127.0.0.1:81", "127.0.0.1", 80, False),
        ("10.0.0.0/8", "192.168.1.1", 80, False),
        ("localhost", "127.0.0.1", 80, True),
        ("localhost", "::1", 80, True),
        ("localhost", "10.0.0.1", 80, False),
        ("intern.example.org", "10.0.0.1", 80, False),
        ("fd00::/8", "fd00::5", 80, True),
    ],
)
def test_private_addresses_are_allowed_only_where_they_are_listed(
    entry: str, address: str, port: int, allowed: bool
) -> None:
    assert HostAllowlist.read([entry]).allows_address(address, port) is allowed


@pytest.mark.parametrize("entry", ["", "user@host", "a*b", "*.*.org", "http://a.org/"])
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(entry)}$"):
        read_entry(entry)
