"""Placed denoising steps (`PolicyConfig.schedule`) of every flow family, in eager and native, and what is refused.
Real-time chunking with them is in test_guided_policy.py and test_pinned_policy.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import (
    evo1_folders,
    groot_folders,
    molmoact2_folders,
    starvla_folders,
    tiny_pi0_fast,
    tiny_smolvla,
    vla_jepa_folders,
)
from tests.support.tiny import tiny_observation
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.engines.tensorrt_plan import content_key
from vla_accel.errors import ConfigError
from vla_accel.families.evo1.network import Evo1
from vla_accel.families.loading import load as load_checkpoint
from vla_accel.nn.dit import DitNetwork
from vla_accel.nn.flow import Schedule
from vla_accel.nn.padding import real_tokens
from vla_accel.policy import ahead_of_time

TIMES = (1.0, 0.3, 0.01, 0.0)
FAMILIES = (
    "pi0", "pi05", "smolvla", "groot", "groot_n16", "groot_n15", "vla_jepa", "starvla_groot", "evo1", "molmoact2",
)  # fmt: skip
OBSERVATIONS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "smolvla": tiny_smolvla.observation,
    "vla_jepa": vla_jepa_folders.observation,
    "starvla_groot": starvla_folders.observation,
    "evo1": evo1_folders.observation,
    "molmoact2": lambda seed: molmoact2_folders.given()[seed % 3],
    **groot_folders.OBSERVATIONS,
}


def load(folder: Path, engine: Any = "eager", **settings: Any) -> OptimizedPolicy:
    specs: dict[str, EngineSpec] = dict.fromkeys(("vision", "kv_cache", "denoise"), EngineSpec(engine))
    config = PolicyConfig(precision="fp32", device="cpu", strict=True, **settings)
    return OptimizedPolicy.from_pretrained(folder, config.with_specs(specs))


def observed(policy: OptimizedPolicy, *seeds: int) -> list[dict[str, Any]]:
    make = OBSERVATIONS.get(policy.family.name, tiny_observation)
    return [make(seed) for seed in seeds]


def noise_of(policy: OptimizedPolicy, batch: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((batch, *policy.action_shape)).astype(np.float32)


def actions(policy: OptimizedPolicy) -> np.ndarray:
    """Of two observations at once, without GR00T's gripper, which is a decision."""
    results = policy.infer_batch(observed(policy, 0, 1), noise=noise_of(policy, 2))
    return np.stack([result["actions"][:, :6] for result in results])


@torch.inference_mode()
def plain_euler(policy: OptimizedPolicy, times: Tensor, dts: Sequence[float], start: Tensor | None = None) -> Tensor:
    """The result of the denoise component for its present inputs, in a loop written without what is tested. `start`:
    instead of the noise."""
    pipeline, model = policy.pipelines.newest, policy.model
    inputs, schedule = pipeline.engine("denoise").inputs, pipeline.shape.schedule
    x = inputs["noise"] if start is None else start
    if isinstance(model, DitNetwork):
        assert model.head.times(schedule) == [int(1000 * (1 - time) + 1e-3) for time in times.tolist()]
        constants, lengths = model.constants(schedule), inputs.get("lengths")
        token = model.head.state_token(inputs.get("state"))
        cache = {s: (inputs[f"{s}_keys"], inputs[f"{s}_values"]) for s in model.config.head.sources}
        for step, dt in enumerate(dts):
            x = x + -dt * model.head.velocity(x, constants, step, token, cache, lengths)
        return x
    if isinstance(model, Evo1):
        assert model.moments(schedule) == [int(999 * (1 - time) + 1e-3) for time in times.tolist()]
        constants, x, keys = model.constants(schedule), model.head.of_robot(x), inputs["keys"]
        mask = real_tokens(inputs["lengths"], keys.shape[2]) if "lengths" in inputs else None
        for step, dt in enumerate(dts):
            time = constants.time[step]
            x = x + -dt * model.head.velocity(x, time, constants.positions, keys, inputs["values"], mask)
        return x
    embeddings, rows = model.conditioning(times)
    keys, values = inputs["keys"], inputs["values"]
    mask = real_tokens(inputs["lengths"], keys.shape[2]) if "lengths" in inputs else None
    for step, dt in enumerate(dts):
        row = None if rows is None else rows[step]
        v = model.velocity(x, embeddings[step], row, inputs.get("state"), keys, values, mask)
        x = x + dt * v
    return x


@pytest.mark.parametrize("family", FAMILIES)
def test_placed_steps_are_euler_at_their_times(flow_folders: dict[str, Path], family: str) -> None:
    policy = load(flow_folders[family], schedule=TIMES)
    actions(policy)
    found = policy.pipelines.newest.engine("denoise").outputs["actions"]
    dts = [after - before for before, after in pairwise(TIMES)]
    assert torch.equal(found, plain_euler(policy, torch.tensor(TIMES[:-1]), dts))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_steps_keep_every_bit(flow_folders: dict[str, Path], family: str) -> None:
    """The times of openpi's float32 sums, lerobot's products, or GR00T's buckets, and steps of exactly 1 / n."""
    policy = load(flow_folders[family], num_steps=3, schedule="uniform")
    found = actions(policy)
    summed = torch.tensor([1.0, 1.0 + torch.tensor(-1 / 3), 1.0 + torch.tensor(-1 / 3) + torch.tensor(-1 / 3)])
    times = summed if family.startswith("pi") else torch.tensor([1.0, 1 - 1 / 3, 1 - 2 / 3])
    outputs = policy.pipelines.newest.engine("denoise").outputs["actions"]
    assert torch.equal(outputs, plain_euler(policy, times, [-1.0 / 3] * 3))
    assert np.array_equal(found, actions(load(flow_folders[family], num_steps=3))), "the default"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_native_is_eager_and_a_schedule_is_another_policy(flow_folders: dict[str, Path], family: str) -> None:
    """Policies that share a store do not share the tables of their steps."""
    eager, native = load(flow_folders[family], schedule=TIMES), load(flow_folders[family], "native", num_steps=3)
    equal = actions(native)
    placed = native.with_steps(schedule=TIMES)
    assert placed.store is native.store and placed.num_steps == 3
    for _ in range(2):
        np.testing.assert_allclose(actions(placed), actions(eager), rtol=0, atol=2e-4)
        np.testing.assert_array_equal(actions(native), equal)
    assert np.abs(actions(placed) - equal).max() > 1e-2
    alone = [placed.infer(one, noise=noise)["actions"][:, :6]
             for one, noise in zip(observed(placed, 0, 1), noise_of(placed, 2), strict=True)]  # fmt: skip
    np.testing.assert_allclose(actions(placed), alone, rtol=0, atol=1e-4)


def test_steps_and_times_replace_those_of_a_policy(flow_folders: dict[str, Path]) -> None:
    policy = load(flow_folders["pi05"], num_steps=2)
    assert policy.schedule == Schedule.uniform(2)
    cubic = policy.with_steps(4, "cubic")
    assert cubic.schedule.times == (1.0, 27 / 64, 1 / 8, 1 / 64, 0.0)
    assert cubic.with_steps(2).schedule.times == (1.0, 1 / 8, 0.0), "the name holds for any number"
    placed = cubic.with_steps(schedule=TIMES)
    assert (placed.num_steps, placed.schedule.times) == (3, TIMES)
    with pytest.raises(ConfigError, match="schedule: expected 6 times for 5 steps, got 4"):
        placed.with_steps(5)
    np.testing.assert_array_equal(actions(placed), actions(load(flow_folders["pi05"], schedule=TIMES)))


NO_TIMES = [], [1.0], [1.0, 0.5], [0.9, 0.0], [1.0, 0.5, 0.5, 0.0], [1.0, 1.2, 0.0], [1.0, float("nan"), 0.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"schedule": times}, "schedule: expected times that fall from 1 to 0, .*, got") for times in NO_TIMES),
        ({"num_steps": 4, "schedule": [1.0, 0.3, 0.01, 0.0]}, "schedule: expected 5 times for 4 steps, got 4"),
        ({"schedule": "cubics"}, r"schedule: expected one of uniform, cubic, got 'cubics': did you mean cubic\?"),
        ({"schedule": 3}, "schedule: expected one of uniform, cubic, got 3"),
        ({"schedule": [1.0, "a", 0.0]}, r"schedule\[1\]: expected float, got 'a'"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_config(settings)
    with pytest.raises(ConfigError, match=f"^{message}"):
        PolicyConfig(**settings)


def test_reports_have_the_times_that_the_number_does_not_imply(flow_folders: dict[str, Path]) -> None:
    policy = load(flow_folders["pi05"], num_steps=3)
    placed = policy.with_steps(schedule=TIMES)
    for report in (policy.metadata, policy.latency_report()):
        assert "schedule" not in report
    for report in (placed.metadata, placed.latency_report()):
        assert report["schedule"] == [*TIMES]
    assert (str(policy.schedule), str(placed.schedule)) == ("3 steps", "3 steps at 1, 0.3, 0.01")


def to_build(folder: Path, *times: float) -> ahead_of_time.Job:
    """The job of `vla-accel build` for the denoise component."""
    specs = {**dict.fromkeys(("vision", "kv_cache"), EngineSpec("eager")), "denoise": EngineSpec("tensorrt_rtx")}
    config = PolicyConfig(precision="fp32", device="cpu", schedule=times).with_specs(specs)
    (job,) = ahead_of_time.jobs(load_checkpoint(folder, config), config, [(8, 9)])
    return job


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_whole_loops_are_kept_by_their_times(flow_folders: dict[str, Path], family: str) -> None:
    """0.3 and 0.2999 are one bucket of GR00T's times, but sizes of other steps."""

    def key(*times: float) -> str:
        job = to_build(flow_folders[family], *times)
        return content_key(job.component, job.component.module, job.spec, "onnx")

    assert key(*TIMES) == key(*TIMES) != key(1.0, 0.2999, 0.01, 0.0)


@pytest.mark.parametrize("family", ["pi0", "pi05", "smolvla"])
def test_the_tables_of_built_loops_have_the_times(flow_folders: dict[str, Path], family: str) -> None:
    component = to_build(flow_folders[family], *TIMES).component
    assert component.loop is not None
    rows = component.loop().rows
    assert rows["dt"].flatten().tolist() == pytest.approx([-0.7, -0.29, -0.01])
    assert rows["time"].flatten().tolist() == pytest.approx(TIMES[:-1])


@pytest.mark.parametrize("times", [(), (0.5,), (1.5, 0.0), (0.5, 0.6, 0.0), (0.5, 0.1)])
def test_a_schedule_falls_to_zero(times: tuple[float, ...]) -> None:
    assert Schedule((0.5, 0.1, 0.0)).dts == (-0.4, -0.1), "a warm start begins later"
    with pytest.raises(ConfigError, match="schedule: expected times that fall from 1 to 0"):
        Schedule(times)


def test_tokens_have_no_times(tmp_path: Path) -> None:
    tiny_pi0_fast.write_lerobot(tmp_path)
    for schedule in ("uniform", TIMES):
        with pytest.raises(ConfigError, match="schedule: expected none for pi0_fast, which has no flow, got"):
            OptimizedPolicy.from_pretrained(tmp_path, PolicyConfig(device="cpu", schedule=schedule))
