"""Autoencoders: our 2-D encoder and decoder, and their native program, against diffusers itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from tests.support.agreement import RATIO, assert_as_near  # noqa: E402
from vla_accel.errors import CheckpointError, EngineError  # noqa: E402
from vla_accel.images import native  # noqa: E402
from vla_accel.images.autoencoder import autoencoder_kind, split_autoencoder  # noqa: E402
from vla_accel.images.models import CONFIGS, random_model  # noqa: E402
from vla_accel.images.native_autoencoder import CompiledHalf, NativeHalf, QuickestHalf  # noqa: E402
from vla_accel.kernels.autotune import Fastest  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["tiny-qwen-vae", "tiny-sd-vae", "tiny-wan-vae", "tiny-wan22-vae"])
def vae(request: pytest.FixtureRequest) -> Any:
    return random_model(request.param, dtype=torch.float32, device=CPU, seed=3)


def inputs(vae: Any, batch: int = 2, height: int = 48, width: int = 96) -> tuple[Tensor, Tensor]:
    """An image and latents of some size, with a frame axis where the model has one."""
    frames = (1,) if autoencoder_kind(vae) == "qwen" else ()
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(batch, 3, *frames, height, width, generator=generator) * 2 - 1
    scale = split_autoencoder(vae)[0].scale
    return image, torch.randn(batch, 4, *frames, height // scale, width // scale, generator=generator)


def diffusers_results(vae: Any, image: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return vae.encode(image).latent_dist.parameters, vae.decode(latents).sample


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def test_both_halves_are_exact(vae: Any) -> None:
    image, latents = inputs(vae)
    encoder, decoder = split_autoencoder(vae)
    for half, x, want in zip((encoder, decoder), (image, latents), diffusers_results(vae, image, latents), strict=True):
        assert want.std() > 0.05, "a test on constants would prove nothing"
        with torch.inference_mode():
            assert relative(half(x), want) < 1e-5


def test_the_native_program_is_exact(vae: Any) -> None:
    image, latents = inputs(vae)
    for half, x, want in zip(
        split_autoencoder(vae), (image, latents), diffusers_results(vae, image, latents), strict=True
    ):
        program, out = NativeHalf(half), torch.full_like(want, torch.nan)
        program({"x": x}, {"y": out})
        assert relative(out, want) < 1e-5
        # One instance serves every size.
        smaller = x[..., : x.shape[-1] // 2].contiguous()
        out = torch.empty(*want.shape[:-1], want.shape[-1] // 2)
        program({"x": smaller}, {"y": out})
        with torch.inference_mode():
            assert relative(out, half(smaller)) < 1e-5
        assert "attention" in program.detail and "channels-last float32" in program.detail


def test_the_decoder_of_qwen_is_held_to_the_picture_range(vae: Any) -> None:
    _, latents = inputs(vae)
    _, decoder = split_autoencoder(vae)
    with torch.inference_mode():
        want = decoder(10 * latents)
    assert (float(want.abs().max()) == 1.0) is (autoencoder_kind(vae) == "qwen")
    out = torch.empty_like(want)
    NativeHalf(decoder)({"x": 10 * latents}, {"y": out})
    assert relative(out, want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_stay_in_range_and_close(vae: Any, dtype: torch.dtype) -> None:
    image, latents = inputs(vae, batch=1)
    wants = diffusers_results(vae, image, latents)
    narrow = random_model(
        next(
            n
            for n, (kind, c) in CONFIGS.items()
            if n.startswith("tiny")
            and kind == type(vae).__name__
            and c.get("patch_size") == vae.config.get("patch_size")
        ),
        dtype=dtype,
        device=CPU,
        seed=3,
    )
    plains = diffusers_results(narrow, image.to(dtype), latents.to(dtype))
    for half, x, plain, want in zip(split_autoencoder(narrow), (image, latents), plains, wants, strict=True):
        with torch.inference_mode():
            got = half(x.to(dtype))
        assert got.dtype == dtype
        assert_as_near(got, plain, want)


def test_float16_inside_is_finer_than_the_bfloat16_round_it(vae: Any) -> None:
    image, _ = inputs(vae)
    encoder, _ = split_autoencoder(vae)
    coarse = copy.deepcopy(encoder).bfloat16()
    with torch.inference_mode():
        want = copy.deepcopy(coarse).float()(image.bfloat16().float())
        plain = coarse(image.bfloat16())
    # Float16 leaves little in addition to the rounding of the result itself.
    for dtype, ratio in ((torch.bfloat16, RATIO), (torch.float16, 0.5)):
        out = torch.empty_like(want, dtype=torch.bfloat16)
        NativeHalf(coarse, dtype)({"x": image.bfloat16()}, {"y": out})
        assert_as_near(out, plain, want, ratio)
    coarse.conv_in.weight.data[0, 0, 0, 0] = 1e5
    with pytest.raises(EngineError, match=r"weight conv_in\.weight does not fit torch\.float16"):
        NativeHalf(coarse, torch.float16)


@pytest.mark.slow
def test_the_quickest_program_is_measured_once_a_size(vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image, _ = inputs(vae)
    encoder, _ = split_autoencoder(vae)
    calls: list[str] = []

    class Noted:
        def __init__(self, name: str, program: Any) -> None:
            self.name, self.program, self.detail = name, program, program.detail

        def __call__(self, inputs: Any, outputs: Any) -> None:
            calls.append(self.name)
            self.program(inputs, outputs)

    measured = 0

    def fastest(ways: dict[str, Any], device: torch.device, repeats: int) -> Fastest:
        nonlocal measured
        measured += 1
        for run in ways.values():
            run()
        return Fastest("compiled", {"fused": 2.0, "compiled": 1.0}, {"third": "too large"})

    fused, compiled = NativeHalf(encoder), CompiledHalf(copy.deepcopy(encoder), backend="eager")
    fused({"x": image}, {"y": torch.empty(2, 8, *image.shape[2:-2], 6, 10)})
    monkeypatch.setattr(native, "fastest", fastest)
    quickest = QuickestHalf({"fused": Noted("fused", fused), "compiled": Noted("compiled", compiled)})
    with torch.inference_mode():
        want = encoder(image)
    for _ in range(2):
        out = torch.empty_like(want)
        quickest({"x": image}, {"y": out})
        assert relative(out, want) < 1e-5
    assert measured == 1 and calls == ["fused", "compiled", "compiled", "compiled"]
    assert quickest.detail == (
        "compiled (fused 2.00 ms, compiled 1.00 ms, third out: too large): "
        "torch.compile (eager) of the channels-last form"
    )


def test_unknown_autoencoders_and_blocks_are_named() -> None:
    with pytest.raises(
        CheckpointError, match="expected one of AutoencoderKLQwenImage, AutoencoderKLWan, AutoencoderKL, got Linear"
    ):
        split_autoencoder(nn.Linear(2, 2))
    vae = random_model("tiny-sd-vae", dtype=torch.float32, device=CPU)
    vae.encoder.mid_block.attentions[0].heads = 2
    with pytest.raises(CheckpointError, match="expected one attention head and a group norm, got 2"):
        split_autoencoder(vae)
    vae = random_model("tiny-qwen-vae", dtype=torch.float32, device=CPU)
    vae.decoder.up_blocks[0].resnets[0] = nn.SiLU()
    with pytest.raises(CheckpointError, match="unknown block SiLU"):
        split_autoencoder(vae)
    encoder, _ = split_autoencoder(random_model("tiny-sd-vae", dtype=torch.float32, device=CPU))
    encoder.blocks[0] = nn.SiLU()
    with pytest.raises(EngineError, match="native autoencoder: unknown block SiLU"):
        NativeHalf(encoder)
