"""`~` in a path that a user names is the home folder, also where no shell replaced it (`--output=~/a.json`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from eval.harness.policies import PolicySource
from eval.libero.benchmark import LIBERO
from vla_accel.cli.options import OutputFile, read
from vla_accel.engines.cache import EngineCache
from vla_accel.images.config import TrtVaeConfig, engine_file, load_vae_config
from vla_accel.images.parts import unet_engine_file
from vla_accel.measure.recording import save_observations
from vla_accel.server import ServerConfig


@dataclass(frozen=True)
class Options:
    output: OutputFile = None
    files: tuple[Path, ...] = ()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_in_options_of_commands(home: Path) -> None:
    found = read(Options, ["--output=~/a.json", "--files=~/b,c"], "program")
    assert found == Options(home / "a.json", (home / "b", Path("c")))


@pytest.mark.parametrize(
    "place",
    [
        lambda name: ServerConfig(api_key_file=Path(name)).api_key_file,
        lambda name: EngineCache(name).folder,
        lambda name: unet_engine_file(name).parents[2],
        lambda name: Path(PolicySource.parse(f"lerobot:{name}", LIBERO, config=None, device="cpu").where),
    ],
    ids=["server", "engine cache", "UNet", "policy by lerobot"],
)
def test_in_settings(place: Callable[[str], Path | None], home: Path) -> None:
    assert place("~/there") == home / "there"


def test_in_an_autoencoders_configuration(home: Path) -> None:
    files = {"trt_engine_path": "~/engines", "multi_profile": True}
    (home / "vae.json").write_text(json.dumps({"vae_type": "tensorrt", "trt_vae_config": files}))
    assert load_vae_config("~/vae.json").trt_vae_config == TrtVaeConfig("~/engines", True)
    file = home / "engines" / "vae_encoder_multi_profile.trt"
    file.parent.mkdir()
    file.touch()
    assert engine_file(TrtVaeConfig("~/engines", True), "encoder", (512, 512)) == file


def test_in_a_recordings_name(home: Path) -> None:
    save_observations([{"a": np.zeros(2)}], "~/recorded.npz")
    assert [path.name for path in home.iterdir()] == ["recorded.npz"]
