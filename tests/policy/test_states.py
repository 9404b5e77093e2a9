"""States far outside the checkpoint's statistics: one warning. Statistics without any span: an error at the load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support import groot_folders, tiny_pi0_fast, tiny_smolvla
from tests.support.lerobot_saved import configure, edit, together
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


def remove_span(table: dict[str, Any], dimensions: slice) -> None:
    for low, high in (("q01", "q99"), ("min", "max")):
        if high in table:
            table[high][dimensions] = table[low][dimensions]
    table["std"][dimensions] = [0.0] * len(table["std"][dimensions])


def write(folder: Path, kind: Any, quantity: str, dimensions: slice, **options: Any) -> None:
    """A checkpoint whose states or actions are constant in `dimensions` (GR00T: groups of them)."""
    if kind in LEROBOT:
        LEROBOT[kind].write_lerobot(folder, **options)
        key = {"state": "observation.state.", "actions": "action."}[quantity]
        for path in folder.glob("policy_*.safetensors"):
            tensors = dict(load_file(path))
            if table := {name.removeprefix(key): value for name, value in tensors.items() if name.startswith(key)}:
                remove_span(table, dimensions)
            save_file(tensors, path)
        return
    if kind == "groot":
        path = groot_folders.write_isaac(folder) / "statistics.json"
    else:
        write_tiny_checkpoint(folder, kind)
        path = folder / "norm_stats.json"
    content = json.loads(path.read_text())
    if kind == "groot":
        for group in [*content[groot_folders.TAG][quantity.removesuffix("s")].values()][dimensions]:
            remove_span(group, slice(None))
    else:
        remove_span(content["norm_stats"][quantity], dimensions)
    path.write_text(json.dumps(content))


LEROBOT: dict[str, Any] = {"smolvla": tiny_smolvla, "pi0_fast": tiny_pi0_fast}


@pytest.mark.parametrize("quantity", ["state", "actions"])
@pytest.mark.parametrize("kind", ["pi05", "pi0", "groot", *LEROBOT])
def test_statistics_without_any_span_are_an_error(kind: str, quantity: str, tmp_path: Path) -> None:
    write(tmp_path / "one", kind, quantity, slice(0, 1))
    load(tmp_path / "one")
    write(tmp_path / "all", kind, quantity, slice(None))
    with pytest.raises(CheckpointError, match=r"expected .*vary in at least one of .* dimensions, got a span of 0"):
        load(tmp_path / "all")


@pytest.mark.parametrize("quantity", ["state", "actions"])
def test_numbers_that_are_not_normalised_need_no_span(quantity: str, tmp_path: Path) -> None:
    """IDENTITY with statistics of zeros."""
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")
    steps = [edit(name, norm_map=modes) for name in ("normalizer_processor", "unnormalizer_processor")]
    change = together(configure(normalization_mapping=modes), *steps)
    write(tmp_path, "smolvla", quantity, slice(None), change=change)
    assert not load(tmp_path).processor.ranges["state"].known
