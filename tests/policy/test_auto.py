"""Engine `auto`: what it chooses on which GPU, what it says, and when it believes that FP8 agrees."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpus import A100, GPUS, H200, RTX_4090, assumed
from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig, cli
from vla_accel.engines import ENGINES
from vla_accel.engines.auto import Choice, Shown, choose
from vla_accel.engines.native import NativeEngine
from vla_accel.errors import ConfigError, EngineError
from vla_accel.fp8 import Scales, fingerprint
from vla_accel.kernels.gpu import Gpu
from vla_accel.measure.recording import save_observations
from vla_accel.nn.flow import Schedule
from vla_accel.nn.quantised import calibrated_products
from vla_accel.policy import agreement, optimized

TWO = Schedule.uniform(2)
PARTS: tuple[str, ...] = ("vision", "kv_cache", "denoise")
FREE: dict[str, EngineSpec] = dict.fromkeys(PARTS, EngineSpec())
BF16, CUDA = torch.bfloat16, torch.device("cuda")
T4 = replace(A100, name="Tesla T4", capability=(7, 5))
SHOWN = Shown({"vision": "auto", "kv_cache": "fp8", "denoise": "auto"}, "parity_native_fp8.json")


def chosen(gpu: Gpu, specs: Any = FREE, dtype: torch.dtype = BF16, shown: Shown | None = None) -> dict[str, Choice]:
    with assumed(gpu):
        return choose(specs, CUDA, dtype, shown)


@pytest.mark.parametrize("name", GPUS)
def test_from_ampere_on_it_is_native_in_bf16(name: str) -> None:
    for choice in chosen(GPUS[name]).values():
        assert choice.spec == EngineSpec("native", ("eager",))
        assert choice.why == f"{GPUS[name].name} has compute capability {GPUS[name].version}"


def test_elsewhere_it_is_eager_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Choice], str]] = [
        (choose(FREE, torch.device("cpu"), BF16), "there is no GPU"),
        (chosen(T4), "the native engine needs compute capability 8.0 or newer, this GPU (Tesla T4) has 7.5"),
        (chosen(H200, dtype=torch.float32), "the native kernels need BF16, got float32"),
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cases.append((chosen(H200), "the native engine needs triton: pip install triton"))
    for choices, why in cases:
        assert choices == dict.fromkeys(PARTS, Choice(EngineSpec("eager"), why))


def test_what_the_configuration_names_stays() -> None:
    named = {**FREE, "vision": EngineSpec("eager"), "denoise": EngineSpec("tensorrt", ("native",))}
    choices = chosen(H200, named)
    assert (choices["vision"], choices["denoise"]) == (Choice(named["vision"]), Choice(named["denoise"]))
    assert choices["kv_cache"].spec.engine == "native" and choices["kv_cache"].why
    asked = chosen(RTX_4090, {**FREE, "kv_cache": EngineSpec(precision="fp8")})
    assert asked["kv_cache"].spec == EngineSpec("native", precision="fp8"), "eager has no FP8 to step down to"
    with pytest.raises(ConfigError, match=r"kv_cache: .*needs compute capability 8\.9.*precision.*fp8"):
        chosen(A100, {**FREE, "kv_cache": EngineSpec(precision="fp8")})


def test_a_lower_precision_is_taken_only_as_a_whole_and_where_the_gpu_has_it() -> None:
    assert {n: c.spec.precision for n, c in chosen(H200, shown=SHOWN).items()} == dict(SHOWN.precisions)
    why = chosen(H200, shown=SHOWN)["kv_cache"].why
    assert why.endswith(", and parity_native_fp8.json shows that fp8 agrees")
    for choices in (
        chosen(H200),
        chosen(A100, shown=SHOWN),
        chosen(H200, {**FREE, "denoise": EngineSpec("eager")}, shown=SHOWN),
        chosen(H200, {**FREE, "vision": EngineSpec(precision="bf16")}, shown=SHOWN),
    ):
        assert choices["kv_cache"].spec.precision == "auto"


def test_auto_needs_no_fallback() -> None:
    for given in (("auto", ("eager",)), ("native", ("auto",))):
        with pytest.raises(ConfigError, match="fallback: engine auto steps down by itself, got"):
            EngineSpec(*given)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_the_default_on_a_cpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vla_accel")
    policy = OptimizedPolicy.from_pretrained(folder, device="cpu")
    assert policy.config == PolicyConfig(device="cpu", num_steps=10)
    said = f"{folder}: auto chose vision, kv_cache, denoise: eager (there is no GPU)"
    for entry in policy.metadata["engines"]:
        assert (entry["requested"], entry["used"], entry["reason"]) == ("auto", "eager", "there is no GPU")
        assert not entry["fell_back"]
    policy.infer(tiny_observation())
    policy.infer(tiny_observation(0, "bowl " * 9))
    policy.with_steps(2).infer(tiny_observation())
    assert caplog.messages == [said], "once a policy, whatever shapes come"
    assert caplog.records[0].levelname == "INFO", "which is no fault"
    agreement.log_choices(policy.name, policy.ledger, policy.specs, CUDA)
    assert caplog.records[1].levelname == "WARNING", "a GPU without its kernels"


def as_if(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized, "choose", lambda specs, device, dtype, shown: chosen(gpu, specs, BF16, shown))


def test_auto_steps_down_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(NativeEngine):
        def __init__(self, component: Any, device: Any, spec: EngineSpec) -> None:
            if component.name == "denoise":
                raise EngineError("denoise: no such kernel")
            super().__init__(component, device, spec)

    as_if(H200, monkeypatch)
    monkeypatch.setitem(ENGINES, "native", Broken)
    policy = OptimizedPolicy.from_pretrained(folder, {"strict": True, "device": "cpu"})
    entries = policy.ledger.entries
    assert {n: e.used for n, e in entries.items()} == {"vision": "native", "kv_cache": "native", "denoise": "eager"}
    why = "NVIDIA H200 has compute capability 9.0"
    assert entries["denoise"].reason == f"{why}; native: no such kernel" and not entries["denoise"].fell_back
    assert caplog.messages == [
        f"{folder}: auto chose vision, kv_cache: native ({why}); denoise: eager ({entries['denoise'].reason})"
    ]
    assert caplog.records[0].levelname == "WARNING", "what it chose could not be built"
    with pytest.raises(EngineError, match="no such kernel"):
        OptimizedPolicy.from_pretrained(folder, {"denoise": "native", "device": "cpu"})


def kept(folder: Path, policy: OptimizedPolicy, name: str = "native_fp8", **changes: Any) -> Path:
    """A report as `vla-accel parity --keep` writes it for a native FP8 configuration."""
    engines = [{"component": part, "used": "native"} for part in PARTS]
    report = {"passed": True, "num_steps": policy.config.num_steps, "engines": engines,
              "fingerprint": agreement.weights_of(policy.model), **changes}  # fmt: skip
    specs = {part: EngineSpec("native", precision="fp8" if part == "kv_cache" else "auto") for part in PARTS}
    return agreement.keep(report, folder, specs, name)


def test_a_kept_report_counts_for_these_weights_steps_and_engines(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    policy = OptimizedPolicy.from_pretrained(folder, device="cpu", num_steps=2)
    assert agreement.shown(folder, policy.model, TWO) is None
    path = kept(folder, policy)
    assert not caplog.messages
    assert path.name == "parity_native_fp8.json" and agreement.shown(folder, policy.model, TWO) == SHOWN
    assert agreement.shown(folder, policy.model, Schedule.uniform(3)) is None
    narrow = OptimizedPolicy.from_pretrained(folder, {"precision": "bf16"}, device="cpu", num_steps=2)
    assert agreement.shown(folder, narrow.model, TWO) == SHOWN, "the same weights in BF16"
    write_tiny_checkpoint(tmp_path / "other", seed=1)
    other = OptimizedPolicy.from_pretrained(tmp_path / "other", device="cpu", num_steps=2)
    assert agreement.shown(folder, other.model, TWO) is None
    mixed = [{"component": p, "used": "eager" if p == "kv_cache" else "native"} for p in PARTS]
    wrong: list[dict[str, Any]] = [{"passed": False}, {"engines": mixed}, {"num_steps": 10},
                                   {"schedule": [1.0, 0.2, 0.0]}]  # fmt: skip
    for changes in wrong:
        caplog.clear()
        kept(folder, policy, **changes)
        same_steps = changes.keys().isdisjoint(("num_steps", "schedule"))
        assert ("parity_native_fp8.json will not be used: " in caplog.text) == same_steps
        assert agreement.shown(folder, policy.model, TWO) is None
    path.write_text("{")
    assert agreement.shown(folder, policy.model, TWO) is None
    whole = {part: EngineSpec("native", precision="fp8") for part in PARTS}
    kept(folder, policy)
    agreement.keep(json.loads(path.read_text()), folder, whole, "all")
    found = agreement.shown(folder, policy.model, TWO)
    assert found is not None and found.source == "parity_all.json", "the one with most in FP8"


def test_a_policy_wants_scales_and_a_report(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def shown(**engines: Any) -> Shown | None:
        policy = OptimizedPolicy.from_pretrained(folder, PolicyConfig(num_steps=2, device="cpu", **engines))
        kept(folder, policy)
        return agreement.for_auto(policy.checkpoint, policy.config.specs(PARTS), TWO)

    assert shown() is None, "no scales"
    model = OptimizedPolicy.from_pretrained(folder, device="cpu").model
    products = calibrated_products(model.config)
    Scales(dict.fromkeys(products, 32.0), 1, "test", "0", fingerprint(model, products)).save(folder)
    assert shown() == SHOWN
    assert shown(vision=EngineSpec("eager")) is None
    Scales(dict.fromkeys(products, 32.0), 1, "test", "0", "of other weights").save(folder)
    caplog.clear()
    assert shown() is None
    assert any("parity_native_fp8.json" in m and "calibrate again" in m for m in caplog.messages)


def test_the_command_keeps_a_report(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "fast.yaml"
    config.write_text(
        "num_steps: 2\nschedule: cubic\nprecision: fp32\nvision: native\nkv_cache: native\ndenoise: native\n"
    )
    save_observations([tiny_observation(i) for i in range(2)], tmp_path / "seen.npz")
    words = ["parity", str(folder), "--config", str(config), "--device", "cpu", "--threshold", "0.99", "--keep"]
    assert cli.main(words) == 1
    assert "--observations and no --threshold of its own, got --threshold" in capsys.readouterr().err
    assert not list(folder.glob("parity_*"))
    words = [*words[:-3], "--keep", "--observations", str(tmp_path / "seen.npz")]
    assert cli.main(words) == 0
    content = json.loads((folder / "parity_fast.json").read_text())
    policy = OptimizedPolicy.from_pretrained(folder, device="cpu")
    assert content["fingerprint"] == agreement.weights_of(policy.model) and content["passed"] is True
    assert content["precisions"] == dict.fromkeys(PARTS, "auto") and content["recorded"] == "seen.npz"
    content["precisions"]["kv_cache"] = "fp8"
    (folder / "parity_fast.json").write_text(json.dumps(content))
    assert content["schedule"] == [1.0, 0.125, 0.0]
    assert agreement.shown(folder, policy.model, Schedule.cubic(2)) == replace(SHOWN, source="parity_fast.json")
    assert agreement.shown(folder, policy.model, TWO) is None
