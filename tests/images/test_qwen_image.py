"""Qwen-Image in diffusers' pipelines with our parts, on a tiny pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.images import CPU
from vla_accel.errors import ConfigError
from vla_accel.images.qwen import accelerate, random_qwen_image
from vla_accel.ledger import Ledger


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = random_qwen_image(tiny=True, layers=2, dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def generate(pipeline: Any) -> torch.Tensor:
    embeds = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(1))
    return pipeline(
        prompt_embeds=embeds,
        true_cfg_scale=1.0,
        height=64,
        width=96,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images


@pytest.mark.parametrize("transformer", ["eager", "native"])
def test_an_accelerated_pipeline_makes_the_same_picture(pipeline: Any, transformer: Any, tmp_path: Path) -> None:
    want = generate(pipeline)
    config = tmp_path / "vae.json"
    config.write_text(json.dumps({"vae_type": "native"}))
    ledger = Ledger()
    undo = accelerate(pipeline, config, transformer, ledger=ledger)
    got = generate(pipeline)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert ledger.entries["vae_decoder"].used == "native"
    assert ("transformer" in ledger.entries) is (transformer == "native")
    again = accelerate(pipeline, {"vae_type": "native"}, transformer)
    again()
    assert torch.equal(generate(pipeline), got), "the first is still there"
    undo()
    undo()  # as in a notebook
    for part in (pipeline.vae, pipeline.transformer):
        assert not {"encode", "decode", "forward"} & set(vars(part))
    assert torch.equal(generate(pipeline), want) and want.std() > 0.05


def test_a_config_without_engine_files_names_the_command(pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    content = {"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(path), "multi_profile": True}}
    undo = accelerate(pipeline, content)
    try:
        with pytest.raises(ConfigError, match=r"build it: vla-accel build-vae --vae MODEL --output-dir .* \(without"):
            generate(pipeline)
    finally:
        undo()
