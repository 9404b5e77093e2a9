"""π0 and π0.5 against openpi's own PyTorch and JAX code, on checkpoints that openpi itself saves.

Needs an interpreter with openpi, passed as ``--openpi-python=PATH``, and for JAX orbax in this one; without them these
tests are skipped. openpi runs in its own process through the scripts of tests/references, which know nothing of this
package. Covers float32 on the CPU, from images in [-1, 1] and tokens to normalised actions: two batch sizes, masked
views, padded prompts, several step counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.parity.compare_with_lerobot import ask_pi0
from tests.parity.conftest import Make
from tests.support.agreement import assert_same
from tests.support.in_memory import load_file_or_folder
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.cli import main
from vla_accel.families.pi0.checkpoint import Stated, infer_config
from vla_accel.families.pi0.network import Pi0

pytestmark = pytest.mark.parity


def loaded(path: Path, kind: str, horizon: int) -> Pi0:
    config = infer_config(SafetensorsWeights(path).shapes, "", Stated(action_horizon=horizon), str(path))
    assert config.kind == kind
    return load_file_or_folder(path, config)


def converted(source: Path, target: Path, *options: str) -> Path:
    pytest.importorskip("orbax.checkpoint", reason="NOT COMPARED WITH OPENPI'S JAX: needs pip install 'vla_accel[jax]'")
    assert main(["convert", str(source), str(target), "--action-horizon", "6", *options]) == 0
    return target


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("size", ["small", pytest.param("wide", marks=pytest.mark.slow), "jax"])
def test_actions(made: Make, tmp_path: Path, kind: str, size: str, record_property: Any) -> None:
    if size == "jax":
        folder = made("openpi", "make_jax_reference") / kind
        path = converted(folder, tmp_path, "--precision", "float32")
        written = json.loads((path / "config.json").read_text())
        assert (written["pi05"], written["action_horizon"]) == (kind == "pi05", 6)
    else:
        folder = made("openpi", "make_openpi_reference", "--size", size) / kind
        path = folder / "model.safetensors"
    model, cases = loaded(path, kind, 10 if size == "wide" else 6), load_file(folder / "cases.safetensors")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for case in ("batch1", "batch3"):
        if size != "jax":
            # Projected image tokens of every view, masked ones included: shows where an error starts.
            theirs = cases[f"{case}.vision"]
            with torch.no_grad():
                ours = model.embed_images(cases[f"{case}.images"]).view(theirs.shape)
            assert_same(ours, theirs, f"{kind} vision {case}", record_property, 1e-5)
        for steps in (1, 10) if size == "jax" else (1, 3, 10):
            ours = ask_pi0(model, cases, case, steps)
            assert_same(ours, cases[f"{case}.steps{steps}"], f"{kind} {case}, {steps} steps", record_property)


def test_the_report_of_a_conversion_names_every_parameter(made: Make, tmp_path: Path) -> None:
    converted(made("openpi", "make_jax_reference") / "pi05", tmp_path, "--unused-head")
    report = json.loads((tmp_path / "conversion.json").read_text())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {k: (file.get_slice(k).get_shape(), file.get_slice(k).get_dtype()) for k in file.keys()}  # noqa: SIM118
    head = "paligemma_with_expert.gemma_expert.lm_head.weight"
    assert stored.pop(head) == ([320, 64], "BF16")
    names = {"bfloat16": "BF16", "float32": "F32"}
    assert stored == {r["target"]: (r["shape"], names[r["dtype"]]) for r in report["rows"]}
    assert len({r["source"] for r in report["rows"]}) == 51
