"""`vla-accel convert` against openpi's own JAX model: its checkpoint, converted, must give its actions.

Needs an interpreter with openpi installed, given as ``--openpi-python=PATH``, and jax and orbax in this one; without
them every test here is skipped and says so. openpi runs in its own process through
``references/make_jax_reference.py``, which knows nothing of this package.

Covers float32 on the CPU: two batch sizes, masked views, padded prompts, 1 and 10 steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.agreement import assert_same
from tests.support.in_memory import load_file_or_folder
from tests.support.reference_script import make_reference, python_of
from tests.support.whole_calls import pi0_actions
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.cli import main
from vla_accel.families.pi0.checkpoint import Stated, infer_config
from vla_accel.families.pi0.network import Pi0

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_jax_reference.py"


@pytest.fixture(scope="module")
def reference_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``pi0`` and ``pi05`` references, made by openpi just now."""
    python = python_of(request, "openpi", "OPENPI'S JAX")
    pytest.importorskip("orbax.checkpoint", reason="NOT COMPARED WITH OPENPI'S JAX: needs pip install 'vla_accel[jax]'")
    return make_reference(python, SCRIPT, tmp_path_factory.mktemp("jax"))


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def converted(
    request: pytest.FixtureRequest, reference_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Pi0, dict[str, np.ndarray]]:
    source, output = reference_folder / request.param, tmp_path_factory.mktemp(request.param)
    assert main(["convert", str(source), str(output), "--action-horizon", "6", "--precision", "float32"]) == 0
    written = json.loads((output / "config.json").read_text())
    assert (written["pi05"], written["action_horizon"]) == (request.param == "pi05", 6)
    config = infer_config(SafetensorsWeights(output).shapes, "", Stated(action_horizon=6), str(output))
    assert config.kind == request.param
    return load_file_or_folder(output, config), dict(np.load(source / "reference.npz"))


@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("case", ["batch1", "batch3"])
def test_actions(converted: tuple[Pi0, dict[str, np.ndarray]], case: str, steps: int, record_property: Any) -> None:
    model, reference = converted
    given = {k.split(".", 1)[1]: torch.from_numpy(v) for k, v in reference.items() if k.startswith(f"{case}.")}
    ours = pi0_actions(
        model,
        images=given["images"].permute(0, 1, 4, 2, 3),
        image_mask=given["image_mask"],
        tokens=given["tokens"].long(),
        token_mask=given["token_mask"],
        state=given["state"],
        noise=given["noise"],
        num_steps=steps,
    )
    theirs = given[f"steps{steps}"]
    assert_same(ours, theirs, f"{model.config.kind} {case}, {steps} steps", record_property)


def test_the_report_names_every_parameter(reference_folder: Path, tmp_path: Path) -> None:
    assert (
        main(["convert", str(reference_folder / "pi05"), str(tmp_path), "--action-horizon", "6", "--unused-head"]) == 0
    )
    report = json.loads((tmp_path / "conversion.json").read_text())
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {k: (file.get_slice(k).get_shape(), file.get_slice(k).get_dtype()) for k in file.keys()}  # noqa: SIM118
    head = "paligemma_with_expert.gemma_expert.lm_head.weight"
    assert stored.pop(head) == ([320, 64], "BF16")
    names = {"bfloat16": "BF16", "float32": "F32"}
    assert stored == {r["target"]: (r["shape"], names[r["dtype"]]) for r in report["rows"]}
    assert len({r["source"] for r in report["rows"]}) == 51
