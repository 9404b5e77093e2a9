"""SmolVLA's native programs compared with its eager components, on the CPU through the ops' references: the same path
that runs kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.agreement import assert_as_near
from tests.support.scales import scales_of_any
from tests.support.tiny_smolvla import observation, tiny_config, tiny_model, write_lerobot
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.config import RtcConfig, load_config
from vla_accel.families.prompted import PromptShape
from vla_accel.families.smolvla.family import SMOLVLA
from vla_accel.families.smolvla.native import SmolVlaStore
from vla_accel.nn import plan
from vla_accel.nn.flow import Schedule
from vla_accel.nn.gemma import SmolLmConfig

NATIVE = EngineSpec("native")
PROMPTS = ("pick up the bowl and place it on the plate", "pick it", "place it")


def settings(precision: str, spec: EngineSpec = NATIVE) -> PolicyConfig:
    return load_config({"num_steps": 3, "precision": precision, "device": "cpu"}).with_specs(
        dict.fromkeys(SMOLVLA.parts, spec)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    made = {libero: tmp_path_factory.mktemp("smolvla") for libero in (False, True)}
    for libero, folder in made.items():
        write_lerobot(folder, libero=libero)
    return made


@pytest.mark.parametrize(("libero", "trained"), [(False, False), (True, False), (True, True)])
def test_native_is_eager(libero: bool, trained: bool, folders: dict[bool, Path]) -> None:
    """A batch of three lengths in one bucket, guided, or pinned where it is trained for that, and not; a state behind
    each prompt."""
    rtc = RtcConfig(trained=True, max_delay=2) if trained else RtcConfig()
    eager, native = (
        OptimizedPolicy.from_pretrained(folders[libero], replace(settings("fp32", spec), rtc=rtc))
        for spec in (EngineSpec("eager"), NATIVE)
    )
    given = [observation(i, libero=libero, prompt=p) for i, p in enumerate(PROMPTS)]
    noise = np.random.default_rng(2).standard_normal((3, 5, 9)).astype(np.float32)
    chunk = np.full((4, 7 if libero else 6), 0.3)
    for more in ({}, {"prev_chunks": [chunk, None, chunk[:2]], "inference_delays": [2, None, 1]}):
        ours, theirs = (policy.infer_batch(given, noise=noise, **more) for policy in (native, eager))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a["actions"], b["actions"], rtol=0, atol=2e-5)
        if more and trained:
            np.testing.assert_allclose(ours[0]["actions"][:2], chunk[:2], rtol=0, atol=1e-6)
    entries = {e["component"]: e for e in native.ledger.as_list()}
    assert {e["used"] for e in entries.values()} == {"native"}
    kernels = 3 * 4 + 2 if libero else 3 * 5 - 1 + 2  # few rows: the norms are measured by the next product
    assert f"{kernels} kernels a step" in str(entries["denoise"]["detail"])


def test_bf16_is_as_near_as_eager(folders: dict[bool, Path]) -> None:
    noise = np.random.default_rng(2).standard_normal((5, 9)).astype(np.float32)
    actions = []
    for precision, spec in (("bf16", NATIVE), ("bf16", EngineSpec("eager")), ("fp32", EngineSpec("eager"))):
        policy = OptimizedPolicy.from_pretrained(folders[False], settings(precision, spec))
        actions.append(torch.from_numpy(policy.infer(observation(), noise=noise)["actions"]))
    assert_as_near(*actions)


@pytest.mark.parametrize("part", ["vision", "kv_cache", "denoise"])
def test_fp8_is_what_the_ledger_says(part: str) -> None:
    """Its products' weights are one byte each, and what it computes is near what it computes in BF16."""
    model = tiny_model(tiny_config()).to_compute_dtype(torch.bfloat16)
    shape = PromptShape(1, Schedule.uniform(2), 2, 32, True)
    feed = {
        "images": torch.randint(0, 256, (1, 2, 32, 32, 3), dtype=torch.uint8), "state": torch.randn(1, 10),
        "tokens": torch.randint(0, 40, (1, 32)), "lengths": torch.tensor([20], dtype=torch.int32),
        "noise": torch.randn(1, 5, 9), "target": torch.zeros(1, 5, 9), "weights": torch.zeros(1, 5),
    }  # fmt: skip
    results = []
    for precision in ("fp8", "auto"):
        store = SmolVlaStore(model, scales_of_any(32.0))
        buffers = dict(feed)
        for component in SMOLVLA.components(model, shape, store=store):
            spec = EngineSpec("native", precision=precision if component.name == part else "auto")
            assert component.native is not None
            program = component.native(spec)
            outputs = {o.name: o.empty(torch.device("cpu")) for o in component.outputs}
            with torch.inference_mode():
                program(buffers, outputs)
            buffers |= outputs
            if component.name == part and precision == "fp8":
                assert "FP8" in program.detail and component.quantised["native"].names
                narrow = [t for t in store.tensors()[part] if t.dtype == torch.float8_e4m3fn]
                assert len(narrow) == {"vision": 8, "kv_cache": 6, "denoise": 12}[part]
        results.append(buffers["actions"])
    difference = (results[0] - results[1]).square().mean().sqrt()
    assert 0 < difference < 0.3 * results[1].square().mean().sqrt()


def test_norms_inside_the_products_agree_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does where all products are own kernels, deep enough that every product follows every other."""
    monkeypatch.setattr(plan, "is_inside", lambda *_: True)
    prefix = SmolLmConfig(width=128, mlp_dim=40, depth=4, heads=4, kv_heads=2)
    config = tiny_config()
    config = replace(config, prefix=prefix, expert=replace(config.expert, depth=4))
    model = tiny_model(config)
    vision, cache, _ = SMOLVLA.components(
        model, PromptShape(2, Schedule.uniform(2), 2, 16, True), store=SmolVlaStore(model, None)
    )
    feed = {
        "images": torch.randint(0, 256, (2, 2, 32, 32, 3), dtype=torch.uint8), "state": torch.randn(2, 10),
        "tokens": torch.randint(0, 40, (2, 16)), "lengths": torch.tensor([25, 20], dtype=torch.int32),
    }  # fmt: skip
    for component, detail in ((vision, "norms inside"), (cache, "norms inside")):
        assert component.native is not None
        program = component.native(EngineSpec("native", precision="fp32"))
        assert detail in program.detail
        ours = {o.name: o.empty(torch.device("cpu")) for o in component.outputs}
        with torch.inference_mode():
            program(feed, ours)
            theirs = component.module(*(feed[i.name] for i in component.inputs))
        for a, b in zip(ours.values(), theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
            for row, length in enumerate(feed["lengths"]):
                rows = slice(length if component is cache else None)
                left, right = (x[:, row, rows] if component is cache else x[row] for x in (a, b))
                torch.testing.assert_close(left, right, rtol=1e-4, atol=5e-5)
        feed |= ours


@pytest.mark.parametrize("self_every", [1, 2, 3, 9])
def test_keys_of_crossing_layers_lie_where_the_expert_reads_them(self_every: int) -> None:
    """However many layers cross between two that do not; with 9, all but the first of the three."""
    model = tiny_model(tiny_config(self_every=self_every))
    store = SmolVlaStore(model, None)
    feed = {
        "image_tokens": torch.randn(2, 8, 48), "tokens": torch.randint(0, 40, (2, 16)), "state": torch.randn(2, 10),
        "lengths": torch.tensor([25, 20], dtype=torch.int32),
    }  # fmt: skip
    prefix = SMOLVLA.components(model, PromptShape(2, Schedule.uniform(2), 2, 16, True), store=store)[1]
    assert prefix.native is not None
    ours = {o.name: o.empty(torch.device("cpu")) for o in prefix.outputs}
    with torch.inference_mode():
        prefix.native(EngineSpec("native", precision="fp32"))(feed, ours)
        theirs = prefix.module(*(feed[i.name] for i in prefix.inputs))
    for a, b in zip(ours.values(), theirs, strict=True):
        for row, length in enumerate(feed["lengths"]):
            torch.testing.assert_close(a[:, row, :length], b[:, row, :length], rtol=0, atol=2e-5)
