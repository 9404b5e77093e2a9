"""A client connects directly, whatever the environment says, unless its user chooses a proxy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import EchoPolicy, local, observation
from tests.support.waiting import PATIENCE_S, silent_port
from vla_accel.client import PolicyClient
from vla_accel.client.proxies import Proxy
from vla_accel.errors import ServerError
from vla_accel.server import background

NAMES = ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy", "socks_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with silent_port() as port:
        address = f"http://user:secret@127.0.0.1:{port}"
        for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
            monkeypatch.setenv(name, address)
        yield f"127.0.0.1:{port}"


def test_the_environments_proxy_sees_no_observation(dead_proxy: str) -> None:
    with background(EchoPolicy(), local()) as server, PolicyClient(server.address) as client:
        assert client.infer(observation(3))["actions"][0, 0] == 3


def test_a_chosen_proxy_that_fails_is_named_without_its_password(dead_proxy: str) -> None:
    with background(EchoPolicy(), local()) as server:
        for chosen in (True, f"http://user:secret@{dead_proxy}"):
            with pytest.raises(ServerError, match=f"cannot connect through the proxy {dead_proxy}") as error:
                PolicyClient(server.address, proxy=chosen)
            assert "secret" not in str(error.value).split("(")[0]


def test_a_chosen_proxy_is_used() -> None:
    def relay(listening: socket.socket) -> bytes:
        """Answers one CONNECT with a tunnel and returns its first line."""
        ours, _ = listening.accept()
        head = b""
        while b"\r\n\r\n" not in head:
            head += ours.recv(65536)
        host, _, port = head.split()[1].decode().rpartition(":")
        theirs = socket.create_connection((host, int(port)))
        ours.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        pool.submit(_pump, ours, theirs)
        pool.submit(_pump, theirs, ours)
        return head

    with (
        background(EchoPolicy(), local()) as server,
        socket.create_server(("127.0.0.1", 0)) as listening,
        ThreadPoolExecutor(3) as pool,
    ):
        asked = pool.submit(relay, listening)
        with PolicyClient(server.address, proxy=f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
            assert client.infer(observation(3))["actions"][0, 0] == 3
        assert asked.result(PATIENCE_S).startswith(b"CONNECT 127.0.0.1:")


def _pump(source: socket.socket, target: socket.socket) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("ws://8.8.8.8:8000", True),
        ("wss://[2606:4700::1111]:8000", True),
        ("ws://gpu.example.com:8000", True),
        ("ws://127.0.0.1:8000", False),
        ("ws://[::1]:8000", False),
        ("ws://192.168.1.5:8000", False),
        ("ws://10.0.0.7:8000", False),
        ("ws://169.254.0.9:8000", False),
        ("ws://localhost:8000", False),
        ("ws://gpu-box:8000", False),
        ("ws://gpu-box.local:8000", False),
    ],
)
def test_an_error_mentions_an_unused_proxy_for_public_addresses(address: str, public: bool, dead_proxy: str) -> None:
    proxy = Proxy(address, None)
    assert proxy.url is None and proxy.through == ""
    assert (f"the proxy {dead_proxy} of the environment is not used: proxy=True" in proxy.hint) == public


def test_the_environment_decides_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Proxy("ws://gpu.example.com", True).url is None
    monkeypatch.setenv("http_proxy", "http://a:1")
    monkeypatch.setenv("https_proxy", "http://b:2")
    monkeypatch.setenv("no_proxy", "inside.example.com")
    assert Proxy("wss://gpu.example.com", True).url == "http://b:2"
    assert Proxy("ws://inside.example.com", True).url is None
    monkeypatch.setenv("ws_proxy", "socks5h://c:3")
    assert Proxy("ws://gpu.example.com", True).url == "socks5h://c:3"
    assert Proxy("ws://gpu.example.com", False).url is None
