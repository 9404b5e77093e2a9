"""The scripts of docs/examples, with small checkpoints of their robots, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support import groot_folders, tiny_smolvla
from tests.support.tiny import Kind, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.client import PolicyClient
from vla_accel.remote.underrun import Hold
from vla_accel.server import ServerConfig, background

SCRIPTS = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


def example(name: str) -> Any:
    (path,) = (path for path in SCRIPTS if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(folder: Path, **settings: Any) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(folder, settings, device="cpu", num_steps=1)


def write_openpi(folder: Path, kind: Kind, size: int) -> None:
    """A checkpoint of a robot with so many state and action values."""
    write_tiny_checkpoint(folder, kind, action_dim=size)
    entry = {"mean": [0.0] * size, "std": [1.0] * size, "q01": [-1.0] * size, "q99": [1.0] * size}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": entry, "actions": entry}}))


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run a script as `uv run` does, with these arguments."""
    (path,) = (path for path in SCRIPTS if path.stem == name)
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_names_what_uv_installs_for_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 60 and lines[0] == "# /// script"
    (listed,) = (re.findall(r'"([^"]+)"', line) for line in lines if line.startswith("# dependencies"))
    assert "vla_accel" in {Requirement(one).name for one in listed}
    (pythons,) = (re.findall(r'"(.+)"', line)[0] for line in lines if line.startswith("# requires-python"))
    assert "3.13" in SpecifierSet(pythons) and "3.15" not in SpecifierSet(pythons), "torch has no wheel for 3.15"
    assert '# vla_accel = { path = "../..", editable = true }' in lines


class So101:
    """lerobot's interface of a robot; it reports the joints that it was sent."""

    def __init__(self, cameras: list[str]) -> None:
        joints = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
        self.action_features = {f"{joint}.pos": float for joint in joints}
        self.cameras, self.sent = dict.fromkeys(cameras), [dict.fromkeys(self.action_features, 0.0)]

    def get_observation(self) -> dict[str, Any]:
        return {**self.sent[-1], **{name: np.zeros((48, 64, 3), np.uint8) for name in self.cameras}}

    def send_action(self, action: dict[str, float]) -> None:
        assert list(action) == list(self.action_features) and np.isfinite(list(action.values())).all()
        self.sent.append(action)


def test_so101(tmp_path: Path) -> None:
    tiny_smolvla.write_lerobot(tmp_path)
    robot = So101([key.removeprefix("observation.images.") for key in tiny_smolvla.CAMERAS])
    report = example("so101").drive(robot, loaded(tmp_path), "pick up the bowl", seconds=0.2)
    assert report.ticks == 6 and len(robot.sent) == 7 and report.chunks >= 1


def test_so101_holds_its_last_position_while_no_chunk_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_smolvla.write_lerobot(tmp_path)
    policy, made = loaded(tmp_path), []
    runner = policy.async_runner
    monkeypatch.setattr(policy, "async_runner", lambda **settings: made.append(settings) or runner(**settings))
    robot = So101([key.removeprefix("observation.images.") for key in tiny_smolvla.CAMERAS])
    example("so101").drive(robot, policy, "pick up the bowl", seconds=0.1)
    (settings,) = made
    assert settings["underrun"] == Hold(motion_dims=())


def test_droid_client(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi05", 8)
    script = example("droid_client")
    serving = background(loaded(tmp_path, preset="droid"), ServerConfig(port=0))
    with serving as server, PolicyClient(server.address) as client:
        found = [
            action for _, action in zip(range(9), script.actions(client, script.still_robot, "push"), strict=False)
        ]
    assert {action.shape for action in found} == {(8,)}


def test_aloha(tmp_path: Path) -> None:
    write_openpi(tmp_path, "pi0", 14)
    script = example("aloha")
    report = script.control(script.Arms(), loaded(tmp_path, preset="aloha"), "fold the towel", seconds=0.1)
    assert report.ticks == 5


def test_groot_takes_nested_observations(tmp_path: Path) -> None:
    groot_folders.write_isaac(tmp_path)
    policy, plain = loaded(tmp_path), groot_folders.observation(1)
    nested = {
        "video": {name: plain[f"observation/{name}"][None, None] for name in ("image", "wrist_image")},
        "state": {"a": plain["observation/state"][None, None, :3], "b": plain["observation/state"][None, None, 3:]},
        "language": {"task": [[plain["prompt"]]]},
    }
    flat = example("groot").flat(nested, policy)
    assert flat.keys() == plain.keys() and all(np.array_equal(flat[key], plain[key]) for key in plain)


def test_droid_client_sends_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_openpi(tmp_path, "pi05", 8)
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with background(loaded(tmp_path, preset="droid"), ServerConfig(port=0, api_key_file=keys)) as server:
        run(monkeypatch, "droid_client", server.address, str(keys), "push")
    assert len(capsys.readouterr().out.splitlines()) == 30


@pytest.mark.slow
def test_eight_robots_share_a_server() -> None:
    script = example("eight_robots")
    script.CALLS = 3
    waits = script.run(OptimizedPolicy.from_pretrained("demo", device="cpu", num_steps=1))
    assert [len(one) for one in waits] == [script.CALLS] * script.ROBOTS


def test_torch_loop() -> None:
    script = example("torch_loop")
    policy = OptimizedPolicy.from_pretrained("demo", device="cpu", num_steps=1)
    first, second = script.chunks(policy, script.random_frames(2), "pick up the black bowl")
    assert first.shape == (10, 7) and first.dtype == torch.float64 and not torch.equal(first, second)


def test_torch_loop_prints_the_latency_of_each_component(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "torch_loop")
    *chunks, latency = capsys.readouterr().out.splitlines()
    assert len(chunks) == 10 and "'denoise'" in latency
