"""The proxy of a client: none, unless the user chooses one."""

from __future__ import annotations

import ipaddress
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from vla_accel.errors import ConfigError

_SCHEMES = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")


class Proxy:
    """The proxy `url` of a connection to `address`; None connects directly. `choice`: None or False for none, True for
    the environment's proxy, or a proxy's address. `through` and `hint` are parts of error messages.

    Raises ConfigError for an invalid choice.
    """

    def __init__(self, address: str, choice: Any) -> None:
        self.url: str | None = None
        self.through = self.hint = ""
        if isinstance(choice, str):
            parts = urlsplit(choice)
            if parts.scheme not in _SCHEMES or not parts.hostname:
                raise ConfigError(f"proxy: expected http://host:port or socks5h://host:port, got {_public(choice)!r}")
            self.url = choice
        elif choice is True:
            self.url = _from_environment(address)
        elif choice not in (None, False):
            raise ConfigError(f"proxy: expected None, True or a proxy's address, got {choice!r}")
        if self.url is not None:
            self.through = f" through the proxy {_public(self.url)}"
        elif _is_public(address) and (unused := _from_environment(address)) is not None:
            self.hint = f"; the environment's proxy {_public(unused)} is not used: proxy=True"


def _from_environment(address: str) -> str | None:
    """The proxy for a websocket address from http_proxy, https_proxy, all_proxy and no_proxy."""
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    if urllib.request.proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    known = urllib.request.getproxies()
    names = ("wss", "socks", "https", "all") if parts.scheme == "wss" else ("ws", "socks", "https", "http", "all")
    name = next((name for name in names if known.get(name)), None)
    if name == "socks":  # the operating system's setting may be http://host:port
        return known[name].replace("http://", "socks5h://", 1)
    return None if name is None else known[name]


def _is_public(address: str) -> bool:
    """Whether a server is outside this machine and its own network, as far as its address shows."""
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan"))


def _public(url: str) -> str:
    """A proxy's address without user and password."""
    return url.rpartition("@")[2]
