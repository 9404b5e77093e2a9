"""Qwen-Image in diffusers' pipelines with our parts, on a tiny pipeline; and the two benchmarks' commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from benchmarks.tables.images import autoencoder_sizes, autoencoders, qwen_images  # noqa: E402
from tests.support.pictures import read_parameters  # noqa: E402
from vla_accel import cli  # noqa: E402
from vla_accel.errors import ConfigError  # noqa: E402
from vla_accel.images.measure import Parity, in_turns, parity, peak_memory  # noqa: E402
from vla_accel.images.picture import load_image  # noqa: E402
from vla_accel.images.qwen import accelerate, random_qwen_image  # noqa: E402
from vla_accel.ledger import Ledger  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline() -> Any:
    made = random_qwen_image(tiny=True, layers=2, dtype=torch.float32, device=CPU)
    made.set_progress_bar_config(disable=True)
    return made


def generate(pipeline: Any) -> torch.Tensor:
    embeds = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(1))
    return pipeline(
        prompt_embeds=embeds,
        true_cfg_scale=1.0,
        height=64,
        width=96,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images


@pytest.mark.parametrize("transformer", ["eager", "native"])
def test_an_accelerated_pipeline_makes_the_same_picture(pipeline: Any, transformer: Any, tmp_path: Path) -> None:
    want = generate(pipeline)
    config = tmp_path / "vae.json"
    config.write_text(json.dumps({"vae_type": "native"}))
    ledger = Ledger()
    undo = accelerate(pipeline, config, transformer, ledger=ledger)
    got = generate(pipeline)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert ledger.entries["vae_decoder"].used == "native"
    assert ("transformer" in ledger.entries) is (transformer == "native")
    again = accelerate(pipeline, {"vae_type": "native"}, transformer)
    again()
    assert torch.equal(generate(pipeline), got), "the first is still there"
    undo()
    undo()  # as in a notebook
    for part in (pipeline.vae, pipeline.transformer):
        assert not {"encode", "decode", "forward"} & set(vars(part))
    assert torch.equal(generate(pipeline), want) and want.std() > 0.05


def test_a_misspelt_transformer_is_refused(pipeline: Any) -> None:
    with pytest.raises(ConfigError, match=r"transformer: expected one of eager, .*, got 'nativ': did you mean native"):
        accelerate(pipeline, None, "nativ")  # type: ignore[arg-type]


def test_the_guides_config_without_engines_says_so(pipeline: Any, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    content = {"vae_type": "tensorrt", "trt_vae_config": {"trt_engine_path": str(path), "multi_profile": True}}
    undo = accelerate(pipeline, content)
    try:
        with pytest.raises(ConfigError, match=r"build it: vla-accel build-vae --vae MODEL --output-dir .* \(without"):
            generate(pipeline)
    finally:
        undo()


def test_twenty_billion_weights_are_not_loaded_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_accel.cli.bench_qwen.random_qwen_image", lambda **_: pytest.fail("loaded"))
    assert cli.main(["bench-qwen", "--device", "cpu"]) == 1
    assert "device: expected a GPU for Qwen-Image's 20 billion weights, --layers N or" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "layers"), [("--tiny", 2), ("--tiny --layers 5", 5), ("--layers 7", 7)])
def test_a_tiny_transformer_is_shallow(words: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sixty, torch.compile took minutes on a CPU."""

    class Asked(Exception):
        pass

    def made(**options: Any) -> Any:
        raise Asked(options["layers"])

    monkeypatch.setattr("vla_accel.cli.bench_qwen.random_qwen_image", made)
    with pytest.raises(Asked, match=f"^{layers}$"):
        cli.main(["bench-qwen", "--device", "cpu", *words.split()])


def test_bench_qwen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench-qwen --tiny --layers 1 --size 64 --steps 2 --dtype fp32 --rounds 1 --transformer native"
    assert cli.main([*words.split(), "--output", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out.strip().splitlines()[-1])
    assert json.loads((tmp_path / "a.json").read_text()) == report
    names = ["baseline", "VAE only", "transformer only (native)", "both (native)"]
    assert said.err.startswith("making Qwen-Image with 1 layers\n")
    told = [line.partition(" took")[0] for line in said.err.splitlines() if "first call" in line]
    assert told == [f"Qwen-Image, {name}: {what}" for name in names for what in ("first call", "the first call")]
    assert [r["system"] for r in report["results"]] == names and report["layers"] == 1
    assert all(r["parity"]["cosine"] > 0.9999 for r in report["results"])
    lines = qwen_images(report).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == [f"| {n}" for n in names]
    assert lines[-1].startswith("64², 2 steps, 1 transformer layers, FP32")


@pytest.mark.parametrize("vae", ["tiny-qwen-vae", "tiny-sd-vae"])
def test_bench_vae(vae: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "both.png"
    words = f"bench-vae --vae {vae} --sizes 64x64,96x64 --systems eager,native --dtype fp32 --rounds 2"
    assert cli.main([*words.split(), "--picture", str(picture), "--output", str(tmp_path / "a.json")]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out.strip().splitlines()[-1])
    assert shown.err.startswith(
        f"loading {vae}\n64x64: the systems, and the reference, eager in float32\n64x64 encoder, "
    )
    assert report["passed"] and len(report["results"]) == 8
    assert {(r["size"], r["side"], r["system"]) for r in report["results"]} == {
        (size, side, system)
        for size in ("64x64", "96x64")
        for side in ("encoder", "decoder")
        for system in ("eager", "native")
    }
    assert all(r["parity"]["cosine"] > 0.9999 and r["calls"] == 2 for r in report["results"])
    assert load_image(picture).shape == (1, 3, 64 + 14, 4 * 64)
    shown = read_parameters(picture)
    assert shown["panels"] == ["source", "eager fp32", "native fp32", "difference x 8"] and shown["random_weights"]
    assert report["picture"]["parity"]["cosine"] > 0.9999 and report["picture"]["size"] == "64x64"


def test_bench_vae_names_its_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench-vae", "--vae", "tiny-sd-vae", "--systems", "eager,tensorrt_rtx", "--sizes", "64x64"]) == 1
    said = "engine-path: expected --engine-path FOLDER for tensorrt_rtx, got none"
    assert capsys.readouterr().err.strip().endswith(said)


def test_bench_vae_fails_on_disagreement(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_accel.images.vae import AcceleratedVae

    real = AcceleratedVae.decode
    monkeypatch.setattr(AcceleratedVae, "decode", lambda self, z: real(self, z) + 0.1)
    words = "bench-vae --vae tiny-qwen-vae --sizes 64x64 --systems eager,native --dtype fp32 --rounds 1"
    assert cli.main(words.split()) == 1
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [r["passed"] for r in report["results"]] == [True, True, True, False]
    assert autoencoders(report).splitlines()[3].startswith("| 64x64 | native | ")


def test_a_system_that_fails_is_reported_and_the_others_are_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_accel.images.vae import AcceleratedVae

    def broken(self: Any, latents: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(AcceleratedVae, "decode", broken)
    words = "bench-vae --vae tiny-qwen-vae --sizes 64x64 --systems eager,native --dtype fp32 --rounds 1"
    assert cli.main(words.split()) == 1
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["errors"] == {"native decoder 64x64": "RuntimeError: no such kernel"}
    assert [(r["side"], r["system"]) for r in report["results"]] == [
        ("encoder", "eager"),
        ("encoder", "native"),
        ("decoder", "eager"),
    ]
    assert autoencoder_sizes(report).splitlines()[2].endswith(", 1.0× | - | 1.000000 |")
    # No sum of one side.
    assert autoencoders(report).splitlines()[3].endswith(" | - | - | - | 1.000000 | - |")


# -- measuring ----------------------------------------------------------------------------------------------------


def test_parity_of_known_differences() -> None:
    a = torch.tensor([0.0, 1.0, 2.0, 1.0])
    same = parity(a, a)
    assert same.mse == 0 and same.as_dict()["psnr_db"] == 999.0 and same.passes(1e-9, 0.999999)
    off = parity(a + torch.tensor([0.0, 0.0, 0.0, 0.2]), a)
    assert off.mse == pytest.approx(0.01) and off.max_error == pytest.approx(0.2)
    # Range 2, root mean square error 0.1: 20 log10(20).
    assert off.psnr_db == pytest.approx(26.0206, abs=1e-3)
    assert off.cosine == pytest.approx(0.99741, abs=1e-4) and not off.passes(0.001, 0.9)
    bad = parity(torch.tensor([torch.nan, 1.0, 2.0, 1.0]), a)
    assert not bad.passes(1e9, -1.0) and set(bad.as_dict().values()) == {None}
    assert isinstance(bad, Parity)


def test_systems_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    systems = {n: lambda n=n: order.append(n) for n in "abc"}
    heard: list[str] = []
    timings = in_turns(systems, rounds=3, device=CPU, warm_up=1, progress=heard.append)
    begun = [f"warming up: {name}" for name in "abc"]
    assert heard == [*begun, "9/9 calls"]
    heard.clear()
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    in_turns(dict.fromkeys("abc", lambda: None), rounds=3, device=CPU, warm_up=1, progress=heard.append)
    assert heard == [*begun, *(f"{done}/9 calls" for done in range(1, 10))], "where each takes longer"
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(t.calls == 3 and t.min_ms <= t.p50_ms for t in timings.values())
    assert peak_memory(CPU, lambda: order.append("x")) is None and "x" not in order, "a call takes minutes there"
