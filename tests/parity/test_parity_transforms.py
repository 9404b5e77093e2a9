"""Presets against openpi's own transforms: images, tokens, state in; robot actions out. LIBERO, DROID and ALOHA.

Needs an interpreter with openpi, passed as ``--openpi-python=PATH``, and sentencepiece and Pillow in this one; without
them the test is skipped. openpi runs in its own process through ``references/make_openpi_transforms.py``.

Covers cameras of other sizes, cameras that are missing, channels first, statistics longer than the state, delta
actions, flipped joints and grippers, and prompts with and without the state. Pixels, tokens and states must agree bit
for bit.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.parity.conftest import Make
from vla_accel.transforms.normalisation import Normaliser, load_statistics
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import load_preset
from vla_accel.transforms.tokenizer import load_tokenizer

pytestmark = pytest.mark.parity

CASES = (
    "pi0_libero", "pi05_libero", "pi0_droid", "pi05_droid", "pi05_droid_joint_position", "pi0_aloha", "pi05_aloha",
    "pi0_aloha_sim",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_preset_is_openpis(made: Make, name: str) -> None:
    pytest.importorskip("sentencepiece", reason="NOT COMPARED WITH OPENPI: needs pip install 'vla_accel[checkpoints]'")
    folder = made("openpi", "make_openpi_transforms")
    content = json.loads((folder / name / "case.json").read_text())
    statistics = load_statistics(folder / name / "norm_stats.json")
    kind = "quantile" if content["family"] == "pi05" else "mean_std"
    processor = Processor(
        tokenizer=load_tokenizer(folder),
        state=Normaliser.of(statistics["state"], kind, "state"),
        actions=Normaliser.of(statistics["actions"], kind, "actions"),
        image_size=224,
        action_dim=32,
        max_token_len=200,
        discrete_state=content["discrete"],
        preset=load_preset(content["preset"]),
    )
    files = sorted((folder / name).glob("*.npz"))
    assert files
    for file in files:
        given = dict(np.load(file))
        start = "observation."
        observation = {k.removeprefix(start): v for k, v in given.items() if k.startswith(start)}
        if "images/cam_high" in observation:
            # As a client sends it: one mapping of cameras.
            cameras = {k.removeprefix("images/"): observation.pop(k) for k in list(observation) if "images/" in k}
            observation["images"] = cameras
        inputs = processor.prepare({**observation, "prompt": content["prompt"]})
        np.testing.assert_array_equal(inputs.images, given["images"])
        np.testing.assert_array_equal(inputs.tokens, given["tokens"])
        np.testing.assert_allclose(inputs.state, given["state"].astype(np.float32), rtol=0, atol=0)
        robot = processor.unnormalize_actions(given["actions"], inputs)
        # openpi adds 1 to π0.5's float32 actions before it widens them; otherwise the last bits of float64 remain.
        np.testing.assert_allclose(robot, given["robot"], rtol=0, atol=1e-6 if kind == "quantile" else 1e-12)
