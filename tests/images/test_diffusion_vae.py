"""The accelerated autoencoder: configuration, engine files, sizes, torch's modes, and diffusers' own results."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.images import (
    CPU,
    ENGINES,
    VAES,
    accelerated,
    assert_near,
    both_sides,
    engine_sizes,
    make_parts,
    make_vae,
    vae_inputs,
)
from vla_accel.errors import CheckpointError, ConfigError, EngineError
from vla_accel.images import AcceleratedVae, VaeConfig, load_vae_config, plug_in
from vla_accel.images import vae_component as sizes
from vla_accel.images.autoencoder import AUTOENCODERS, split_autoencoder
from vla_accel.images.config import TrtVaeConfig, engine_file
from vla_accel.images.models import load_model, random_model
from vla_accel.images.native_autoencoder import CompiledHalf
from vla_accel.images.stable import Request
from vla_accel.images.stage import first_non_finite, require_finite
from vla_accel.ledger import Ledger


@pytest.fixture(scope="module")
def vae() -> Any:
    return make_vae()


def image(height: int, width: int) -> Tensor:
    return vae_inputs("tiny-qwen-vae", height, width)[0]


def test_every_static_size_is_found_under_the_key_it_is_built_with(tmp_path: Path) -> None:
    built = sizes.static_sizes(["1024x1024", "64x1920", "1664x928"])
    assert list(built) == ["16_9", "9_16", "1_1", "4_3", "3_4", "1024x1024", "64x1920"]
    for side in ("encoder", "decoder"):
        for key in built:
            path = tmp_path / key / f"vae_{side}.trt"
            path.parent.mkdir(exist_ok=True)
            path.touch()
        # The runtime knows only the size in pixels.
        found = {size: engine_file(TrtVaeConfig(str(tmp_path)), side, size) for size in built.values()}
        assert {p.parent.name for p in found.values()} == set(built)


def test_ratios_are_those_of_the_guide() -> None:
    named = {k: (w, h) for k, (h, w) in sizes.RATIOS.items()}
    # 1472x1140 fits no latent; diffusers makes 1472x1136 of it.
    wide, high = {"16_9": (1664, 928), "4_3": (1472, 1136)}, {"9_16": (928, 1664), "3_4": (768, 1024)}
    assert named == {**wide, **high, "1_1": (1328, 1328)}
    assert all(sizes.check_size(size) == size for size in (*sizes.RATIOS.values(), *sizes.PROFILES))
    assert len(set(sizes.PROFILES)) == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1920x1081", "from 64 to 1920 pixels a side, got 1920x1081; the smallest that holds it is 1920x1088$"),
        ("65x1", "got 65x1; the smallest that holds it is 72x64$"),
        ("1905x64", "got 1905x64; the smallest that holds it is 1912x64$"),
        ("512x1936", "got 512x1936$"),
        ("2048x512", "got 2048x512$"),
        *((text, "expected WIDTHxHEIGHT or one of 16_9") for text in ("1024", "axb", "1024x", "-64x64", "5_4")),
    ],
)
def test_a_size_that_no_engine_file_has_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes.parse_size(text)


@pytest.mark.parametrize(
    ("name", "scale", "of_latents"),
    [
        ("tiny-qwen-vae", 8, "latents.3=8:60:240, latents.4=8:106:240"),
        ("tiny-wan22-vae", 16, "latents.3=4:30:120, latents.4=4:53:120"),
    ],
)
def test_ranges_and_profiles_of_an_engine_file(name: str, scale: int, of_latents: str) -> None:
    texts = {"encoder": "image.3=64:480:1920, image.4=64:848:1920", "decoder": of_latents}
    for half, (side, text) in zip(split_autoencoder(make_vae(name)), texts.items(), strict=True):
        component = sizes.vae_component(half, side, (512, 768), dynamic=True)  # type: ignore[arg-type]
        pixels, latents = (component.inputs[0], component.outputs[0])[:: 1 if side == "encoder" else -1]
        channels = 8 if side == "encoder" else 4
        assert pixels.shape == (1, 3, 1, 512, 768) and latents.shape == (1, channels, 1, 512 // scale, 768 // scale)
        fewest, most = 64 // scale, 1920 // scale
        assert pixels.ranges == {3: (64, 1920), 4: (64, 1920)} and latents.ranges == dict.fromkeys(
            (3, 4), (fewest, most)
        )
        assert len(sizes.profile_texts(component)) == 9 and sizes.profile_texts(component)[2] == text


def test_the_json_of_the_guide(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    files = {"multi_profile": True, "trt_engine_path": "engines"}
    path.write_text(json.dumps({"vae_type": "tensorrt", "trt_vae_config": files}))
    config = load_vae_config(path)
    assert config.vae_type == "tensorrt" and config.trt_vae_config == TrtVaeConfig("engines", True)
    static = load_vae_config({"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": "engines"}})
    assert static.trt_vae_config == TrtVaeConfig("engines", False) and load_vae_config(config) is config


ENGINE_PATH = {"trt_engine_path": "engines"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vae_typ": "native"}, "unknown key vae_typ: did you mean vae_type"),
        ({"trt_vae_config": {"multi_profil": True}}, "did you mean trt_vae_config.multi_profile"),
        ({"vae_type": "fast"}, "vae_type: expected one of eager, native, tensorrt, tensorrt_rtx"),
        ({"vae_type": "tensorrt"}, "trt_engine_path: expected a path for vae_type tensorrt, got none"),
        ({"memory_budget_gib": 0}, "memory_budget_gib: expected more than 0"),
        ({"vae_type": "eager", "precision": "fp16"}, "precision: fp16 is for vae_type native, got eager"),
        ({"pad": "auto"}, "pad: auto is for vae_type tensorrt or tensorrt_rtx, got native"),
        ({"vae_type": "eager", "inductor": "measure"}, "inductor: measure is for vae_type native, got eager"),
        ({"trt_vae_config": ENGINE_PATH}, "trt_vae_config: expected vae_type tensorrt .*native"),
        ({"vae_type": "eager", "trt_vae_config": {"multi_profile": True}}, "trt_vae_config: .*, got eager"),
    ],
)
def test_bad_configurations(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_vae_config(content)


@pytest.mark.parametrize("kind", [VaeConfig, dict])
def test_a_configuration_is_checked_in_python_as_in_a_file(vae: Any, kind: Any) -> None:
    wrong = {"vae_type": "nativ", "pad": "Auto", "inductor": "mesure", "precision": "half"}
    values = [("memory_budget_gib", value) for value in (float("nan"), "3", None)]
    for field, value in (*wrong.items(), *values):
        with pytest.raises(ConfigError, match=f"{field}: expected"):
            AcceleratedVae(vae, kind(**{field: value}))


def test_engine_files_of_folder_and_file_mode(tmp_path: Path) -> None:
    for side in ("encoder", "decoder"):
        (tmp_path / f"vae_{side}_multi_profile.trt").touch()
    (tmp_path / "vae_decoder.trt").touch()
    old = TrtVaeConfig(str(tmp_path / "vae_encoder_multi_profile.trt"))
    for config in (TrtVaeConfig(str(tmp_path), True), old):
        for side in ("encoder", "decoder"):
            assert engine_file(config, side, (512, 512)) == tmp_path / f"vae_{side}_multi_profile.trt"
    for path, size, message in (
        (tmp_path, (1328, 1328), r"expected 1_1/vae_encoder.trt, found: vae_decoder.trt, vae_decoder_multi_profile"),
        (tmp_path / "no", (64, 512), r"build it: vla-accel build-vae --vae MODEL --output-dir .* --static --sizes 512"),
        (tmp_path / "vae_decoder.trt", (64, 512), r"expected a folder or an encoder's file, got vae_decoder\.trt"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_file(TrtVaeConfig(str(path)), "encoder", size)


@pytest.mark.parametrize("multi", [True, False])
def test_a_size_without_an_engine_file_is_refused_or_runs_without_an_engine(
    multi: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vae = make_vae("tiny-sd-vae")
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
    # A static size that was not built falls back, too; a missing folder does not.
    latents, size = torch.randn(1, 4, 8, 8), {**config, "pad": "auto"}
    if not multi:
        with torch.inference_mode():
            assert torch.equal(AcceleratedVae(vae, size).decode(latents), vae.decode(latents).sample)
        size["trt_vae_config"] = {"trt_engine_path": str(tmp_path / "misspelt")}
        with pytest.raises(ConfigError, match="no such folder"):
            AcceleratedVae(vae, size).decode(latents)


SIZES = [(8, 8), (16, 72), (72, 72), (72, 64), (120, 136), (100, 75), (63, 65), (9, 200), (72, 72)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", (*VAES, "tiny-wan-vae"))
def test_results_are_diffusers_own_at_every_size(name: str, engine: str) -> None:
    vae = make_vae(name)
    values = [vae_inputs(name, *size, batch=1 + i % 2) for i, size in enumerate(SIZES)]
    wanted = [both_sides(vae, *value) for value in values]
    ledger = Ledger(strict=True)
    fast = AcceleratedVae(vae, {"vae_type": engine}, ledger=ledger)
    undo = plug_in(vae, fast)
    for value, want in zip(values, wanted, strict=True):
        assert_near(both_sides(vae, *value), want)
        assert_near((fast.encode(value[0]), fast.decode(value[1])), want)
    side = values[0][0].shape[-1]
    assert engine_sizes(fast)[:2] == [f"encoder {side}x{side}", f"decoder {side}x{side}"]
    assert {e["used"] for e in ledger.as_list()} == {engine}
    x, z = values[3]
    assert_near((vae.encode(x, return_dict=False)[0].parameters, vae.decode(z, return_dict=False)[0]), wanted[3])
    undo()
    assert not {"encode", "decode"} & set(vars(vae))


def test_engines_are_made_on_first_use_and_dropped_under_the_budget(vae: Any) -> None:
    accelerated = AcceleratedVae(vae)
    assert engine_sizes(accelerated) == []
    accelerated.encode(image(64, 64))
    one = sum(stage.bytes for stage in accelerated.cache.made.values())
    assert one == 4 * (3 * 64 * 64 + 8 * 8 * 8)
    tight = AcceleratedVae(vae, VaeConfig(memory_budget_gib=2.5 * one / 2**30))
    for size in ((64, 64), (64, 64), (64, 80), (64, 64), (80, 64)):
        tight.encode(image(*size))
    # 64x80 was the least recently used.
    assert engine_sizes(tight) == ["encoder 64x64", "encoder 64x80"]
    tight.encode(image(512, 512))
    assert engine_sizes(tight) == ["encoder 512x512"], "the newest stays even above the budget"
    first = accelerated.encode(image(64, 64))
    copy = first.clone()
    accelerated.encode(-image(64, 64))
    assert torch.equal(first, copy), "a result is not overwritten"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(1, 3, 64, 64), r"expected \(B, C, 1, H, W\) with C = 3, got \(1, 3, 64, 64\)"),
        (torch.zeros(1, 3, 2, 64, 64), r"got \(1, 3, 2, 64, 64\)"),
        (torch.zeros(1, 4, 1, 64, 64), r"with C = 3, got \(1, 4, 1, 64, 64\)"),
        (torch.zeros(1, 3, 1, 64, 64, dtype=torch.float16), "expected dtype torch.float32, got torch.float16"),
        (torch.zeros(1, 3, 1, 64, 64, device="meta"), "expected device cpu, got meta"),
    ],
)
def test_an_input_of_another_shape_dtype_or_device_is_refused(vae: Any, value: Tensor, message: str) -> None:
    with pytest.raises(EngineError, match=f"vae_encoder: .*{message}"):
        AcceleratedVae(vae).encode(value)


def test_several_frames_and_images_without_a_latent_are_refused() -> None:
    vae = make_vae()
    plug_in(vae, AcceleratedVae(vae))
    with pytest.raises(EngineError, match=r"expected one frame, .*, got \(1, 4, 2, 8, 8\)"):
        vae.decode(torch.zeros(1, 4, 2, 8, 8))
    with pytest.raises(ConfigError, match="image size: expected at least 8 pixels a side, got 64x7"):
        AcceleratedVae(make_vae("tiny-sd-vae")).encode(torch.zeros(1, 3, 7, 64))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_non_finite_result_names_the_module(engine: str) -> None:
    vae = make_vae()
    vae.decoder.up_blocks[1].resnets[0].conv1.bias.data[0] = torch.inf
    with pytest.raises(EngineError, match=r"vae_decoder: \d+ of 12288 output values are not finite, first in module"):
        AcceleratedVae(vae, {"vae_type": engine}).decode(torch.zeros(1, 4, 1, 8, 8))
    _, decoder = split_autoencoder(vae)
    name = first_non_finite(decoder, (torch.zeros(1, 4, 1, 8, 8),))
    assert name is not None and name.endswith(".conv1") and name.startswith("blocks.")
    component = sizes.vae_component(split_autoencoder(make_vae())[0], "encoder", (64, 64))
    with pytest.raises(EngineError, match="not in the eager module: compare the engines"):
        require_finite(torch.tensor([1.0, torch.nan]), component, (image(64, 64),))
    require_finite(torch.ones(2), component, (image(64, 64),))


@pytest.mark.slow
def test_both_programs_that_inductor_measures_have_the_requested_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    real = CompiledHalf.__init__

    def init(self: Any, half: Any, backend: str = "eager") -> None:
        seen.append(half.dtype)
        real(self, half, "eager")

    monkeypatch.setattr(CompiledHalf, "__init__", init)
    vae, latents = make_vae("tiny-sd-vae"), vae_inputs("tiny-sd-vae")[1]
    fast = AcceleratedVae(vae, {"inductor": "measure", "precision": "bf16"})
    exact = AcceleratedVae(vae).decode(latents)
    fast.decode(latents)
    program = fast.cache.shared["decoder program"]
    for way in ("fused", "inductor"):
        program.chosen = dict.fromkeys(program.chosen, way)
        result = fast.decode(latents)
        assert result.dtype == torch.float32 and 1e-3 < float((result - exact).abs().max()) < 1.0
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("engine", ENGINES)
def test_wan22_takes_multiples_of_its_scale(engine: str) -> None:
    vae = make_vae("tiny-wan22-vae")
    fast = AcceleratedVae(vae, {"vae_type": engine})
    with pytest.raises(ConfigError, match="image size: expected multiples of 16 pixels a side, got 40x32"):
        fast.encode(torch.zeros(1, 3, 1, 32, 40))


@pytest.mark.parametrize("name", VAES)
def test_latents_may_enter_a_training_loop_but_gradients_are_refused(name: str) -> None:
    vae, (image, latents) = make_vae(name), vae_inputs(name)
    with torch.no_grad():
        want = vae.encode(image).latent_dist.mode()
    plug_in(vae, AcceleratedVae(vae))
    with torch.no_grad():
        encoded = vae.encode(image).latent_dist.mode()
        vae.decode(latents).sample.mul_(2)
    weight = torch.ones(1, requires_grad=True)
    (encoded * weight).sum().backward()
    torch.testing.assert_close(weight.grad, want.sum()[None], rtol=1e-4, atol=1e-3)
    for value in (image, latents):
        value.requires_grad_()
    for call, value, part in ((vae.encode, image, "vae_encoder"), (vae.decode, latents, "vae_decoder")):
        with pytest.raises(EngineError, match=rf"{part}: expected inputs without gradient.*got requires_grad=True"):
            call(value)
        with torch.no_grad():
            call(value)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_is_refused_and_leaves_nothing_behind(engine: str) -> None:
    vae, (_, latents) = make_vae("tiny-sd-vae"), vae_inputs("tiny-sd-vae")
    with torch.no_grad():
        want = vae.decode(latents).sample
    plug_in(vae, AcceleratedVae(vae, {"vae_type": engine}))
    pipeline = accelerated(make_parts(), engine)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(EngineError, match=r"vae_decoder: expected a call outside of torch\.autocast"):
            vae.decode(latents)
        with pytest.raises(EngineError, match=r"generate: expected a call outside of torch\.autocast"):
            pipeline.generate(Request("a bowl", steps=1))
        with torch.autocast("cpu", enabled=False):
            got = vae.decode(latents).sample
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_models_load_from_a_folder_of_safetensors(vae: Any, tmp_path: Path) -> None:
    def load(source: Any, dtype: torch.dtype = torch.float32) -> Any:
        return load_model(source, kinds=AUTOENCODERS, dtype=dtype, device=CPU, also=["two"])

    folder = tmp_path / "vae"
    vae.save_pretrained(folder)
    loaded = load(folder, torch.bfloat16)
    assert type(loaded) is type(vae) and loaded.dtype == torch.bfloat16 and not loaded.training
    torch.testing.assert_close(loaded.encoder.conv_in.weight, vae.encoder.conv_in.weight.bfloat16())
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    for source, message in (
        (folder, r"model .*vae: .*safetensors"),
        (tmp_path / "nothing", r"expected a config\.json, found none"),
        ("sd-va", r"qwen-vae, sd-vae, wan-vae, .*tiny-.*, two, or .*, got neither: did you mean sd-vae"),
        ("sd-unet", r"model sd-unet: .* got the class UNet2DConditionModel"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(source)
    for text, message in (("{", "expected a readable YAML or JSON file"), ("[1]", "expected a mapping, got list")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(folder)
    with pytest.raises(ConfigError, match="expected one of qwen-vae"):
        random_model("other", dtype=torch.float32, device=CPU)
