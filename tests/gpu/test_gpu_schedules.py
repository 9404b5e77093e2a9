"""Placed denoising steps on a GPU, cold and from a warm start: each family's native loop, with Hopper's kernels and
without, next to eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from tests.support import evo1_folders, groot_folders, tiny_smolvla
from tests.support.agreement import assert_as_near
from tests.support.gpu_policies import EAGER, NATIVE, load, noise_for
from tests.support.tiny import tiny_observation
from vla_accel.config import NativeOptions

pytestmark = pytest.mark.gpu
TIMES = (1.0, 0.3, 0.01, 0.0)
OBSERVATIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "smolvla": tiny_smolvla.observation,
    "evo1": evo1_folders.observation,
    **groot_folders.OBSERVATIONS,
}


@pytest.mark.parametrize("start", [None, 0.5])
@pytest.mark.parametrize("kernels", ["auto", "portable"])
@pytest.mark.parametrize("family", ["pi05", "pi0", "smolvla", "groot", "groot_n16", "groot_n15", "evo1"])
def test_placed_steps_are_as_near_as_eager(
    family: str, kernels: Literal["auto", "portable"], start: float | None, folders: dict[str, Path],
    flow_folders: dict[str, Path],
) -> None:  # fmt: skip
    """`start`: of a warm start from the rest of other chunks."""
    folder = {**flow_folders, **folders}[family]
    low = replace(EAGER, precision="bf16")
    steps: dict[str, Any] = {"schedule": TIMES, "warm_start": start}
    native = load(folder, replace(NATIVE, native=NativeOptions(kernels=kernels), **steps))
    others = [load(folder, replace(config, **steps)) for config in (low, EAGER)]
    observations = [OBSERVATIONS.get(family, tiny_observation)(seed) for seed in range(2)]
    before = native.infer_batch(observations, noise=noise_for(native, 2))
    rests = None if start is None else [one["actions"][2:] for one in before]
    rows = []
    for policy in (native, *others, native.with_steps(schedule="uniform")):
        policy.infer_batch(observations, noise=noise_for(policy, 2), prev_chunks=rests)
        rows.append(policy.pipelines.newest.outputs["actions"].cpu().clone())
    *placed, equal = rows
    assert native.pipelines.newest.captured is not None
    assert_as_near(*placed)
    assert float((placed[0] - equal).abs().max()) > 1e-2
    assert torch.isfinite(equal).all() and np.isfinite(placed[0].numpy()).all()
