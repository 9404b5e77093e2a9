"""GR00T N1.6 and N1.5 against numbers that the original code left (tests/references/make_groot_n1*_reference.py), and
their native programs against the eager network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parity.compare_with_lerobot import ask_groot
from tests.references.groot_weights import draw
from tests.support import groot_folders as written
from tests.support.groot_folders import REFERENCES, statistics, tensors
from tests.support.in_memory import MemoryWeights
from tests.support.scripts import lines_of, needs_triton
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.network import Groot, groot_n15, groot_n16
from vla_accel.nn import plan
from vla_accel.nn.eagle_vision import EagleVisionConfig

PARTS = ("vision", "kv_cache", "denoise")
STATED = {
    "groot_n16": written.N16_CONFIG,
    "groot_n15": {**written.N15_CONFIG["action_head_cfg"], "select_layer": 3},
}
SIDE, SPECIAL = {"groot_n16": 84, "groot_n15": 224}, {"groot_n16": 0, "groot_n15": 6}
CASES = {
    "batch1": (2, (35,)), "batch3": (2, (34, 34, 34)), "missing camera": (1, (31,)), "padded": (2, (35, 31, 33)),
}  # fmt: skip


def small(name: str) -> Groot:
    weights, embodiment = MemoryWeights(tensors(name)), {"groot_n16": 2, "groot_n15": 31}[name]
    loaded = load_groot(weights, infer_config(weights.shapes, STATED[name], "small"), embodiment, "small")
    return loaded.placed(torch.device("cpu"), torch.float32).whole()


@pytest.fixture(scope="module", params=["groot_n16", "groot_n15"])
def model(request: pytest.FixtureRequest) -> Groot:
    return small(request.param)


def name_of(model: Groot) -> str:
    return "groot_n16" if model.config.arrangement.text_first else "groot_n15"


def inputs(model: Groot, case: str) -> dict[str, Tensor]:
    """What the script gave the original model."""
    config, name, (views, lengths) = model.config, name_of(model), CASES[case]
    batch, vocabulary = len(lengths), config.language.vocab_size - SPECIAL[name]

    def drawn(what: str, *shape: int) -> Tensor:
        return torch.from_numpy(draw(f"{name.removeprefix('groot_')}.{case}.{what}", *shape))

    found = {
        "pixels": drawn("pixels", batch, views, 3, SIDE[name], SIDE[name]).clamp(-1, 1),
        "tokens": (drawn("tokens", batch, max(lengths)).abs() * 1e4).long() % vocabulary,
        "state": drawn("state", batch, config.state_dim),
        "noise": drawn("noise", batch, config.action_horizon, config.action_dim),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    return {f"{case}.{k}": v for k, v in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_actions_are_the_originals(model: Groot, case: str) -> None:
    stride = {"groot_n16": 3, "groot_n15": 5}[name_of(model)]
    for steps in (4, 2):
        found = ask_groot(model, inputs(model, case), case, steps)
        kept = torch.tensor(REFERENCES[name_of(model)]["answers"][f"{case}.steps{steps}"])
        torch.testing.assert_close(found[..., ::stride, :4], kept, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (groot_n16, {"vision": 426, "embed": 311, "language": 805, "head": 1103}),
        (groot_n15, {"vision": 415, "embed": 311, "language": 604, "head": 763}),
    ],
)
def test_the_published_sizes(size: Callable[[], Any], parts: dict[str, int]) -> None:
    with torch.device("meta"):
        found = Groot(size())
    assert {k: round(sum(p.numel() for p in getattr(found, k).parameters()) / 1e6) for k in parts} == parts


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="vision: expected one frame, no deepstack, and patches joined or not"):
        EagleVisionConfig(merge=2)
    with pytest.raises(ConfigError, match=r"head\.vl_depth: expected 0 where the text comes first, got 4"):
        groot_n16(head=replace(groot_n16().head, vl_depth=4))


# -- native -------------------------------------------------------------------------------------------------------


def write_n16(folder: Path) -> Path:
    """A robot other than LIBERO's, whose cameras may be missing."""
    tag, stats = "new_embodiment", {"state": statistics(written.STATE), "action": statistics(written.ACTION)}
    return written.write_n16(folder, modalities={tag: written.LIBERO}, stats={tag: stats}, ids={tag: 2})


WRITE = {"groot_n16": write_n16, "groot_n15": written.write_n15_lerobot}


@pytest.fixture(scope="module", params=WRITE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITE[request.param](tmp_path_factory.mktemp("groot") / request.param)


def policy_of(folder: Path, engine: Any, precision: Any = "fp32", **low: Any) -> OptimizedPolicy:
    specs = {part: EngineSpec(engine, precision=low.get(part, "auto")) for part in PARTS}
    config = PolicyConfig(device="cpu", precision=precision).with_specs(specs)
    return OptimizedPolicy.from_pretrained(folder, config)


@pytest.fixture(scope="module")
def eager(folder: Path) -> OptimizedPolicy:
    return policy_of(folder, "eager")


@pytest.fixture(scope="module")
def native(folder: Path) -> OptimizedPolicy:
    return policy_of(folder, "native")


def observed(policy: OptimizedPolicy, seed: int, prompt: str = "Pick up the bowl!") -> dict[str, Any]:
    given, preset = written.observation(seed, prompt), policy.processor.preset
    images = (given["observation/image"], given["observation/wrist_image"])
    state = preset.split(given["observation/state"])
    return {**dict(zip(preset.images, images, strict=True)), **state, preset.prompt: prompt}


def noise(policy: OptimizedPolicy, count: int) -> np.ndarray:
    config = policy.model.config
    drawn = np.random.default_rng(count).standard_normal((count, config.action_horizon, config.action_dim))
    return drawn.astype(np.float32)


def test_every_part_is_what_eager_computes(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    assert {entry["used"] for entry in native.ledger.as_list()} == {"native"}
    given, start = observed(eager, 0), noise(eager, 1)[0]
    want, got = (policy.infer_with_internals(given, noise=start)[1] for policy in (eager, native))
    sources = eager.model.config.head.sources
    assert list(got) == ["actions", "image_tokens", *(f"{s}_{what}" for s in sources for what in ("keys", "values"))]
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_rows_of_a_batch_are_what_they_are_alone(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    """Prompts of three lengths, whose padding comes first in N1.6 and last in N1.5."""
    given = [observed(eager, i, prompt) for i, prompt in enumerate(("open it", "pick up the black bowl", ""))]
    starts = noise(eager, 3)
    alone = [eager.infer(one, noise=start)["actions"] for one, start in zip(given, starts, strict=True)]
    for policy in (eager, native):
        for found, want in zip(policy.infer_batch(given, noise=starts), alone, strict=True):
            np.testing.assert_allclose(found["actions"], want, atol=1e-5)


def test_a_previous_chunk_is_refused(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    for policy in (eager, native):
        assert not policy.supports_prev_chunk
        assert not {"target", "weights"} & set(policy.pipelines.newest.engine("denoise").inputs)
        with pytest.raises(ConfigError, match=r"^prev_chunk: this family has no real-time chunking"):
            policy.infer(observed(policy, 1), prev_chunk=np.zeros((2, 7)), inference_delay=1)


def test_placed_steps_and_a_missing_camera(eager: OptimizedPolicy, native: OptimizedPolicy) -> None:
    given, start = observed(eager, 1), noise(eager, 2)[0]
    placed = [p.with_steps(3, "cubic").infer(given, noise=start)["actions"] for p in (eager, native)]
    np.testing.assert_allclose(placed[1], placed[0], atol=1e-5)
    fewer = {k: v for k, v in given.items() if k != eager.processor.preset.images[1]}
    one = [p.infer(fewer, noise=start)["actions"] for p in (eager, native)]
    np.testing.assert_allclose(one[1], one[0], atol=1e-5)
    assert np.abs(one[0] - eager.infer(given, noise=start)["actions"]).max() > 1e-3


def test_norms_inside_the_products_agree_with_eager(
    folder: Path, eager: OptimizedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "is_inside", lambda *_: True)
    fused, given, start = policy_of(folder, "native"), observed(eager, 1), noise(eager, 2)[0]
    want, got = (policy.infer(given, noise=start) for policy in (eager, fused))
    np.testing.assert_allclose(got["actions"], want["actions"], atol=1e-5)
    assert any("norms inside" in str(entry["detail"]) for entry in got["engines"])


@pytest.mark.slow
def test_lower_precisions_are_as_near_as_eagers(folder: Path, eager: OptimizedPolicy) -> None:
    def error(policy: OptimizedPolicy) -> float:
        given, start = observed(eager, 0), noise(eager, 1)[0]
        found = [p.infer_with_internals(given, noise=start)[1]["actions"] for p in (eager, policy)]
        return float(np.abs(found[0] - found[1]).mean())

    plain, fused = error(policy_of(folder, "eager", "bf16")), error(policy_of(folder, "native", "bf16"))
    narrow = error(policy_of(folder, "native", "bf16", denoise="fp8"))
    assert 0 < fused < 2 * plain and plain < narrow < 20 * plain


def test_cameras_are_in_the_models_order(eager: OptimizedPolicy) -> None:
    """The second view is dark: swapped ones are other actions."""
    given, start, (first, second) = observed(eager, 2), noise(eager, 1)[0], eager.processor.preset.images
    assert (first, second) in (
        ("observation.images.image", "observation.images.wrist_image"),
        ("observation.images.front", "observation.images.wrist"),
    )
    given[second] = given[second] // 8
    inputs = eager.processor.prepare(given)
    assert [image.mean() for image in inputs.images] == pytest.approx([127, 16], abs=4)
    swapped = {**given, first: given[second], second: given[first]}
    found = [eager.infer(one, noise=start)["actions"] for one in (given, swapped)]
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flop", "read"), [("groot_n16", 1.28, 1.66), ("groot_n15", 1.56, 0.83)])
def test_work_of_the_published_size(name: str, flop: float, read: float) -> None:
    """As counted apart from this code, in TFLOP and GB a step, at two views."""
    family, card = family_named(name), bench_card(family_named(name))
    config = card.published()
    transforms = card.dummy(config, 2)
    inputs = transforms.prepare(card.random_observation(transforms, np.random.default_rng(0)))
    work = card.work(config, inputs, 4, PolicyConfig().specs(family.parts))
    assert sum(w.flop for w in work.values()) / 1e12 == pytest.approx(flop, abs=0.1)
    assert work["denoise"].bytes / 4 / 1e9 == pytest.approx(read, abs=0.1)


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(("kind", "depth"), [("groot_n16", 32), ("groot_n15", 16)])
def test_a_call_launches_few_kernels(kind: str, depth: int) -> None:
    found = json.loads(*lines_of("compile_each", kind, "--count"))
    assert found["denoise"] == 4 * (5 * depth + 6) + 1 and found["vision"] < 100 and found["kv_cache"] < 100
