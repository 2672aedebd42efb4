"""Decides which web pages may use a server, and under which host names. Knows header values, no web framework.

Without API keys, whoever reaches a server may use it, and a page of any site reaches the servers of its browser's
machine. A browser says where a request comes from (`Sec-Fetch-Site`, `Origin`), so requests of other pages can be
refused. It does not see through a name that its owner points to this machine (DNS rebinding): such a page counts as the
server's own, and only the `Host` header tells. Browsers never send an API key on their own, so with keys neither
matters.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from toka_async.config import AuthConfig, ConfigError

ANY = "*"
OWN = frozenset({"same-origin", "none"})  # values of Sec-Fetch-Site; none: a person acts, e.g. in the address bar

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+|null|\*")
_HOST = re.compile(r"[\w.-]+|\*")


@dataclass(frozen=True, slots=True)
class Origins:
    """The allowed origins of pages, and the server's host names, in lower case and without ports."""

    allowed: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset({"localhost"})

    def allows(self, origin: str | None) -> bool:
        """Tells whether the operator allows this origin, or all."""
        return origin is not None and (origin.lower() in self.allowed or ANY in self.allowed)

    def accepts(self, method: str, headers: Mapping[str, str]) -> bool:
        """Tells whether a request comes from no page, or from one that may use the server."""
        site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
        if site is None:  # no browser, or one that sends it only over HTTPS and to this machine
            is_own = origin is None or origin.partition("://")[2].lower() == headers.get("Host", "").lower()
        else:
            is_own = site in OWN or is_followed_link(method, headers)
        return is_own or self.allows(origin)

    def is_own_host(self, host: str | None) -> bool:
        """Tells whether no foreign owner can have pointed the name here. host: the header, which browsers always
        send."""
        if host is None or ANY in self.hosts:
            return True
        name = strip_port(host)
        return name in self.hosts or name.endswith(".localhost") or _is_address(name)


def read_origins(config: AuthConfig, host: str) -> Origins:
    """Reads the origins of a server at that address. Raises ConfigError that names the key."""
    allowed = [text.lower().rstrip("/") for text in re.split(r"[,\s]+", config.allowed_origins) if text]
    for text in allowed:
        if not _ORIGIN.fullmatch(text):
            raise ConfigError(
                f"auth.allowed_origins: expected origins such as https://app.example.org, or *, got {text!r}"
            )
    hosts = [text.lower() for text in re.split(r"[,\s]+", config.allowed_hosts) if text]
    for text in hosts:
        if not _HOST.fullmatch(text):
            raise ConfigError(f"auth.allowed_hosts: expected names without scheme and port, or *, got {text!r}")
    own = ("localhost", host.lower(), socket.gethostname().lower())
    return Origins(frozenset(allowed), frozenset((*own, *hosts)))


def is_followed_link(method: str, headers: Mapping[str, str]) -> bool:
    """Tells whether a person opens a page of this server: only the new window sees the answer."""
    mode, target = headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")
    return method in ("GET", "HEAD") and (mode, target) == ("navigate", "document")


def strip_port(host: str) -> str:
    """Returns a `Host` header without its port and the brackets of an address."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def is_loopback(address: object) -> bool:
    """Tells whether only this machine reaches a socket's own address. None (a closed connection) counts as such."""
    if not isinstance(address, tuple):
        return address is None
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def _is_address(name: str) -> bool:
    """Tells whether a host is an address, which nobody can point elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
