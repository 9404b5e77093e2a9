"""The accelerated autoencoder: sizes and their keys, the guide's JSON, padding, memory budget, diffusers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.errors import CheckpointError, ConfigError, EngineError  # noqa: E402
from vla_accel.images import AcceleratedVae, VaeConfig, load_vae_config, plug_in  # noqa: E402
from vla_accel.images import vae_component as sizes  # noqa: E402
from vla_accel.images.autoencoder import AUTOENCODERS, split_autoencoder  # noqa: E402
from vla_accel.images.config import engine_file  # noqa: E402
from vla_accel.images.models import random_model  # noqa: E402
from vla_accel.images.stage import first_non_finite, require_finite  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vae() -> Any:
    return random_model("tiny-qwen-vae", dtype=torch.float32, device=CPU)


def image(height: int, width: int, batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, 1, height, width, generator=torch.Generator().manual_seed(height)) * 2 - 1


# -- sizes --------------------------------------------------------------------------------------------------------


def test_every_static_size_is_found_under_the_key_it_is_built_with(tmp_path: Path) -> None:
    built = sizes.static_sizes(["1024x1024", "64x1920", "1664x928"])
    assert list(built) == ["16_9", "9_16", "1_1", "4_3", "3_4", "1024x1024", "64x1920"]
    config = load_vae_config({"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(tmp_path)}})
    for side in ("encoder", "decoder"):
        for key in built:
            path = tmp_path / key / f"vae_{side}.trt"
            path.parent.mkdir(exist_ok=True)
            path.touch()
        # Looked up as the runtime does: from a size in pixels alone.
        found = {size: engine_file(config.trt_vae_config, side, size) for size in built.values()}
        assert {p.parent.name for p in found.values()} == set(built)
        assert all(sizes.size_key(size) == path.parent.name for size, path in found.items())


def test_ratios_are_the_guides() -> None:
    named = {k: (w, h) for k, (h, w) in sizes.RATIOS.items()}
    # 1472x1140 fits no latent; diffusers makes 1472x1136 of it.
    assert named == {
        "16_9": (1664, 928),
        "9_16": (928, 1664),
        "1_1": (1328, 1328),
        "4_3": (1472, 1136),
        "3_4": (768, 1024),
    }
    assert all(sizes.check_size(size) == size for size in (*sizes.RATIOS.values(), *sizes.PROFILES))
    assert len(set(sizes.PROFILES)) == 9


@pytest.mark.parametrize(
    ("size", "larger"), [((1081, 1920), (1088, 1920)), ((1, 65), (64, 72)), ((64, 1905), (64, 1912))]
)
def test_a_size_that_no_engine_file_has_names_a_larger_one(size: sizes.Size, larger: sizes.Size) -> None:
    assert sizes.check_size(larger) == larger
    with pytest.raises(
        ConfigError, match=f"got {size[1]}x{size[0]}; the smallest that holds it is {larger[1]}x{larger[0]}"
    ):
        sizes.check_size(size)


@pytest.mark.parametrize("size", [(1936, 512), (512, 2048)])
def test_a_size_beyond_the_range_of_engine_files_is_refused(size: sizes.Size) -> None:
    with pytest.raises(ConfigError, match=f"from 64 to 1920 pixels a side, got {size[1]}x{size[0]}$"):
        sizes.check_size(size)


@pytest.mark.parametrize("text", ["1024", "axb", "1024x", "-64x64", "5_4"])
def test_size_texts_that_mean_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="expected WIDTHxHEIGHT or one of 16_9"):
        sizes.parse_size(text)


def test_components_and_profiles(vae: Any) -> None:
    encoder, decoder = split_autoencoder(vae)
    component = sizes.vae_component(encoder, "encoder", (512, 768), dynamic=True)
    assert component.inputs[0].shape == (1, 3, 1, 512, 768) and component.outputs[0].shape == (1, 8, 1, 64, 96)
    assert component.inputs[0].ranges == {3: (64, 1920), 4: (64, 1920)}
    assert component.outputs[0].ranges == {3: (8, 240), 4: (8, 240)}
    texts = sizes.profile_texts(component)
    assert len(texts) == 9 and texts[2] == "image.3=64:480:1920, image.4=64:848:1920"
    component = sizes.vae_component(decoder, "decoder", (512, 768), dynamic=True)
    assert component.inputs[0].shape == (1, 4, 1, 64, 96)
    assert sizes.profile_texts(component)[2] == "latents.3=8:60:240, latents.4=8:106:240"
    assert not sizes.vae_component(decoder, "decoder", (512, 768)).inputs[0].ranges


# -- configuration ------------------------------------------------------------------------------------------------


def test_the_guides_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    content = {"vae_type": "tensorrt", "trt_vae_config": {"multi_profile": True, "trt_engine_path": "engines"}}
    path.write_text(json.dumps(content))
    config = load_vae_config(path)
    assert config.vae_type == "tensorrt" and config.trt_vae_config.multi_profile
    assert config.trt_vae_config.trt_engine_path == "engines" and config.from_files
    static = load_vae_config({"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": "engines"}})
    assert not static.trt_vae_config.multi_profile
    assert load_vae_config(config) is config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vae_typ": "native"}, "unknown key vae_typ: did you mean vae_type"),
        ({"trt_vae_config": {"multi_profil": True}}, "did you mean trt_vae_config.multi_profile"),
        ({"vae_type": "fast"}, "vae_type: expected one of eager, native, tensorrt, tensorrt_rtx"),
        ({"vae_type": "tensorrt"}, "trt_engine_path: expected a path for vae_type tensorrt, got none"),
        ({"memory_budget_gib": 0}, "memory_budget_gib: expected more than 0"),
        ({"vae_type": "eager", "precision": "fp16"}, "precision: fp16 is for vae_type native, got eager"),
        ({"pad": "yes"}, "pad: expected one of error, auto"),
        ({"vae_type": "eager", "inductor": "measure"}, "inductor: measure is for vae_type native, got eager"),
        (
            {"vae_type": "tensorrt", "inductor": "measure", "trt_vae_config": {"trt_engine_path": "engines"}},
            "inductor: measure is for vae_type native, got tensorrt",
        ),
        ({"trt_vae_config": {"trt_engine_path": "engines"}}, "trt_vae_config: expected vae_type tensorrt .*native"),
        ({"vae_type": "eager", "trt_vae_config": {"multi_profile": True}}, "trt_vae_config: .*, got eager"),
    ],
)
def test_bad_configurations(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_vae_config(content)


def test_engine_files_of_folder_and_file_mode(tmp_path: Path) -> None:
    for name in ("vae_encoder_multi_profile.trt", "vae_decoder_multi_profile.trt"):
        (tmp_path / name).touch()
    folder = load_vae_config(
        {"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(tmp_path), "multi_profile": True}}
    ).trt_vae_config
    assert engine_file(folder, "decoder", (512, 512)).name == "vae_decoder_multi_profile.trt"
    old = load_vae_config(
        {
            "vae_type": "tensorrt",
            "trt_vae_config": {"trt_engine_path": str(tmp_path / "vae_encoder_multi_profile.trt")},
        }
    ).trt_vae_config
    assert engine_file(old, "decoder", (512, 512)) == tmp_path / "vae_decoder_multi_profile.trt"
    assert engine_file(old, "encoder", (512, 512)) == tmp_path / "vae_encoder_multi_profile.trt"
    static = load_vae_config({"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"expected 1_1/vae_encoder.trt, found: vae_decoder_multi_profile.trt"):
        engine_file(static.trt_vae_config, "encoder", (1328, 1328))
    gone = load_vae_config({"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(tmp_path / "no")}})
    with pytest.raises(
        ConfigError,
        match=r"build it: vla-accel build-vae --vae MODEL --output-dir .* --static --sizes 512",
    ):
        engine_file(gone.trt_vae_config, "encoder", (64, 512))
    (tmp_path / "vae_decoder.trt").touch()
    wrong = load_vae_config(
        {"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(tmp_path / "vae_decoder.trt")}}
    )
    with pytest.raises(ConfigError, match=r"expected a folder or an encoder's file, got vae_decoder\.trt"):
        engine_file(wrong.trt_vae_config, "encoder", (64, 512))


# -- running ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_results_are_diffusers_own_at_every_size(vae: Any, engine: str) -> None:
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    for size in ((64, 96), (96, 64), (64, 96)):
        x = image(*size, batch=2)
        with torch.inference_mode():
            moments = vae.encode(x).latent_dist.parameters
            latents = moments[:, :4].contiguous()
            picture = vae.decode(latents).sample
        torch.testing.assert_close(accelerated.encode(x), moments, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(accelerated.decode(latents), picture, rtol=1e-4, atol=1e-5)
    assert accelerated.sizes == ["encoder 64x96", "decoder 64x96", "encoder 96x64", "decoder 96x64"]
    assert {e["used"] for e in accelerated.ledger.as_list()} == {engine}


def test_results_do_not_change_with_the_next_call(vae: Any) -> None:
    accelerated = AcceleratedVae(vae)
    first = accelerated.encode(image(64, 64))
    copy = first.clone()
    accelerated.encode(-image(64, 64))
    assert torch.equal(first, copy)


def test_engines_are_made_on_first_use_and_given_up_under_the_budget(vae: Any) -> None:
    accelerated = AcceleratedVae(vae)
    assert accelerated.sizes == [] and accelerated.bytes == 0
    accelerated.encode(image(64, 64))
    one = accelerated.bytes
    assert one == 4 * (3 * 64 * 64 + 8 * 8 * 8)
    tight = AcceleratedVae(vae, VaeConfig(memory_budget_gib=2.5 * one / 2**30))
    for size in ((64, 64), (64, 64), (64, 80), (64, 64), (80, 64)):
        tight.encode(image(*size))
    # 64x80 was used longest ago.
    assert tight.sizes == ["encoder 64x64", "encoder 64x80"]
    tight.encode(image(512, 512))
    assert tight.sizes == ["encoder 512x512"], "the newest stays even above the budget"


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
def test_bad_inputs(vae: Any, value: torch.Tensor, message: str) -> None:
    with pytest.raises(EngineError, match=f"vae_encoder: .*{message}"):
        AcceleratedVae(vae).encode(value)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_a_non_finite_result_names_the_module(engine: str) -> None:
    vae = random_model("tiny-qwen-vae", dtype=torch.float32, device=CPU)
    vae.decoder.up_blocks[1].resnets[0].conv1.bias.data[0] = torch.inf
    accelerated = AcceleratedVae(vae, {"vae_type": engine})
    with pytest.raises(EngineError, match=r"vae_decoder: \d+ of 12288 output values are not finite, first in module"):
        accelerated.decode(torch.zeros(1, 4, 1, 8, 8))
    _, decoder = split_autoencoder(vae)
    name = first_non_finite(decoder, (torch.zeros(1, 4, 1, 8, 8),))
    assert name is not None and name.endswith(".conv1") and name.startswith("blocks.")


def test_a_non_finite_result_that_eager_does_not_have_blames_the_engine() -> None:
    encoder, _ = split_autoencoder(random_model("tiny-qwen-vae", dtype=torch.float32, device=CPU))
    component = sizes.vae_component(encoder, "encoder", (64, 64))
    with pytest.raises(EngineError, match="not in the eager module: compare the engines"):
        require_finite(torch.tensor([1.0, torch.nan]), component, (image(64, 64),))
    require_finite(torch.ones(2), component, (image(64, 64),))
    assert first_non_finite(nn.Sequential(nn.Identity()), (torch.ones(1),)) is None


# -- in diffusers' pipelines --------------------------------------------------------------------------------------


def test_plugged_in_it_answers_as_the_autoencoder_does(vae: Any) -> None:
    x, latents = image(64, 64), torch.randn(1, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mode, sample = vae.encode(x).latent_dist.mode(), vae.decode(latents).sample
    accelerated = AcceleratedVae(vae)
    undo = plug_in(vae, accelerated)
    try:
        torch.testing.assert_close(vae.encode(x).latent_dist.mode(), mode, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vae.encode(x, return_dict=False)[0].mode(), mode, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vae.decode(latents).sample, sample, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(vae.decode(latents, return_dict=False)[0], sample, rtol=1e-4, atol=1e-5)
        assert len(accelerated.sizes) == 2 and vae.config.z_dim == 4 and vae.dtype == torch.float32
    finally:
        undo()
    assert "encode" not in vars(vae) and "decode" not in vars(vae)


# -- models by name -----------------------------------------------------------------------------------------------


def test_models_load_from_a_folder_of_safetensors(vae: Any, tmp_path: Path) -> None:
    from vla_accel.images.models import load_model

    vae.save_pretrained(tmp_path / "vae")
    loaded = load_model(tmp_path / "vae", kinds=AUTOENCODERS, dtype=torch.bfloat16, device=CPU)
    assert type(loaded) is type(vae) and loaded.dtype == torch.bfloat16 and not loaded.training
    torch.testing.assert_close(loaded.encoder.conv_in.weight, vae.encoder.conv_in.weight.bfloat16())
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model .*vae: .*safetensors"):
        load_model(tmp_path / "vae", kinds=AUTOENCODERS, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=r"expected a config\.json, found none"):
        load_model(tmp_path / "nothing", kinds=AUTOENCODERS, dtype=torch.float32, device=CPU)
    with pytest.raises(
        CheckpointError, match=r"qwen-vae, sd-vae, tiny-.*, two, or .*, got neither: did you mean sd-vae"
    ):
        load_model("sd-va", also=["two"], kinds=AUTOENCODERS, dtype=torch.float32, device=CPU)
    with pytest.raises(CheckpointError, match=r"model sd-unet: .* got the class UNet2DConditionModel"):
        load_model("sd-unet", kinds=AUTOENCODERS, dtype=torch.float32, device=CPU)
    for text, message in (("{", "expected a readable YAML or JSON file"), ("[1]", "expected a mapping, got list")):
        (tmp_path / "vae" / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_model(tmp_path / "vae", kinds=AUTOENCODERS, dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match="expected one of qwen-vae"):
        random_model("other", dtype=torch.float32, device=CPU)
