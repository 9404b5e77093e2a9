"""Stable Diffusion pipelines and their commands: pictures against diffusers' own pipelines on tiny random models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from benchmarks.tables.images import unets  # noqa: E402
from tests.support.agreement import RATIO  # noqa: E402
from tests.support.pictures import read_parameters  # noqa: E402
from vla_accel import cli, latency  # noqa: E402
from vla_accel.cli import bench_unet  # noqa: E402
from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import CheckpointError, ConfigError, EngineError  # noqa: E402
from vla_accel.images.models import load_model, random_stable_diffusion  # noqa: E402
from vla_accel.images.parts import load_parts, make_scheduler  # noqa: E402
from vla_accel.images.picture import load_image, save_png, to_uint8  # noqa: E402
from vla_accel.images.stable import Engines, Request, StableDiffusion  # noqa: E402

CPU = torch.device("cpu")
# Half a step of uint8, which our picture is rounded to, and float32 noise over some steps.
HALF_STEP = 0.5 / 255 + 2e-4


@pytest.fixture(scope="module")
def parts() -> Any:
    made = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def ours(parts: Any, engine: Any) -> StableDiffusion:
    return StableDiffusion(parts, Engines.all(EngineSpec(engine=engine)))


def input_image(height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(4)) * 2 - 1


@pytest.mark.parametrize("engine", ["eager", "native"])
@pytest.mark.parametrize("scheduler", [None, "DDIM", "DPMSolverMultistepScheduler"])
def test_text_to_image_is_diffusers_own(parts: Any, engine: str, scheduler: str | None) -> None:
    request = Request("a red bowl", "blue", height=64, width=80, steps=4, guidance=5.0, seed=3, scheduler=scheduler)
    result = ours(parts, engine).generate(request)
    pipeline = diffusers.StableDiffusionPipeline(
        **{**parts.components, "scheduler": make_scheduler(parts.scheduler, scheduler)}, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(
        "a red bowl",
        negative_prompt="blue",
        height=64,
        width=80,
        num_inference_steps=4,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images[0]
    assert result.pixels.shape == (64, 80, 3) and want.std() > 0.1
    assert np.abs(result.pixels / 255 - want).max() < HALF_STEP


@pytest.mark.parametrize("scheduler", ["EulerDiscrete", "EulerAncestralDiscrete"])
def test_schedulers_that_scale_and_draw_are_served(scheduler: str) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    parts.set_progress_bar_config(disable=True)
    # Another class takes over only what the configuration sets, not what it leaves at its own class's default.
    config = {k: v for k, v in parts.scheduler.config.items() if k != "_use_default_values"}
    parts.scheduler = type(parts.scheduler).from_config(config)
    request = Request("a red bowl", height=64, width=64, steps=3, seed=3, scheduler=scheduler)
    result = ours(parts, "native").generate(request)
    parts.scheduler = make_scheduler(parts.scheduler, scheduler)
    assert parts.scheduler.init_noise_sigma != 1.0
    want = parts(
        "a red bowl",
        height=64,
        width=64,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
    ).images[0]
    assert np.abs(result.pixels / 255 - want).max() < HALF_STEP


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_image_to_image_is_diffusers_own(parts: Any, engine: str) -> None:
    image = input_image()
    result = ours(parts, engine).generate(Request("a red bowl", steps=5, strength=0.5, seed=1), image)
    pipeline = diffusers.StableDiffusionImg2ImgPipeline(**parts.components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(
        "a red bowl",
        image=image / 2 + 0.5,
        num_inference_steps=5,
        strength=0.5,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    assert np.abs(result.pixels / 255 - want).max() < HALF_STEP


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_without_guidance_the_prompt_runs_alone(parts: Any, engine: str) -> None:
    result = ours(parts, engine).generate(Request("a bowl", height=64, width=64, steps=2, guidance=1.0, seed=2))
    pipeline = diffusers.StableDiffusionPipeline(**parts.components, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    want = pipeline(
        "a bowl",
        height=64,
        width=64,
        num_inference_steps=2,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(2),
        output_type="np",
    ).images[0]
    assert np.abs(result.pixels / 255 - want).max() < HALF_STEP


def test_seed_prompt_and_negative_prompt_all_count(parts: Any) -> None:
    pipeline = ours(parts, "native")
    base = Request("a red bowl", "blue", height=64, width=64, steps=2, seed=0)
    first = pipeline.generate(base).pixels
    assert np.array_equal(first, pipeline.generate(base).pixels)
    for other in (
        Request("a red bowl", "blue", height=64, width=64, steps=2, seed=1),
        Request("a cup", "blue", height=64, width=64, steps=2),
        Request("a red bowl", "green", height=64, width=64, steps=2),
    ):
        assert not np.array_equal(first, pipeline.generate(other).pixels)


def test_the_breakdown_names_every_part(parts: Any) -> None:
    pipeline = ours(parts, "native")
    done: list[tuple[int, int]] = []
    pipeline.generate(Request("x", steps=4, strength=0.5), input_image(), on_step=lambda *at: done.append(at))
    # PNDM runs its second step twice; half of them are skipped.
    assert done == [(i + 1, len(done)) for i in range(len(done))] and len(done) >= 2
    report = pipeline.latency_report(4)
    names = {"text_encoder", "vae_encode", "scheduler", "unet", "vae_decode", "postprocess", "total"}
    assert report["schema"] == latency.SCHEMA and set(report["components"]) == names
    shares = [report["components"][n]["share"] for n in names - {"total"}]
    assert all(s > 0 for s in shares) and sum(shares) <= 1.0 + 1e-9
    assert {e["component"] for e in report["engines"]} == {"text_encoder", "unet", "vae_encoder", "vae_decoder"}
    json.dumps(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: expected 1 to 1000, got 0"),
        ({"strength": 1.5}, "strength: expected 0 to 1, got 1.5"),
        ({"height": 70, "width": 64}, "multiples of 8, got 64x70; the smallest that holds it is 64x72"),
        ({"height": 0, "width": 64}, "multiples of 8, got 64x0; the smallest that holds it is 64x8"),
        ({"height": 64}, "size: expected both height and width, or neither"),
    ],
)
def test_bad_requests(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Request("x", **change)


def test_what_does_not_fit_is_refused(parts: Any) -> None:
    pipeline = ours(parts, "eager")
    with pytest.raises(ConfigError, match="image: expected 80x64 pixels, got 64x64"):
        pipeline.generate(Request("x", height=64, width=80), input_image())
    with pytest.raises(ConfigError, match=r"strength 0\.1: expected at least one of 5 steps to run, got none"):
        pipeline.generate(Request("x", steps=5, strength=0.1, scheduler="DDIM"), input_image())
    with pytest.raises(ConfigError, match=r"expected whole timesteps below 1000, got 999, 499\.5"):
        pipeline.generate(Request("x", height=64, width=64, steps=3, scheduler="EulerDiscrete"))
    with pytest.raises(ConfigError, match="scheduler: expected a diffusers class like DDIMScheduler, got Quick"):
        pipeline.generate(Request("x", height=64, width=64, scheduler="Quick"))


@pytest.mark.parametrize(
    ("part", "where"), [("unet", "unet"), ("vae", "vae_decoder"), ("text_encoder", "text_encoder")]
)
def test_a_non_finite_picture_names_component_and_module(part: str, where: str) -> None:
    parts = random_stable_diffusion(tiny=True, dtype=torch.float32, device=CPU)
    broken = {
        "unet": lambda: parts.unet.mid_block.resnets[0].conv1,
        "vae": lambda: parts.vae.decoder.conv_in,
        "text_encoder": lambda: next(
            m for n, m in parts.text_encoder.named_modules() if n.endswith("layers.1.mlp.fc1")
        ),
    }[part]()
    broken.bias.data.fill_(torch.nan)
    with pytest.raises(EngineError, match=rf"^{where}: \d+ of \d+ output values are not finite, first in module \S+"):
        ours(parts, "eager").generate(Request("x", height=64, width=64, steps=2))


def test_an_engine_that_cannot_be_is_said(parts: Any) -> None:
    pipeline = StableDiffusion(parts, Engines(unet=EngineSpec("tensorrt_rtx")))
    with pytest.raises(EngineError, match="unet: no engine could be built"):
        pipeline.generate(Request("x", height=64, width=64))


# -- pictures -----------------------------------------------------------------------------------------------------


def test_pictures_keep_pixels_and_parameters(tmp_path: Path) -> None:
    image = input_image(16, 24)
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


# -- commands -----------------------------------------------------------------------------------------------------


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


def test_the_commands_make_pictures_that_say_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    out = tmp_path / "first.png"
    words = f"txt2img --sd-dir tiny-random --height 64 --width 64 --steps 2 --seed 5 --out-img-path {out}"
    breakdown = tmp_path / "latency.json"
    extra = ["--prompt", "a red bowl", "--use-pipeline", "--latency-json", str(breakdown), "--calls", "2"]
    assert cli.main([*words.split(), *extra]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("loading tiny-random\n") and "\ndenoising in 2 steps\n" in printed.err
    assert printed.err.count("denoising: 100 %\n") == 2, "no terminal: lines now and then"
    asks = logging.getLogger("transformers.utils.import_utils")
    assert not asks.isEnabledFor(logging.WARNING), "it would speak of torchvision, once a process"
    report = last_json(printed.out)
    # Ours is rounded to uint8.
    assert report["pipeline"]["parity"]["max_error"] < HALF_STEP and report["samples"] == 1
    assert json.loads(breakdown.read_text()) == report
    settings = read_parameters(out)
    assert settings["prompt"] == "a red bowl" and settings["seed"] == 5 and settings["scheduler"] == "PNDMScheduler"
    assert settings["engines"] == dict.fromkeys(("text_encoder", "unet", "vae_decoder"), "native")
    assert read_parameters(tmp_path / "first.pipeline.png")["engines"] == "diffusers"
    second = tmp_path / "second.png"
    words = f"img2img --sd-dir tiny-random --in-img-path {out} --steps 4 --strength 0.5 --out-img-path {second}"
    assert cli.main([*words.split(), "--engine", "eager", "--use-pipeline"]) == 0
    printed = capsys.readouterr()
    report = last_json(printed.out)
    shown = " ".join(printed.out.split())
    assert report["steps"] == 2 and "64x64, 2 of 4 steps" in shown and "denoising in 2 of 4 steps\n" in printed.err
    assert report["pipeline"]["parity"]["max_error"] < HALF_STEP
    assert read_parameters(second)["strength"] == 0.5 and load_image(second).shape == (1, 3, 64, 64)


def test_commands_report_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "--sd-dir tiny-random --out-img-path a.jpg": "expected a .png, got a.jpg",
        "--sd-dir tiny-random --height 64": "expected both --height and --width",
        f"--sd-dir {tmp_path}": "expected a model_index.json, found none",
        "--sd-dir random --scheduler DDMI": "a diffusers class like DDIMScheduler, got DDMI: did you mean DD",
        "--sd-dir no-such-folder": "or owner/name of one on the hub, got 'no-such-folder'",
        "--sd-dir tiny-random --device cuda": "finds no CUDA GPU",
    }
    if torch.cuda.is_available():
        del cases["--sd-dir tiny-random --device cuda"]
    for words, message in cases.items():
        assert cli.main(["txt2img", *words.split()]) == 1
        said = capsys.readouterr().err
        assert message in said and ("loading" not in said or "--scheduler" not in words)


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


def test_bench_unet_compares_with_both_eagers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench-unet --sd-dir tiny-random --systems eager-fp32,eager,native --dtype bf16 --size 64 --steps 2"
    cli.main([*words.split(), "--rounds", "1", "--unet-rounds", "1"])
    report = last_json(capsys.readouterr().out)
    assert report["errors"] == {}
    for rows, names in (
        (report["unet"], ("parity", "parity_eager")),
        (report["txt2img"], ("parity", "parity_eager", "latents", "latents_eager")),
    ):
        wide, eager, _ = rows
        for name in names:
            own, other = (eager, wide) if name.endswith("eager") else (wide, eager)
            assert own[name]["mse"] == 0 and other[name]["mse"] > 0
    assert report["agreement_with"]["parity_eager"] == "eager in bf16"
    text = unets(report)
    assert "| txt2img, 2 steps | native |" in text and "cosine with eager BF16" in text and "img2img" not in text


def test_bench_unet_compares_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench-unet --sd-dir tiny-random --systems eager-fp32,native --device cpu --size 64 --steps 2 --rounds 1"
    picture, output = tmp_path / "both.png", tmp_path / "bench.json"
    extra = f"--unet-rounds 2 --img2img --picture {picture} --output {output}"
    assert cli.main([*words.split(), *extra.split()]) == 0
    shown = capsys.readouterr()
    report = last_json(shown.out)
    said = "loading tiny-random\nunet: the systems, and the reference, eager in float32\nunet, eager-fp32: first call\n"
    assert shown.err.startswith(said) and report["dtype"] == "fp32", "fp16 is for GPUs"
    assert json.loads(output.read_text()) == report and report["passed"]
    for rows in (report["unet"], report["txt2img"], report["img2img"]):
        assert [r["system"] for r in rows] == ["eager-fp32", "native"]
        assert rows[0]["speedup"] == 1.0 and rows[1]["parity"]["cosine"] > 0.9999
        assert "parity_eager" not in rows[0]
    assert all(r["latents"]["cosine"] > 0.9999 for part in ("txt2img", "img2img") for r in report[part])
    assert load_image(picture).shape == (1, 3, 64, 128)
    assert {"unet", "vae_decode", "total"} <= set(report["breakdown"]["native"])


class NarrowDrawsDiffer(TorchFunctionMode):
    """As on some machines, where a generator's float16 values are others than its float32 values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = func(*args, **kwargs)
        return -drawn if func is torch.randn and kwargs.get("dtype") is torch.bfloat16 else drawn


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["PNDMScheduler", "DDPMScheduler"])
def test_bench_unet_starts_both_dtypes_from_the_same_noise(
    scheduler: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts(name: str, **given: Any) -> Any:
        made = load_parts(name, **given)
        # The second draws in every step, too.
        made.scheduler = getattr(diffusers, scheduler).from_config(made.scheduler.config)
        return made

    monkeypatch.setattr(bench_unet, "load_parts", parts)
    words = "bench-unet --sd-dir tiny-random --systems eager-fp32,eager,native --dtype bf16 --size 64 --steps 3"
    with NarrowDrawsDiffer():
        cli.main([*words.split(), "--rounds", "1", "--unet-rounds", "1", "--img2img"])
    report = last_json(capsys.readouterr().out)
    assert report["errors"] == {}
    for rows in (report["txt2img"], report["img2img"]):
        _, eager, native = rows
        # Other noise leaves -0.3 and less; BF16, summed in any order tried, 0.998 and more.
        assert eager["latents"]["cosine"] > 0.95
        for name in ("latents", "parity"):
            assert native[name]["mse"] <= RATIO**2 * eager[name]["mse"], name


def test_bench_unet_leaves_behind_where_it_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    output = tmp_path / "bench.json"
    monkeypatch.setattr(bench_unet, "in_turns", die)
    words = "bench-unet --sd-dir tiny-random --systems eager,native --dtype fp32 --size 64 --steps 2 --output"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cli.main([*words.split(), str(output)])
    report = json.loads(output.read_text())
    assert report["errors"] == {"unet": "not finished"} and not report["passed"]
    assert set(report["first_calls_s"]) == {"unet eager", "unet native"} and "unet" not in report
