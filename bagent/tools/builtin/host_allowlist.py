"""Which hosts a tool may ask, by name and by the address that is really connected to.

A name says nothing of where it leads: a public name may resolve to this machine, and to another
address the next moment. So names are checked before a request, and addresses when the socket is
made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

_METADATA = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Public addresses that clouds answer with secrets (Azure's WireServer). The others, such as
169.254.169.254, 100.100.100.200 and fd00:ec2::254, are not global anyway."""

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("192.0.0.0/24", "192.88.99.0/24"),
        *("64:ff9b:1::/48", "::ffff:0:0:0/96", "fec0::/10", "2002::/16", "2001::/32"),
    )
)
"""What some versions of Python call global and is not: protocol assignments, local translation,
site-local addresses, and tunnels (6to4, Teredo) that end wherever their sender likes."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of ``allow_hosts``; ``port`` None: any."""

    port: int | None = None
    name: str = ""
    network: Network | None = None

    def takes_port(self, port: int | None) -> bool:
        """Whether the entry speaks of that port."""
        return self.port is None or self.port == port


def read_entry(entry: str) -> AllowedHost:
    """An entry: ``example.org``, ``*.example.org``, ``*``, an address or a network, or these with
    ``:PORT`` (an IPv6 address then in brackets).

    Raises:
        ValueError: it is none of these.
    """
    text = entry.strip().lower()
    network = as_network(text)
    if network is not None:
        return AllowedHost(network=network)
    host, colon, port_text = text.rpartition(":")
    port = None
    if colon and port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 65536:
        text, port = host, int(port_text)
    network = as_network(text.removeprefix("[").removesuffix("]"))
    if network is not None:
        return AllowedHost(port, network=network)
    name = text.rstrip(".")
    bad = not name or set(name) & set("/:@[]?# ") or "*" in name.removeprefix("*.")
    if bad and name != "*":
        raise ValueError(entry)
    return AllowedHost(port, name)


def as_network(text: str) -> Network | None:
    """An address or network in its usual form; None if it is not one."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def as_address(text: str) -> Address | None:
    """An IP address, its zone (``%eth0``) left out; None if it is not one."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def inner_addresses(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses that it leads to in another form.

    These are mapped and compatible (RFC 4291) and NAT64 (RFC 6052) addresses.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return [address, address.ipv4_mapped]
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
            return [address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address]


def is_public(address: Address) -> bool:
    """Whether the address, and every address inside it, is one of the open Internet."""
    inner = inner_addresses(address)
    # A mapped address is as public as the one in it; of itself it counts as reserved.
    checked = inner[1:] if getattr(address, "ipv4_mapped", None) else inner
    return all(map(_is_public, checked))


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and address not in _METADATA
        and not any(_in(network, address) for network in _NOT_PUBLIC)
    )


@dataclass(frozen=True, slots=True)
class HostAllowlist:
    """The entries of ``allow_hosts``, ready to decide."""

    entries: tuple[AllowedHost, ...]
    _shown: str = field(default="")

    @classmethod
    def read(cls, entries: Iterable[str]) -> HostAllowlist:
        """Read the entries.

        Raises:
            ValueError: one is wrong; its text is the argument.
        """
        listed = tuple(entries)
        return cls(tuple(read_entry(entry) for entry in listed), ", ".join(listed))

    def __str__(self) -> str:
        return self._shown

    def allows_host(self, host: str, port: int) -> bool:
        """Whether a URL may name ``host``; its address is still to be checked."""
        name = host.lower().rstrip(".")
        address = as_address(name)
        return any(
            entry.takes_port(port) and _names(entry, name, address) for entry in self.entries
        )

    def allows_address(self, text: str, port: int) -> bool:
        """Whether a socket may be connected to an address.

        A public one may. Another one may only where it, its network, or for this machine's own
        ``localhost``, is an entry: that a name is allowed does not make its addresses allowed.
        """
        address = as_address(text)
        if address is None:
            return False
        if is_public(address):
            return True
        inner = inner_addresses(address)[-1]
        return any(
            entry.takes_port(port) and _holds(entry, address, inner) for entry in self.entries
        )


def _names(entry: AllowedHost, name: str, address: Address | None) -> bool:
    if entry.network is not None:
        return address is not None and _in(entry.network, address)
    if entry.name == "*":
        return True
    if entry.name.startswith("*."):
        return name.endswith(entry.name[1:])
    return name == entry.name


def _holds(entry: AllowedHost, address: Address, inner: Address) -> bool:
    if entry.network is not None:
        return _in(entry.network, address) or _in(entry.network, inner)
    return entry.name == "localhost" and any(
        one in network for one in (address, inner) for network in _LOOPBACK
    )


def _in(network: Network, address: Address) -> bool:
    return address.version == network.version and address in network
