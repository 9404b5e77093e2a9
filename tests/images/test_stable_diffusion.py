"""Stable Diffusion on engines against diffusers' own pipelines, on tiny random models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.images import (
    CPU,
    ENGINES,
    accelerated,
    assert_same_picture,
    diffusers,
    diffusers_picture,
    make_parts,
    picture,
    read_parameters,
)
from vla_accel import latency
from vla_accel.errors import CheckpointError, ConfigError, EngineError
from vla_accel.images.models import filled, load_model
from vla_accel.images.parts import load_parts
from vla_accel.images.picture import load_image, save_png, to_uint8
from vla_accel.images.stable import Request, StableDiffusion


@pytest.fixture(scope="module")
def parts() -> Any:
    return make_parts()


@pytest.fixture(scope="module")
def pipeline(parts: Any) -> StableDiffusion:
    return accelerated(parts, "eager")


def wanted(prompt: str = "a bowl", height: int | None = 64, width: int | None = 72, **options: Any) -> Request:
    return Request(prompt, **{"height": height, "width": width, "steps": 4, "seed": 3, **options})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("request_", "size"),
    [
        *((wanted(negative_prompt="blue", guidance=5.0, scheduler=s), None) for s in (None, "DDIM")),
        (wanted(scheduler="DPMSolverMultistepScheduler"), None),
        (wanted(scheduler="TCD"), None),  # with an eta of its own
        (wanted(guidance=1.0), None),
        (wanted(scheduler="TCD"), (64, 72)),
        *((wanted(height=None, width=None, strength=0.5), size) for size in ((64, 64), (72, 72), (75, 100), (79, 65))),
    ],
    ids=str,
)
def test_pictures_are_those_of_diffusers(parts: Any, engine: str, request_: Request, size: Any) -> None:
    image = None if size is None else picture(*size)
    got = accelerated(parts, engine).generate(request_, image).pixels
    assert size is None or got.shape == (size[0] // 8 * 8, size[1] // 8 * 8, 3)
    assert_same_picture(got, diffusers_picture(parts, request_, image))


@pytest.fixture(scope="module")
def deep() -> Any:
    """A pipeline whose UNet has four levels, as Stable Diffusion has: 8 pixels are far from even at the lowest."""
    made = make_parts()
    down, up = ("CrossAttnDownBlock2D",) * 3, ("CrossAttnUpBlock2D",) * 3
    config: dict[str, Any] = {
        "sample_size": 8,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
        "layers_per_block": 1,
        "block_out_channels": (16, 16, 16, 16),
        "down_block_types": (*down, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *up),
    }
    unet = filled(lambda: diffusers.UNet2DConditionModel(**config), dtype=torch.float32, device=CPU)
    made.register_modules(unet=unet)
    return made


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [(72, 64), (64, 104), (8, 40), (136, 120)])
def test_text_to_image_takes_every_multiple_of_8(deep: Any, size: tuple[int, int], engine: str) -> None:
    request = wanted(height=size[0], width=size[1], steps=2)
    assert_same_picture(
        accelerated(deep, engine, strict=True).generate(request).pixels, diffusers_picture(deep, request)
    )


@pytest.mark.parametrize("scheduler", ["EulerDiscrete", "EulerAncestralDiscrete"])
def test_schedulers_that_scale_and_draw(scheduler: str) -> None:
    parts = make_parts()
    # Another class reads what the configuration sets, but not the defaults of its class.
    config = {k: v for k, v in parts.scheduler.config.items() if k != "_use_default_values"}
    parts.scheduler = type(parts.scheduler).from_config(config)
    request = wanted(steps=3, scheduler=scheduler)
    assert_same_picture(accelerated(parts).generate(request).pixels, diffusers_picture(parts, request))


def test_seed_prompt_and_negative_prompt_change_the_picture(parts: Any) -> None:
    pipeline = accelerated(parts)
    base = {"prompt": "a red bowl", "negative_prompt": "blue", "steps": 2}
    first = pipeline.generate(wanted(**base)).pixels
    assert np.array_equal(first, pipeline.generate(wanted(**base)).pixels)
    for other in ({"seed": 1}, {"prompt": "a cup"}, {"negative_prompt": "green"}):
        assert not np.array_equal(first, pipeline.generate(wanted(**{**base, **other})).pixels)


def test_the_breakdown_names_every_part(parts: Any) -> None:
    pipeline = accelerated(parts)
    done: list[tuple[int, int]] = []
    pipeline.generate(Request("x", steps=4, strength=0.5), picture(), on_step=lambda *at: done.append(at))
    # PNDM runs its second step twice; half of them are skipped.
    assert done == [(i + 1, len(done)) for i in range(len(done))] and len(done) >= 2
    report = pipeline.latency_report(4)
    names = {"text_encoder", "vae_encode", "scheduler", "unet", "vae_decode", "postprocess", "total"}
    assert report["schema"] == latency.SCHEMA and set(report["components"]) == names
    shares = [report["components"][n]["share"] for n in names - {"total"}]
    assert all(s > 0 for s in shares) and sum(shares) <= 1.0 + 1e-9
    assert {e["component"] for e in report["engines"]} == {"text_encoder", "unet", "vae_encoder", "vae_decoder"}
    json.dumps(report)


def test_a_deep_copy_is_a_pipeline_of_its_own(pipeline: StableDiffusion) -> None:
    request = wanted(steps=2)
    want = pipeline.generate(request)
    want.latents.mul_(1)  # an ordinary tensor
    made = copy.deepcopy(pipeline)
    assert (made.generate(request).pixels == want.pixels).all()
    with torch.no_grad():
        made.parts.vae.decoder.conv_out.weight.mul_(-1)
    assert (made.generate(request).pixels != want.pixels).any()
    assert (pipeline.generate(request).pixels == want.pixels).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected 1 to 1000, got 0"),
        ({"strength": 1.5}, "strength: expected 0 to 1, got 1.5"),
        ({"height": 70, "width": 64}, "multiples of 8, got 64x70; the smallest that holds it is 64x72"),
        ({"height": 0, "width": 64}, "multiples of 8, got 64x0; the smallest that holds it is 64x8"),
        ({"height": 64}, "size: expected both height and width, or neither"),
        *(({field: value}, f"{field}: expected") for field, value in (
            ("guidance", float("nan")), ("guidance", "7"), ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("steps", 2.5),
            ("prompt", ["a", "b"]), ("negative_prompt", None), ("strength", "0.5"), ("scheduler", 3),
        )),
    ],
)  # fmt: skip
def test_a_request_names_the_value_that_it_cannot_take(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Request(**{"prompt": "x", **change})


HALF = picture(64, 72) / 2 + 0.5


@pytest.mark.parametrize(
    ("options", "image", "message"),
    [
        ({"height": 64, "width": 80}, picture(), "image: expected 80x64 pixels, got 64x64"),
        ({"steps": 5, "strength": 0.1, "scheduler": "DDIM"}, picture(), r"strength 0\.1: expected at least one of 5 s"),
        ({"steps": 3, "scheduler": "EulerDiscrete"}, None, r"expected whole timesteps below 1000, got 999, 499\.5"),
        ({"scheduler": "Quick"}, None, "scheduler: expected a diffusers class like DDIMScheduler, got Quick"),
        ({"scheduler": "Amused"}, None, "scheduler AmusedScheduler: expected .*mask_token_id"),
        ({"scheduler": "EntropyBound"}, None, "scheduler EntropyBoundScheduler: .*without init_noise_sigma"),
        ({"scheduler": "RePaint"}, None, "scheduler RePaintScheduler: expected .*original_image"),
        ({"scheduler": "DDIMInverse"}, picture(), "scheduler DDIMInverseScheduler: expected one with add_noise"),
        ({}, (HALF * 255).to(torch.uint8), r"image: expected .*, got torch\.uint8"),
        ({}, HALF * 255, r"image: expected .*, got 0\.\d+ to 25"),
        ({}, HALF * float("nan"), "image: expected .*, got nan"),
        ({}, HALF.numpy(), "image: expected .*, got ndarray"),
    ],
)
def test_a_call_names_what_does_not_fit(
    pipeline: StableDiffusion, options: dict[str, Any], image: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline.generate(Request("x", **options), image)
    if "DDIMInverse" in message:  # still makes pictures from prompts
        assert pipeline.generate(wanted(steps=2, scheduler="DDIMInverse")).pixels.shape == (64, 72, 3)


@pytest.mark.parametrize(
    ("part", "broken", "where"),
    [
        ("unet", "mid_block.resnets.0.conv1", "unet"),
        ("vae", "decoder.conv_in", "vae_decoder"),
        ("text_encoder", "layers.1.mlp.fc1", "text_encoder"),
    ],
)
def test_a_non_finite_picture_names_component_and_module(part: str, broken: str, where: str) -> None:
    parts = make_parts()
    modules = getattr(parts, part).named_modules()
    next(m for n, m in modules if n.endswith(broken)).bias.data.fill_(torch.nan)
    with pytest.raises(EngineError, match=rf"^{where}: \d+ of \d+ output values are not finite, first in module \S+"):
        accelerated(parts, "eager").generate(wanted(steps=2))


def test_models_that_need_other_inputs_are_refused() -> None:
    parts = make_parts()
    parts.text_encoder.config.use_attention_mask = True
    with pytest.raises(CheckpointError, match=r"text_encoder: expected use_attention_mask False, .* got True"):
        accelerated(parts)
    parts.unet.register_to_config(in_channels=9)
    with pytest.raises(CheckpointError, match=r"unet: expected in_channels 4, .* got 9; use diffusers' own pipeline"):
        accelerated(parts)


def test_a_saved_pipeline_loads(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts.save_pretrained(tmp_path)
    for module in (diffusers.pipelines.pipeline_utils, diffusers.models.modeling_utils):
        monkeypatch.setattr(module.logger, "warning", lambda text, *_: pytest.fail(text))  # of accelerate
    load_model(tmp_path / "unet", kinds=["UNet2DConditionModel"], dtype=torch.float32, device=CPU)
    loaded = load_parts(tmp_path, device=CPU, dtype=torch.float32)
    assert torch.equal(loaded.unet.conv_in.weight, parts.unet.conv_in.weight)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "unet" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"Stable Diffusion .*: .*safetensors"):
        load_parts(tmp_path, device=CPU, dtype=torch.float32)


def test_picture_files_keep_pixels_and_parameters_and_are_reduced_as_by_diffusers(tmp_path: Path) -> None:
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image

    image = picture(16, 24)
    pixels = to_uint8(image[0])
    save_png(tmp_path / "a" / "b.png", pixels, {"prompt": "π", "seed": 3})
    assert read_parameters(tmp_path / "a" / "b.png") == {"prompt": "π", "seed": 3}
    loaded = load_image(tmp_path / "a" / "b.png")
    assert np.array_equal(to_uint8(loaded[0]), pixels) and float((loaded - image).abs().max()) <= 1 / 255 + 1e-6
    assert load_image(tmp_path / "a" / "b.png", (8, 32)).shape == (1, 3, 8, 32)
    with pytest.raises(ConfigError, match=r"expected a \.png, which can carry its parameters, got b\.jpg"):
        save_png(tmp_path / "b.jpg", pixels, {})
    (tmp_path / "text.png").write_text("no picture")
    for name in ("text.png", "missing.png"):
        with pytest.raises(ConfigError, match="expected a readable picture"):
            load_image(tmp_path / name)
    odd = np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8)
    save_png(tmp_path / "odd.png", odd, {})
    got = load_image(tmp_path / "odd.png", multiple=8)
    assert got.shape == (1, 3, 72, 96) and load_image(tmp_path / "odd.png").shape == (1, 3, 75, 100)
    torch.testing.assert_close(got, VaeImageProcessor(vae_scale_factor=8).preprocess(Image.fromarray(odd)))
    save_png(tmp_path / "low.png", odd[:7], {})
    with pytest.raises(ConfigError, match="expected at least 8 pixels a side, got 100x7"):
        load_image(tmp_path / "low.png", multiple=8)
