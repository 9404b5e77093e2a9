"""Image sizes: whatever diffusers takes gives diffusers' answer, of the same size and content."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel import cli  # noqa: E402
from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import ConfigError, EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, plug_in  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.picture import load_image, save_png  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402
from vla_accel.ledger import Ledger  # noqa: E402

CPU = torch.device("cpu")
# Half a step of uint8, which our picture is rounded to, and float32 noise over some steps.
HALF_STEP = 0.5 / 255 + 2e-4
SIZES = [(8, 8), (16, 72), (72, 72), (72, 64), (120, 136), (100, 75), (63, 65), (9, 200)]
"""(height, width): multiples of 8 and others."""


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", ["tiny-sd-vae", "tiny-qwen-vae"])
def test_every_size_has_the_answer_of_diffusers(name: str, engine: Any) -> None:
    vae = random_model(name, dtype=torch.float32, device=CPU)
    frames = (1,) if name == "tiny-qwen-vae" else ()
    ledger, wanted = Ledger(strict=True), []
    generator = torch.Generator().manual_seed(0)
    for height, width in SIZES:
        image = torch.rand(1, 3, *frames, height, width, generator=generator) * 2 - 1
        latents = torch.randn(1, 4, *frames, height // 8, width // 8, generator=generator)
        with torch.inference_mode():
            wanted.append((image, vae.encode(image).latent_dist.parameters, latents, vae.decode(latents).sample))
    plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}, ledger=ledger))
    for image, moments, latents, picture in wanted:
        torch.testing.assert_close(vae.encode(image).latent_dist.parameters, moments, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(vae.decode(latents).sample, picture, rtol=1e-4, atol=1e-4)


def test_an_image_smaller_than_a_latent_is_refused() -> None:
    accelerated = AcceleratedVae(random_model("tiny-sd-vae", dtype=torch.float32, device=CPU))
    with pytest.raises(ConfigError, match="image size: expected at least 8 pixels a side, got 64x7"):
        accelerated.encode(torch.zeros(1, 3, 7, 64))


@pytest.mark.parametrize("multi", [True, False])
def test_a_size_without_an_engine_file_is_refused_or_runs_without_an_engine(
    multi: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vae = random_model("tiny-sd-vae", dtype=torch.float32, device=CPU)
    (tmp_path / "512x512").mkdir()
    files = {"trt_engine_path": str(tmp_path), "multi_profile": multi}
    config: dict[str, Any] = {"vae_type": "tensorrt", "trt_vae_config": files}
    image = torch.rand(1, 3, 100, 75) * 2 - 1
    with pytest.raises(ConfigError, match=r"got 75x100; .*pad: auto"):
        AcceleratedVae(vae, config).encode(image)
    with torch.inference_mode():
        moments = vae.encode(image).latent_dist.parameters
    accelerated = AcceleratedVae(vae, {**config, "pad": "auto"})
    with caplog.at_level(logging.WARNING, "vla_accel"):
        assert torch.equal(accelerated.encode(image), moments)
    entry = accelerated.ledger.entries["vae_encoder"]
    assert (entry.requested, entry.used) == ("tensorrt", "eager") and "75x100" in entry.reason and entry.fell_back
    assert "vae_encoder" in caplog.text and "75x100" in caplog.text
    with pytest.raises(EngineError, match="strict mode: vae_encoder"):
        AcceleratedVae(vae, {**config, "pad": "auto"}, ledger=Ledger(strict=True)).encode(image)


def test_a_static_size_that_was_not_built_falls_back_but_a_missing_folder_does_not(tmp_path: Path) -> None:
    vae = random_model("tiny-sd-vae", dtype=torch.float32, device=CPU)
    (tmp_path / "512x512").mkdir()
    latents = torch.randn(1, 4, 8, 8)

    def accelerated(folder: Path) -> AcceleratedVae:
        files = {"trt_engine_path": str(folder)}
        return AcceleratedVae(vae, {"vae_type": "tensorrt", "trt_vae_config": files, "pad": "auto"})

    one = accelerated(tmp_path)
    with torch.inference_mode():
        assert torch.equal(one.decode(latents), vae.decode(latents).sample)
    assert one.ledger.entries["vae_decoder"].used == "eager"
    with pytest.raises(ConfigError, match="no such folder"):
        accelerated(tmp_path / "misspelt").decode(latents)


@pytest.fixture(scope="module")
def parts() -> Any:
    made = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def deep() -> Any:
    """A pipeline whose UNet has four levels, as Stable Diffusion has: 8 pixels are far from even at the lowest."""
    made = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    down = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
    from vla_accel.images.models import filled

    made.register_modules(
        unet=filled(
            lambda: diffusers.UNet2DConditionModel(
                sample_size=8, cross_attention_dim=32, attention_head_dim=4, norm_num_groups=8, layers_per_block=1,
                block_out_channels=(16, 16, 16, 16), down_block_types=down, up_block_types=up,
            ),
            dtype=torch.float32, device=CPU,
        )
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("size", [(72, 64), (64, 104), (8, 40), (136, 120)])
def test_text_to_image_takes_every_multiple_of_8(size: tuple[int, int], engine: Any) -> None:
    parts = deep()
    height, width = size
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec(engine)), strict=True)
    got = pipeline.generate(Request("a bowl", height=height, width=width, steps=2, seed=1)).pixels
    want = parts(
        "a bowl",
        height=height,
        width=width,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    assert got.shape == (height, width, 3)
    assert np.abs(got / 255 - want).max() < HALF_STEP


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("size", [(72, 72), (75, 100), (79, 65)])
def test_image_to_image_gives_the_size_and_content_of_diffusers(parts: Any, size: tuple[int, int], engine: Any) -> None:
    image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(4)) * 2 - 1
    request = Request("a bowl", steps=4, strength=0.5, seed=1)
    got = StableDiffusion(parts, Engines.all(EngineSpec(engine))).generate(request, image).pixels
    pipeline = diffusers.StableDiffusionImg2ImgPipeline(**parts.components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(
        "a bowl",
        image=image / 2 + 0.5,
        num_inference_steps=4,
        strength=0.5,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    assert got.shape == want.shape == (size[0] // 8 * 8, size[1] // 8 * 8, 3)
    assert np.abs(got / 255 - want).max() < HALF_STEP


def test_a_diffusers_pipeline_with_a_plugged_in_autoencoder_keeps_sizes(parts: Any) -> None:
    from PIL import Image

    pipeline = diffusers.StableDiffusionImg2ImgPipeline(**parts.components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    noise = np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8)

    def generate() -> np.ndarray:
        return pipeline(
            "a bowl",
            image=Image.fromarray(noise),
            num_inference_steps=2,
            strength=0.5,
            generator=torch.Generator().manual_seed(1),
            output_type="np",
        ).images[0]

    want = generate()
    undo = plug_in(pipeline.vae, AcceleratedVae(pipeline.vae))
    try:
        got = generate()
    finally:
        undo()
    assert got.shape == want.shape == (72, 96, 3)
    assert np.abs(got - want).max() < 1e-3


def test_a_picture_file_of_an_odd_size_is_reduced_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8)
    save_png(tmp_path / "a.png", pixels, {})
    want = VaeImageProcessor(vae_scale_factor=8).preprocess(Image.fromarray(pixels))
    got = load_image(tmp_path / "a.png", multiple=8)
    assert got.shape == (1, 3, 72, 96)
    torch.testing.assert_close(got, want)
    assert load_image(tmp_path / "a.png").shape == (1, 3, 75, 100)
    save_png(tmp_path / "b.png", pixels[:7], {})
    with pytest.raises(ConfigError, match="expected at least 8 pixels a side, got 100x7"):
        load_image(tmp_path / "b.png", multiple=8)


def test_the_commands_look_at_sizes_before_they_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StableDiffusion, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    picture = tmp_path / "a.png"
    save_png(picture, np.zeros((7, 100, 3), np.uint8), {})
    for words, message in {
        "txt2img --height 70 --width 64": "multiples of 8, got 64x70; the smallest that holds it is 64x72",
        f"img2img --in-img-path {picture} --height 64 --width 4": "multiples of 8, got 4x64",
        f"img2img --in-img-path {picture}": "expected at least 8 pixels a side, got 100x7",
    }.items():
        assert cli.main([*words.split(), "--sd-dir", "tiny-random", "--out-img-path", str(tmp_path / "out.png")]) == 1
        printed = capsys.readouterr()
        assert message in printed.err and "loading" not in printed.err and "denoising" not in printed.err


def test_the_command_makes_a_picture_of_an_odd_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, out = tmp_path / "a.png", tmp_path / "out.png"
    save_png(picture, np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8), {})
    words = f"img2img --sd-dir tiny-random --in-img-path {picture} --steps 4 --strength 0.5 --out-img-path {out}"
    assert cli.main([*words.split(), "--use-pipeline"]) == 0
    capsys.readouterr()
    ours, theirs = load_image(out), load_image(out.with_suffix(".pipeline.png"))
    assert ours.shape == theirs.shape == (1, 3, 72, 96)
    assert float((ours - theirs).abs().max()) <= 2 / 255 + 1e-6
