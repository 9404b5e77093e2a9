"""Keys with names that change while the server runs, TLS, and doors that stand open only when told to."""

from __future__ import annotations

import logging
import os
import re
import shutil
import ssl
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.server_support import EchoPolicy, get, local, observation, port_of
from tests.support.waiting import PATIENCE_S, eventually
from vla_accel.cli.asked.servers import Serve
from vla_accel.cli.serve import server_config
from vla_accel.client import PolicyClient
from vla_accel.errors import ConfigError, ServerError
from vla_accel.server import app, background
from vla_accel.server.keys import Keys, read_keys


def test_keys_have_names_are_counted_and_change_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "_CHECK_EVERY_S", 0.005)
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "keys"
    file.write_text("# robots\narm: first-secret\nbase: second-secret\n")
    with background(EchoPolicy(), local(api_key_file=file)) as server:

        def asks(key: str) -> PolicyClient:
            client = PolicyClient(server.address, api_key=f"{key}\n")  # as it is read from a file of its own
            client.infer(observation(1))
            return client

        arm, base = asks("first-secret"), asks("second-secret")
        base.infer(observation(2))
        file.write_text("base: second-secret\nnew: third-secret\n")
        # The key that is gone takes its connection along; the other stays, and the new one is let in.
        eventually(lambda: server.metrics.refused.values.get("api key withdrawn") == 1)
        with pytest.raises(ServerError):
            arm.infer(observation(1))
        with pytest.raises(ServerError, match="HTTP 401"):
            asks("first-secret")
        base.infer(observation(3))
        asks("third-secret").close()
        # A file of no use changes nothing.
        file.write_text("")
        eventually(lambda: "the keys stay as they were" in caplog.text)
        base.infer(observation(4))
        page = get(server.address, "/metrics", {"Authorization": "Api-Key second-secret"})[2]
        base.close()
    for line in ('{key="base"} 4', '{key="new"} 1'):
        assert f"vla_accel_key_requests_total{line}" in page
    # Its last request may have come before its connection went.
    assert re.search(r'vla_accel_key_requests_total\{key="arm"\} [12]\b', page)
    assert "secret" not in page and "secret" not in caplog.text
    assert "keys read again: base, new" in caplog.text


def test_keys_that_were_read_half_written_are_read_again(tmp_path: Path) -> None:
    """A file system's clock may stand still between two writes."""
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
    assert read_keys(file) == {"default": "a key: with spaces"}, "as ever: one line is the key"
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


def test_beyond_this_machine_without_a_key_only_when_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        with pytest.raises(ConfigError, match=f"host: {host} without a key lets in whoever reaches it"):
            server_config(Serve(host=host))
        assert server_config(Serve(host=host, insecure=True)).host == host
        assert server_config(Serve(host=host, api_key_file=tmp_path / "key")).api_key_file == tmp_path / "key"
    assert server_config(Serve()).host == "127.0.0.1"


def test_an_open_door_is_told_also_in_a_program_of_ones_own(caplog: pytest.LogCaptureFixture) -> None:
    for given, told in (
        ({}, "0.0.0.0 without a key: whoever"),
        ({"api_key": "a"}, "0.0.0.0 without a TLS certificate"),
    ):
        with background(EchoPolicy(), replace(local(**given), host="0.0.0.0")):
            assert told in caplog.text
        caplog.clear()
    with background(EchoPolicy(), local()):
        assert not caplog.records


@pytest.fixture(scope="module")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str) -> tuple[Path, Path]:
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
        more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
        subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
        return cert, key

    return make


def test_wss_of_a_server_without_a_certificate() -> None:
    said = r"cannot connect .* is asked by wss://, one without by ws://"
    with background(EchoPolicy(), local()) as server, pytest.raises(ServerError, match=said):
        PolicyClient(server.address.replace("ws", "wss"), connect_timeout_s=PATIENCE_S)


def test_tls(make_certificate: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    cert, key = make_certificate("server")
    config = local(api_key="secret", tls_cert=cert, tls_key=key)
    with background(EchoPolicy(), config) as server:
        assert server.address.startswith("wss://127.0.0.1:")
        with PolicyClient(server.address, api_key="secret", tls_ca=cert) as client:
            assert client.infer(observation(4, image=True))["actions"][0, 0] == 4
        with pytest.raises(ServerError, match=r"certificate verify failed.*certificate is your own: tls_ca"):
            PolicyClient(server.address, api_key="secret")
        with pytest.raises(ServerError, match=r"cannot connect .* is asked by wss://, one without by ws://"):
            PolicyClient(server.address.replace("wss", "ws"), api_key="secret", connect_timeout_s=PATIENCE_S)
        request = urllib.request.Request(
            f"https://127.0.0.1:{port_of(server.address)}/metrics", headers={"Authorization": "Api-Key secret"}
        )
        handlers = (
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=cert)),
        )
        with urllib.request.build_opener(*handlers).open(request, timeout=PATIENCE_S) as response:
            assert b'outcome="ok"} 1' in response.read()
    wrongs: list[dict[str, Any]] = [
        {"tls_cert": tmp_path / "none"},
        {"tls_cert": key},
        {"tls_cert": cert, "tls_key": cert},
    ]
    for wrong in wrongs:
        with (
            pytest.raises(ConfigError, match="tls_cert: expected a certificate and its key in"),
            background(EchoPolicy(), local(**wrong)),
        ):
            raise AssertionError("it must not serve")
    with pytest.raises(ConfigError, match=r"a key in a file of its own: --tls-key$"):
        local(tls_cert=cert).tls()
    with pytest.raises(ConfigError, match=r"tls_ca .*: expected certificates in PEM"):
        PolicyClient("wss://127.0.0.1:1", tls_ca=os.devnull)
