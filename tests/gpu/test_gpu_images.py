"""Image models on a GPU: threads with streams of their own, graphs that follow the weights, sizes, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from tests.support.agreement import assert_as_near  # noqa: E402
from tests.support.gpu_memory import Reserve  # noqa: E402
from tests.support.images import ENGINES, VAES, both_sides, vae_inputs, wrong_answers  # noqa: E402
from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import DeviceMemoryError, EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, plug_in  # noqa: E402
from vla_accel.images.autoencoder import split_autoencoder  # noqa: E402
from vla_accel.images.memory import required_bytes  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.qwen import accelerate, random_qwen_image  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402
from vla_accel.images.vae_component import vae_component  # noqa: E402
from vla_accel.ledger import Ledger  # noqa: E402

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def own_stream() -> Any:
    return torch.cuda.stream(torch.cuda.Stream())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VAES)
def test_each_thread_gets_its_own_picture(name: str, engine: str) -> None:
    vae = random_model(name, dtype=torch.bfloat16, device=GPU)
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    like = vae_inputs(name, 256, 256)[1]
    values = [torch.randn(like.shape, device=GPU, dtype=torch.bfloat16) for _ in range(4)]
    expected = [accelerated.decode(value) for value in values]
    torch.cuda.synchronize()
    assert wrong_answers(lambda i: accelerated.decode(values[i]), expected, 100, own_stream, tolerance=1e-2) == 0


def test_threads_make_engines_at_the_same_time() -> None:
    """Each object and size records graphs of its own, on the stream that all of them share."""
    vaes = [random_model("tiny-sd-vae", dtype=torch.bfloat16, device=GPU, seed=i) for i in range(4)]
    latents = torch.randn(1, 4, 16, 24, device=GPU, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = [vae.decode(latents).sample for vae in vaes]
    torch.cuda.synchronize()

    def decode(index: int) -> Tensor:
        return AcceleratedVae(vaes[index]).decode(latents)

    errors = [float((decode(i).float() - e.float()).abs().max()) for i, e in enumerate(expected)]
    bound = 2 * max(errors) + 1e-3
    assert wrong_answers(decode, expected, 3, tolerance=bound) == 0


def test_each_thread_gets_the_picture_of_its_own_prompt() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float16, device=GPU)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec("native")))
    requests = [Request("abcd"[i], height=64, width=72, steps=3, seed=i) for i in range(4)]

    def pixels(index: int) -> Tensor:
        return torch.from_numpy(pipeline.generate(requests[index]).pixels / 255.0)

    expected = [pixels(i) for i in range(4)]
    assert wrong_answers(pixels, expected, 5, own_stream, tolerance=1e-2) == 0


@pytest.fixture
def transformer() -> Any:
    return random_qwen_image(tiny=True, layers=2, dtype=torch.float32, device=GPU)


def named(seed: int) -> dict[str, Any]:
    generator = torch.Generator(GPU).manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 24, 16, generator=generator, device=GPU),
        "encoder_hidden_states": torch.randn(1, 7, 24, generator=generator, device=GPU),
        "timestep": torch.tensor([0.5], device=GPU),
        "img_shapes": [[(1, 4, 6)]],
    }


@torch.inference_mode()
def test_a_graphed_transformer_follows_threads_inputs_and_weights(transformer: Any) -> None:
    module = transformer.transformer
    inputs = [named(i) for i in range(4)]
    samples = [[torch.randn(1, 24, 32, device=GPU)] for _ in range(2)]
    plain = [module(**one).sample for one in inputs]
    controlled = [module(**inputs[0], controlnet_block_samples=s).sample for s in samples]
    ledger = Ledger()
    undo = accelerate(transformer, None, "native", ledger=ledger)
    assert ledger.entries["transformer"].used == "native"

    def run(index: int) -> Tensor:
        with torch.inference_mode():
            return module(**inputs[index]).sample

    for index, want in enumerate(plain):
        torch.testing.assert_close(run(index), want, rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()
    assert wrong_answers(run, plain, 50, own_stream, tolerance=1e-2) == 0
    for sample, want in zip(samples, controlled, strict=True):
        got = module(**inputs[0], controlnet_block_samples=sample).sample
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    other = copy.deepcopy(module)
    for change in (lambda m: m.proj_out.weight.data.mul_(2), replace_weights):
        change(module)
        got = run(0)
        undo()
        want = module(**inputs[0]).sample
        undo = accelerate(transformer, None, "native")
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert float((got - plain[0]).abs().max()) > 1e-2
    torch.testing.assert_close(other(**inputs[0]).sample, plain[0], rtol=1e-3, atol=1e-3)
    with pytest.raises(EngineError, match=r"expected tensors, numbers or texts, got object"):
        module(**inputs[0], attention_kwargs={"x": object()})


def replace_weights(module: Any) -> None:
    module.proj_out = nn.Linear(32, 16, device=GPU)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "channels"), [("sd-vae", 4), ("qwen-vae", 16), ("wan-vae", 16), ("wan22-vae", 48)])
def test_published_autoencoders_are_as_near_to_diffusers_in_float32_as_its_own_bfloat16(
    name: str, channels: int, engine: str, reserve: Reserve
) -> None:
    reserve(8)
    image, latents = (x.to(GPU) for x in vae_inputs(name, 256, 384, channels=channels))
    vae = random_model(name, dtype=torch.bfloat16, device=GPU)
    plain = both_sides(vae, image.bfloat16(), latents.bfloat16())
    plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    got = both_sides(vae, image.bfloat16(), latents.bfloat16())
    wide = random_model(name, dtype=torch.float32, device=GPU)
    wide.load_state_dict({k: v.float() for k, v in vae.state_dict().items()})
    want = both_sides(wide, image.bfloat16().float(), latents.bfloat16().float())
    for one, other, exact in zip(got, plain, want, strict=True):
        assert_as_near(one, other, exact)


def test_odd_sizes_are_those_of_eager() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=GPU)
    latents = torch.randn(1, 4, 9, 13, device=GPU)
    image = torch.rand(1, 3, 75, 100, device=GPU) * 2 - 1
    with torch.inference_mode():
        want = parts.vae.encode(image).latent_dist.parameters, parts.vae.decode(latents).sample
    parts.vae.to(torch.bfloat16)
    accelerated = AcceleratedVae(parts.vae)
    got = accelerated.encode(image.bfloat16()), accelerated.decode(latents.bfloat16())
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        cosine = torch.nn.functional.cosine_similarity(one.float().flatten(), other.flatten(), dim=0)
        assert float(cosine) > 0.999
    request = Request("a bowl", height=72, width=104, steps=2)
    pictures = [
        StableDiffusion(random_stable_diffusion(tiny=True, dtype=torch.float16, device=GPU), Engines.all(EngineSpec(e)))
        .generate(request)
        .pixels.astype(float)
        for e in ("eager", "native")
    ]
    assert abs(pictures[0] - pictures[1]).mean() < 2


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", ["sd-vae", "qwen-vae", "wan22-vae"])
def test_the_estimate_of_memory_is_near_what_is_used(name: str, engine: str, reserve: Reserve) -> None:
    reserve(16)
    vae = random_model(name, dtype=torch.bfloat16, device=GPU)
    component = vae_component(split_autoencoder(vae)[1], "decoder", (1024, 1024))
    estimate = required_bytes(component)
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    accelerated.decode(component.inputs[0].empty(GPU)[..., :8, :8].zero_())  # weights of the program
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Not what is reserved: the allocator gives its cached blocks back when memory runs out.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accelerated.decode(torch.zeros(component.inputs[0].shape, device=GPU, dtype=torch.bfloat16))
    used = torch.cuda.max_memory_allocated() - before
    print(f"{name} {engine}: estimated {estimate / 1e9:.2f} GB, used {used / 1e9:.2f} GB")
    assert 0.4 * used < estimate < 3 * used


def test_what_does_not_fit_is_refused_and_tiles_fit() -> None:
    vae = random_model("tiny-sd-vae", dtype=torch.bfloat16, device=GPU)
    plug_in(vae, AcceleratedVae(vae))
    latents = torch.zeros(1, 4, 6000, 6000, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(DeviceMemoryError, match="enable_tiling"):
        vae.decode(latents)
    vae.enable_tiling()
    assert vae.decode(latents[..., :100, :130]).sample.shape == (1, 3, 800, 1040)
