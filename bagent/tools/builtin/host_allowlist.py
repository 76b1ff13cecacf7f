"""The hosts that a tool may connect to, by name and by address.

A public name may resolve to this machine, or to another address the next moment. So names are
checked before a request, and addresses when the socket is made.
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
"""Networks that some versions of Python call global: protocol assignments, local translation,
site-local addresses, and tunnels (6to4, Teredo) to any address."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_COMPATIBLE = ipaddress.ip_network("::/96")


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """One entry of ``allow_hosts``; ``port`` None: any."""

    port: int | None = None
    name: str = ""
    network: Network | None = None

    def takes_port(self, port: int | None) -> bool:
        """Return whether the entry allows ``port``."""
        return self.port is None or self.port == port


def read_entry(entry: str) -> AllowedHost:
    """Read ``example.org``, ``*.example.org``, ``*``, an address or a network, or these with
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
    """Return the network of an address or network in text, None if it is neither."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def as_address(text: str) -> Address | None:
    """Return an IP address without its zone (``%eth0``), None if it is none."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def inner_addresses(address: Address) -> list[Address]:
    """Return the address, and the IPv4 address inside a mapped, compatible or NAT64 one.

    Sources: RFC 4291, RFC 6052.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return [address, address.ipv4_mapped]
        if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
            return [address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address]


def is_public(address: Address) -> bool:
    """Return whether the address, and every address inside it, is public."""
    inner = inner_addresses(address)
    # A mapped address is reserved itself; the one inside decides.
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
    """The entries of ``allow_hosts``."""

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
        """Return whether a URL may name ``host``; its address is checked apart."""
        name = host.lower().rstrip(".")
        address = as_address(name)
        return any(
            entry.takes_port(port) and _names(entry, name, address) for entry in self.entries
        )

    def allows_address(self, text: str, port: int) -> bool:
        """Return whether a socket may connect to an address.

        Public addresses are allowed. Others need an entry for the address, its network, or
        ``localhost``; an entry for a name does not allow its addresses.
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
        candidate in network for candidate in (address, inner) for network in _LOOPBACK
    )


def _in(network: Network, address: Address) -> bool:
    return address.version == network.version and address in network
