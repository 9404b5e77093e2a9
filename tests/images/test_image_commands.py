"""The commands of image models: pictures, benchmarks and their reports; each option has an effect, or is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.tables.images import autoencoder_sizes, autoencoders, qwen_images, unets
from tests.support.agreement import RATIO
from tests.support.images import CPU, VAES, diffusers, last_json, read_parameters
from vla_accel import cli
from vla_accel.cli import bench_unet, build_images
from vla_accel.engines.cache import Entry
from vla_accel.engines.onnx import OnnxFile
from vla_accel.engines.tensorrt_plan import Obtained
from vla_accel.images import AcceleratedVae
from vla_accel.images.measure import Bench, parity
from vla_accel.images.models import random_model
from vla_accel.images.parts import load_parts
from vla_accel.images.picture import load_image, save_png
from vla_accel.images.stable import StableDiffusion

Capture = pytest.CaptureFixture[str]
HALF_STEP = 0.5 / 255 + 2e-4


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT-RTX that builds nothing."""
    library = SimpleNamespace(title="TensorRT", name="tensorrt_rtx")
    monkeypatch.setattr(build_images, "load_library", lambda _: library)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: None) -> Path:
    """An empty folder to work in; loading a model there fails the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("bench_vae.load_model", "bench_qwen.random_qwen_image"):
        monkeypatch.setattr(f"vla_accel.cli.{name}", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(StableDiffusion, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    save_png(tmp_path / "low.png", np.zeros((7, 100, 3), np.uint8), {})
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench-vae --engine-path engines", "engine-path: expected tensorrt or tensorrt_rtx among --systems"),
        ("bench-vae --multi-profile", "multi-profile: expected tensorrt or tensorrt_rtx among --systems"),
        ("bench-vae --systems eager,compile --picture a.png", "picture: expected an accelerated system"),
        ("bench-vae --systems eager,native --compile-sizes 72x72", "compile-sizes: expected one of"),
        ("bench-vae --systems eager,tensorrt_rtx", "engine-path: expected --engine-path FOLDER for tensorrt_rtx, got"),
        ("bench-unet --size 508", "size: expected a multiple of 8, got 508"),
        ("bench-qwen --size 72 --tiny", "size: expected a multiple of 16, got 72"),
        ("bench-qwen --vae tensorrt --tiny", "trt_engine_path: expected a path"),
        ("bench-qwen --device cpu", "device: expected a GPU for Qwen-Image's 20 billion weights, --layers N or"),
        ("precision tiny-sd-vae --tokens 5", "tokens: expected a text encoder with it, got tiny-sd-vae"),
        ("precision tiny-qwen-text-encoder --size 64", "size: expected an image model with it"),
        ("precision tiny-sd-vae --size 3", "size: expected at least 8, got 3"),
        ("txt2img --sd-dir tiny-random --out-img-path a.jpg", "expected a file name ending in .png, got 'a.jpg'"),
        ("txt2img --sd-dir tiny-random --height 64", "expected both height and width"),
        ("txt2img --sd-dir random --scheduler DDMI", "a diffusers class like DDIMScheduler, got DDMI: did you mean DD"),
        ("txt2img --sd-dir tiny-random --height 70 --width 64", "multiples of 8, got 64x70; the smallest that holds"),
        ("img2img --sd-dir x --in-img-path low.png --height 64 --width 4", "multiples of 8, got 4x64"),
        ("img2img --sd-dir x --in-img-path low.png", "expected at least 8 pixels a side, got 100x7"),
        ("build-vae --vae tiny-sd-vae --output-dir x --targets sm89 --static --sizes 64x64 --only 72x64", "--only rep"),
        ("build-vae --vae tiny-qwen-vae --output-dir x --targets sm89 --sizes 64x64", "belong to --static"),
        ("build-unet --sd-dir tiny-random --targets sm89", "expected a folder for the files of tiny-random, got none"),
        ("doctor --count 3", "count: expected --observations with it, got 3"),
        ("convert folder out --lora-scale nan", "lora-scale: expected more than 0, got nan"),
    ],
)
def test_options_without_effect_are_refused_before_anything_is_loaded(
    words: str, message: str, capsys: Capture, unloaded: Path
) -> None:
    assert cli.main(words.split()) == 1
    said = capsys.readouterr().err
    assert message in said and "denoising" not in said


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--sd-dir .", 1, "expected a model_index.json, found none"),
        ("--sd-dir no-such-folder", 1, "or owner/name of one on the hub, got 'no-such-folder'"),
        ("--sd-dir tiny-random --device cuda", 1, "finds no CUDA GPU"),
        ("--sd-dir tiny-random --engine auto", 2, "auto"),
    ],
)
def test_a_model_device_or_engine_that_does_not_exist_is_one_error(
    words: str, status: int, message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("NOT RUN: this machine has a GPU")
    try:
        assert cli.main(["txt2img", *words.split()]) == status
    except SystemExit as ended:
        assert ended.code == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("words", "layers"), [("--tiny", 2), ("--tiny --layers 5", 5), ("--layers 7", 7)])
def test_a_tiny_transformer_is_shallow(words: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def stop(**options: Any) -> Any:
        made.append(options["layers"])
        raise KeyboardInterrupt

    monkeypatch.setattr("vla_accel.cli.bench_qwen.random_qwen_image", stop)
    assert cli.main(["bench-qwen", "--device", "cpu", *words.split()]) == 130 and made == [layers]


def test_the_commands_make_pictures_with_their_parameters(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    out = tmp_path / "first.png"
    words = f"txt2img --sd-dir tiny-random --height 64 --width 64 --steps 2 --seed 5 --out-img-path {out}"
    breakdown = tmp_path / "latency.json"
    extra = ["--prompt", "a red bowl", "--use-pipeline", "--latency-json", str(breakdown), "--calls", "2"]
    assert cli.main([*words.split(), *extra]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("loading tiny-random\n") and "\ndenoising in 2 steps\n" in printed.err
    assert printed.err.count("denoising: 100 %\n") == 2, "lines instead of a bar without a terminal"
    torchvision = logging.getLogger("transformers.utils.import_utils")
    assert not torchvision.isEnabledFor(logging.WARNING), "it would warn that torchvision is missing"
    report = last_json(printed.out)
    # Ours is rounded to uint8.
    assert report["pipeline"]["parity"]["max_error"] < HALF_STEP and report["samples"] == 1
    assert json.loads(breakdown.read_text()) == report
    settings = read_parameters(out)
    assert settings["prompt"] == "a red bowl" and settings["seed"] == 5 and settings["scheduler"] == "PNDMScheduler"
    assert settings["engines"] == dict.fromkeys(("text_encoder", "unet", "vae_decoder"), "native")
    assert read_parameters(tmp_path / "first.pipeline.png")["engines"] == "diffusers"


def test_img2img_reduces_a_picture_as_diffusers_does(tmp_path: Path, capsys: Capture) -> None:
    picture, out = tmp_path / "a.png", tmp_path / "out.png"
    save_png(picture, np.random.default_rng(0).integers(0, 256, (75, 100, 3), dtype=np.uint8), {})
    words = f"img2img --sd-dir tiny-random --in-img-path {picture} --steps 4 --strength 0.5 --out-img-path {out}"
    assert cli.main([*words.split(), "--engine", "eager", "--use-pipeline"]) == 0
    printed = capsys.readouterr()
    report = last_json(printed.out)
    assert report["steps"] == 2 and "96x72, 2 of 4 steps" in " ".join(printed.out.split())
    assert "denoising in 2 of 4 steps\n" in printed.err and report["pipeline"]["parity"]["max_error"] < HALF_STEP
    assert read_parameters(out)["strength"] == 0.5
    ours, theirs = load_image(out), load_image(out.with_suffix(".pipeline.png"))
    assert ours.shape == theirs.shape == (1, 3, 72, 96) and float((ours - theirs).abs().max()) <= 2 / 255 + 1e-6


def test_bench_qwen(tmp_path: Path, capsys: Capture) -> None:
    words = "bench-qwen --tiny --layers 1 --size 64 --steps 2 --dtype fp32 --rounds 1 --transformer native"
    assert cli.main([*words.split(), "--output", str(tmp_path / "a.json")]) == 0
    printed = capsys.readouterr()
    report = last_json(printed.out)
    assert json.loads((tmp_path / "a.json").read_text()) == report
    names = ["baseline", "VAE only", "transformer only (native)", "both (native)"]
    assert printed.err.startswith("creating Qwen-Image with 1 layers\n")
    lines = [line for line in printed.err.splitlines() if "first call" in line and "so far" not in line]
    first = [f"Qwen-Image, {name}: {what}" for name in names for what in ("first call", "the first call")]
    assert [line.partition(" took")[0] for line in lines] == first
    assert [r["system"] for r in report["results"]] == names and report["layers"] == 1
    assert all(r["parity"]["cosine"] > 0.9999 for r in report["results"])
    lines = qwen_images(report).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == [f"| {n}" for n in names]
    assert lines[-1].startswith("64², 2 steps, 1 transformer layers, FP32")


@pytest.mark.slow
@pytest.mark.parametrize("vae", [*VAES, "tiny-wan-vae"])
def test_bench_vae(vae: str, tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "both.png"
    words = f"bench-vae --vae {vae} --sizes 64x64,80x64 --systems eager,compile,native --compile-sizes 96x96"
    extra = f"--dtype fp32 --rounds 2 --picture {picture} --output {tmp_path / 'a.json'}"
    assert cli.main([*words.split(), *extra.split()]) == 0
    printed = capsys.readouterr()
    report = last_json(printed.out)
    assert printed.err.startswith(f"loading {vae}\n64x64: the systems, and the reference, eager in float32\n")
    assert "80x64: without compile, which --compile-sizes leaves out" in printed.err
    assert report["passed"] and [(r["size"], r["side"], r["system"]) for r in report["results"]] == [
        (size, side, system)
        for size in ("64x64", "80x64")
        for side in ("encoder", "decoder")
        for system in ("eager", "native")
    ]
    assert all(r["parity"]["cosine"] > 0.9999 and r["calls"] == 2 for r in report["results"])
    assert load_image(picture).shape == (1, 3, 64 + 14, 4 * 64)
    shown = read_parameters(picture)
    assert shown["panels"] == ["source", "eager fp32", "native fp32", "difference x 8"] and shown["random_weights"]
    assert report["picture"]["parity"]["cosine"] > 0.9999 and report["picture"]["size"] == "64x64"


@pytest.mark.parametrize("fails", [False, True])
def test_bench_vae_fails_if_a_system_disagrees_or_fails(
    fails: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AcceleratedVae.decode

    def decode(self: Any, latents: Any) -> Any:
        if fails:
            raise RuntimeError("no such kernel")
        return real(self, latents) + 0.1

    monkeypatch.setattr(AcceleratedVae, "decode", decode)
    words = "bench-vae --vae tiny-qwen-vae --sizes 64x64 --systems eager,native --dtype fp32 --rounds 1"
    assert cli.main(words.split()) == 1
    report = last_json(capsys.readouterr().out)
    systems = [("encoder", "eager", True), ("encoder", "native", True), ("decoder", "eager", True)]
    systems += [] if fails else [("decoder", "native", False)]
    assert [(r["side"], r["system"], r["passed"]) for r in report["results"]] == systems
    row = autoencoders(report).splitlines()[3]
    assert row.startswith("| 64x64 | native | ")
    if fails:
        assert report["errors"] == {"native decoder 64x64": "RuntimeError: no such kernel"}
        assert autoencoder_sizes(report).splitlines()[2].endswith(", 1.0× | - | 1.000000 |")
        # No sum of one side.
        assert row.endswith(" | - | - | - | 1.000000 | - |")


UNETS = "bench-unet --sd-dir tiny-random --size 64 --rounds 1 --unet-rounds 1"


@pytest.mark.slow
def test_bench_unet_compares_with_both_eagers(tmp_path: Path, capsys: Capture) -> None:
    picture, output = tmp_path / "both.png", tmp_path / "bench.json"
    words = f"{UNETS} --systems eager-fp32,eager,native --dtype bf16 --steps 2 --img2img"
    cli.main([*words.split(), "--picture", str(picture), "--output", str(output)])
    printed = capsys.readouterr()
    report = last_json(printed.out)
    said = "loading tiny-random\nunet: the systems, and the reference, eager in float32\nunet, eager-fp32: first call\n"
    assert printed.err.startswith(said) and json.loads(output.read_text()) == report and report["errors"] == {}
    names = ("parity", "parity_eager")
    for part, agreements in (("unet", names), ("txt2img", (*names, "latents", "latents_eager"))):
        wide, eager, _ = report[part]
        assert wide["speedup"] == 1.0
        for name in agreements:
            own, other = (eager, wide) if name.endswith("eager") else (wide, eager)
            assert own[name]["mse"] == 0 and other[name]["mse"] > 0
    assert report["agreement_with"]["parity_eager"] == "eager in bf16" and load_image(picture).shape == (1, 3, 64, 128)
    assert {"unet", "vae_decode", "total"} <= set(report["breakdown"]["native"])
    text = unets(report)
    assert "| txt2img, 2 steps | native |" in text and "cosine with eager BF16" in text and "img2img" in text


def test_bench_unet_in_float32_agrees_and_needs_no_eager(capsys: Capture) -> None:
    assert cli.main(f"{UNETS} --systems eager-fp32,native --device cpu --steps 2".split()) == 0
    report = last_json(capsys.readouterr().out)
    assert report["passed"] and report["dtype"] == "fp32", "fp16 is for GPUs"
    for part in ("unet", "txt2img"):
        assert [row["system"] for row in report[part]] == ["eager-fp32", "native"]
        assert all(row["parity"]["cosine"] > 0.9999 and "parity_eager" not in row for row in report[part])
        assert part == "unet" or all(row["latents"]["cosine"] > 0.9999 for row in report[part])


class NarrowDrawsDiffer(TorchFunctionMode):
    """Makes a generator's bfloat16 values differ from its float32 values, as on some machines."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn, dtype = func(*args, **(kwargs or {})), (kwargs or {}).get("dtype")
        return -drawn if func is torch.randn and dtype is torch.bfloat16 else drawn


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["PNDMScheduler", "DDPMScheduler"])
def test_bench_unet_starts_both_dtypes_from_the_same_noise(
    scheduler: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def parts(name: str, **options: Any) -> Any:
        made = load_parts(name, **options)
        # The second draws in every step, too.
        made.scheduler = getattr(diffusers, scheduler).from_config(made.scheduler.config)
        return made

    monkeypatch.setattr(bench_unet, "load_parts", parts)
    with NarrowDrawsDiffer():
        cli.main(f"{UNETS} --systems eager-fp32,eager,native --dtype bf16 --steps 3 --img2img".split())
    report = last_json(capsys.readouterr().out)
    assert report["errors"] == {}
    for rows in (report["txt2img"], report["img2img"]):
        _, eager, native = rows
        # Other noise leaves -0.3 and less; BF16, summed in any order tried, 0.998 and more.
        assert eager["latents"]["cosine"] > 0.95
        for name in ("latents", "parity"):
            assert native[name]["mse"] <= RATIO**2 * eager[name]["mse"], name


def test_bench_unet_leaves_a_report_where_it_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    output = tmp_path / "bench.json"
    monkeypatch.setattr(Bench, "timings", die)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        cli.main(f"{UNETS} --systems eager,native --dtype fp32 --steps 2 --output {output}".split())
    report = json.loads(output.read_text())
    assert report["errors"] == {"unet": "not finished"} and not report["passed"]
    assert set(report["first_calls_s"]) == {"unet eager", "unet native"} and "unet" not in report


def test_parity_of_known_differences() -> None:
    a = torch.tensor([0.0, 1.0, 2.0, 1.0])
    same, off, bad = (parity(a + torch.tensor([0.0, 0.0, 0.0, error]), a) for error in (0.0, 0.2, torch.nan))
    assert same.mse == 0 and same.as_dict()["psnr_db"] == 999.0 and same.passes(1e-9, 0.999999)
    assert off.mse == pytest.approx(0.01) and off.max_error == pytest.approx(0.2)
    # Range 2, root mean square error 0.1: 20 log10(20).
    assert off.psnr_db == pytest.approx(26.0206, abs=1e-3)
    assert off.cosine == pytest.approx(0.99741, abs=1e-4) and not off.passes(0.001, 0.9)
    assert not bad.passes(1e9, -1.0) and set(bad.as_dict().values()) == {None}
    timings = {"slow": {"p50_ms": 2.0}, "fast": {"p50_ms": 1.0}}
    rows = Bench.rows(timings, {"parity": (dict.fromkeys(timings, a), a), "none": ({}, None)}, "slow")
    assert [row["speedup"] for row in rows] == [1.0, 2.0] and "none" not in rows[0] and rows[0]["parity"]["mse"] == 0


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    lines: list[str] = []
    bench = Bench(CPU, lines.append)
    timings = bench.timings({n: lambda n=n: order.append(n) for n in "abc"}, rounds=3, warm_up=1)
    warm_ups = [f"warming up: {name}" for name in "abc"]
    assert lines == [*warm_ups, "9/9 calls"]
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(t["calls"] == 3 and t["min_ms"] <= t["p50_ms"] for t in timings.values())
    assert bench.peak_gib(lambda: order.append("x")) is None and "x" not in order, "no call without a GPU"
    lines.clear()
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    bench.timings(dict.fromkeys("abc", lambda: None), rounds=3, warm_up=1)
    assert lines == [*warm_ups, *(f"{done}/9 calls" for done in range(1, 10))]


def built(path: Path, **about: Any) -> Obtained:
    plain = {"target": "sm89", "optimization_level": None, "seconds": {}, "bytes": 1, "profiles": []}
    return Obtained(Entry(path, {**plain, "similarity": None, **about}), built=False)


@pytest.mark.parametrize(
    ("words", "about", "message"),
    [
        ("--targets sm120", {}, r"targets: expected an engine for sm120, got .* which was built for sm89"),
        ("--targets sm89,sm120", {}, r"targets: expected an engine for sm120, sm89, got .* built for sm89"),
        ("--targets sm89 --optimization-level 2", {}, "optimization-level: expected an engine built with 2"),
        ("--targets sm89 --optimization-level 2", {"optimization_level": 3}, "which was built with 3"),
        ("--targets sm89", {"target": "sm86+sm89", "optimization_level": 3}, ""),
        ("--targets sm89 --optimization-level 3", {"optimization_level": 3}, ""),
    ],
)
@pytest.mark.usefixtures("library")
def test_an_existing_engine_file_must_be_what_was_requested(
    words: str, about: dict[str, Any], message: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_images, "found_file", lambda _, path, *__: built(path, **about))
    monkeypatch.setattr(build_images, "build_file", lambda *_: pytest.fail("built"))
    command = f"build-vae --vae tiny-qwen-vae --output-dir {tmp_path} --sides encoder {words}"
    assert cli.main(command.split()) == bool(message)
    err = capsys.readouterr().err
    assert not message or (re.search(message, err) and "--force-engine" in err)


@pytest.mark.usefixtures("library")
def test_a_stored_graph_of_other_weights_or_another_dtype_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[str] = []

    def export(component: Any, folder: Path, **_: Any) -> OnnxFile:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "unet.onnx").write_bytes(b"graph")
        exported.append(str(component.inputs[0].dtype))
        return OnnxFile(folder / "unet.onnx", {}, (component.inputs[0].dtype,), 0)

    monkeypatch.setattr(build_images, "found_file", lambda *_: None)
    monkeypatch.setattr(build_images, "export_onnx", export)
    monkeypatch.setattr(build_images, "build_file", lambda component, graph, path, *_: built(path))
    words = f"build-unet --sd-dir tiny-random --output-dir {tmp_path} --targets sm89 --dtype"
    for dtype in ("fp16", "fp16", "fp32", "fp32"):
        assert cli.main([*words.split(), dtype]) == 0
    assert exported == ["torch.float16", "torch.float32"]
    other = lambda name, **options: random_model(name, **options, seed=1)  # noqa: E731
    monkeypatch.setattr("vla_accel.images.models.random_model", other)
    assert cli.main([*words.split(), "fp32"]) == 0
    assert len(exported) == 3, "other weights"
