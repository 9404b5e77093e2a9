"""Switches of a diffusers pipeline with exchanged parts: each one works, changes nothing, or is refused by name."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.images import (
    CPU,
    ENGINES,
    ONE_EACH,
    VAES,
    accelerated,
    assert_near,
    assert_same_picture,
    both_sides,
    diffusers,
    diffusers_picture,
    engine_sizes,
    make_parts,
    make_vae,
    vae_inputs,
)
from vla_accel.config import EngineSpec, NativeOptions
from vla_accel.errors import CheckpointError, ConfigError, EngineError
from vla_accel.images import AcceleratedVae, plug_in
from vla_accel.images.cache import WeightState
from vla_accel.images.graphed import GraphedForward
from vla_accel.images.qwen import accelerate, random_qwen_image
from vla_accel.images.stable import Engines, Request, StableDiffusion
from vla_accel.ledger import Ledger

REQUEST = Request("a bowl", height=64, width=64, steps=2)


def make_qwen() -> Any:
    return random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=CPU)


def differ(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    return all(float((a - b).abs().max()) > 1e-2 for a, b in zip(got, want, strict=True))


def tile(vae: Any, size: int) -> None:
    if isinstance(vae, diffusers.AutoencoderKL):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = size, size // 8
    else:
        vae.enable_tiling(size, size, size * 3 // 4, size * 3 // 4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), ONE_EACH)
def test_tiles_are_those_of_diffusers(name: str, engine: str) -> None:
    vae = make_vae(name)
    image, latents = vae_inputs(name, 136, 200)
    whole = both_sides(vae, image, latents)
    tile(vae, 64)
    tiled = both_sides(vae, image, latents)
    tile(vae, 96)
    larger = both_sides(vae, image, latents)
    vae.disable_tiling()
    assert differ(tiled, whole) and differ(larger, tiled), "equal answers would prove nothing"
    fast = AcceleratedVae(vae, {"vae_type": engine})
    plug_in(vae, fast)
    tile(vae, 64)
    assert_near(both_sides(vae, image, latents), tiled)
    assert not any("136" in key for key in engine_sizes(fast)), "no engine has the size of the whole picture"
    tile(vae, 96)
    assert_near(both_sides(vae, image, latents), larger)
    vae.disable_tiling()
    assert_near(both_sides(vae, image, latents), whole)


@pytest.mark.parametrize("name", VAES)
def test_slices_run_one_image_at_a_time(name: str) -> None:
    vae = make_vae(name)
    image, latents = vae_inputs(name, batch=3)
    want = both_sides(vae, image, latents)
    fast = AcceleratedVae(vae)
    plug_in(vae, fast)
    for switch, batches in ((vae.enable_slicing, {1}), (vae.disable_slicing, {1, 3})):
        switch()
        assert_near(both_sides(vae, image, latents), want)
        assert {batch for _, batch, _ in fast.cache.made} == batches


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
@pytest.mark.parametrize(("name", "engine"), ONE_EACH)
def test_weights_that_change_later_count(name: str, engine: str, change: Callable[[Any], None]) -> None:
    vae = make_vae(name)
    values = vae_inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    before = both_sides(vae, *values)
    change(vae)
    got = both_sides(vae, *values)
    undo()
    want = both_sides(vae, *values)
    assert_near(got, want)
    assert differ(want, before), "the change must show"


@pytest.mark.parametrize(("name", "engine"), ONE_EACH)
def test_another_dtype_counts(name: str, engine: str) -> None:
    vae = make_vae(name)
    image, latents = vae_inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    both_sides(vae, image, latents)
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        vae.to(dtype)
        got = both_sides(vae, image.to(dtype), latents.to(dtype))
        assert got[0].dtype == got[1].dtype == dtype
    with pytest.raises(EngineError, match=r"vae_encoder: expected dtype torch.float32, got torch.float16"):
        vae.encode(image.half())
    undo()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_weights_of_our_own_pipeline_count(part: str, engine: str) -> None:
    parts = make_parts()
    pipeline = accelerated(parts, engine)
    before = pipeline.generate(REQUEST).pixels
    with torch.no_grad():
        for parameter in getattr(parts, part).parameters():
            parameter.data.mul_(1.2)
    got = pipeline.generate(REQUEST).pixels
    assert_same_picture(got, diffusers_picture(parts, REQUEST), noise=5e-4)
    assert abs(got.astype(float) - before).max() > 3, "the change must show"


def test_a_weight_state_notices_changes() -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    changes: list[tuple[bool, Callable[[], Any]]] = [
        (False, lambda: module(torch.ones(2, 3))),
        (True, lambda: module[0].weight.data.neg_()),
        (True, lambda: module[1].running_mean.add_(1)),
        (True, lambda: module.insert(0, nn.Linear(3, 3))),
    ]
    for changed, change in changes:
        state = WeightState(module)
        change()
        assert state.changed() is changed
    state = WeightState(module, values=False)
    module[0].weight.data.neg_()
    assert not state.changed()


class FakeLora(nn.Module):
    """A layer with the attributes of peft's LoRA layers."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer, self.merged_adapters, self.scaling = base, [], {"one": 1.0}

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * (1 + self.scaling["one"])


class OffloadHook:
    """A hook of accelerate."""


def lora(vae: Any) -> None:
    vae.decoder.conv_in = FakeLora(vae.decoder.conv_in)


def offload(vae: Any) -> None:
    vae._hf_hook = OffloadHook()


def sequential_offload(vae: Any) -> None:
    vae.encoder.conv_in._hf_hook = OffloadHook()


def group_offload(vae: Any) -> None:
    from diffusers.hooks.hooks import HookRegistry, ModelHook

    HookRegistry.check_if_exists_or_initialize(vae.encoder).register_hook(ModelHook(), "group_offloading")


def hook(vae: Any) -> None:
    vae.decoder.mid_block.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lora, r"vae\.decoder\.conv_in: .* LoRA layer; call pipeline\.fuse_lora\(\)"),
        (offload, r"vae: .*OffloadHook \(enable_model_cpu_offload, .*remove_all_hooks\(\)"),
        (sequential_offload, r"vae\.encoder\.conv_in: .*enable_sequential_cpu_offload"),
        (group_offload, r"vae\.encoder: .*group_offloading \(enable_group_offload"),
        (hook, r"vae\.decoder\.mid_block: .*\(register_forward_hook\)"),
    ],
)
def test_switches_that_engines_would_ignore_are_refused(name: str, change: Callable[[Any], None], message: str) -> None:
    vae = make_vae(name)
    values = vae_inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae))
    both_sides(vae, *values)
    change(vae)
    with pytest.raises(EngineError, match=message):
        both_sides(vae, *values)
    undo()
    with pytest.raises(EngineError, match=message):
        AcceleratedVae(vae).decode(values[1])


def test_attention_of_the_same_mathematics_is_neutral_and_any_other_is_refused() -> None:
    from diffusers.hooks.hooks import HookRegistry
    from diffusers.models.attention_processor import AttnProcessor

    vae = make_vae("tiny-sd-vae")
    values = vae_inputs("tiny-sd-vae")
    want = both_sides(vae, *values)
    plug_in(vae, AcceleratedVae(vae))
    HookRegistry.check_if_exists_or_initialize(vae)  # has no hooks
    vae.set_attn_processor(AttnProcessor())
    assert_near(both_sides(vae, *values), want)
    vae.fuse_qkv_projections()
    assert_near(both_sides(vae, *values), want)
    vae.unfuse_qkv_projections()
    vae.set_attn_processor(type("OwnProcessor", (AttnProcessor,), {})())
    with pytest.raises(EngineError, match="got OwnProcessor"):
        both_sides(vae, *values)


def test_switches_of_the_unet_work_in_eager_and_are_refused_elsewhere() -> None:
    parts, request = make_parts(), REQUEST
    eager, native = (accelerated(parts, engine) for engine in ENGINES)
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
    parts = make_parts()
    pipeline = accelerated(parts)
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


@pytest.mark.parametrize("name", VAES)
def test_a_deep_copy_has_engines_of_its_own(name: str) -> None:
    vae = make_vae(name)
    values = vae_inputs(name)
    undo = plug_in(vae, AcceleratedVae(vae))
    before = both_sides(vae, *values)
    other = copy.deepcopy(vae)
    in_place(other)
    assert_near(both_sides(vae, *values), before)
    changed = both_sides(other, *values)
    assert differ(changed, before)
    undo()
    plain = make_vae(name)
    in_place(plain)
    assert_near(changed, both_sides(plain, *values))
    assert_near(both_sides(other, *values), changed)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_several_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    vae = make_vae("tiny-sd-vae")
    there = dict(vars(vae))
    engines = [AcceleratedVae(vae) for _ in order]
    undo = [plug_in(vae, one) for one in engines]
    left = {0, 1, 2}
    for index in order:
        undo[index]()
        undo[index]()
        left.discard(index)
        if left:
            vae.decode(vae_inputs("tiny-sd-vae", 8 * (8 + len(left)))[1])
            assert engines[max(left)].cache.made, "the newest that is left runs"
    assert vars(vae) == there


def test_functions_of_the_user_come_back() -> None:
    vae = make_vae("tiny-sd-vae")
    vae.decode = "a user's own"
    for undo in [plug_in(vae, AcceleratedVae(vae)) for _ in range(2)]:
        undo()
    assert vars(vae)["decode"] == "a user's own" and "encode" not in vars(vae)


def test_engines_of_another_autoencoder_are_refused() -> None:
    one, other = make_vae("tiny-sd-vae"), make_vae("tiny-sd-vae")
    with pytest.raises(EngineError, match="plug_in: expected an AcceleratedVae made from this autoencoder"):
        plug_in(one, AcceleratedVae(other))
    assert "decode" not in vars(one)


@pytest.mark.parametrize(
    ("make", "transformer", "strict", "message"),
    [
        (make_parts, "native", False, r"Pipeline\.transformer: expected QwenImageTransformer2DModel, got no such part"),
        (make_parts, "compile", False, r"Pipeline\.transformer: expected .*, got no such part"),
        (make_qwen, "nativ", False, r"transformer: expected one of eager, .*, got 'nativ': did you mean native"),
        (make_qwen, "native", True, r"strict mode: transformer: .*a CUDA graph needs a GPU"),
    ],
)
def test_a_pipeline_that_cannot_be_accelerated_stays_unchanged(
    make: Callable[[], Any], transformer: Any, strict: bool, message: str
) -> None:
    pipeline = make()
    parts = [part for name in ("vae", "transformer") if (part := getattr(pipeline, name, None))]
    before = [dict(vars(part)) for part in parts]
    with pytest.raises((ConfigError, EngineError), match=message):
        accelerate(pipeline, {"vae_type": "native"}, transformer, ledger=Ledger(strict=strict))
    assert [vars(part) for part in parts] == before


def test_a_pipeline_of_another_autoencoder_is_refused() -> None:
    pipeline = make_qwen()
    pipeline.vae = diffusers.AutoencoderTiny()
    with pytest.raises(
        ConfigError, match=r"\.vae: expected AutoencoderKLQwenImage or .* or AutoencoderKL, got the class"
    ):
        accelerate(pipeline, {"vae_type": "native"}, "native")
    assert "forward" not in vars(pipeline.transformer)


def transformer_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 24, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, 7, 24, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 6)]],
    }


@pytest.mark.parametrize("transformer", ["native", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_transformer_takes_every_argument_and_deep_copies(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's own compiler takes minutes; the arguments are this package's.
    compile_module = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, mode: compile_module(module, backend="aot_eager"))
    pipeline = make_qwen()
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


def test_exchanges_of_a_transformer_are_independent_and_offloading_is_refused() -> None:
    pipeline = make_qwen()
    first, second = (accelerate(pipeline, None, "native") for _ in range(2))
    forward = vars(pipeline.transformer)["forward"]
    assert isinstance(forward, GraphedForward)
    first()
    assert vars(pipeline.transformer)["forward"] is forward
    pipeline.transformer._hf_hook = OffloadHook()
    with pytest.raises(EngineError, match=r"^transformer: .*enable_model_cpu_offload"):
        pipeline.transformer(**transformer_inputs())
    second()
    assert "forward" not in vars(pipeline.transformer)


def test_a_prompt_that_is_too_long_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    parts = make_parts()
    pipeline = accelerated(parts, "eager")
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
    if part.startswith("vae") and spec.precision == "fp8":
        message = "expected precision auto, fp32, bf16, fp16, got fp8"
    with pytest.raises(ConfigError, match=f"^{part}: .*{message}"):
        StableDiffusion(make_parts(), Engines(**{part: spec}))
