"""Choice of the proxy for an address.

Engines of the user's own are reached directly. For other addresses the environment's proxies apply,
less NO_PROXY in all forms in use: host names, suffixes with or without a leading dot or ``*.``,
``*`` anywhere, ``host:port``, addresses and CIDR ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from bagent.errors import UsageError


def proxy_for(url: str, env: Mapping[str, str]) -> str | None:
    """Return the proxy of ``env`` for ``url``, None for a direct connection.

    Lower-case variables come first, as in curl. One that is set but empty disables its upper-case
    twin.

    Raises:
        UsageError: the proxy that the environment names is of a kind that is not spoken (SOCKS).
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    if not host or _is_here(host):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if excluded(host, port, _get(env, "no_proxy")[1]):
        return None
    for kind in (f"{parts.scheme}_proxy", "all_proxy"):
        name, value = _get(env, kind)
        if not value:
            continue
        if "://" not in value:
            value = f"http://{value}"
        if not value.lower().startswith(("http://", "https://")):
            raise UsageError(
                f"{name} names a kind of proxy that bagent does not support: {value.split(':')[0]}",
                hint=f"set {parts.scheme}_proxy to an http:// proxy, or unset {name}",
            )
        return value
    return None


def without_userinfo(url: str) -> str:
    """Return ``url`` without user name and password, for messages."""
    scheme, mark, remainder = url.partition("://")
    if not mark:
        return url.rpartition("@")[2]
    host, slash, path = remainder.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def excluded(host: str, port: int, no_proxy: str) -> bool:
    """Return whether the list ``no_proxy`` (separated by commas or blanks) covers ``host`` and
    ``port``."""
    host = host.lower().strip("[]").rstrip(".")
    address = _address(host)
    return any(
        _covers(entry, host, address, port) for entry in no_proxy.lower().replace(",", " ").split()
    )


def _covers(entry: str, host: str, address: IPv4Address | IPv6Address | None, port: int) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ip_network(_unbracketed(entry), strict=False)
        except ValueError:
            return False
    entry, entry_port = _split_port(entry)
    if entry_port is not None and entry_port != port:
        return False
    named = _address(entry)
    if address is not None and named is not None:
        return address == named
    suffix = entry.removeprefix("*").removeprefix(".").rstrip(".")
    if "*" in suffix:
        return fnmatchcase(host, entry)
    if not suffix or address is not None:
        return False
    return host == suffix or host.endswith("." + suffix)


def _unbracketed(entry: str) -> str:
    return entry.replace("[", "").replace("]", "")


def _split_port(entry: str) -> tuple[str, int | None]:
    """Split ``host:port`` and ``[v6]:port``; a bare IPv6 address has no port."""
    if entry.startswith("["):
        host, _, port = entry[1:].partition("]")
        port = port.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        return entry, None
    return host, int(port) if port.isdecimal() else None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_here(host: str) -> bool:
    """Return whether ``host`` is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    address = _address(host)
    return address is not None and (address.is_loopback or address.is_unspecified)


def _get(env: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the variable's name as spelled in ``env``, and its value or an empty text."""
    for spelling in (name, name.upper()):
        if spelling in env:
            return spelling, env[spelling].strip()
    return name, ""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a name or an address of this machine's loopback."""
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost"):
        return True
    address = _address(host)
    return address is not None and address.is_loopback
