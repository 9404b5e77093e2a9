"""The seam between models and the rest: a family that shares nothing with π0 runs through all of it, by its registry
line alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.toy_family.family import REAL, TOY
from tests.support.toy_family.network import Toy, ToyConfig
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig, cli
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.config import load_config
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import FAMILIES, family_named
from vla_accel.families.loading import load
from vla_accel.measure.parity import LIMITS, compare
from vla_accel.measure.random_policy import random_observations, random_policy
from vla_accel.measure.recording import save_observations
from vla_accel.policy import ahead_of_time

FP32 = PolicyConfig(num_steps=3, precision="fp32", device="cpu")
EAGER, NATIVE = (FP32.with_specs(dict.fromkeys(TOY.parts, EngineSpec(e))) for e in ("eager", "native"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", "tests.support.toy_family.family:TOY")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ToyConfig(width=6)
    model = bench_card(TOY).random(config, seed=1, device="cpu", dtype=torch.float32)
    save_checkpoint(model.state_dict(), config, tmp_path, family="toy")
    return tmp_path


def observation(seed: int = 0) -> dict[str, Any]:
    return bench_card(TOY).random_observation(None, np.random.default_rng(seed))


def noise(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 2)).astype(np.float32)


def by_hand(policy: OptimizedPolicy, given: dict[str, Any], start: np.ndarray) -> np.ndarray:
    """The toy in NumPy."""
    weights = {n: p.double().numpy() for n, p in policy.model.named_parameters()}
    patches = given["frame"].reshape(4, 12)[:REAL] / 255
    latents = np.tanh(patches @ weights["encoder.weight"].T + weights["encoder.bias"])
    features = np.concatenate((latents.mean(0), given["joints"]))
    target, x = features @ weights["head.weight"].T + weights["head.bias"], start.astype(np.float64)
    for step in range(policy.num_steps):
        x = x + (target - x) / (policy.num_steps - step + 1)
    return x + given["joints"]


@pytest.mark.parametrize("config", [EAGER, NATIVE], ids=["eager", "native"])
def test_a_checkpoint_acts_in_every_engine(folder: Path, config: PolicyConfig) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, config)
    assert (policy.checkpoint.folder, policy.family) == (folder, TOY)
    result = policy.infer(observation(), noise=noise())
    np.testing.assert_allclose(result["actions"], by_hand(policy, observation(), noise()), atol=1e-6)
    np.testing.assert_array_equal(result["state"], observation()["joints"])
    used = config.engines["head"].engine
    assert [(e["component"], e["used"]) for e in result["engines"]] == [("encoder", used), ("head", used)]
    assert policy.metadata["model"] == {"kind": "toy", "parameters": 96, "action_horizon": 3, "action_dim": 2}


@pytest.mark.parametrize("config", [EAGER, NATIVE], ids=["eager", "native"])
def test_batches_reports_and_joined_buffers(folder: Path, config: PolicyConfig) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, config)
    given, starts = [observation(i) for i in range(3)], np.stack([noise(i) for i in range(3)])
    for one, start, result in zip(given, starts, policy.infer_batch(given, noise=starts), strict=True):
        np.testing.assert_allclose(result["actions"], by_hand(policy, one, start), atol=1e-6)
    report = policy.latency_report()["components"]
    sections = ["preprocess", "encoder", "head", "transfer", "postprocess"]
    assert list(report) == [*sections, "total"]
    assert sum(report[n]["mean_ms"] for n in sections) == pytest.approx(report["total"]["mean_ms"])
    encoder, head = (e for _, e in policy.pipelines.newest.engines)
    assert head.inputs["latents"] is encoder.outputs["latents"], "joined by name"
    assert head.inputs["mask"].data_ptr() == encoder.inputs["mask"].data_ptr(), "staged once"
    assert set(policy.pipelines.newest._host) == {"frame", "mask", "joints"}
    with pytest.raises(ObservationError, match=r"noise: expected shape \(3, 2\), got \(2, 3\)"):
        policy.infer(observation(), noise=np.zeros((2, 3)))


def test_parity_compares_what_the_family_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, reference = random_policy("toy", replace(NATIVE, precision="bf16"), with_reference=True)
    assert reference is not None and reference.model.dtype == torch.float32
    report = compare(policy, reference, random_observations(policy, 3), name="toy")
    assert list(report.components) == ["latents"] and 0.9995 < report.actions.cosine < 1
    assert {e["used"] for e in reference.ledger.as_list()} == {"eager"}
    path = tmp_path / "toy.yaml"
    path.write_text("num_steps: 2\nprecision: bf16\nengines: {encoder: native, head: eager}\n")
    words = ["parity", "--config", str(path), "--model", "toy", "--device", "cpu"]
    exact, infer = list[int](), OptimizedPolicy.infer_with_internals

    def counted(one: OptimizedPolicy, *given: Any, **named: Any) -> Any:
        exact.extend([1] * (one.model.dtype == torch.float32))
        return infer(one, *given, **named)

    monkeypatch.setattr(OptimizedPolicy, "infer_with_internals", counted)
    assert cli.main([*words, "--count", "2"]) == 0
    assert len(exact) == 4, "FP32 computes each answer once: of an observation, and of another one with its noise"
    out, err = capsys.readouterr()
    assert err.startswith("preparing toy and FP32 eager\n"), "both take their time on a GPU"
    found = json.loads(out.splitlines()[-1])
    assert [e["used"] for e in found["engines"]] == ["native", "eager"] and found["model"]["kind"] == "toy"
    assert found["threshold"] is None and found["eager_error"] > 0
    assert found["relative_threshold"] == max(LIMITS["bf16"].relative, min(2 * found["eager_error"], 0.5))
    assert f"and {found['eager_error']:.1%} in eager of the same dtype" in out
    assert cli.main([*words, "--count", "2", "--threshold", "1"]) == 1, "BF16 is not FP32"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["threshold"] == 1
    # Both are judged on the same observations.
    save_observations(random_observations(policy, 3, seed=5), tmp_path / "recorded.npz")
    recorded = [*words, "--observations", str(tmp_path / "recorded.npz")]
    assert cli.main(recorded) == 0
    other = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert other["observations"] == 3 and other["eager_error"] != found["eager_error"]
    assert cli.main([*words, "--observations", str(tmp_path / "recorded.npz"), "--count", "1"]) == 1
    assert "count: expected at least 2 observations with --model" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_times_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--model", "toy", "--steps", "2,1", "--calls", "1", "--device", "cpu", "--batch", "2"]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "no GPU: toy at its published size" in err and "preparing eager, 1 step\n" in err
    assert "\ntiming native-bf16, eager\n" in err, "before anything is looked for or built"
    report = json.loads(out.splitlines()[-1])
    assert [(r["system"], r["steps"]) for r in report["rows"]] == [
        ("native-bf16", 2), ("eager", 2), ("native-bf16", 1), ("eager", 1),
    ]  # fmt: skip
    row = report["rows"][0]
    assert {"encoder", "head"} <= set(row["parts_ms"]) and {"encoder_tflops", "head_gb_per_s"} <= set(row)
    assert report["model"]["kind"] == "toy" and len(report["throughput"]) == 2
    assert cli.main([*words, "--systems", "openpi-eager"]) == 1
    assert (
        "systems: expected some of eager, native-bf16, portable-bf16, triton-bf16, got openpi-eager"
        in capsys.readouterr().err
    )


def test_it_is_served(folder: Path) -> None:
    pytest.importorskip("websockets", reason="needs websockets")
    pytest.importorskip("msgpack", reason="the wire format needs msgpack")
    from vla_accel.client import PolicyClient
    from vla_accel.server import ServerConfig, background

    policy = OptimizedPolicy.from_pretrained(folder, EAGER)
    with background(policy, ServerConfig(port=0)) as server, PolicyClient(server.address) as client:
        assert client.metadata["model"]["kind"] == "toy"
        policy.reset()
        got = client.infer(observation())["actions"]
        policy.reset()
        np.testing.assert_array_equal(got, policy.infer(observation())["actions"])


def test_engines_are_built_ahead_for_its_components(folder: Path) -> None:
    config = load_config({"engines": {"head": "tensorrt_rtx"}})
    jobs = ahead_of_time.jobs(load(folder, dtype=torch.bfloat16), config, [(8, 9), (12, 0)])
    assert [job.title for job in jobs] == [f"head · tensorrt_rtx · auto · {t}" for t in ("sm89", "sm120")]
    with pytest.raises(ConfigError, match=r"names no TensorRT engine \(encoder auto, head auto\)"):
        ahead_of_time.jobs(load(folder), PolicyConfig(), [])


@pytest.mark.parametrize("name", ["eager", "eager_fp32", "native"])
def test_a_configuration_that_treats_all_components_alike_fits_it(folder: Path, name: str) -> None:
    config = load_config(name)
    assert config.specs(TOY.parts) == dict.fromkeys(TOY.parts, config.denoise)
    extra = ("camera_encoder", "vision", "kv_cache", "denoise")
    assert set(config.specs(extra).values()) == {config.denoise}, "no component is left to auto"
    policy = OptimizedPolicy.from_pretrained(folder, name, device="cpu")
    assert {spec.engine for spec in policy.specs.values()} == {config.denoise.engine}


def test_components_are_those_of_parts_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(TOY), "parts", TOY.parts[::-1])
    with pytest.raises(EngineError, match=r"toy: components: expected head, encoder \(`parts`\), got encoder, head"):
        OptimizedPolicy.from_pretrained(folder, device="cpu").infer(observation())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"vision": "native"},
            r"expected components of the model \(encoder, head\), got vision; remove it, or use .* native",
        ),
        ({"engines": {"tail": "eager"}}, r"expected components of the model \(encoder, head\), got tail"),
        ({"engines": {"head": "warp"}}, r"engines\.head\.engine: expected one of auto, eager.*, got 'warp'"),
        ({"engines": "native"}, "engines: expected a mapping, got 'native'"),
    ],
)
def test_components_that_it_lacks_are_named(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizedPolicy.from_pretrained(folder, config, device="cpu")


def test_engines_by_name_are_those_of_the_fields(folder: Path) -> None:
    parts = ("vision", "kv_cache", "denoise")
    named, fields = load_config({"engines": {"denoise": "native"}}), load_config({"denoise": "native"})
    assert named.specs(parts) == fields.specs(parts)
    with pytest.raises(ConfigError, match=r"engines\.denoise: configured twice"):
        load_config({"engines": {"denoise": "native"}, "denoise": "eager"}).specs(parts)
    specs = {"denoise": EngineSpec("native"), "head": EngineSpec("eager")}
    changed = fields.with_specs(specs)
    assert changed.denoise == EngineSpec("native") and changed.engines == {"head": EngineSpec("eager")}


def test_a_previous_chunk_is_refused_by_a_family_that_cannot_follow_it(folder: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, EAGER)
    with pytest.raises(ConfigError, match="prev_chunk: this family has no real-time chunking"):
        policy.infer(observation(), prev_chunk=np.zeros((2, 2)), inference_delay=1)


def test_weights_that_do_not_fit_the_sizes_are_refused(folder: Path) -> None:
    save_checkpoint(Toy(ToyConfig(width=5)).state_dict(), ToyConfig(width=6), folder, family="toy")
    with pytest.raises(CheckpointError, match=r"does not fit its config.json: 3 misshaped: encoder\.bias"):
        OptimizedPolicy.from_pretrained(folder, EAGER)
    save_checkpoint(Toy(ToyConfig()).state_dict(), ToyConfig(), folder, family="nobody")
    with pytest.raises(CheckpointError, match=r"expected a family of type pi0 or pi05 or .*toy, got 'nobody'"):
        OptimizedPolicy.from_pretrained(folder, EAGER)
    with pytest.raises(ConfigError, match=r"model: expected one of pi0, pi05, .*toy, got 'toi': did you mean toy\?"):
        family_named("toi")


def test_joints_that_cannot_be_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TOY.components

    def two_results(*a: Any, **k: Any) -> Any:
        encoder, head = whole(*a, **k)
        return encoder, replace(head, outputs=(*head.outputs, replace(head.outputs[0], name="more")))

    monkeypatch.setattr(TOY, "components", two_results)
    with pytest.raises(EngineError, match="head: expected one output of the last component, got actions, more"):
        OptimizedPolicy.from_pretrained(folder, EAGER)

    def same_output(*a: Any, **k: Any) -> Any:
        encoder, head = whole(*a, **k)
        return encoder, replace(head, outputs=encoder.outputs)

    monkeypatch.setattr(TOY, "components", same_output)
    with pytest.raises(EngineError, match=r"head\.latents: an earlier component has an output of this name"):
        OptimizedPolicy.from_pretrained(folder, EAGER)
