"""Which proxy a client connects through: none, unless its user says so."""

from __future__ import annotations

import ipaddress
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from vla_accel.errors import ConfigError

_SCHEMES = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")


class Proxy:
    """The proxy of a connection.

    Args:
        address: the server's, `ws://host:port` or `wss://host:port`.
        chosen: None or False for none, True for what the environment says of this address, or a proxy's address.

    Raises:
        ConfigError: `chosen` is nothing of these.
    """

    def __init__(self, address: str, chosen: Any) -> None:
        self.url: str | None = None
        """The proxy's address; None connects directly."""
        if isinstance(chosen, str):
            parts = urlsplit(chosen)
            if parts.scheme not in _SCHEMES or not parts.hostname:
                raise ConfigError(f"proxy: expected http://host:port or socks5h://host:port, got {_public(chosen)!r}")
            self.url = chosen
        elif chosen is True:
            self.url = _of_environment(address)
        elif chosen not in (None, False):
            raise ConfigError(f"proxy: expected None, True or a proxy's address, got {chosen!r}")
        unused = None if self.url is not None or not _is_public(address) else _of_environment(address)
        self.hint = ""
        """What ends an error of a server that may be out of reach without a proxy."""
        if unused is not None:
            self.hint = f"; the proxy {_public(unused)} of the environment is not used: proxy=True"

    @property
    def through(self) -> str:
        """How an error names the proxy; empty without one."""
        return "" if self.url is None else f" through the proxy {_public(self.url)}"


def _of_environment(address: str) -> str | None:
    """The proxy for a websocket address from http_proxy, https_proxy, all_proxy and no_proxy."""
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    if urllib.request.proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    known = urllib.request.getproxies()
    names = ("wss", "socks", "https", "all") if parts.scheme == "wss" else ("ws", "socks", "https", "http", "all")
    name = next((name for name in names if known.get(name)), None)
    if name == "socks":  # the operating system's may read http://host:port
        return known[name].replace("http://", "socks5h://", 1)
    return None if name is None else known[name]


def _is_public(address: str) -> bool:
    """Whether a server is beyond this machine and its own network, as far as its address tells."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan"))


def _public(url: str) -> str:
    """A proxy's address without the password that it may hold."""
    return url.rpartition("@")[2] if "@" in url else url
