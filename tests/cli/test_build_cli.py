"""`vla-accel build`, `cache` and `inspect`, with real TensorRT-RTX builds of a tiny policy."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import groot_folders, tiny_smolvla
from tests.support.tiny import write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.cli import main
from vla_accel.config import load_config, shipped_configs
from vla_accel.engines import torch_tensorrt
from vla_accel.engines.tensorrt_plan import obtain
from vla_accel.errors import ConfigError, EngineError
from vla_accel.families.bench import sized
from vla_accel.measure.random_policy import calibrate_on_noise
from vla_accel.policy import ahead_of_time as building

pytestmark = pytest.mark.tensorrt
CONFIG = """# test
vision: {engine: tensorrt_rtx, precision: fp16}
denoise: {engine: tensorrt_rtx}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_tiny_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def built(config: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache with the engines of both targets, and what the command that built them printed."""
    cache = tmp_path_factory.mktemp("built") / "engines"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert run("build", checkpoint, "--config", config, "--cache", cache, "--targets", "sm89,sm120") == 0
    return cache, json.loads(printed.getvalue().strip().splitlines()[-1])


def run(*words: Any) -> int:
    return main([str(w) for w in words])


def last_line(capsys: Any) -> Any:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.slow
def test_build_cache_and_inspect(
    config: Path, checkpoint: Path, built: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Any
) -> None:
    cache = tmp_path / "engines"
    common = ("build", checkpoint, "--config", config, "--cache", cache, "--targets", "sm89,sm120")
    assert run(*common, "--dry-run") == 0
    planned = last_line(capsys)
    assert len(planned["jobs"]) == 4 and set(planned["states"]) == {"to build"} and not cache.exists()

    made = built[1]
    shutil.copytree(built[0], cache)
    assert made["schema"] == "vla_accel.build/1" and made["checkpoint"] == str(checkpoint)
    assert made == json.loads((cache / "manifests" / "config.json").read_text())
    rows = made["engines"]
    assert [(r["name"], r["target"]) for r in rows] == [
        *itertools.product(("vision", "denoise_step"), ("sm89", "sm120"))
    ]
    for row in rows:
        assert row["built"] and row["bytes"] == (cache / row["file"]).stat().st_size > 1000
        assert row["coverage"]["in_engine"] == row["coverage"]["operators"] > 10
        assert row["similarity"] > 0.9999 and set(row["seconds"]) == {"export", "verify", "parse", "build"}
        assert row["library"].startswith("TensorRT-RTX 1.")

    assert run(*common) == 0
    assert [r["built"] for r in last_line(capsys)["engines"]] == [False] * 4
    assert run(*common, "--dry-run") == 0
    assert set(last_line(capsys)["states"]) == {"in the cache"}

    assert run("cache", "list", "--cache", cache) == 0
    listed = last_line(capsys)
    assert len(listed["engines"]) == 4 and listed["problems"] == 0
    engine = cache / rows[0]["file"]
    assert run("inspect", engine, "--layers") == 0
    seen = last_line(capsys)
    assert seen["source"] == "description" and seen["target"] == "sm89" and seen["dtypes"]["half"] > 10
    assert seen["profiles"] == [{"images": [[1, 1, 28, 28, 3], [1, 4, 28, 28, 3], [1, 4, 28, 28, 3]]}]
    assert {"name", "type", "dtype"} == set(seen["layers"][0])

    engine.write_bytes(engine.read_bytes()[:-5])
    assert run("cache", "verify", "--cache", cache) == 1
    assert last_line(capsys)["problems"] == 1
    assert run("inspect", engine) == 1
    assert "truncated" in capsys.readouterr().err
    assert run(*common) == 0
    again = last_line(capsys)["engines"]
    assert [r["built"] for r in again] == [True, False, False, False] and "is truncated" in again[0]["note"]
    assert run("cache", "clear", "--cache", cache) == 0
    assert last_line(capsys)["removed"] == 4 and not list(cache.glob("*.engine"))


@pytest.mark.slow
def test_an_engine_built_ahead_is_the_one_a_policy_asks_for(
    config: Path, checkpoint: Path, built: tuple[Path, dict[str, Any]]
) -> None:
    """The same key from the command and from the policy's own components, at another example size."""
    from vla_accel.engines.tensorrt_library import load_library
    from vla_accel.families.loading import load

    settings = load_config(config)
    found = load(checkpoint, settings, dtype=torch.bfloat16)
    inputs = found.processor.prepare(found.processor.example())
    small = replace(inputs, images=inputs.images[:1], tokens=inputs.tokens[:3])
    todo = building.jobs(found, settings, [(8, 9)], small)
    for job in todo:
        spec = replace(job.spec, tensorrt=replace(job.spec.tensorrt, cache=str(built[0])))
        body = building.body_of(job.component)
        assert not obtain(body, spec, load_library("tensorrt_rtx"), [(8, 9)], device=torch.device("cpu")).built


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("vision: eager", "", r"nothing to build: .* names no TensorRT engine \(vision eager, kv_cache auto"),
        (CONFIG, "--targets ada", "target: expected a compute capability like sm89 or 8.9, got 'ada'"),
        (CONFIG, "--targets sm90", "TensorRT-RTX does not run on compute capability 9.0; it runs on 7.5,"),
        (CONFIG, "", "expected a GPU or targets, got neither; pass --targets sm89,sm120"),
        (
            CONFIG,
            "--targets sm89 --model pi7",
            "openvla_oft, pi0, pi05, pi05_demo, pi0_fast, ",
        ),
        ("vision: {engine: tensorrt}", "", "no usable TensorRT"),
        ("vision: {engine: tensorrt_rtx, tensorrt: {targets: [x]}}", "", "target: expected a compute capability"),
        ("vision: {engine: tensorrt_rtx, tensorrt: {refits: true}}", "", "vision.tensorrt.refits: did you mean"),
        ("vision: {engine: tensorrt_rtx, tensorrt: {optimization_level: 9}}", "", "expected 0 to 5, got 9"),
        ("vision: {engine: tensorrt_rtx, tensorrt: {cache_gb: 0}}", "", "cache_gb: expected more than 0"),
        ("vision: {engine: tensorrt_rtx, tensorrt: {workspace_mb: 0}}", "", "workspace_mb: expected at least 1"),
        ("kv_cache: {engine: tensorrt_rtx, precision: fp8}", "--targets sm89", "FP8 needs calibrated scales"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(
    tmp_path: Path, checkpoint: Path, capsys: Any, monkeypatch: Any, text: str, words: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert run("build", checkpoint, "--config", path, "--cache", tmp_path / "e", *words.split()) == 1
    said = capsys.readouterr().err.strip()
    pattern = message if "\\" in message else re.escape(message)
    *begun, last = said.splitlines()
    assert re.search(pattern, last) and all(" · " in job for job in begun), said


def test_everything_that_is_missing_comes_in_one_error(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(torch_tensorrt, "installed_version", lambda package: None)
    path = tmp_path / "c.yaml"
    path.write_text("vision: torch_tensorrt\nkv_cache: tensorrt\ndenoise: tensorrt_rtx\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("build", "--config", path, "--cache", tmp_path / "e") == 1
    said = capsys.readouterr().err
    for part in ("torch-tensorrt is not installed; the set for torch", "no usable TensorRT", "pass --targets"):
        assert part in said
    assert said.count("pip install") == 2


@pytest.mark.slow
def test_an_interrupted_build_keeps_what_is_whole(
    config: Path, checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    real = building.build
    cache = tmp_path / "engines"
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)

    def interrupted(job: Any, *args: Any, **given: Any) -> Any:
        if job.component.name == "denoise":
            raise KeyboardInterrupt
        return real(job, *args, **given)

    monkeypatch.setattr(building, "build", interrupted)
    words = ("build", checkpoint, "--config", config, "--cache", cache, "--targets", "sm89", "--no-verify")
    assert run(*words) == 130
    told = capsys.readouterr().err
    assert "interrupted after 1 engines; they are in the cache" in told
    job = "vision · tensorrt_rtx · fp16 · sm89"
    assert f"\n{job}\n" in f"\n{told}" and f"\n{job}: " in told, "no terminal: a line for the job, and for its phases"
    assert len(list(cache.glob("*.engine"))) == 1 and not (cache / "manifests").exists()
    monkeypatch.undo()
    assert run(*words) == 0
    assert [r["built"] for r in last_line(capsys)["engines"]] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "shipped"),
    [(tiny_smolvla.write_lerobot, "tensorrt_rtx"), (groot_folders.write_isaac, "tensorrt_rtx_bf16")],
    ids=["smolvla", "groot"],
)
def test_other_families_build(write: Callable[[Path], object], shipped: str, tmp_path: Path, capsys: Any) -> None:
    """All that a shipped configuration names is in an engine, whose graph is what the module computes."""
    folder, config, manifest = tmp_path / "checkpoint", tmp_path / "config.yaml", tmp_path / "manifest.json"
    write(folder)
    config.write_text(shipped_configs()[shipped].read_text() + "num_steps: 2\n")
    where = ("--targets", "sm89", "--cache", tmp_path / "cache", "--manifest", manifest)
    assert run("build", folder, "--config", config, *where) == 0
    capsys.readouterr()
    engines = json.loads(manifest.read_text())["engines"]
    assert [e["component"] for e in engines] == ["vision", "kv_cache", "denoise"]
    for engine in engines:
        assert engine["similarity"] > 0.9999 and engine["bytes"] > 0
        assert engine["coverage"]["in_engine"] == engine["coverage"]["operators"]


def test_sized_models_for_measuring() -> None:
    card, size = sized("pi05_demo")
    model: Any = card.random(card.shallow(size(), 1), seed=0, device="cpu", dtype=torch.bfloat16).whole()
    assert (len(model.prefix.layers), len(model.expert.layers), len(model.vision.layers)) == (1, 1, 5)
    assert all(bool(p.isfinite().all()) and float(p.float().abs().max()) > 0 for p in model.parameters())
    assert model.dtype == torch.bfloat16 and model.action_in_proj.weight.dtype == torch.float32
    with pytest.raises(
        ConfigError, match=r"model: expected one of .*pi05_demo, .*got 'pi05_demo2': did you mean pi05_demo\?"
    ):
        sized("pi05_demo2")


@pytest.mark.slow
def test_scales_of_random_weights_are_of_these() -> None:
    card, size = sized("pi05_demo")
    sizes = card.shallow(size(), 2)
    model = card.random(sizes, seed=0, device="cpu", dtype=torch.float32)
    scales = calibrate_on_noise(card.family, model, card.dummy(sizes, 2), count=1)
    assert {f"prefix.layers.0.{n}" for n in ("gate_up_proj", "down_proj")} <= set(scales.amax)
    assert scales.why_not(model) is None


def test_a_policy_without_such_a_gpu_falls_back_loudly(checkpoint: Path, tmp_path: Path) -> None:
    options = {"cache": str(tmp_path / "e"), "targets": ["sm89"]}
    part = {"engine": "tensorrt_rtx", "fallback": ["eager"], "tensorrt": options}
    policy = OptimizedPolicy.from_pretrained(checkpoint, {"device": "cpu", "vision": part, "denoise": part})
    engines = {e["component"]: e for e in policy.metadata["engines"]}
    for name in ("vision", "denoise"):
        assert engines[name]["used"] == "eager" and engines[name]["fell_back"]
        assert "TensorRT engines run on a CUDA GPU, the device is cpu" in str(engines[name]["reason"])
    with pytest.raises(EngineError, match=r"strict mode: vision: requested engine tensorrt_rtx, using eager"):
        OptimizedPolicy.from_pretrained(checkpoint, {"device": "cpu", "strict": True, "vision": part})


def test_a_cache_that_cannot_be_written_is_known_before_engines_are_built(
    config: Path, checkpoint: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.setattr(building, "build", lambda *_, **__: pytest.fail("built"))
    assert run("build", checkpoint, "--config", config, "--targets", "sm89") == 1
    assert "vla-accel build: cache: /proc/none/vla_accel/engines cannot be written: /proc: " in capsys.readouterr().err
