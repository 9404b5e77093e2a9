"""Switches of a diffusers pipeline after its parts were exchanged: each is honoured, neutral or refused by name."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.config.policy import NativeOptions  # noqa: E402
from vla_accel.errors import CheckpointError, ConfigError, EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, plug_in  # noqa: E402
from vla_accel.images.cache import WeightState  # noqa: E402
from vla_accel.images.graphed import GraphedForward  # noqa: E402
from vla_accel.images.models import random_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.qwen import accelerate, random_qwen_image  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402
from vla_accel.ledger import Ledger  # noqa: E402

CPU = torch.device("cpu")
VAES = ("tiny-sd-vae", "tiny-qwen-vae")


def make(name: str) -> Any:
    return random_model(name, dtype=torch.float32, device=CPU)


def inputs(name: str, height: int = 64, width: int = 64, batch: int = 1) -> tuple[Tensor, Tensor]:
    """An image and latents."""
    frames = (1,) if name == "tiny-qwen-vae" else ()
    generator = torch.Generator().manual_seed(height)
    image = torch.rand(batch, 3, *frames, height, width, generator=generator) * 2 - 1
    return image, 2 * torch.randn(batch, 4, *frames, height // 8, width // 8, generator=generator)


@torch.no_grad()  # as diffusers' pipelines call: tiles are blended in place
def both(vae: Any, image: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    return vae.encode(image).latent_dist.parameters, vae.decode(latents).sample


def assert_near(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def far(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    return all(float((a - b).abs().max()) > 1e-2 for a, b in zip(got, want, strict=True))


# -- tiles and slices ---------------------------------------------------------------------------------------------


def tile(vae: Any, size: int) -> None:
    if isinstance(vae, diffusers.AutoencoderKL):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = size, size // 8
    else:
        vae.enable_tiling(size, size, size * 3 // 4, size * 3 // 4)


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", VAES)
def test_tiles_are_those_of_diffusers(name: str, engine: Any) -> None:
    vae = make(name)
    image, latents = inputs(name, 136, 200)
    whole = both(vae, image, latents)
    tile(vae, 64)
    tiled = both(vae, image, latents)
    tile(vae, 96)
    larger = both(vae, image, latents)
    vae.disable_tiling()
    assert far(tiled, whole) and far(larger, tiled), "equal answers would prove nothing"
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    plug_in(vae, accelerated)
    tile(vae, 64)
    assert_near(both(vae, image, latents), tiled)
    assert not any("136" in key for key in accelerated.sizes), "no engine has the size of the whole picture"
    tile(vae, 96)
    assert_near(both(vae, image, latents), larger)
    vae.disable_tiling()
    assert_near(both(vae, image, latents), whole)


@pytest.mark.parametrize("name", VAES)
def test_slices_run_one_image_at_a_time(name: str) -> None:
    vae = make(name)
    image, latents = inputs(name, batch=3)
    want = both(vae, image, latents)
    accelerated = AcceleratedVae(vae)
    plug_in(vae, accelerated)
    vae.enable_slicing()
    assert_near(both(vae, image, latents), want)
    assert {batch for _, batch, _ in accelerated.cache.made} == {1}
    vae.disable_slicing()
    assert_near(both(vae, image, latents), want)
    assert {batch for _, batch, _ in accelerated.cache.made} == {1, 3}


def test_tiles_count_in_our_own_pipeline() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    parts.set_progress_bar_config(disable=True)
    tile(parts.vae, 64)
    want = parts(
        "a bowl", height=72, width=136, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images[0]  # fmt: skip
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec("native")))
    request = Request("a bowl", height=72, width=136, steps=2)
    tiled = pipeline.generate(request).pixels
    assert abs(tiled / 255 - want).max() < 0.5 / 255 + 2e-4
    assert "decoder 136x72" not in pipeline.vae.sizes
    parts.vae.disable_tiling()
    assert abs(pipeline.generate(request).pixels - tiled.astype(float)).max() > 1


def test_several_frames_are_refused() -> None:
    vae = make("tiny-qwen-vae")
    plug_in(vae, AcceleratedVae(vae))
    with pytest.raises(EngineError, match=r"expected one frame, .*, got \(1, 4, 2, 8, 8\)"):
        vae.decode(torch.zeros(1, 4, 2, 8, 8))


# -- weights ------------------------------------------------------------------------------------------------------


def loaded(vae: Any) -> None:
    vae.load_state_dict({k: v * 1.1 for k, v in vae.state_dict().items()})


def in_place(vae: Any) -> None:
    with torch.no_grad():
        vae.encoder.conv_in.weight.mul_(-1)
        vae.decoder.conv_out.weight.mul_(-1)


def through_data(vae: Any) -> None:
    """As peft's `fuse_lora` writes: neither the address nor the version of the tensor changes."""
    vae.encoder.mid_block.resnets[0].conv1.weight.data += 0.2
    vae.decoder.mid_block.resnets[0].conv1.weight.data += 0.2


def exchanged_parameters(vae: Any) -> None:
    for part in (vae.encoder, vae.decoder):
        part.conv_in.weight = nn.Parameter(part.conv_in.weight * 1.5)


@pytest.mark.parametrize("change", [loaded, in_place, through_data, exchanged_parameters])
@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", VAES)
def test_weights_that_change_later_count(name: str, engine: Any, change: Callable[[Any], None]) -> None:
    vae = make(name)
    values = inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    before = both(vae, *values)
    change(vae)
    got = both(vae, *values)
    undo()
    want = both(vae, *values)
    assert_near(got, want)
    assert far(want, before), "the change must show"


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("name", VAES)
def test_another_dtype_counts(name: str, engine: Any) -> None:
    vae = make(name)
    image, latents = inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    both(vae, image, latents)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        vae.to(dtype)
        got = both(vae, image.to(dtype), latents.to(dtype))
        assert got[0].dtype == got[1].dtype == dtype
    with pytest.raises(EngineError, match=r"vae_encoder: expected dtype torch.float32, got torch.float16"):
        vae.encode(image.half())
    undo()


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_weights_of_our_own_pipeline_count(part: str, engine: Any) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    parts.set_progress_bar_config(disable=True)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec(engine)))
    request = Request("a bowl", height=64, width=64, steps=2)
    before = pipeline.generate(request).pixels
    with torch.no_grad():
        for parameter in getattr(parts, part).parameters():
            parameter.data.mul_(1.2)
    got = pipeline.generate(request).pixels
    want = parts(
        "a bowl", height=64, width=64, num_inference_steps=2, generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images[0]  # fmt: skip
    assert abs(got / 255 - want).max() < 0.5 / 255 + 5e-4
    assert abs(got.astype(float) - before).max() > 3, "the change must show"


def test_our_own_pipeline_follows_to_another_dtype() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec("native")))
    request = Request("a bowl", height=64, width=64, steps=2)
    narrow = pipeline.generate(request)
    parts.to(torch.bfloat16)
    wide = pipeline.generate(request)
    assert narrow.latents.dtype == torch.float32 and wide.latents.dtype == torch.bfloat16


def test_a_state_tells_what_changed_and_what_did_not() -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    state = WeightState(module)
    module(torch.ones(2, 3))
    assert not state.changed()
    module[0].weight.data.neg_()
    assert state.changed() and not WeightState(module, values=False).changed()
    state = WeightState(module)
    module[1].running_mean.add_(1)
    assert state.changed()
    state = WeightState(module)
    module[0] = nn.Linear(3, 3)
    assert state.changed()


# -- adapters, hooks, offloading ----------------------------------------------------------------------------------


class FakeLora(nn.Module):
    """A LoRA layer as peft puts it in the place of a layer: with the attributes that peft's have."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters, self.scaling = base, [], {"one": 1.0}

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * (1 + self.scaling["one"])


class OffloadHook:
    """Stands for accelerate's hook."""


def refusals() -> Iterator[tuple[str, Callable[[Any], None], str]]:
    def lora(vae: Any) -> None:
        vae.decoder.conv_in = FakeLora(vae.decoder.conv_in)

    def offload(vae: Any) -> None:
        vae._hf_hook = OffloadHook()

    def sequential(vae: Any) -> None:
        vae.encoder.conv_in._hf_hook = OffloadHook()

    def group(vae: Any) -> None:
        from diffusers.hooks.hooks import HookRegistry, ModelHook

        HookRegistry.check_if_exists_or_initialize(vae.encoder).register_hook(ModelHook(), "group_offloading")

    def hook(vae: Any) -> None:
        vae.decoder.mid_block.register_forward_hook(lambda *_: None)

    yield "lora", lora, r"vae\.decoder\.conv_in: .* LoRA layer; call pipeline\.fuse_lora\(\)"
    yield "offload", offload, r"vae: .*OffloadHook \(enable_model_cpu_offload, .*remove_all_hooks\(\)"
    yield "sequential", sequential, r"vae\.encoder\.conv_in: .*enable_sequential_cpu_offload"
    yield "group", group, r"vae\.encoder: .*group_offloading \(enable_group_offload"
    yield "hook", hook, r"vae\.decoder\.mid_block: .*\(register_forward_hook\)"


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize(("change", "message"), [r[1:] for r in refusals()], ids=[r[0] for r in refusals()])
def test_what_engines_would_ignore_is_refused_before_and_after(
    name: str, change: Callable[[Any], None], message: str
) -> None:
    vae = make(name)
    values = inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae))
    both(vae, *values)
    change(vae)
    with pytest.raises(EngineError, match=message):
        both(vae, *values)
    undo()
    with pytest.raises(EngineError, match=message):
        AcceleratedVae(vae).decode(values[1])


def test_a_registry_without_hooks_is_fine() -> None:
    from diffusers.hooks.hooks import HookRegistry

    vae = make("tiny-sd-vae")
    HookRegistry.check_if_exists_or_initialize(vae)
    AcceleratedVae(vae).decode(inputs("tiny-sd-vae")[1])


def test_attention_of_the_same_mathematics_is_neutral_and_any_other_is_refused() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    vae = make("tiny-sd-vae")
    values = inputs("tiny-sd-vae")
    want = both(vae, *values)
    plug_in(vae, AcceleratedVae(vae))
    vae.set_attn_processor(AttnProcessor())
    assert_near(both(vae, *values), want)
    vae.fuse_qkv_projections()
    assert_near(both(vae, *values), want)

    class OwnProcessor(AttnProcessor):
        pass

    vae.unfuse_qkv_projections()
    vae.set_attn_processor(OwnProcessor())
    with pytest.raises(EngineError, match="got OwnProcessor"):
        both(vae, *values)


def test_switches_of_the_unet_count_in_eager_and_are_refused_elsewhere() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    request = Request("a bowl", height=64, width=64, steps=2)
    eager, native = (StableDiffusion(parts, Engines.all(EngineSpec(engine))) for engine in ("eager", "native"))
    plain = eager.generate(request).pixels.astype(float)
    assert abs(native.generate(request).pixels - plain).max() <= 1
    parts.enable_freeu(s1=0.9, s2=0.2, b1=1.4, b2=1.6)
    assert abs(eager.generate(request).pixels - plain).max() > 3
    with pytest.raises(EngineError, match=r"unet\.up_blocks\.0: expected no FreeU \(enable_freeu\)"):
        native.generate(request)
    parts.disable_freeu()
    assert abs(native.generate(request).pixels - plain).max() <= 1
    block = parts.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2
    block.to_q = FakeLora(block.to_q)
    assert abs(eager.generate(request).pixels - plain).max() > 1
    block.to_q.scaling["one"] = 0.0
    assert abs(eager.generate(request).pixels - plain).max() <= 1
    with pytest.raises(EngineError, match=r"unet\.down_blocks\.0.*attn2\.to_q: .*LoRA layer"):
        native.generate(request)
    block.to_q = block.to_q.base_layer
    parts.unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    for pipeline in (eager, native):
        with pytest.raises(CheckpointError, match=r"encoder_hid_dim_type None, .* got 'ip_image_proj'"):
            pipeline.generate(request)


def test_offloading_and_hooks_in_our_own_pipeline() -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts, Engines.all(EngineSpec("native")))
    request = Request("a bowl", height=64, width=64, steps=1)
    pipeline.generate(request)
    for part in ("unet", "text_encoder", "vae"):
        module = getattr(parts, part)
        module._hf_hook = OffloadHook()
        with pytest.raises(EngineError, match=f"^{part}: .*enable_model_cpu_offload"):
            pipeline.generate(request)
        del module._hf_hook
    handle = parts.unet.mid_block.register_forward_hook(lambda *_: None)
    with pytest.raises(EngineError, match=r"^unet\.mid_block: .*register_forward_hook"):
        pipeline.generate(request)
    handle.remove()
    pipeline.generate(request)


# -- copies, undoing, other pipelines -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", VAES)
def test_a_deep_copy_has_engines_of_its_own(name: str) -> None:
    vae = make(name)
    values = inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae))
    before = both(vae, *values)
    other = copy.deepcopy(vae)
    in_place(other)
    assert_near(both(vae, *values), before)
    changed = both(other, *values)
    assert far(changed, before)
    undo()
    plain = make(name)
    in_place(plain)
    assert_near(changed, both(plain, *values))
    assert_near(both(other, *values), changed)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_several_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    vae = make("tiny-sd-vae")
    there = dict(vars(vae))
    engines = [AcceleratedVae(vae) for _ in order]
    undo = [plug_in(vae, one) for one in engines]
    left = {0, 1, 2}
    for index in order:
        undo[index]()
        undo[index]()
        left.discard(index)
        if left:
            vae.decode(inputs("tiny-sd-vae", 8 * (8 + len(left)))[1])
            assert engines[max(left)].sizes, "the newest that is left runs"
    assert vars(vae) == there


def test_own_functions_of_an_object_come_back() -> None:
    vae = make("tiny-sd-vae")
    vae.decode = "a user's own"
    first, second = (plug_in(vae, AcceleratedVae(vae)) for _ in range(2))
    first()
    second()
    assert vars(vae)["decode"] == "a user's own" and "encode" not in vars(vae)


def test_engines_of_another_autoencoder_are_refused() -> None:
    one, other = make("tiny-sd-vae"), make("tiny-sd-vae")
    with pytest.raises(EngineError, match="plug_in: expected an AcceleratedVae made from this autoencoder"):
        plug_in(one, AcceleratedVae(other))
    assert "decode" not in vars(one)


@pytest.mark.parametrize("transformer", ["native", "compile"])
def test_an_unsupported_pipeline_is_one_error_and_stays_as_it_is(transformer: Any) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    there = dict(vars(parts.vae))
    with pytest.raises(
        ConfigError,
        match=r"StableDiffusionPipeline\.transformer: expected QwenImageTransformer2DModel, got no such part",
    ):
        accelerate(parts, {"vae_type": "native"}, transformer)
    assert vars(parts.vae) == there


def test_a_pipeline_of_another_autoencoder_is_refused() -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    pipeline.vae = diffusers.AutoencoderTiny()
    with pytest.raises(ConfigError, match=r"\.vae: expected AutoencoderKLQwenImage or AutoencoderKL, got the class"):
        accelerate(pipeline, {"vae_type": "native"}, "native")
    assert "forward" not in vars(pipeline.transformer)


def test_whatever_fails_leaves_the_pipeline_as_it_is() -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    with pytest.raises(EngineError, match=r"strict mode: transformer: .*a CUDA graph needs a GPU"):
        accelerate(pipeline, {"vae_type": "native"}, "native", ledger=Ledger(strict=True))
    assert "decode" not in vars(pipeline.vae) and "forward" not in vars(pipeline.transformer)


# -- the transformer ----------------------------------------------------------------------------------------------


def test_without_a_gpu_the_ledger_says_that_there_is_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    ledger = Ledger()
    with caplog.at_level(logging.WARNING, "vla_accel"):
        accelerate(pipeline, None, "native", ledger=ledger)
    entry = ledger.entries["transformer"]
    assert (entry.requested, entry.used) == ("native", "eager") and entry.fell_back
    assert "CUDA graph" not in entry.detail and "a CUDA graph needs a GPU, got cpu" in caplog.text


def transformer_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 24, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, 7, 24, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 6)]],
    }


@pytest.mark.parametrize("transformer", ["native", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_transformer_takes_every_argument_and_deep_copies(transformer: Any) -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    named = transformer_inputs()
    samples = [torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(1))]
    module = pipeline.transformer
    with torch.inference_mode():
        want, controlled = module(**named).sample, module(**named, controlnet_block_samples=samples).sample
        assert float((want - controlled).abs().max()) > 1e-2
        accelerate(pipeline, None, transformer)
        hidden = named.pop("hidden_states")
        torch.testing.assert_close(module(hidden, **named).sample, want)
        torch.testing.assert_close(module(hidden, **named, return_dict=False)[0], want)
        torch.testing.assert_close(module(hidden, **named, controlnet_block_samples=samples).sample, controlled)
        other = copy.deepcopy(module)
        other.proj_out.weight.data.mul_(2)
        torch.testing.assert_close(module(hidden, **named).sample, want)
        assert float((other(hidden, **named).sample - want).abs().max()) > 1e-2


def test_a_second_exchange_wraps_the_forward_of_the_module_itself() -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    first, second = (accelerate(pipeline, None, "native") for _ in range(2))
    forward = vars(pipeline.transformer)["forward"]
    assert isinstance(forward, GraphedForward)
    first()
    assert vars(pipeline.transformer)["forward"] is forward
    second()
    assert "forward" not in vars(pipeline.transformer)


def test_an_offloaded_transformer_is_refused() -> None:
    pipeline = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)
    accelerate(pipeline, None, "native")
    pipeline.transformer._hf_hook = OffloadHook()
    with pytest.raises(EngineError, match=r"^transformer: .*enable_model_cpu_offload"):
        pipeline.transformer(**transformer_inputs())


# -- prompts and options ------------------------------------------------------------------------------------------


def test_a_prompt_that_is_cut_is_told(caplog: pytest.LogCaptureFixture) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    pipeline = StableDiffusion(parts)
    with caplog.at_level(logging.WARNING, "vla_accel"):
        pipeline.generate(Request("a" * 75, height=64, width=64, steps=1))
        assert not [r for r in caplog.records if r.name == "vla_accel"]
        pipeline.generate(Request("a" * 75 + "xyz", height=64, width=64, steps=1))
    (record,) = (r for r in caplog.records if r.name == "vla_accel")
    assert "expected at most 77 tokens, got 80" in record.getMessage()
    assert re.search(r"x\s*y\s*z", record.getMessage()) and "a" * 75 not in record.getMessage()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EngineSpec("native", precision="fp8"), "expected precision auto, .*got fp8"),
        (EngineSpec("eager", precision="bf16"), "engine eager: expected precision auto, got bf16"),
        (EngineSpec("native", native=NativeOptions(embeddings="host")), "native.embeddings: expected gpu"),
    ],
)
@pytest.mark.parametrize("part", ["text_encoder", "unet", "vae_encoder", "vae_decoder"])
def test_options_that_an_image_model_would_ignore_are_refused(part: str, spec: EngineSpec, message: str) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    if part.startswith("vae") and spec.precision == "fp8":
        message = "expected precision auto, fp32, bf16, fp16, got fp8"
    with pytest.raises(ConfigError, match=f"^{part}: .*{message}"):
        StableDiffusion(parts, Engines(**{part: spec}))
