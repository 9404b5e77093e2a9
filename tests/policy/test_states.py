"""States far outside the checkpoint's statistics: one warning. Statistics without any span: an error at the load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import groot_folders, tiny_pi0_fast, tiny_smolvla
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load

EAGER = PolicyConfig(num_steps=1, precision="fp32", device="cpu")


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_a_state_far_outside_is_a_warning_once(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_checkpoint(tmp_path, kind)
    policy = OptimizedPolicy.from_pretrained(tmp_path, EAGER)
    caplog.clear()
    near = tiny_observation()
    near["observation/state"][3] = 8.0  # outside, but by few spans
    policy.infer(near)
    assert not caplog.messages
    far = tiny_observation()
    far["observation/state"][[3, 6]] = 3000.0, -1e5
    for _ in range(2):
        policy.infer(far)
    policy.with_steps(2).infer(far)
    (said,) = caplog.messages
    expected, _, got = said.partition(", got ")
    assert expected.startswith("observation/state: expected dimension 3") and got.startswith("3000,")
    low, high = policy.processor.ranges["state"].limits()
    assert f"{low[3]:.4g} to {high[3]:.4g}" in expected and "1 other dimension" in got
    assert any("far outside" in about for about in policy.ledger.warned)


def test_a_groot_state_far_outside_is_a_warning_although_it_is_clipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    groot_folders.write_isaac(tmp_path)
    policy = OptimizedPolicy.from_pretrained(tmp_path, EAGER)
    caplog.clear()
    given = policy.processor.example()
    policy.infer(given)
    assert not caplog.messages
    (key,) = policy.processor.preset.state
    far = {**given, key: given[key] + 1e4}
    assert np.abs(policy.processor.prepare(far).state).max() <= 1.0
    policy.infer(far)
    (said,) = caplog.messages
    assert said.startswith(f"{key}: expected dimension 0 in the range")


def openpi(folder: Path, kind: Any, quantity: str, dimensions: slice) -> None:
    write_tiny_checkpoint(folder, kind)
    path = folder / "norm_stats.json"
    content = json.loads(path.read_text())
    table = {k: np.array(v) for k, v in content["norm_stats"][quantity].items()}
    table["std"][dimensions] = 0.0
    table["q99"][dimensions] = table["q01"][dimensions]
    content["norm_stats"][quantity] = {k: v.tolist() for k, v in table.items()}
    path.write_text(json.dumps(content))


def lerobot(write: Callable[[Path], Any], folder: Path, quantity: str, dimensions: slice) -> None:
    write(folder)
    key = {"state": "observation.state", "actions": "action"}[quantity]
    for path in folder.glob("policy_*.safetensors"):
        table = dict(load_file(path))
        if f"{key}.std" in table:
            table[f"{key}.std"][dimensions] = 0.0
        for low, high in (("q01", "q99"), ("min", "max")):
            if f"{key}.{low}" in table:
                table[f"{key}.{high}"][dimensions] = table[f"{key}.{low}"][dimensions]
        save_file(table, path)


def isaac(folder: Path, quantity: str, dimensions: slice) -> None:
    groot_folders.write_isaac(folder)
    path = folder / "statistics.json"
    content = json.loads(path.read_text())
    for robot in content.values():
        groups = robot[{"state": "state", "actions": "action"}[quantity]]
        for index, group in enumerate(groups.values()):
            if dimensions == slice(None) or index == 0:
                group["max"], group["q99"] = group["min"], group["q01"]
                group["std"] = [0.0] * len(group["std"])
    path.write_text(json.dumps(content))


WRITERS: dict[str, Callable[[Path, str, slice], None]] = {
    "openpi pi05": lambda folder, name, dims: openpi(folder, "pi05", name, dims),
    "openpi pi0": lambda folder, name, dims: openpi(folder, "pi0", name, dims),
    "smolvla": lambda folder, name, dims: lerobot(tiny_smolvla.write_lerobot, folder, name, dims),
    "pi0_fast": lambda folder, name, dims: lerobot(tiny_pi0_fast.write_lerobot, folder, name, dims),
    "groot": isaac,
}


@pytest.mark.parametrize("quantity", ["state", "actions"])
@pytest.mark.parametrize("kind", WRITERS)
def test_statistics_without_any_span_are_an_error(kind: str, quantity: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "one", quantity, slice(0, 1))
    load(tmp_path / "one")
    WRITERS[kind](tmp_path / "all", quantity, slice(None))
    with pytest.raises(CheckpointError, match=r"expected .*vary in at least one of .* dimensions, got a span of 0"):
        load(tmp_path / "all")


def test_numbers_that_are_not_normalised_need_no_span(tmp_path: Path) -> None:
    """IDENTITY with statistics of zeros."""

    def identity(files: dict[str, Any]) -> None:
        modes = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"}
        files["config"]["normalization_mapping"] = modes
        for name in ("policy_preprocessor", "policy_postprocessor"):
            for step in files[name]["steps"]:
                if "norm_map" in step["config"]:
                    step["config"]["norm_map"] = modes

    def write(folder: Path) -> None:
        tiny_smolvla.write_lerobot(folder, change=identity)

    for quantity in ("state", "actions"):
        lerobot(write, tmp_path / quantity, quantity, slice(None))
        assert not load(tmp_path / quantity).processor.ranges["state"].known
