"""API keys, their file, TLS, and servers that other machines can reach."""

from __future__ import annotations

import base64
import logging
import os
import ssl
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.server_support import EchoPolicy, RawClient, get, local, observation
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.cli.serve import Serve, server_config
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ServerError
from vla_accel.server import app, background
from vla_accel.server.keys import Keys, read_keys


def test_a_key_is_required_before_anything_else() -> None:
    policy = EchoPolicy()
    with background(policy, local(api_key="secret")) as server:
        for key in (None, "wrong", "secret2", "Secret"):
            with pytest.raises(ServerError, match=r"HTTP 401.*api_key"):
                PolicyClient(server.address, api_key=key)
        for headers in (
            "Authorization: secret\r\n",
            "Authorization: Bearer secret\r\n",
            "Authorization: Api-Key secret\r\nAuthorization: Api-Key secret\r\n",
            "Authorization: Api-Key \xff\xfe\r\n",
        ):
            client = RawClient(server.address, headers=headers)
            assert b" 401 " in client.head, headers
            client.close()
        assert not policy.batches
        assert server.metrics.counters["refused"] == {"api key": 8}
        assert get(server.address, "/healthz")[0] == 200, "health checks need no key"
        with PolicyClient(server.address, api_key="secret") as client:
            assert client.infer(observation(1))["actions"].shape == (10, 7)
        basic = {text: base64.b64encode(text.encode()).decode() for text in ("anyone:secret", "secret:wrong")}
        for path in ("/", "/status.json", "/metrics"):
            for value, status in (
                (None, 401),
                ("Api-Key secret", 200),
                (f"Basic {basic['anyone:secret']}", 200),  # as browsers send it
                (f"Basic {basic['secret:wrong']}", 401),
                ("Basic %%%", 401),
                ("Basic /w==", 401),
            ):
                assert get(server.address, path, {"Authorization": value} if value else None)[0] == status, value
        with pytest.raises(ServerError, match="HTTP 401"):  # a browser would send it from any site
            PolicyClient(server.address.replace("//", "//anyone:secret@"))


def test_keys_can_change_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_CHECK_EVERY_S", 0.005)
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text("# robots\narm: first-secret\nbase: second-secret\n")
    with background(EchoPolicy(), local(api_key_file=file)) as server:

        def client_of(key: str) -> PolicyClient:
            client = PolicyClient(server.address, api_key=f"{key}\n")  # as a file's line ends
            client.infer(observation(1))
            return client

        arm, base = client_of("first-secret"), client_of("second-secret")
        base.infer(observation(2))
        file.write_text("base: second-secret\nnew: third-secret\n")
        # The connection of the removed key closes; the other stays, and the new key is accepted.
        eventually(lambda: server.metrics.counters["refused"].get("api key withdrawn") == 1)
        with pytest.raises(ServerError):
            arm.infer(observation(1))
        with pytest.raises(ServerError, match="HTTP 401"):
            client_of("first-secret")
        base.infer(observation(3))
        client_of("third-secret").close()
        file.write_text("")  # an unusable file changes nothing
        eventually(lambda: "the keys stay unchanged" in caplog.text)
        base.infer(observation(4))
        page = get(server.address, "/metrics", {"Authorization": "Api-Key second-secret"})[2]
        base.close()
    counts = server.metrics.counters["key_requests"]
    # The last request of `arm` may have arrived before its connection closed.
    assert (counts["base"], counts["new"]) == (4, 1) and counts["arm"] in (1, 2)
    assert 'vla_accel_key_requests_total{key="base"} 4' in page
    assert "secret" not in page and "secret" not in caplog.text
    assert "base, new" in caplog.text


def test_a_half_written_file_of_keys_is_read_again(tmp_path: Path) -> None:
    """A file system's clock may not advance between two writes."""
    file = tmp_path / "keys"
    file.write_text("arm: first-secret\n")
    keys = Keys(file=file)
    for text, changed in (("", False), ("base: second-secret\n", True)):
        file.write_text(text)
        os.utime(file, (1, 1))
        assert keys.refresh() == changed
    assert keys.name_of("Api-Key second-secret") == "base"


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("  a key: with spaces \n")
    assert read_keys(file) == {"default": "a key: with spaces"}, "a single line is the key"
    file.write_text("arm: one\n\n# none\nbase:  two: three\n")
    assert read_keys(file) == {"arm": "one", "base": "two: three"}
    for text, said in (
        ("\n# x\n", "expected a key, got an empty file"),
        ("arm: one\nsecret\n", "line 2: with several keys expected NAME: KEY, no space in NAME"),
        ("arm: one\narm: secret\n", "line 2: expected a name and a key of its own, got arm again"),
        ("arm: secret\nbase: secret\n", "line 2: expected a name and a key of its own, got the key of arm again"),
        ("secr\u00e9t\n", "line 1: expected printable ASCII"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            read_keys(file)
        assert "secr" not in str(caught.value)
    file.write_bytes(b"\xff\xfesecret")
    with pytest.raises(ConfigError, match="expected a readable text file, got: no UTF-8"):
        read_keys(file)
    with pytest.raises(ConfigError, match="api key no/such/file: expected a readable text file, got: No such file"):
        Keys(file=Path("no/such/file"))


def test_a_public_address_requires_a_key_or_insecure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "key").write_text("secret")
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        with pytest.raises(ConfigError, match=f"host: {host} without a key .*--api-key-file, or --insecure"):
            server_config(Serve(host=host))
        assert server_config(Serve(host=host, insecure=True)).host == host
        assert server_config(Serve(host=host, api_key_file=tmp_path / "key")).api_key_file == tmp_path / "key"
    assert server_config(Serve()).host == "127.0.0.1"
    for options, warning in (({}, "0.0.0.0 without a key"), ({"api_key": "a"}, "0.0.0.0 without a TLS certificate")):
        with background(EchoPolicy(), replace(local(**options), host="0.0.0.0")):
            assert warning in caplog.text
        caplog.clear()
    with background(EchoPolicy(), local()):
        assert not caplog.records


def test_a_clients_certificates_may_lie_in_the_home_folder(
    make_certificate: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, _ = make_certificate("server")
    monkeypatch.setenv("HOME", str(cert.parent))
    with pytest.raises(ServerError, match="cannot connect"):
        PolicyClient("wss://127.0.0.1:1", tls_ca=f"~/{cert.name}")
    with pytest.raises(ConfigError, match=r"tls_ca ~/none\.pem: expected certificates"):
        PolicyClient("wss://127.0.0.1:1", tls_ca="~/none.pem")


def test_tls(make_certificate: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    cert, key = make_certificate("server")
    config = local(api_key="secret", tls_cert=cert, tls_key=key)
    with background(EchoPolicy(), config) as server:
        assert server.address.startswith("wss://127.0.0.1:")
        with PolicyClient(server.address, api_key="secret", tls_ca=cert) as client:
            assert client.infer(observation(4, image=True))["actions"][0, 0] == 4
        with pytest.raises(ServerError, match=r"certificate verify failed.*tls_ca"):
            PolicyClient(server.address, api_key="secret")
        with pytest.raises(ServerError, match=r"cannot connect .*wss://"):
            PolicyClient(server.address.replace("wss", "ws"), api_key="secret", connect_timeout_s=PATIENCE_S)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=cert)),
        )
        request = urllib.request.Request(server.address.replace("wss", "https") + "/metrics")
        request.add_header("Authorization", "Api-Key secret")
        with opener.open(request, timeout=PATIENCE_S) as response:
            assert b'outcome="ok"} 1' in response.read()
    with background(EchoPolicy(), local()) as server, pytest.raises(ServerError, match=r"cannot connect .*ws://"):
        PolicyClient(server.address.replace("ws", "wss"), connect_timeout_s=PATIENCE_S)
    for wrong in ({"tls_cert": tmp_path / "none"}, {"tls_cert": key}, {"tls_cert": cert, "tls_key": cert}):
        with pytest.raises(ConfigError, match="tls_cert: expected a certificate and its key in"):
            local(**wrong).tls()
    with pytest.raises(ConfigError, match="--tls-key"):
        local(tls_cert=cert).tls()
    with pytest.raises(ConfigError, match=r"tls_ca .*: expected certificates in PEM"):
        PolicyClient("wss://127.0.0.1:1", tls_ca=os.devnull)
