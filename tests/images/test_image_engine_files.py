"""TensorRT engine files of image models, built with TensorRT-RTX without a GPU: tiny ones, and the real sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.images import CPU, last_json, make_parts, make_vae
from vla_accel import cli
from vla_accel.cli import build_images
from vla_accel.config import EngineSpec
from vla_accel.engines.tensorrt_builder import pick_profile
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images import AcceleratedVae, load_vae_config
from vla_accel.images.autoencoder import split_autoencoder
from vla_accel.images.engine_files import FileEngine, found_file, identity
from vla_accel.images.models import random_model
from vla_accel.images.parts import unet_engine_file
from vla_accel.images.stable import Engines, Request, StableDiffusion
from vla_accel.images.vae_component import PROFILES, RATIOS, vae_component

pytest.importorskip("tensorrt_rtx", reason="NOT RUN: needs tensorrt-rtx")
pytest.importorskip("onnxruntime", reason="NOT RUN: needs onnxruntime")
pytestmark = pytest.mark.tensorrt
FP16 = torch.float16


def command(*words: str) -> dict[str, Any]:
    """The JSON line of a command in a process of its own, whose memory is freed when it ends."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "vla_accel", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return last_json(done.stdout)


@pytest.fixture(scope="module")
def multi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with multi-profile engines of the tiny Qwen autoencoder."""
    folder = tmp_path_factory.mktemp("multi")
    words = ["build-vae", "--vae", "tiny-qwen-vae", "--output-dir", str(folder), "--targets", "sm89"]
    assert cli.main(words) == 0
    return folder


def encoder_component(dtype: torch.dtype = FP16, seed: int = 0) -> Any:
    encoder, _ = split_autoencoder(random_model("tiny-qwen-vae", dtype=dtype, device=CPU, seed=seed))
    return vae_component(encoder, "encoder", (512, 512), dynamic=True)


@pytest.mark.slow
def test_one_file_has_nine_profiles_over_the_whole_range(multi: Path) -> None:
    names = {p.name for p in multi.iterdir()}
    assert names == {f"vae_{s}_multi_profile.{e}" for s in ("encoder", "decoder") for e in ("trt", "json")} | {
        "vae_config.json"
    }
    for side, unit, name in (("encoder", 1, "image"), ("decoder", 8, "latents")):
        about = json.loads((multi / f"vae_{side}_multi_profile.json").read_text())
        assert len(about["profiles"]) == 9 and about["target"] == "sm89" and about["library"] == "tensorrt_rtx"
        for profile, (height, width) in zip(about["profiles"], PROFILES, strict=True):
            low, best, high = profile[name]
            assert low[3:] == [64 // unit] * 2 and high[3:] == [1920 // unit] * 2
            assert best[3:] == [height // unit, width // unit]
        # Compared with the module before it was built.
        assert about["similarity"] > 0.9999
    content = json.loads((multi / "vae_config.json").read_text())
    files = {"trt_engine_path": str(multi), "multi_profile": True}
    assert content == {"vae_type": "tensorrt_rtx", "trt_vae_config": files}
    assert load_vae_config(multi / "vae_config.json").trt_vae_config.multi_profile


@pytest.mark.slow
def test_every_size_finds_its_profile_and_inspect_shows_them(multi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_file(encoder_component(), multi / "vae_encoder_multi_profile.trt", "tensorrt_rtx")
    assert found is not None
    profiles = found.profiles
    for index, size in enumerate(PROFILES):
        assert pick_profile(profiles, {"image": (1, 3, 1, *size)}, "vae") == index
    for height in range(64, 1921, 16):
        pick_profile(profiles, {"image": (1, 3, 1, height, 64)}, "vae")
    with pytest.raises(EngineError, match=r"no optimization profile covers image \(1, 3, 1, 1936, 64\)"):
        pick_profile(profiles, {"image": (1, 3, 1, 1936, 64)}, "vae")
    capsys.readouterr()
    assert cli.main(["inspect", str(multi / "vae_encoder_multi_profile.trt")]) == 0
    shown = last_json(capsys.readouterr().out)
    assert shown["layers"] == sum(shown["types"].values()) > 50 and shown["types"]["convolution"] > 10
    assert shown["inputs"] and shown["outputs"] and len(shown["profiles"]) == len(PROFILES)


@pytest.mark.slow
def test_what_is_there_is_used(multi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (multi / "vae_encoder_multi_profile.trt").stat().st_mtime
    words = ["build-vae", "--vae", "tiny-qwen-vae", "--output-dir", str(multi), "--targets", "sm89"]
    assert cli.main(words) == 0
    assert [f["built"] for f in last_json(capsys.readouterr().out)["files"]] == [False, False]
    assert (multi / "vae_encoder_multi_profile.trt").stat().st_mtime == before


@pytest.mark.slow
def test_another_model_or_a_damaged_file_is_refused(multi: Path, tmp_path: Path) -> None:
    for suffix in ("trt", "json"):
        (tmp_path / f"a.{suffix}").write_bytes((multi / f"vae_encoder_multi_profile.{suffix}").read_bytes())
    component, path = encoder_component(), tmp_path / "a.trt"
    assert found_file(component, path, "tensorrt_rtx") is not None
    assert found_file(component, tmp_path / "b.trt", "tensorrt_rtx") is None
    decoder = vae_component(split_autoencoder(make_vae(dtype=FP16))[1], "decoder", (64, 64))
    cases: list[tuple[Any, Any, str]] = [
        (encoder_component(seed=1), "tensorrt_rtx", "was built from another model"),
        (decoder, "tensorrt_rtx", "was built from another model"),
        (encoder_component(torch.float32), "tensorrt_rtx", "computes in float16, and the model is in float32"),
        (component, "tensorrt", "expected an engine of tensorrt, got one of tensorrt_rtx"),
    ]
    for other, library, message in cases:
        with pytest.raises(EngineError, match=message):
            found_file(other, path, library)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    for damaged, message in ((content, r"a\.trt is damaged.*--force-engine"), (content[:2000], "truncated")):
        path.write_bytes(damaged)
        with pytest.raises(EngineError, match=message):
            found_file(component, path, "tensorrt_rtx")
    path.with_suffix(".json").unlink()
    with pytest.raises(EngineError, match="has no description"):
        found_file(component, path, "tensorrt_rtx")


@pytest.mark.slow
def test_running_a_file_needs_a_gpu_and_the_file(multi: Path) -> None:
    vae = make_vae(dtype=FP16)
    with pytest.raises(EngineError, match=r"vae_encoder: vae_encoder_multi_profile\.trt needs an NVIDIA GPU"):
        AcceleratedVae(vae, multi / "vae_config.json").encode(torch.zeros(1, 3, 1, 64, 64, dtype=FP16))
    missing = {"vae_type": "tensorrt_rtx", "trt_vae_config": {"trt_engine_path": str(multi)}}
    with pytest.raises(ConfigError, match=r"expected 512x64/vae_encoder\.trt, found: vae_config\.json, vae_decoder"):
        AcceleratedVae(vae, missing).encode(torch.zeros(1, 3, 1, 64, 512, dtype=FP16))
    with pytest.raises(EngineError, match="no such engine file"):
        FileEngine(encoder_component(), CPU, EngineSpec("tensorrt_rtx"), multi / "gone.trt")


@pytest.mark.slow
def test_targets_are_needed_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["build-vae", "--vae", "tiny-qwen-vae", "--output-dir", str(tmp_path)]
    if not torch.cuda.is_available():
        assert cli.main(words) == 1
        error = capsys.readouterr().err
        assert "expected --targets" in error and "tensorrt_rtx" in error and "got none" in error
    assert cli.main([*words, "--targets", "sm90"]) == 1
    assert "does not run on compute capability 9.0" in capsys.readouterr().err


@pytest.mark.slow
def test_static_folders_have_the_names_that_the_runtime_uses(tmp_path: Path) -> None:
    words = ["build-vae", "--vae", "tiny-qwen-vae", "--output-dir", str(tmp_path), "--targets", "sm89", "--static"]
    assert cli.main([*words, "--only", "3_4,64x80", "--sides", "decoder"]) == 0
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.trt")) == [
        "3_4/vae_decoder.trt",
        "64x80/vae_decoder.trt",
    ]
    content = json.loads((tmp_path / "vae_config.json").read_text())
    assert content["trt_vae_config"] == {"trt_engine_path": str(tmp_path), "multi_profile": False}
    _, decoder = split_autoencoder(make_vae(dtype=FP16))
    found = found_file(
        vae_component(decoder, "decoder", RATIOS["3_4"]), tmp_path / "3_4" / "vae_decoder.trt", "tensorrt_rtx"
    )
    assert found is not None
    (profile,) = found.profiles
    assert profile["latents"] == ((1, 4, 1, 128, 96),) * 3


@pytest.mark.slow
def test_identity_is_of_weights_and_dtypes_not_of_size() -> None:
    encoder, other = (split_autoencoder(make_vae("tiny-sd-vae"))[0] for _ in range(2))
    small, large = (vae_component(encoder, "encoder", s) for s in ((64, 64), (512, 512)))
    assert identity(small) == identity(large)
    assert identity(vae_component(other, "encoder", (64, 64))) == identity(small)
    other.conv_in.weight.data[0, 0, 0, 0] += 1
    assert identity(vae_component(other, "encoder", (64, 64))) != identity(small)


class Exported(Exception):
    """Raised in place of an export, which takes most of a build's time."""

    @classmethod
    def instead(cls, component: Any, folder: Path, **_: Any) -> None:
        raise cls(f"{component.name} to {folder.name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "file"),
    [
        ("build-unet --sd-dir tiny-random", "unet/trt/unet.trt"),
        ("build-vae --vae tiny-qwen-vae", "vae_encoder_multi_profile.trt"),
    ],
)
def test_a_build_reports_before_it_begins_that_it_takes_minutes(
    words: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_images, "export_onnx", Exported.instead)
    with pytest.raises(Exported):
        cli.main([*words.split(), "--output-dir", str(tmp_path), "--targets", "sm89"])
    assert capsys.readouterr().err.splitlines()[-1] == f"building {tmp_path / file}: minutes"


@pytest.mark.slow
def test_the_unet_is_exported_once_and_built_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parts().save_pretrained(tmp_path)
    words = ["build-unet", "--sd-dir", str(tmp_path), "--targets", "sm89"]

    def run(*extra: str) -> dict[str, Any]:
        assert cli.main([*words, *extra]) == 0
        return last_json(capsys.readouterr().out)["files"][0]

    first = run()
    assert first["built"] and first["similarity"] > 0.9999 and first["file"] == "unet/trt/unet.trt"
    graph, engine = tmp_path / "unet" / "onnx" / "unet.onnx", unet_engine_file(tmp_path)
    exported, built = graph.stat().st_mtime_ns, engine.stat().st_mtime_ns
    assert not run()["built"]
    assert (graph.stat().st_mtime_ns, engine.stat().st_mtime_ns) == (exported, built)
    assert run("--force-engine")["built"]
    assert graph.stat().st_mtime_ns == exported and engine.stat().st_mtime_ns > built
    with monkeypatch.context() as patch, pytest.raises(Exported, match=r"^unet to onnx$"):
        patch.setattr(build_images, "export_onnx", Exported.instead)
        run("--force-onnx")
    # The pipeline finds it, but needs a GPU to run it.
    engines = Engines(unet=EngineSpec("tensorrt_rtx"))
    pipeline = StableDiffusion.from_pretrained(tmp_path, engines, device=CPU, dtype=FP16)
    assert pipeline.unet_file == engine
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match=r"unet: unet\.trt needs an NVIDIA GPU"):
            pipeline.generate(Request("x", height=256, width=256, steps=1))


@pytest.mark.slow
def test_the_full_size_autoencoder_builds_with_nine_profiles(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--full-size"):
        pytest.skip("NOT RUN: needs --full-size (see CONTRIBUTING)")
    report = command("build-vae", "--vae", "qwen-vae", "--output-dir", str(tmp_path), "--targets", "sm89")
    encoder, decoder = report["files"]
    assert encoder["profiles"] == decoder["profiles"] == 9
    # 54 and 73 million half-precision weights, less two thirds of the 3-D kernels.
    assert 35 < encoder["mb"] < 150 and 45 < decoder["mb"] < 150
    assert min(encoder["similarity"], decoder["similarity"]) > 0.9999


@pytest.mark.slow
def test_the_full_size_unet_builds(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--full-size"):
        pytest.skip("NOT RUN: needs --full-size, and five minutes of two cores (see CONTRIBUTING)")
    report = command("build-unet", "--sd-dir", "random", "--output-dir", str(tmp_path), "--targets", "sm89")
    (file,) = report["files"]
    # 860 million half-precision weights.
    assert 1700 < file["mb"] < 1900 and file["similarity"] > 0.9999
