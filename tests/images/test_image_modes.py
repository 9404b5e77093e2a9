"""torch's modes around image engines: no_grad, inference mode, autocast and gradients; odd values of requests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import ConfigError, EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, VaeConfig, plug_in  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402

CPU = torch.device("cpu")
VAES = ("tiny-sd-vae", "tiny-qwen-vae")


def pair(name: str, engine: str) -> tuple[Any, Any]:
    """diffusers' autoencoder, and the same one on engines."""
    plain = random_model(name, dtype=torch.float32, device=CPU)
    fast = copy.deepcopy(plain)
    plug_in(fast, AcceleratedVae(fast, {"vae_type": engine}))
    return plain, fast


def inputs(name: str) -> tuple[Tensor, Tensor]:
    """An image and latents."""
    frames = (1,) if name == "tiny-qwen-vae" else ()
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, *frames, 64, 64, generator=generator) * 2 - 1
    return image, torch.randn(1, 4, *frames, 8, 8, generator=generator)


@pytest.mark.parametrize("name", VAES)
def test_latents_may_enter_a_training_loop(name: str) -> None:
    plain, fast = pair(name, "native")
    image, latents = inputs(name)
    found: list[Tensor] = []
    for vae in (plain, fast):
        with torch.no_grad():
            encoded = vae.encode(image).latent_dist.mode()
            vae.decode(latents).sample.mul_(2)
        weight = torch.ones(1, requires_grad=True)
        (encoded * weight).sum().backward()
        assert weight.grad is not None
        found.append(weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", VAES)
def test_gradients_are_refused_instead_of_lost(name: str) -> None:
    _, fast = pair(name, "native")
    image, latents = (value.requires_grad_() for value in inputs(name))
    for call, value, part in ((fast.encode, image, "vae_encoder"), (fast.decode, latents, "vae_decoder")):
        with pytest.raises(EngineError, match=rf"{part}: expected inputs without gradient.*got requires_grad=True"):
            call(value)
        with torch.no_grad():
            call(value)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_autocast_is_refused_and_leaves_nothing_behind(engine: Any) -> None:
    plain, fast = pair("tiny-sd-vae", engine)
    _, latents = inputs("tiny-sd-vae")
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec(engine)))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(EngineError, match=r"vae_decoder: expected a call outside of torch\.autocast"):
            fast.decode(latents)
        with pytest.raises(EngineError, match=r"generate: expected a call outside of torch\.autocast"):
            pipeline.generate(Request("a bowl", steps=1))
        with torch.autocast("cpu", enabled=False):
            got = fast.decode(latents).sample
    with torch.no_grad():
        torch.testing.assert_close(got, plain.decode(latents).sample, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [VaeConfig, dict])
@pytest.mark.parametrize(
    ("field", "value"),
    [("vae_type", "nativ"), ("pad", "Auto"), ("inductor", "mesure"), ("precision", "half"),
     ("memory_budget_gib", float("nan")), ("memory_budget_gib", "3"), ("memory_budget_gib", None)],
)  # fmt: skip
def test_a_configuration_is_checked_in_python_as_in_a_file(kind: Any, field: str, value: Any) -> None:
    vae = random_model("tiny-sd-vae", dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        AcceleratedVae(vae, kind(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("guidance", float("nan")), ("guidance", "7"), ("seed", -1), ("seed", 2**64), ("seed", 1.5), ("steps", 2.5),
     ("prompt", ["a", "b"]), ("negative_prompt", None), ("strength", "0.5"), ("scheduler", 3)],
)  # fmt: skip
def test_a_request_names_the_value_that_it_cannot_take(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field}: expected"):
        Request(**{"prompt": "a bowl", field: value})


# -- a whole pipeline ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    parts.set_progress_bar_config(disable=True)
    return StableDiffusion(parts)


IMAGE = torch.rand(1, 3, 64, 72, generator=torch.Generator().manual_seed(5)) * 2 - 1


@pytest.mark.parametrize(
    ("image", "got"),
    [(((IMAGE / 2 + 0.5) * 255).to(torch.uint8), "torch.uint8"), ((IMAGE / 2 + 0.5) * 255, r"0\.\d+ to 25"),
     (IMAGE * float("nan"), "nan"), (IMAGE.numpy(), "ndarray")],
)  # fmt: skip
def test_pixels_of_another_range_are_refused(pipeline: StableDiffusion, image: Any, got: str) -> None:
    with pytest.raises(ConfigError, match=f"image: expected .*, got {got}"):
        pipeline.generate(Request("a bowl", steps=2), image)


@pytest.mark.parametrize("from_image", [False, True])
def test_a_scheduler_with_an_eta_of_its_own_gives_the_picture_of_diffusers(
    pipeline: StableDiffusion, from_image: bool
) -> None:
    parts = pipeline.parts
    kind = diffusers.StableDiffusionImg2ImgPipeline if from_image else diffusers.StableDiffusionPipeline
    plain = kind(**parts.components, requires_safety_checker=False)
    plain.scheduler = diffusers.TCDScheduler.from_config(parts.scheduler.config)
    plain.set_progress_bar_config(disable=True)
    size = {"image": IMAGE / 2 + 0.5, "strength": 0.8} if from_image else {"height": 64, "width": 72}
    generator = torch.Generator().manual_seed(0)
    want = plain("a bowl", num_inference_steps=4, generator=generator, output_type="np", **size).images[0]
    request = Request("a bowl", height=64, width=72, steps=4, scheduler="TCD")
    got = pipeline.generate(request, IMAGE if from_image else None).pixels
    assert abs(got / 255 - want).max() < 0.5 / 255 + 2e-4


@pytest.mark.parametrize(
    ("name", "got"),
    [("Amused", "mask_token_id"), ("EntropyBound", "without init_noise_sigma"), ("RePaint", "original_image")],
)
def test_a_scheduler_of_other_models_is_refused_by_name(pipeline: StableDiffusion, name: str, got: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler {name}Scheduler: expected .*{got}"):
        pipeline.generate(Request("a bowl", steps=2, scheduler=name))


def test_a_scheduler_without_noise_for_images_still_makes_pictures(pipeline: StableDiffusion) -> None:
    with pytest.raises(ConfigError, match="scheduler DDIMInverseScheduler: expected one with add_noise"):
        pipeline.generate(Request("a bowl", steps=2, scheduler="DDIMInverse"), IMAGE)
    pipeline.generate(Request("a bowl", height=64, width=64, steps=2, scheduler="DDIMInverse"))


def test_a_deep_copy_is_a_pipeline_of_its_own(pipeline: StableDiffusion) -> None:
    request = Request("a bowl", height=64, width=64, steps=2)
    want = pipeline.generate(request)
    want.latents.mul_(1)  # an ordinary tensor
    made = copy.deepcopy(pipeline)
    assert (made.generate(request).pixels == want.pixels).all()
    with torch.no_grad():
        made.parts.vae.decoder.conv_out.weight.mul_(-1)
    assert (made.generate(request).pixels != want.pixels).any()
    assert (pipeline.generate(request).pixels == want.pixels).all()
