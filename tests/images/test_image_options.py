"""Options of the image commands: each has an effect, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel import cli  # noqa: E402
from vla_accel.cli import bench_vae, build_unet, build_vae  # noqa: E402
from vla_accel.engines.onnx import OnnxFile  # noqa: E402
from vla_accel.images import AcceleratedVae  # noqa: E402
from vla_accel.images.engine_files import BuiltFile  # noqa: E402
from vla_accel.images.models import random_model  # noqa: E402
from vla_accel.images.native_autoencoder import CompiledHalf  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench-vae --engine-path engines", "engine-path: expected tensorrt or tensorrt_rtx among --systems"),
        ("bench-vae --multi-profile", "multi-profile: expected tensorrt or tensorrt_rtx among --systems"),
        ("bench-vae --systems eager,compile --picture a.png", "picture: expected an accelerated system"),
        ("bench-unet --size 508", "size: expected a multiple of 8, got 508"),
        ("bench-qwen --size 72 --tiny", "size: expected a multiple of 16, got 72"),
        ("bench-qwen --vae tensorrt --tiny", "trt_engine_path: expected a path"),
    ],
)
def test_options_without_effect_are_refused_before_anything_is_loaded(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_vae, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("vla_accel.cli.bench_qwen.random_qwen_image", lambda **_: pytest.fail("loaded"))
    assert cli.main(words.split()) == 1
    assert message in capsys.readouterr().err


def test_an_engine_that_image_models_do_not_have_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["txt2img", "--sd-dir", "tiny-random", "--engine", "auto"])
    assert ended.value.code == 2 and "auto" in capsys.readouterr().err


def test_systems_that_are_not_timed_at_a_size_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench-vae --vae tiny-sd-vae --sizes 72x64 --systems eager,compile,native --dtype fp32 --rounds 1"
    assert cli.main(words.split()) == 0
    printed = capsys.readouterr()
    assert "72x64: without compile, which --compile-sizes leaves out" in printed.err
    rows = json.loads(printed.out.splitlines()[-1])["results"]
    assert {row["system"] for row in rows} == {"eager", "native"} and {row["size"] for row in rows} == {"72x64"}


def built(tmp_path: Path, **about: Any) -> BuiltFile:
    told = {"target": "sm89", "optimization_level": None, "seconds": {}, "bytes": 1, "profiles": [], "similarity": None}
    return BuiltFile(tmp_path / "vae_encoder_multi_profile.trt", {**told, **about}, built=False)


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
def test_an_engine_file_that_is_there_must_be_what_was_requested(
    words: str,
    about: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import re
    from types import SimpleNamespace

    monkeypatch.setattr(build_vae, "load_library", lambda _: SimpleNamespace(title="TensorRT", name="tensorrt_rtx"))
    monkeypatch.setattr(build_vae, "found_file", lambda *_: built(tmp_path, **about))
    monkeypatch.setattr(build_vae, "build_file", lambda *_: pytest.fail("built"))
    command = f"build-vae --vae tiny-qwen-vae --output-dir {tmp_path} --sides encoder {words}"
    status = cli.main(command.split())
    err = capsys.readouterr().err
    assert status == bool(message)
    assert not message or (re.search(message, err) and "--force-engine" in err)


def test_sizes_and_only_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(build_vae, "load_library", lambda _: SimpleNamespace(title="TensorRT", name="tensorrt_rtx"))
    words = f"build-vae --vae tiny-qwen-vae --output-dir {tmp_path} --targets sm89 --static --sizes 64x64 --only 72x64"
    assert cli.main(words.split()) == 1
    assert "--sizes adds to the five ratios, --only takes their place" in capsys.readouterr().err


def test_a_stored_graph_of_other_weights_or_another_dtype_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    exported: list[str] = []

    def export(component: Any, folder: Path, **_: Any) -> OnnxFile:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "unet.onnx").write_bytes(b"graph")
        exported.append(str(component.inputs[0].dtype))
        return OnnxFile(folder / "unet.onnx", {}, (component.inputs[0].dtype,), 0)

    def build(component: Any, graph: OnnxFile, path: Path, *_: Any) -> BuiltFile:
        return BuiltFile(path, built(tmp_path).about, built=True)

    monkeypatch.setattr(build_unet, "load_library", lambda _: SimpleNamespace(title="TensorRT", name="tensorrt_rtx"))
    monkeypatch.setattr(build_unet, "found_file", lambda *_: None)
    monkeypatch.setattr(build_unet, "export_onnx", export)
    monkeypatch.setattr(build_unet, "build_file", build)
    words = f"build-unet --sd-dir tiny-random --output-dir {tmp_path} --targets sm89 --dtype"
    for dtype in ("fp16", "fp16", "fp32", "fp32"):
        assert cli.main([*words.split(), dtype]) == 0
    assert exported == ["torch.float16", "torch.float32"]
    real = random_model

    def other(name: str, **options: Any) -> Any:
        return real(name, **options, seed=1)

    monkeypatch.setattr("vla_accel.images.models.random_model", other)
    assert cli.main([*words.split(), "fp32"]) == 0
    assert len(exported) == 3, "other weights"


def test_precision_counts_for_both_ways_that_inductor_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster way is chosen for its time, so both must compute in the precision that was requested."""
    seen: list[torch.dtype] = []
    real = CompiledHalf.__init__

    def init(self: Any, half: Any, backend: str = "eager") -> None:
        seen.append(half.dtype)
        real(self, half, "eager")

    monkeypatch.setattr(CompiledHalf, "__init__", init)
    vae = random_model("tiny-sd-vae", dtype=torch.float32, device=CPU)
    accelerated = AcceleratedVae(vae, {"inductor": "measure", "precision": "bf16"})
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    exact = AcceleratedVae(vae).decode(latents)
    results = []
    for way in ("fused", "inductor"):
        accelerated.decode(latents)
        program: Any = accelerated.cache.shared["decoder program"]
        program.chosen = dict.fromkeys(program.chosen, way)
        results.append(accelerated.decode(latents))
    assert seen == [torch.bfloat16]
    for result in results:
        assert result.dtype == torch.float32 and 1e-3 < float((result - exact).abs().max()) < 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("precision tiny-sd-vae --tokens 5", "tokens: expected a text encoder with it, got tiny-sd-vae"),
        ("precision tiny-qwen-text-encoder --size 64", "size: expected an image model with it"),
        ("precision tiny-sd-vae --size 3", "size: expected at least 8, got 3"),
        ("bench-vae --vae tiny-sd-vae --systems eager,native --compile-sizes 72x72", "compile-sizes: expected one of"),
        ("doctor --count 3", "count: expected --observations with it, got 3"),
        ("convert folder out --lora-scale nan", "lora-scale: expected more than 0, got nan"),
    ],
)
def test_options_that_no_part_would_read_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words.split(), *(() if words.startswith("convert") else ("--device", "cpu"))]) == 1
    assert message in capsys.readouterr().err
