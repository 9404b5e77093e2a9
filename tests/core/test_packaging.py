"""The package as `pip install` builds it, used outside of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import vla_accel

ROOT = Path(__file__).parents[2]
SHIPPED_AS_SOURCE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "mkdocs.yml"),
    *(".ci", "configs", "benchmarks", "docs", "eval", "plugins", "tests", "vla_accel"),
)
CONFIGS = sorted(p.name for p in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: it leaves files next to its source."""
    folder = tmp_path_factory.mktemp("packaging") / "source"
    # The demo's weights would only take time.
    left_out = (".git", ".venv", "runs", "site", "build", "dist", "*.egg-info", "__pycache__", "*.safetensors")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*left_out))
    (folder / "docs" / "deploy" / "secrets").mkdir(exist_ok=True)
    (folder / "docs" / "deploy" / "secrets" / "api_keys").write_text("a secret")
    return folder


def build(source: Path, kind: str, into: Path) -> Path:
    """The wheel or sdist of a source folder."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools")
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    return into / done.stdout.splitlines()[-1]


def test_there_is_one_copy_of_the_configurations() -> None:
    link = ROOT / "vla_accel" / "configs"
    if not (ROOT / ".git").exists():
        pytest.skip("NOT RUN: an unpacked source package holds no links")
    assert link.is_symlink() and link.readlink() == Path("../configs") and len(CONFIGS) > 5


def test_every_distribution_has_the_packages_version_and_the_changelog_its_date() -> None:
    version = vla_accel.__version__
    newest = re.search(r"^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version
    series = version.rpartition(".")[0]
    for path in (ROOT / "plugins").glob("*/pyproject.toml"):
        text = path.read_text()
        assert f'\nversion = "{version}"\n' in text and f'"vla_accel>={series},<' in text, path
    for path in (ROOT / "plugins").glob("*/package.xml"):  # ROS packages
        assert f"<version>{version}</version>" in path.read_text(), path
    assert f'version="{version}"' in (ROOT / "plugins/vla_accel_ros/setup.py").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_the_wheel_and_the_sdists_wheel_bring_configurations_and_types(source: Path, tmp_path: Path) -> None:
    direct = build(source, "wheel", tmp_path)
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    for name in SHIPPED_AS_SOURCE:
        there = sorted(p for p in (source / name).rglob("*") if p.is_file()) or [source / name]
        missing = [p for p in there if not (unpacked / p.relative_to(source)).is_file()]
        assert missing == [source / "docs/deploy/secrets/api_keys"] * (name == "docs"), "all but the secrets"
    (tmp_path / "again").mkdir()
    contents = []
    for wheel in (direct, build(unpacked, "wheel", tmp_path / "again")):
        with zipfile.ZipFile(wheel) as archive:
            contents.append(sorted(archive.namelist()))
            assert {f"vla_accel/configs/{name}" for name in CONFIGS} | {"vla_accel/py.typed"} <= set(contents[-1])
            assert not any(name.startswith(("configs/", "tests/", "eval/")) for name in contents[-1])
            archive.extractall(tmp_path / "installed")
    assert contents[0] == contents[1]
    code = (
        "import vla_accel; from vla_accel.config import load_config, shipped_configs; "
        "print(vla_accel.__file__, load_config('native_fp8').kv_cache.precision, *shipped_configs())"
    )
    place = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, precision, *names = done.stdout.split()
    assert where.startswith(str(tmp_path)) and precision == "fp8"
    assert names == [name.removesuffix(".yaml") for name in CONFIGS]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.parent.name for p in (ROOT / "plugins").glob("*/pyproject.toml")))
def test_a_plugins_wheel_says_what_it_is_and_under_which_license(source: Path, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(build(source / "plugins" / name, "wheel", tmp_path)) as archive:
        (about,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        (terms,) = (archive.read(n).decode() for n in archive.namelist() if n.endswith("/licenses/LICENSE"))
    assert "\nDescription-Content-Type: text/markdown\n" in about and f"\n# {name}\n" in about
    assert terms == (ROOT / "LICENSE").read_text()
