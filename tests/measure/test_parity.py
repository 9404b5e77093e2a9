"""Agreement with the reference: what is judged, several noises an observation, flipped commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import cli
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.fastwam.network import fastwam
from vla_accel.families.molmoact2.network import MolmoExpertConfig, MolmoTextConfig, molmoact2
from vla_accel.families.pi0.family import PI05
from vla_accel.families.pi0.network import Pi0Config, pi05
from vla_accel.families.xvla.network import xvla
from vla_accel.images.autoencoder import WanEncoderConfig
from vla_accel.ledger import Ledger
from vla_accel.measure.parity import FLIP_RATE, LIMITS, Limits, compare, random_limits
from vla_accel.measure.random_policy import random_observations, random_policy
from vla_accel.measure.recording import save_observations
from vla_accel.nn.bart import BartConfig
from vla_accel.nn.davit import DavitConfig
from vla_accel.nn.flow import Schedule
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.molmo_vision import MolmoVisionConfig
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.nn.wan import WanConfig
from vla_accel.policy import OptimizedPolicy


class Stub:
    """A policy whose actions are the noise and what it sees, and, as the last dimension, the noise's sign.

    `flip`: calls that turn it once."""

    def __init__(self, error: float = 0.0, flip: tuple[int, ...] = ()) -> None:
        self.error, self.flip, self.calls = error, flip, 0
        self.model, self.action_shape = SimpleNamespace(dtype=torch.float32), (3, 2)
        self.num_steps, self.schedule, self.specs = 4, Schedule.uniform(4), {"all": EngineSpec()}
        self.ledger, self.family = Ledger(), PI05
        self.noises: list[np.ndarray] = []
        self.noise_shape = self.action_shape

    def infer_with_internals(self, observation: Any, *, noise: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        self.noises.append(noise)
        seen = observation.get("seen", 0.0) if observation else 0.0
        actions = np.stack([noise[:, 0] + seen + self.error, np.sign(noise[:, 1])], axis=1)
        if self.calls in self.flip:
            actions[0, 1] *= -1
        self.calls += 1
        one = np.ones(4)
        return {"actions": actions}, {"actions": actions, "image_tokens": one, "keys": one, "values": one}


def report(policy: Stub, reference: Stub, count: int = 4, **more: Any) -> Any:
    # Observations half a recording apart differ by 0.5.
    shown = [{"seen": 0.5 * (i >= count // 2)} for i in range(count)]
    found = compare(policy, reference, shown, name="stub", **more)  # type: ignore[arg-type]
    assert found.name == "stub"
    return found


def test_every_draw_has_its_own_noise_and_both_policies_get_it() -> None:
    policy, reference = Stub(), Stub()
    found = report(policy, reference, draws=3)
    assert len(policy.noises) == 12 and found.observations == 4 and found.draws == 3
    drawn = [n.tobytes() for n in policy.noises]
    assert list(dict.fromkeys(n.tobytes() for n in reference.noises)) == drawn and len(set(drawn)) == 12
    assert found.passed and found.actions.cosine == pytest.approx(1) and found.flipped == 0
    assert set(found.components) == {"image_tokens", "keys", "values"}


@pytest.mark.parametrize("config", ["eager", "native"])
def test_prompts_of_any_lengths_are_compared(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    write_tiny_checkpoint(tmp_path / "checkpoint")
    prompts = ("pick", "pick up the bowl", "pick up the bowl place it on the plate")
    save_observations([tiny_observation(i, prompt) for i, prompt in enumerate(prompts)], tmp_path / "observations.npz")
    (tmp_path / "eager.yaml").write_text("num_steps: 2\n")
    named = {"eager": str(tmp_path / "eager.yaml"), "native": "native"}[config]
    words = ["parity", str(tmp_path / "checkpoint"), "--observations", str(tmp_path / "observations.npz"), "--config"]
    assert cli.main([*words, named, "--device", "cpu"]) == 0
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert content["observations"] == 3 and content["engines"][0]["used"] == config
    assert set(content["components"]) == {"image_tokens", "keys", "values"}
    assert all(found["worst_cosine"] > 0.9999 for found in content["components"].values())


def test_one_wrong_key_of_one_observation_is_seen_whatever_the_lengths() -> None:
    class Long(Stub):
        """Whose keys are as many as the prompt has tokens, one of them wrong by `error` where it has five."""

        def infer_with_internals(self, observation: Any, *, noise: np.ndarray) -> Any:
            result, raw = super().infer_with_internals(observation, noise=noise)
            keys = np.ones((2, observation["length"]))
            keys[1, 2] += self.error * (observation["length"] == 5)
            return result, {**raw, "keys": keys}

    shown = [{"seen": 0.5 * length, "length": length} for length in (4, 5, 6, 7)]
    right, wrong = (compare(Long(by), Long(), shown, name="stub").components["keys"] for by in (0.0, 0.5))  # type: ignore[arg-type]
    assert right.max_error == 0 and right.cosine == pytest.approx(1) and right.worst_cosine == pytest.approx(1)
    assert wrong.max_error == 0.5 and wrong.mean_error == pytest.approx(0.5 / (2 * (4 + 5 + 6 + 7)))
    assert wrong.median_cosine == pytest.approx(1) and wrong.worst_cosine < wrong.cosine < 0.9999


def test_flipped_commands_are_counted_and_judged_by_their_rate_alone() -> None:
    found = report(Stub(error=0.001, flip=(1, 5)), Stub(), draws=2, limits=Limits(0.999, 0.005))
    assert found.flipped == 2 and found.rest_cosine > 0.9999 and found.actions.cosine < 0.95
    assert not found.passed and not [r for r in found.reasons if "cosine" in r]
    assert [r for r in found.reasons if r.startswith("commands flipped in at least ")]
    assert report(Stub(error=0.9), Stub()).flipped == 0
    everything = report(Stub(flip=(0, 1, 2, 3)), Stub())
    assert everything.flipped == 4 and everything.rest_cosine is None and not everything.passed
    json.dumps(everything.as_dict())


def test_the_cosine_is_of_the_chunks_in_which_no_command_fell_the_other_way() -> None:
    # One flip of 200 chunks costs the cosine of all 0.0017, which is more than the limit leaves.
    rare = report(Stub(flip=(7,)), Stub(), count=200, limits=Limits(0.999, 0.005))
    assert rare.actions.cosine < 0.999 and rare.rest_cosine == pytest.approx(1)
    assert [r.partition(" %")[0] for r in rare.reasons] == ["error 16.3"], "all that FP32 is refused for"
    off = report(Stub(error=0.3, flip=(7,)), Stub(), count=200, limits=Limits(0.999, 0.005))
    assert off.flipped == 1 and [r for r in off.reasons if r.startswith(f"cosine {off.rest_cosine:.6f}, ")]


# -- what agreement is worth: a policy that does not look must fail --------------------------------------------------


def narrow(depth: int, patch: int) -> Pi0Config:
    """π0.5's published structure at a small width: two views, an expert that reads each layer of the prefix."""
    return pi05(
        vision=SiglipConfig(width=64, depth=depth, mlp_dim=128, heads=4, patch_size=patch),
        prefix=GemmaConfig(64, depth, 128, heads=4, head_dim=32),
        expert=GemmaConfig(64, depth, 128, heads=4, head_dim=32),
        vocab_size=4096,
        action_horizon=10,
        discrete_state_input=False,
    )


class Cheat:
    """A policy that acts on something else than what it is shown."""

    def __init__(self, policy: OptimizedPolicy, **instead: Any) -> None:
        self._policy, self._instead = policy, instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def infer_with_internals(self, observation: Any, *, noise: np.ndarray) -> Any:
        return self._policy.infer_with_internals({**observation, **self._instead}, noise=noise)


def judged(config: Pi0Config, steps: int) -> dict[str, Any]:
    """Reports on an honest policy, one that sees other images, and one with the K/V cache of another prompt; all of
    them in BF16, and given FP8's looser limits."""
    settings = PolicyConfig(num_steps=steps, precision="bf16", device="cpu")
    settings = settings.with_specs({name: EngineSpec("eager") for name in PI05.parts})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_card(PI05), "published", lambda horizon=None: config)
        policy, reference = random_policy(PI05, settings, with_reference=True, device="cpu")
    assert reference is not None
    observations = random_observations(policy, 2)
    images = {key: value for key, value in observations[1].items() if "image" in key}
    cheats = {
        "honest": policy,
        "one image for all": Cheat(policy, **{key: np.full_like(value, 127) for key, value in images.items()}),
        "another prompt": Cheat(
            policy, prompt="open the middle drawer of the wooden cabinet and push the white mug to the back wall"
        ),
    }
    loose = LIMITS["fp8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vla_accel.measure.parity.limits_of", lambda specs, dtype: loose)
        return {
            name: compare(cheat, reference, observations, name=name)  # type: ignore[arg-type]
            for name, cheat in cheats.items()
        }


def check_that_parity_bites(reports: dict[str, Any]) -> None:
    honest = reports.pop("honest")
    assert honest.passed and honest.sensitivity > 0.15, "random weights for which observations matter"
    assert 0 < honest.relative_error < LIMITS["bf16"].relative
    for name, report in reports.items():
        assert not report.passed and report.relative_error > LIMITS["fp8"].relative, name
        assert any("of the change between observations" in reason for reason in report.reasons), name


def test_a_policy_that_does_not_look_fails() -> None:
    check_that_parity_bites(judged(narrow(depth=4, patch=28), steps=2))


@pytest.mark.slow
def test_a_policy_that_does_not_look_fails_at_the_published_depth_and_length() -> None:
    check_that_parity_bites(judged(narrow(depth=18, patch=14), steps=3))


def narrower(name: str) -> Any:
    """A family's published structure at a small width."""
    if name == "fastwam":
        sizes: dict[str, Any] = {"heads": 2, "head_dim": 32, "depth": 8, "text_dim": 64}
        video, action = WanConfig(width=96, mlp_dim=192, **sizes), WanConfig(width=64, mlp_dim=128, **sizes)
        return fastwam(vae=WanEncoderConfig(base=16), video=video, action=action, image_size=(128, 256))
    if name == "molmoact2":
        tower: dict[str, Any] = {"width": 64, "depth": 4, "mlp_dim": 128, "heads": 2, "image_size": 126}
        vision = MolmoVisionConfig(**tower, levels=(3, 1), pool_width=64, pool_heads=2, hidden=256)
        prefix, expert = MolmoTextConfig(96, 8, 192, 4, 2, 32), MolmoExpertConfig(64, 128, 2, 8)
        return molmoact2(vision=vision, prefix=prefix, expert=expert)
    stages = tuple(replace(one, width=one.width // 4, heads=one.heads // 4, groups=one.groups // 4)
                   for one in DavitConfig().stages)  # fmt: skip
    encoder = BartConfig(width=256, mlp_dim=1024, heads=4)
    return xvla(vision=DavitConfig(stages), encoder=encoder, width=128, depth=24, heads=4, mlp_dim=256)


@pytest.mark.parametrize("name", ["fastwam", "molmoact2", pytest.param("xvla", marks=pytest.mark.slow)])
def test_random_weights_look_at_the_observation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16 they lose less than what another observation changes, so that agreement says something."""
    family = family_named(name)
    monkeypatch.setattr(bench_card(family), "published", lambda horizon=None: narrower(name))
    settings = PolicyConfig(num_steps=2, precision="bf16", device="cpu")
    settings = settings.with_specs({part: EngineSpec("eager") for part in family.parts})
    policy, reference = random_policy(family, settings, with_reference=True, device="cpu")
    assert reference is not None
    found = compare(policy, reference, random_observations(policy, 2), name=name)
    assert found.sensitivity is not None and found.sensitivity > 0.15
    assert found.relative_error is not None and found.relative_error < LIMITS["bf16"].relative, found.sensitivity


def test_a_blind_reference_judges_nothing() -> None:
    blind = compare(Stub(), Stub(), [{"a": 1}, {"a": 2}], name="stub")  # type: ignore[arg-type]
    assert blind.sensitivity == 0 and blind.relative_error is None and not blind.passed
    assert blind.reasons == ("another observation changes nothing, so agreement proves nothing",)
    alone = report(Stub(), Stub(), count=1)
    assert alone.passed and alone.sensitivity is None and alone.relative_error is None


def test_the_error_is_measured_in_what_another_observation_changes() -> None:
    found = report(Stub(error=0.02), Stub(), limits=Limits(0.0, 0.005))
    # The stub's first action dimension moves by 0.5 from one observation to the next, and all errors are 0.02.
    assert found.relative_error == pytest.approx(0.02 / 0.5) and not found.passed
    assert found.reasons == ("error 4.0 % of the change between observations, at most 0.5 % allowed",)


@pytest.mark.parametrize(
    ("dtype", "precision", "eager_error", "largest"),
    [
        (torch.bfloat16, "auto", 0.01, 0.06), (torch.bfloat16, "auto", 0.05, 0.1), (torch.bfloat16, "auto", 0.4, 0.5),
        (torch.bfloat16, "fp8", 0.01, 0.2), (torch.bfloat16, "int8", 0.02, 0.32), (torch.bfloat16, "fp8", 0.1, 0.5),
        (torch.float32, "auto", 0.0, 0.005),
    ],
)  # fmt: skip
def test_eager_in_the_same_dtype_sets_the_limit_of_random_weights(
    dtype: torch.dtype, precision: Any, eager_error: float, largest: float
) -> None:
    specs = {"vision": EngineSpec(), "denoise": EngineSpec(precision=precision)}
    limits = random_limits(specs, dtype, eager_error)
    assert limits.cosine is None and limits.relative == pytest.approx(largest)
    far = report(Stub(error=0.3 * largest), Stub(), limits=limits)  # 60 % of the limit: the actions change by 0.5
    assert far.passed and far.threshold is None
    assert not report(Stub(error=0.51 * largest), Stub(), limits=limits).passed


def test_flips_fail_where_their_interval_lies_above_the_rate() -> None:
    few = report(Stub(flip=(1,)), Stub(), count=50, limits=Limits(0.0, 0.005))
    many = report(Stub(flip=tuple(range(0, 50, 8))), Stub(), count=50, limits=Limits(0.0, 0.005))
    assert few.flipped == 1 and few.flipped_low < FLIP_RATE < few.flipped_high
    assert many.flipped == 7 and many.flipped_low > FLIP_RATE
    assert not [r for r in few.reasons if "commands" in r]
    assert [r for r in many.reasons if r.startswith("commands flipped in at least ")]
