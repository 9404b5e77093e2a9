"""The model against openpi's own PyTorch code, on checkpoints that openpi itself saves.

Needs an interpreter with openpi installed, given as ``--openpi-python=PATH``; without it every test
here is skipped and says so. openpi runs in its own process (its packages pin other versions than
ours) through ``references/make_openpi_reference.py``, which knows nothing of this package.

Covers float32 on the CPU, from images in [-1, 1] and tokens to normalised actions: two batch sizes,
masked views, padded prompts, several step counts. Does not cover pixels to floats, normalisation or
tokenisation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.agreement import assert_same
from tests.support.in_memory import load_file_or_folder
from tests.support.reference_script import make_reference, python_of
from tests.support.whole_calls import pi0_actions
from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

pytestmark = pytest.mark.parity

SCRIPT = Path(__file__).parents[1] / "references" / "make_openpi_reference.py"
VISION_ATOL = 1e-5


@dataclass(frozen=True)
class Reference:
    """One family's checkpoint loaded by us, and what openpi was given and answered."""

    model: Pi0
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]

    def case(self, name: str) -> dict[str, Tensor]:
        """The inputs of one case, without the case's name in the keys."""
        return {k.split(".", 1)[1]: v for k, v in self.inputs.items() if k.startswith(f"{name}.")}


def our_config(written: dict[str, Any]) -> Pi0Config:
    """The reference's config.json (plain sizes) in our terms."""

    def gemma(tower: dict[str, int]) -> GemmaConfig:
        return GemmaConfig(
            width=tower["width"],
            depth=tower["depth"],
            mlp_dim=tower["mlp_dim"],
            heads=tower["num_heads"],
            kv_heads=tower["num_kv_heads"],
            head_dim=tower["head_dim"],
        )

    vision = SiglipConfig(
        width=written["vision"]["width"],
        depth=written["vision"]["depth"],
        mlp_dim=written["vision"]["mlp_dim"],
        heads=written["vision"]["num_heads"],
        image_size=written["image_size"],
        patch_size=written["patch_size"],
    )
    return Pi0Config(
        kind=written["family"],
        vision=vision,
        prefix=gemma(written["prefix"]),
        expert=gemma(written["expert"]),
        vocab_size=written["vocab_size"],
        action_dim=written["action_dim"],
        action_horizon=written["action_horizon"],
        max_token_len=written["max_token_len"],
        discrete_state_input=False,
    )


@pytest.fixture(scope="module", params=["small", pytest.param("wide", marks=pytest.mark.slow)])
def reference_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``pi0`` and ``pi05`` references, made by openpi just now."""
    python = python_of(request, "openpi", "OPENPI")
    folder = tmp_path_factory.mktemp(f"openpi_{request.param}")
    return make_reference(python, SCRIPT, folder, "--size", request.param)


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def reference(request: pytest.FixtureRequest, reference_folder: Path) -> Reference:
    """openpi's checkpoint in our model, in float32."""
    folder = reference_folder / request.param
    config = our_config(json.loads((folder / "config.json").read_text()))
    model = load_file_or_folder(folder / "model.safetensors", config)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return Reference(
        model,
        inputs=load_file(folder / "inputs.safetensors"),
        expected=load_file(folder / "expected.safetensors"),
    )


def sample(reference: Reference, case: str, steps: int) -> Tensor:
    """Our actions for one of the reference's cases."""
    given = reference.case(case)
    return pi0_actions(
        reference.model,
        images=given["images"],
        image_mask=given["image_mask"],
        tokens=given["tokens"],
        token_mask=given["token_mask"],
        state=given["state"],
        noise=given["noise"],
        num_steps=steps,
    )


@pytest.mark.parametrize("case", ["batch1", "batch3"])
def test_vision_tokens(reference: Reference, case: str, record_property: Any) -> None:
    """Projected image tokens of every view, masked ones included: tells where an error starts."""
    theirs = reference.expected[f"{case}.vision"]
    with torch.no_grad():
        ours = reference.model.embed_images(reference.case(case)["images"]).view(theirs.shape)
    assert_same(ours, theirs, f"vision {case}", record_property, VISION_ATOL)


@pytest.mark.parametrize("steps", [1, 3, 10])
@pytest.mark.parametrize("case", ["batch1", "batch3"])
def test_final_actions(reference: Reference, case: str, steps: int, record_property: Any) -> None:
    """Final actions, which is where agreement is judged."""
    theirs = reference.expected[f"{case}.steps{steps}.actions"]
    ours = sample(reference, case, steps)
    assert_same(ours, theirs, f"actions {case}, {steps} steps", record_property)
