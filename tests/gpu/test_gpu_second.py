"""A policy on the second GPU computes what it does on the first: whatever is left to the current device, a launch, an
allocation, a graph, would show here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.config import NativeOptions, load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT RUN: needs two GPUs"),
]

FIRST, SECOND = "cuda:0", "cuda:1"
CONFIGS: dict[str, PolicyConfig] = {
    "eager": load_config("eager"),
    "native": load_config("native"),
    "native, portable kernels": replace(load_config("native"), native=NativeOptions(kernels="portable")),
    "native, FP8": load_config("native_fp8"),
    "native, FP8 and vision": load_config("native_fp8_vision"),
}


@pytest.fixture(autouse=True)
def _the_first_stays_current() -> Iterator[None]:
    """Nobody has made the second GPU the current one, and nobody does."""
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def load(name: str, device: str, graph: bool) -> OptimizedPolicy:
    config = replace(CONFIGS[name], device=device, num_steps=3, strict=True, cuda_graph=graph)
    return OptimizedPolicy.from_pretrained("demo", config)


def actions(policy: OptimizedPolicy) -> dict[str, np.ndarray]:
    """Of one observation, of one that is guided by an earlier chunk, and of two together."""
    rng = np.random.default_rng(0)
    shape = policy.metadata["action_horizon"], policy.metadata["action_dim"]
    noise = rng.standard_normal((2, *shape)).astype(np.float32)
    one, two = (_changed(policy.processor.example(), rng) for _ in range(2))
    first = policy.infer(one, noise=noise[0])["actions"]
    guided = policy.infer(two, noise=noise[1], prev_chunk=first[3:], inference_delay=2)["actions"]
    both = policy.infer_batch([one, two], noise=noise)
    return {"one": first, "guided": guided, "two": np.stack([b["actions"] for b in both])}


def _changed(example: Any, rng: np.random.Generator) -> dict[str, Any]:
    def draw(value: Any) -> Any:
        image = isinstance(value, np.ndarray) and value.dtype == np.uint8
        return rng.integers(0, 256, value.shape, dtype=np.uint8) if image else value

    return {key: draw(value) for key, value in example.items()}


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "no graph"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_second_gpu_computes_what_the_first_does(name: str, graph: bool) -> None:
    want = actions(load(name, FIRST, graph))
    policy = load(name, SECOND, graph)
    got = actions(policy)
    # What a native policy has prepared from a weight is read in its place; the weight is on no device then.
    places = {parameter.device for parameter in policy.model.parameters() if not parameter.is_meta}
    assert places <= {torch.device(SECOND)} and torch.cuda.memory_allocated(SECOND) > 0
    for which, expected in want.items():
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(got[which], expected, err_msg=which)


def test_policies_on_both_gpus_take_turns_in_one_process() -> None:
    policies = [load("native", device, True) for device in (FIRST, SECOND)]
    want = actions(policies[0])
    for policy in (*reversed(policies), *policies):
        got = actions(policy)
        for which, expected in want.items():
            np.testing.assert_array_equal(got[which], expected, err_msg=which)
