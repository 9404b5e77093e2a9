"""BF16 and FP16 mode: what is converted, what stays, ranges, costs, and the command."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.tables.images import precisions
from tests.support.agreement import RATIO
from vla_accel import cli
from vla_accel.cli import precision
from vla_accel.cli.image_options import Precision
from vla_accel.errors import ConfigError
from vla_accel.images.measure import parity
from vla_accel.measure.reduced_precision import (
    ModuleRange,
    cost,
    dtype_counts,
    inference,
    overflowing,
    ranges,
    reduce_precision,
)

CPU = torch.device("cpu")


class Net(nn.Module):
    """A convolution, a list of layers, and one that is too large for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.loud = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            self.loud.weight.copy_(1e5 * torch.eye(4))
            self.loud.bias.zero_()
            self.last.weight.mul_(1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).mean((2, 3)) + 1
        for layer in self.layers:
            x = layer(x)
        return self.last(self.loud(x))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def example(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_everything_is_converted_but_what_is_kept(net: Net) -> None:
    want = net(example())
    kept = reduce_precision(net, "fp16", ("loud", "layers*"))
    assert kept == ["loud", "layers.0", "layers.1"]
    assert {n for n, p in net.named_parameters() if p.dtype == torch.float32} == {
        f"{k}.{w}" for k in kept for w in ("weight", "bias")
    }
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert dtype_counts(net) == {"float16": 3 * 4 * 9 + 4 + 10, "float32": 60}
    with inference():
        got = net(example(torch.float16))
    # 1e5 times anything leaves float16 on the way out of the kept module: its own output is narrowed.
    assert got.dtype == torch.float16 and want.shape == got.shape


def test_kept_modules_rescue_a_sum_that_float16_cannot_hold() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with torch.no_grad():
        for layer, scale in ((net[0], 1.0), (net[1][0], 1e6), (net[1][1], 1e-6)):  # type: ignore[index]
            layer.weight.copy_(scale * torch.eye(8))  # pyright: ignore[reportCallIssue]
            layer.bias.zero_()  # pyright: ignore[reportCallIssue]
    net.requires_grad_(False)
    x = torch.ones(1, 8)
    lost = reduce_precision(net, "fp16", ("1",))
    assert lost == ["1"]
    torch.testing.assert_close(net(x.half()), x.half())
    net[1].to(torch.float16)
    assert not torch.isfinite(nn.Sequential(*net[1])(x.half())).all()  # type: ignore[misc]


def test_a_pattern_that_names_nothing_is_an_error(net: Net) -> None:
    with pytest.raises(ConfigError, match=r"keep_fp32: no module is named 'decoder\.\*'; the first are conv, layers"):
        reduce_precision(net, "bf16", ("decoder.*",))


def test_ranges_find_what_overflows(net: Net) -> None:
    found = {r.name: r for r in ranges(net, lambda: net(example()))}
    assert list(found) == ["conv", "layers.0", "layers.1", "loud", "last"]
    assert found["loud"].largest > 65504 and found["conv"].largest < 100 and found["loud"].weights == "float32"
    assert overflowing(list(found.values()), torch.float16) == ["loud"]
    assert overflowing(list(found.values()), torch.bfloat16) == []
    # No hook stays behind.
    assert not any(m._forward_hooks for m in net.modules())
    narrow = reduce_precision(net, "fp16")
    seen = {r.name: r for r in ranges(net, lambda: net(example(torch.float16)))}
    assert narrow == [] and seen["loud"].non_finite > 0 and seen["loud"].state(torch.float16) == "overflow"


@pytest.mark.parametrize(
    ("largest", "bad", "state"),
    [(1.0, 0, "ok"), (40000.0, 0, "close"), (7e4, 0, "overflow"), (1.0, 2, "overflow"), (float("nan"), 0, "overflow")],
)
def test_states(largest: float, bad: int, state: str) -> None:
    assert ModuleRange("m", "Linear", "-", "float32", largest, bad).state(torch.float16) == state


def test_cost_halves_the_weights(net: Net) -> None:
    before = cost(net, lambda: net(example()), CPU, calls=3)
    reduce_precision(net, "bf16")
    after = cost(net, lambda: net(example(torch.bfloat16)), CPU, calls=3)
    assert after.weights_mib == before.weights_mib / 2 and before.latency_ms > 0 and before.peak_mib is None


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny-qwen-vae", "tiny-sd-vae", "tiny-sd-unet", "tiny-qwen-text-encoder"])
def test_the_command_reports(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", 0.0)
    torch.manual_seed(0)
    name, number = ("tokens", 8) if model == "tiny-qwen-text-encoder" else ("size", 64)
    assert cli.main(["precision", model, f"--{name}", str(number), "--calls", "1"]) == 0
    shown = capsys.readouterr()
    calls = ("timed calls: 1", *(f"{done} %" for done in (20, 40, 60, 80, 100)))
    said = [f"{model} in {dtype}{',' if 'calls' in told else ':'} {told}" for dtype in ("float32", "bf16")
            for told in calls]  # fmt: skip
    lines = [line for line in shown.err.splitlines() if not line.endswith(" so far")]
    told = [line for line in lines if line.startswith((f"loading {model}", f"{model} in "))]
    assert told == [f"loading {model}", *said], "at full size it takes minutes"
    report: dict[str, Any] = json.loads(shown.out.strip().splitlines()[-1])
    assert f"{report['speedup']:.2f}x as fast" in shown.out + shown.err, "it may be slower"
    assert report["weights_ratio"] == pytest.approx(0.5, abs=0.02) and list(report["parameters"]) == ["bfloat16"]
    assert report["overflow"] == [] and report["kept_fp32"] == []
    costs = report["before"], report["after"]
    assert [c["peak_mib"] for c in costs] == [None, None] and report["peak_ratio"] is None, "only a GPU tells"
    assert precision._cells(costs[0])[1] == "-" and precision._cells({**costs[0], "peak_mib": 2.4})[1] == "2"
    # As far from float32 as the model that is simply cast.
    torch.manual_seed(0)
    sized = Precision(model=model, tokens=number) if name == "tokens" else Precision(model=model, size=number)
    wide, call = precision._model(sized, CPU)
    with torch.inference_mode():
        exact = call(wide, torch.float32)()
        plain = call(copy.deepcopy(wide).bfloat16(), torch.bfloat16)()
    cast = parity(plain, exact)
    assert cast.mse > 0 and cast.mse / RATIO**2 < report["parity"]["mse"] < cast.mse * RATIO**2
    line = precisions([report]).splitlines()[2]
    assert line.startswith(f"| {model} | BF16 | ") and " | - | - | " in line and line.endswith(" | 0 | none |")


def test_the_command_fails_on_overflow_and_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")
    load = precision.load_model

    def loud(*args: Any, **keywords: Any) -> Any:
        model = load(*args, **keywords)
        model.decoder.mid_block.resnets[0].conv1.weight.data.mul_(1e6)
        return model

    monkeypatch.setattr(precision, "load_model", loud)
    words = ["precision", "tiny-sd-vae", "--dtype", "fp16", "--size", "64", "--calls", "1"]
    name = "decoder.mid_block.resnets.0.conv1"
    assert cli.main(words) == 1
    captured = capsys.readouterr().out
    report = json.loads(captured.strip().splitlines()[-1])
    assert name in report["overflow"] and report["parity"]["cosine"] is None
    assert cli.main([*words, "--keep-fp32", "decoder.*.none"]) == 1
    assert "timed calls" not in capsys.readouterr().err, "it is said before the first run"
    assert cli.main([*words, "--keep-fp32", "decoder.mid_block.resnets.0"]) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert report["kept_fp32"] == ["decoder.mid_block.resnets.0"]
    # In BF16, which is eight times coarser, nothing overflows.
    words[words.index("fp16")] = "bf16"
    assert cli.main(words) == 0
    coarse = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert 0 < report["parity"]["mse"] < coarse["parity"]["mse"] / RATIO**2
