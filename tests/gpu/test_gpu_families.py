"""SmolVLA, GR00T, π0-FAST, ACT and Diffusion Policy on a GPU: native next to eager, small and at the published size
with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import (
    evo1_folders,
    groot_folders,
    openvla_oft_folders,
    tiny_act,
    tiny_diffusion_policy,
    tiny_multi_task_dit,
    tiny_pi0_fast,
    tiny_smolvla,
)
from tests.support.agreement import RATIO, assert_as_near
from tests.support.gpu_memory import Reserve, free, gigabytes
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import load_config
from vla_accel.families.act.family import ACT
from vla_accel.families.diffusion_policy.family import DIFFUSION_POLICY
from vla_accel.families.evo1.family import EVO1
from vla_accel.families.fastwam.family import FASTWAM
from vla_accel.families.groot.family import GROOT, GROOT_N15, GROOT_N16
from vla_accel.families.molmoact2.family import MOLMOACT2
from vla_accel.families.multi_task_dit.family import MULTI_TASK_DIT
from vla_accel.families.openvla_oft.family import OPENVLA_OFT
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.native_decode import TURN
from vla_accel.families.smolvla.family import SMOLVLA
from vla_accel.families.starvla.family import STARVLA_GROOT, STARVLA_OFT, STARVLA_PI
from vla_accel.families.vla_jepa.family import VLA_JEPA
from vla_accel.families.xvla.family import XVLA
from vla_accel.measure.parity import LIMITS, compare
from vla_accel.measure.random_policy import random_observations, random_policy
from vla_accel.numeric import cosine

pytestmark = pytest.mark.gpu

GROOTS = (GROOT, GROOT_N16, GROOT_N15)
FEWER_BITS = 2**4
"""How much coarser FP8 is than BF16, with three bits of a mantissa in place of seven. INT8's steps are finer."""
PROMPTS = {
    "smolvla": ("pick up the bowl", "pick it", "place it"),
    "groot": ("open it", "pick up the black bowl", "put it on the task " * 6),
    "pi0_fast": ("pick up the bowl", "pick it", "pick up the bowl : pick it up"),
}


def settings(family: Any, precision: str, engine: str, **parts: str) -> PolicyConfig:
    """`parts`: precision of the engine of a component."""
    spec = EngineSpec(engine)  # type: ignore[arg-type]
    specs = {n: replace(spec, precision=parts.get(n, "auto")) for n in family.parts}  # type: ignore[arg-type]
    base = {"precision": precision, "device": "cuda", "checkpoint": {"relaxed_actions": family is PI0_FAST}}
    return load_config(base).with_specs(specs)


def used(policy: OptimizedPolicy) -> set[str]:
    return {entry.used for entry in policy.ledger.entries.values()}


@pytest.mark.parametrize(
    ("family", "low"),
    [
        (SMOLVLA, {}), (SMOLVLA, {"kv_cache": "fp8"}), (SMOLVLA, {"vision": "fp8", "kv_cache": "fp8"}),
        (SMOLVLA, {"denoise": "int8"}), (GROOT, {}), (GROOT, {"denoise": "fp8"}), (GROOT, {"denoise": "int8"}),
        (GROOT_N16, {}), (GROOT_N16, {"denoise": "fp8"}), (GROOT_N15, {}), (GROOT_N15, {"denoise": "fp8"}),
        (VLA_JEPA, {}), (VLA_JEPA, {"denoise": "fp8"}), (VLA_JEPA, {"denoise": "int8"}), (ACT, {}),
        (EVO1, {}), (EVO1, {"denoise": "fp8"}), (EVO1, {"denoise": "int8"}),
        (STARVLA_GROOT, {}), (STARVLA_PI, {}), (STARVLA_OFT, {}),
        (OPENVLA_OFT, {}), (OPENVLA_OFT, {"decode": "fp8"}),
        (DIFFUSION_POLICY, {}), (DIFFUSION_POLICY, {"denoise": "int8"}),
        (MOLMOACT2, {}), (MOLMOACT2, {"denoise": "fp8"}), (MOLMOACT2, {"denoise": "int8"}),
        (MOLMOACT2, {"vision": "fp8", "kv_cache": "fp8"}),
        (FASTWAM, {}), (FASTWAM, {"kv_cache": "fp8"}), (FASTWAM, {"kv_cache": "fp8", "denoise": "fp8"}),
        (XVLA, {}), (XVLA, {"denoise": "fp8"}),
        (MULTI_TASK_DIT, {}), (MULTI_TASK_DIT, {"denoise": "fp8"}), (MULTI_TASK_DIT, {"denoise": "int8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", str(value)),
)  # fmt: skip
def test_published_size(family: Any, low: dict[str, str], reserve: Reserve) -> None:
    """Random weights, in one graph: in BF16 as near to FP32 as eager is, in a lower precision as near as its bits
    permit and nearer to the answer for its own observation than to another's. How large the cosine is depends on what
    the observations change."""
    reserve(gigabytes(family))
    policy, exact = random_policy(family, settings(family, "bf16", "native", **low), with_reference=True)
    assert exact is not None
    given = random_observations(policy, 4)
    report = compare(policy, exact, given, name="native")
    assert used(policy) == {"native", "cuda_graph"}
    if family is SMOLVLA:
        streamed = torch.cuda.get_device_capability() == (9, 0) and "denoise" not in low
        assert policy.ledger.entries["denoise"].detail.startswith("streamed CUDA kernels" if streamed else "fused ops")
    del policy
    free()
    plain, _ = random_policy(family, settings(family, "bf16", "eager"))
    eager = compare(plain, exact, given, name="eager")
    assert report.relative_error is not None and eager.relative_error is not None
    assert report.relative_error <= (FEWER_BITS if low else RATIO) * eager.relative_error
    if low:
        assert report.relative_error < 0.5


@pytest.mark.parametrize("libero", [False, True])
def test_smolvla_is_as_near_as_eager(libero: bool, tmp_path: Path) -> None:
    """Batches of several lengths in one graph, guided and not, in BF16."""
    tiny_smolvla.write_lerobot(tmp_path, libero=libero)
    given = [tiny_smolvla.observation(i, libero=libero, prompt=prompt) for i, prompt in enumerate(PROMPTS["smolvla"])]
    noise = np.random.default_rng(2).standard_normal((3, 5, 9)).astype(np.float32)
    chunk = np.full((4, 7 if libero else 6), 0.3)
    for guided in ({}, {"prev_chunks": [chunk, None, chunk[:2]], "inference_delays": [2, None, 1]}):
        answers = []
        for precision, engine in (("bf16", "native"), ("bf16", "eager"), ("fp32", "eager")):
            policy = OptimizedPolicy.from_pretrained(tmp_path, settings(SMOLVLA, precision, engine))
            made = [r["actions"] for r in policy.infer_batch(given, noise=noise, **guided)]
            answers.append(torch.from_numpy(np.stack(made)))
            assert used(policy) - {"cuda_graph", "stream"} == {engine}
        assert_as_near(*answers)


def test_smolvla_in_fp32_is_eager(tmp_path: Path) -> None:
    tiny_smolvla.write_lerobot(tmp_path)
    noise = np.random.default_rng(2).standard_normal((5, 9)).astype(np.float32)
    policies = [OptimizedPolicy.from_pretrained(tmp_path, settings(SMOLVLA, "fp32", e)) for e in ("native", "eager")]
    ours, theirs = (p.infer(tiny_smolvla.observation(), noise=noise)["actions"] for p in policies)
    # TF32 products keep ten bits of a mantissa.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-3)


@pytest.mark.parametrize("libero", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_act_is_as_near_as_eager(batch: int, libero: bool, tmp_path: Path) -> None:
    """Cameras of two sizes, and of one; every call again the same."""
    tiny_act.write_lerobot(tmp_path, libero=libero)
    given = [tiny_act.observation(seed, libero=libero) for seed in range(batch)]
    answers = []
    for precision, engine in (("bf16", "native"), ("bf16", "eager"), ("fp32", "eager")):
        policy = OptimizedPolicy.from_pretrained(tmp_path, settings(ACT, precision, engine))
        first, again = (np.stack([r["actions"] for r in policy.infer_batch(given)]) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        answers.append(torch.from_numpy(first))
        assert used(policy) - {"cuda_graph"} == {engine}
    assert_as_near(*answers)


@pytest.mark.parametrize("variant", openvla_oft_folders.VARIANTS)
def test_openvla_oft_is_as_near_as_eager(variant: str, tmp_path: Path) -> None:
    """Batches of several prompt lengths in one graph, with images that the device resizes and crops; every call again
    the same."""
    folder = openvla_oft_folders.write(tmp_path, variant)
    preset = openvla_oft_folders.preset(tmp_path, variant)
    sizes = openvla_oft_folders.ODD
    given = [openvla_oft_folders.given(variant, index, sizes) for index in range(3)]
    answers = []
    for precision, engine in (("bf16", "native"), ("bf16", "eager"), ("fp32", "eager")):
        config = replace(settings(OPENVLA_OFT, precision, engine), preset=preset)
        policy = OptimizedPolicy.from_pretrained(folder, config)
        first, again = (np.stack([r["actions"] for r in policy.infer_batch(given)]) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        # LIBERO's gripper has three values.
        answers.append(torch.from_numpy(first if variant == "aloha" else first[..., :6]))
        assert used(policy) - {"cuda_graph"} == {engine}
    assert_as_near(*answers)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("family", "support"),
    [(DIFFUSION_POLICY, tiny_diffusion_policy), (MULTI_TASK_DIT, tiny_multi_task_dit)],
    ids=["diffusion_policy", "multi_task_dit"],
)
def test_a_noise_scheduler_is_as_near_as_eager(family: Any, support: Any, batch: int, tmp_path: Path) -> None:
    """Frames of two cameras and two moments, prompts of several lengths, and new noise at each step."""
    support.write_lerobot(tmp_path)
    given = [support.observation(seed, 2) for seed in range(batch)]
    answers = []
    for precision, engine in (("bf16", "native"), ("bf16", "eager"), ("fp32", "eager")):
        policy = OptimizedPolicy.from_pretrained(tmp_path, settings(family, precision, engine))
        noise = np.random.default_rng(0).standard_normal((batch, *policy.noise_shape))
        first, again = (np.stack([r["actions"] for r in policy.infer_batch(given, noise=noise)]) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        answers.append(torch.from_numpy(first))
        assert used(policy) - {"cuda_graph"} == {engine}
    assert_as_near(*answers)


def test_a_graph_encodes_an_instruction_when_it_changes(tmp_path: Path) -> None:
    tiny_multi_task_dit.write_lerobot(tmp_path)
    policy = OptimizedPolicy.from_pretrained(tmp_path, settings(MULTI_TASK_DIT, "bf16", "native"))
    noise = np.random.default_rng(0).standard_normal(policy.noise_shape)
    first, second = ({**tiny_multi_task_dit.observation(0, 2), "task": task} for task in tiny_multi_task_dit.TASKS[:2])
    results = [policy.infer(given, noise=noise) for given in (second, first, first, second, second)]
    spent = [result["policy_timing"]["kv_cache_ms"] > 0 for result in results]
    assert spent[1:] == [True, False, True, False]
    actions = [result["actions"] for result in results]
    for one, other in ((0, 3), (3, 4), (1, 2)):
        np.testing.assert_array_equal(actions[one], actions[other])
    assert np.abs(actions[0] - actions[1]).max() > 0


# -- GR00T ------------------------------------------------------------------------------------------------------------


def groot_noise(policy: OptimizedPolicy, count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, *policy.action_shape)).astype(np.float32)


@pytest.mark.parametrize("denoise", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", GROOTS, ids=lambda family: family.name)
def test_groot_is_as_near_as_eager(flow_folders: dict[str, Path], family: Any, batch: int, denoise: Any) -> None:
    """Prompts of three lengths, of which N1.6's are padded in front."""
    configs = (
        settings(family, "bf16", "native", denoise=denoise), settings(family, "bf16", "eager"),
        settings(family, "fp32", "eager"),
    )  # fmt: skip
    policies = [OptimizedPolicy.from_pretrained(flow_folders[family.name], config) for config in configs]
    assert policies[0].pipelines.newest.captured is not None, "a whole call in graphs"
    given = [groot_folders.OBSERVATIONS[family.name](i, PROMPTS["groot"][i]) for i in range(batch)]
    rows = []
    for policy in policies:
        policy.infer_batch(given, noise=groot_noise(policy, batch))
        rows.append(policy.pipelines.newest.outputs["actions"].cpu().clone())
    if denoise == "auto":
        assert_as_near(*rows)
    else:
        least = LIMITS[denoise].cosine
        assert least is not None and cosine(rows[0].numpy(), rows[2].numpy()) >= least


def test_guided_and_plain_calls_of_groot_share_a_graph(groot_folder: Path) -> None:
    native, eager = (
        OptimizedPolicy.from_pretrained(groot_folder, settings(GROOT, "bf16", e)) for e in ("native", "eager")
    )
    observation = groot_folders.observation
    noise, one, other = groot_noise(native, 1)[0], observation(), observation(1)
    plain = native.infer(one, noise=noise)["actions"]
    chunk = plain[2:]
    guided = [p.infer(other, noise=noise, prev_chunk=chunk, inference_delay=2)["actions"] for p in (native, eager)]
    np.testing.assert_allclose(guided[0][:2, :6], chunk[:2, :6], atol=1e-5)
    np.testing.assert_allclose(guided[0][:, :6], guided[1][:, :6], atol=0.1)
    np.testing.assert_array_equal(native.infer(one, noise=noise)["actions"], plain)


# -- Evo-1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("denoise", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("batch", [1, 3])
def test_evo1_is_as_near_as_eager(flow_folders: dict[str, Path], batch: int, denoise: Any) -> None:
    """Prompts of three lengths, guided and not, with images that the device resizes."""
    configs = (
        settings(EVO1, "bf16", "native", denoise=denoise), settings(EVO1, "bf16", "eager"),
        settings(EVO1, "fp32", "eager"),
    )  # fmt: skip
    given = evo1_folders.given("resized")[:batch]
    chunk = np.full((4, 7), 0.3)
    policies = [OptimizedPolicy.from_pretrained(flow_folders["evo1"], config) for config in configs]
    for guided in ({}, {"prev_chunks": [chunk] * batch, "inference_delays": [2] * batch}):
        rows = []
        for policy in policies:
            policy.infer_batch(given, noise=evo1_folders.noise()[:batch], **guided)
            rows.append(policy.pipelines.newest.outputs["actions"].cpu().clone())
        assert policies[0].pipelines.newest.captured is not None, "a whole call in graphs"
        if denoise == "auto":
            assert_as_near(*rows)
        else:
            assert cosine(rows[0].numpy(), rows[2].numpy()) >= 0.95


# -- π0-FAST ----------------------------------------------------------------------------------------------------------


def unchecked(files: dict[str, Any]) -> None:
    files["config"]["validate_action_token_prefix"] = False


def tokens_of(policy: OptimizedPolicy) -> torch.Tensor:
    return policy.pipelines.newest.outputs["action_tokens"].cpu().clone()


def test_captured_turns_of_pi0_fast_write_what_launches_do(tmp_path: Path) -> None:
    """In BF16, bit for bit: as one call of graphs, and launched one by one."""
    tiny_pi0_fast.write_lerobot(tmp_path, change=unchecked)
    given = [tiny_pi0_fast.observation(i, prompt) for i, prompt in enumerate(PROMPTS["pi0_fast"])]
    found = []
    for captured in (True, False):
        config = replace(settings(PI0_FAST, "bf16", "native"), cuda_graph=captured)
        policy = OptimizedPolicy.from_pretrained(tmp_path, config, num_steps=3 * TURN + 2)
        for _ in range(3):
            policy.infer_batch(given)
            found.append(tokens_of(policy))
        assert used(policy) == ({"native", "cuda_graph"} if captured else {"native"})
    assert all(torch.equal(one, found[0]) for one in found[1:])


def test_pi0_fast_ends_early_for_every_stop_token(tmp_path: Path) -> None:
    config = tiny_pi0_fast.tiny_config(stop_token=None, max_steps=40)
    tiny_pi0_fast.write_lerobot(tmp_path, config, change=unchecked)
    policy = OptimizedPolicy.from_pretrained(tmp_path, settings(PI0_FAST, "bf16", "native"))
    stop = policy.model.config.stop_token
    for given in (tiny_pi0_fast.observation(0), tiny_pi0_fast.observation(3, "pick it")):
        times = policy.infer(given)["policy_timing"]
        whole = tokens_of(policy)[0].tolist()
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        # At most two turns more than needed.
        assert not any(whole[(end // TURN + 3) * TURN :])
        assert times["decode_ms"] > 0 and times["total_ms"] >= times["decode_ms"]


def test_pi0_fast_in_fp32_is_eager(tmp_path: Path) -> None:
    """Products on either side are TF32's or float32's; the first tokens must be the same."""
    tiny_pi0_fast.write_lerobot(tmp_path, change=unchecked)
    found = []
    for engine in ("native", "eager"):
        policy = OptimizedPolicy.from_pretrained(tmp_path, settings(PI0_FAST, "fp32", engine), num_steps=TURN)
        policy.infer(tiny_pi0_fast.observation())
        found.append(tokens_of(policy))
    assert torch.equal(found[0][:, :1], found[1][:, :1])


@pytest.mark.parametrize(
    "low", [{}, {"kv_cache": "fp8"}, {"kv_cache": "fp8", "decode": "fp8"}, {"decode": "int8"}], ids=str
)
def test_published_size_of_pi0_fast(low: dict[str, str], reserve: Reserve) -> None:
    """Random weights: keys and values are near eager's, and the requested number of tokens comes in one call of
    graphs."""
    reserve(gigabytes(PI0_FAST, bytes_each=4))
    policy, _ = random_policy(PI0_FAST, settings(PI0_FAST, "bf16", "native", **low).with_steps(32))
    given = random_observations(policy, 2)
    answers = [policy.infer(one)["actions"] for one in given]
    assert all(np.isfinite(actions).all() and actions.shape == (50, 7) for actions in answers)
    assert used(policy) == {"native", "cuda_graph"} and tokens_of(policy).shape == (1, 32)
    for one, actions in zip(given, answers, strict=True):
        np.testing.assert_array_equal(policy.infer(one)["actions"], actions)
    if low:
        return
    keys = policy.pipelines.newest.outputs["keys"].float()
    plain, _ = random_policy(PI0_FAST, settings(PI0_FAST, "bf16", "eager").with_steps(1))
    plain.infer(given[1])
    real = plain.pipelines.newest.outputs["keys"].float()
    kept = keys[:, :, : real.shape[2]]
    assert torch.nn.functional.cosine_similarity(kept.flatten(), real.flatten(), dim=0) > 0.999
    # Each weight once: tower and projector, Gemma, and the table that is the head, too.
    assert policy.memory()["total"] - policy.memory()["buffers"] < 6.3e9
