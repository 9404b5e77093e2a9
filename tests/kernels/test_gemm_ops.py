"""The ops that Hopper's GEMM serves, on the CPU: gates by eights, norms inside the products, and whose product is
taken."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.test_gemm import BF16, FP8, TILINGS
from tests.support.gpus import H200, RTX_4090
from tests.support.runtimes import pinned, steered
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.gemm import choice as gemm_choice
from vla_accel.kernels.gemm import hopper as gemm
from vla_accel.kernels.gemm import linear, norms
from vla_accel.kernels.gemm.hopper import Tiling
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair
from vla_accel.kernels.gpu import Gpu


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fp8", [False, True])
def test_gate_and_up_by_eights_are_the_same_product(fp8: bool) -> None:
    x, weight, bias = draw(5, 32), draw(48, 32, seed=1), draw(48, seed=2)
    whole = make_linear(weight, bias, torch.float32, 4.0 if fp8 else None)
    paired = pair(whole)
    assert paired.paired and paired.weight.shape == whole.weight.shape and paired.bytes == whole.bytes
    # Gate's first eight rows, up's first eight, gate's next eight …
    bits = (lambda t: t.view(torch.uint8)) if fp8 else (lambda t: t)
    assert torch.equal(bits(paired.weight)[:8], bits(whole.weight)[:8])
    assert torch.equal(bits(paired.weight)[8:16], bits(whole.weight)[24:32])
    assert torch.equal(bits(paired.weight)[40:48], bits(whole.weight)[40:48])
    x = x.to(FP8) if fp8 else x
    scale = whole.input_scale_value * whole.weight_scale_value
    gate, up = F.linear(x.float() * scale, whole.weight.float(), bias).chunk(2, 1)
    want = F.gelu(gate, approximate="tanh") * up
    for layer in (whole, paired):
        got, scratch = torch.empty(5, 24), torch.empty(5, 48)
        linear.gate_up(x, layer, scratch, got, inverse_scale=None)
        torch.testing.assert_close(got, want)
        narrow = torch.empty(5, 24).to(FP8)
        linear.gate_up(x, layer, scratch, narrow, inverse_scale=10.0)
        assert torch.equal(narrow.float(), (got * 10).clamp(-448, 448).to(FP8).float())


def test_halves_that_are_no_eights_stay_as_they_are() -> None:
    layer = make_linear(draw(24, 8), None, torch.float32)
    assert pair(layer) is layer


def test_linear_gelu_is_linear_and_gelu() -> None:
    x, layer = draw(3, 16), make_linear(draw(32, 16, seed=1), draw(32, seed=2), torch.float32)
    want = F.gelu(F.linear(x, layer.weight, layer.bias), approximate="tanh")
    out = torch.empty(3, 32)
    linear.linear_gelu(x, layer, out, out, inverse_scale=None)
    torch.testing.assert_close(out, want)
    wide, narrow = out.clone(), torch.empty(3, 32).to(FP8)
    linear.linear_gelu(x, layer, out, narrow, inverse_scale=30.0)
    assert torch.equal(narrow.float(), (wide * 30).clamp(-448, 448).to(FP8).float())


def test_an_own_gemm_gets_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    monkeypatch.setattr(gemm, "planned", lambda *_: TILINGS[0])
    monkeypatch.setattr(gemm, "why_not", lambda *_: None)
    monkeypatch.setattr(gemm, "gemm", lambda x, weight, bias, out, **options: seen.append({"bias": bias, **options}))
    layer = Linear(torch.zeros(32, 16).to(FP8), torch.ones(32), torch.tensor(0.5), torch.tensor(0.25), 0.5, 0.25)
    x, out = torch.zeros(2, 16).to(FP8), torch.zeros(2, 32)
    assert linear.launched_own_gemm(x, layer, out, Activation.GELU, 3.0)
    assert seen == [
        {
            "bias": layer.bias,
            "gpu": H200,
            "tiling": TILINGS[0],
            "activation": Activation.GELU,
            "scale": 0.125,
            "inverse_scale": 3.0,
        }
    ]
    # A GeGLU's product has no bias.
    assert not linear.launched_own_gemm(x, pair(layer), out[:, :16], Activation.GEGLU, None) and len(seen) == 1


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_norms_inside_the_products_are_the_norms(offset: float) -> None:
    """A residual of great mean, too: what is normed varies by one part in hundreds."""
    rows, width, hidden = 7, 192, 40
    x, a = draw(rows, width) + offset, draw(rows, 32, seed=1)
    first = make_linear(draw(width, 32, seed=2), draw(width, seed=3), torch.float32)
    second = norms.with_sums(make_linear(draw(hidden, width, seed=4), draw(hidden, seed=5), torch.float32))
    moments = torch.full((3, rows, 2), float("nan"))
    residual = x.clone()
    norms.residual_linear(a, first, residual, moments)
    want = x + F.linear(a, first.weight, first.bias)
    torch.testing.assert_close(residual, want)
    parts = want.view(rows, 3, 64)
    torch.testing.assert_close(moments[..., 0].T, parts.mean(2))
    torch.testing.assert_close(moments[..., 1].T, parts.var(2, unbiased=False) * 64)
    out = torch.empty(rows, hidden)
    for layer_norm, gelu in itertools.product((False, True), repeat=2):
        norms.normed_linear(
            want,
            moments,
            second,
            out,
            layer_norm=layer_norm,
            eps=1e-6,
            activation=Activation.GELU if gelu else Activation.NONE,
        )
        normed = F.layer_norm(want, (width,), eps=1e-6) if layer_norm else F.rms_norm(want, (width,), eps=1e-6)
        expected = F.linear(
            normed.double(), second.weight.double(), second.bias.double() if second.bias is not None else None
        )
        expected = F.gelu(expected, approximate="tanh") if gelu else expected
        torch.testing.assert_close(out.double(), expected, atol=2e-3 if offset else 2e-5, rtol=1e-4)


def test_normed_rows_have_moments_that_change_nothing() -> None:
    x, layer = (
        F.layer_norm(draw(5, 128), (128,)),
        norms.with_sums(make_linear(draw(16, 128, seed=1), None, torch.float32)),
    )
    moments, out = norms.moments_buffer(5, 128, x.device, 1e-3), torch.empty(5, 16)
    for layer_norm in (False, True):
        norms.normed_linear(x, moments, layer, out, layer_norm=layer_norm, eps=1e-3)
        torch.testing.assert_close(out, F.linear(x, layer.weight))


def test_norms_are_folded_where_every_product_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [(make_linear(torch.zeros(n, 64), None, BF16), Activation.NONE) for n in (64, 128)]
    assert not norms.can_be_inside(8, 64, *products)
    for known in ((64,), (64, 128)):
        monkeypatch.setattr(gemm, "planned", lambda *sizes, known=known: TILINGS[0] if sizes[4] in known else None)
        with steered("cuda"):
            assert norms.can_be_inside(8, 64, *products) == (len(known) == 2)


@pytest.mark.parametrize("activation", [Activation.GEGLU, Activation.SWIGLU])
def test_a_norm_inside_gate_and_up_is_the_norm(activation: Activation) -> None:
    rows, width, hidden = 7, 128, 24
    x, a = draw(rows, width), draw(rows, 32, seed=1)
    residual, moments = x.clone(), torch.empty(2, rows, 2)
    norms.residual_linear(a, make_linear(draw(width, 32, seed=2), None, torch.float32), residual, moments)
    layer = make_linear(draw(2 * hidden, width, seed=3), None, torch.float32)
    normed = F.rms_norm(residual, (width,), eps=1e-6)
    want, got = torch.empty(rows, hidden), torch.empty(rows, hidden)
    linear.gate_up(normed, layer, torch.empty(rows, 2 * hidden), want, inverse_scale=None, activation=activation)
    norms.normed_gate_up(residual, moments, pair(layer), got, eps=1e-6, activation=activation)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_gate_and_up_that_are_not_paired_or_quantised_take_no_norm_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "planned", lambda *_: TILINGS[0])
    plain = make_linear(draw(64, 64), None, BF16)
    quantised = pair(make_linear(draw(64, 64), None, BF16, 4.0))
    with steered("cuda"):
        assert norms.can_be_inside(8, 64, (pair(plain), Activation.SWIGLU))
        assert not norms.can_be_inside(8, 64, (plain, Activation.SWIGLU))
        assert not norms.can_be_inside(8, 64, (quantised, Activation.SWIGLU))
        assert not norms.can_be_inside(8, 80, (pair(plain), Activation.SWIGLU)), "moments are of 64 columns"
        persistent = Tiling(2, 1, 2, 136, 3, persistent=True)
        monkeypatch.setattr(gemm, "planned", lambda *_: persistent)
        assert linear.has_own_gemm(8, pair(plain), Activation.SWIGLU)
        assert not norms.can_be_inside(8, 64, (pair(plain), Activation.SWIGLU)), "a block has the norms of one tile"


def test_own_or_library_is_measured_once_while_a_program_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    way = 1

    def remembered(what: str, ways: dict[str, Any], device: object, repeats: int) -> Fastest:
        asked.append([what, *ways])
        return Fastest(list(ways)[way])

    monkeypatch.setattr(gemm_choice, "remembered", remembered)
    monkeypatch.setattr(gemm_choice, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Gpu, "of", lambda _: H200)

    def measured(rows: int) -> Tiling | None:
        return gemm_choice.measured(
            torch.device("cpu"), BF16, Activation.NONE, rows, 2048, 2048, lambda _: lambda _: None
        )

    size = (torch.device("cpu"), BF16, Activation.NONE, 576, 2048, 2048)
    assert gemm_choice.known(*size) is None and not asked, "a call measures nothing"
    found = measured(576)
    assert found is gemm_choice.known(*size) and found == gemm.searched(H200, *size[1:])[0]
    assert asked[0][:2] == ["GEMM torch.bfloat16 none 576x2048x2048", "library"] and len(asked[0]) > 2
    assert measured(576) is found and len(asked) == 1
    way = 0
    assert measured(584) is None and len(asked) == 2
    assert measured(584) is None and len(asked) == 2, "the library is an answer, too"
    with pinned():
        assert measured(576) is gemm_choice.known(*size) is None and len(asked) == 2, "only the table counts"
        assert measured(592) is None and measured(544) is not None and len(asked) == 2
        assert gemm_choice.why_library(*size) == "no tiling of it is known for this size"
    assert measured(576) is found
    # A graph is not disturbed.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured(600) is None and len(asked) == 2


def test_the_table_s_tiling_is_measured_against_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone; inside a chain, where the library cannot take its place, and before it was measured it is believed."""
    way, asked = 0, list[list[str]]()

    def remembered(what: str, ways: dict[str, Any], device: object, repeats: int) -> Fastest:
        asked.append(list(ways))
        return Fastest(list(ways)[way])

    monkeypatch.setattr(gemm_choice, "remembered", remembered)
    monkeypatch.setattr(gemm_choice, "_KNOWN", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    cpu = torch.device("cpu")

    def measured(rows: int, *, inside: bool = False) -> Tiling | None:
        trial: Any = lambda _: lambda _: None  # noqa: E731
        return gemm_choice.measured(cpu, BF16, Activation.NONE, rows, 2048, 2048, trial, inside=inside)

    table = gemm.planned(H200, BF16, Activation.NONE, 544, 2048, 2048)
    assert table is not None
    assert gemm_choice.known(cpu, BF16, Activation.NONE, 544, 2048, 2048) == table, "before anybody asked"
    assert measured(544, inside=True) == table and not asked
    assert measured(544) is None and asked == [["library", str(table)]]
    assert gemm_choice.known(cpu, BF16, Activation.NONE, 544, 2048, 2048) is None
    assert gemm_choice.known(cpu, BF16, Activation.NONE, 544, 2048, 2048, inside=True) == table
    assert gemm_choice.why_library(cpu, BF16, Activation.NONE, 544, 2048, 2048) == "it was measured to be slower"
    way = 1
    assert measured(520) == gemm.planned(H200, BF16, Activation.NONE, 520, 2048, 2048) is not None and len(asked) == 2
    assert measured(520) is not None and len(asked) == 2


def test_a_product_that_takes_a_norm_in_is_launched_by_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the plain one was measured to be slower than the library's: then the library runs that."""
    launched: list[str] = []
    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    monkeypatch.setattr(gemm, "planned", lambda *_: TILINGS[0])
    monkeypatch.setattr(gemm, "why_not", lambda *_: None)
    monkeypatch.setattr(gemm, "gemm", lambda *_, **options: launched.extend(options.keys() & {"norm", "moments"}))
    layer = make_linear(torch.zeros(64, 64), None, BF16)
    x, out = torch.zeros(8, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    key = (x.device, H200, BF16, Activation.NONE, 8, 64, 64)
    monkeypatch.setattr(gemm_choice, "_KNOWN", {key: None})
    with steered("cuda"):
        assert not linear.launched_own_gemm(x, layer, out, Activation.NONE, None)
        moments = torch.zeros(1, 8, 2)
        norms.normed_linear(x, moments, layer, out, layer_norm=False, eps=1e-6)
        norms.residual_linear(x, layer, out, moments)
        assert launched == ["norm", "moments"]
        assert not linear.has_own_gemm(8, layer, Activation.NONE) and linear.has_own_gemm(
            8, layer, Activation.NONE, inside=True
        )
        said = ", products by cuBLAS (CUDA C++ out: it was measured to be slower): a; in CUDA C++: b"
        assert linear.products_by(8, {"a": (layer, Activation.NONE), "b": (layer, Activation.NONE)}, {"b"})[0] == said


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.GELU, Activation.GEGLU, Activation.SWIGLU])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_measured_is_the_product_with_its_activation(
    activation: Activation, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library and by a tiling, with the output that the program has."""
    seen: list[Tensor] = []
    monkeypatch.setattr(gemm, "gemm", lambda x, weight, bias, out, **_: seen.append(out))
    monkeypatch.setattr(linear, "library_product", linear.linear)
    layer = make_linear(draw(64, 32), None if activation.gated else draw(64), BF16, 4.0 if fp8 else None)
    call = linear._trial(layer, activation, 6, H200)
    call(TILINGS[0])
    (out,) = seen
    call(None)
    assert out.shape == (6, 32 if activation.gated else 64)
    assert out.dtype == (FP8 if fp8 and activation is not Activation.NONE else BF16)
    x = draw(6, 32).to(layer.weight.dtype).float() * layer.input_scale_value
    y = x @ (layer.weight.float() * layer.weight_scale_value).T + (0 if layer.bias is None else layer.bias.float())
    if activation is Activation.GELU:
        y = F.gelu(y, approximate="tanh")
    elif activation.gated:
        gate = y[:, :32]
        y = (F.silu(gate) if activation is Activation.SWIGLU else F.gelu(gate, approximate="tanh")) * y[:, 32:]
    assert float((out.float() - y).abs().max() / y.abs().max()) < (0.07 if out.dtype == FP8 else 0.02)


def test_the_ledger_names_whose_products_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_linear(torch.zeros(128, 64), None, BF16)
    products = {"a": (layer, Activation.NONE), "b": (layer, Activation.GELU)}
    assert linear.products_by(8, products) == ("", False), "on a CPU nobody asks"
    monkeypatch.setattr(
        gemm, "planned", lambda device, kind, activation, *_: TILINGS[0] if activation is Activation.NONE else None
    )
    with steered("cuda"):
        said = ", products in CUDA C++: a; by cuBLAS (CUDA C++ out: there is no GPU): b"
        assert linear.products_by(8, products) == (said, True)
        said = ", products by cuBLAS (CUDA C++ out: there is no GPU): b"
        assert linear.products_by(8, {"b": products["b"]}) == (said, False), "dependent launches do not pay off"


def test_the_ledger_says_why_the_library_takes_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clause, and products of one reason together."""
    monkeypatch.setattr(gemm_choice, "_KNOWN", {})
    monkeypatch.setattr(gemm_choice, "remembered", lambda *_: Fastest("library"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(linear, "_trial", lambda *_: lambda _: None)
    large = make_linear(torch.empty(2048, 2048, device="meta"), None, BF16)
    odd = make_linear(torch.empty(2040, 2048, device="meta"), None, BF16)
    small = make_linear(torch.empty(128, 128, device="meta"), None, BF16)
    products = {
        "a": (large, Activation.NONE),
        "b": (odd, Activation.NONE),
        "c": (small, Activation.NONE),
        "d": (large, Activation.GEGLU),
        "e": (large, Activation.GELU),
    }

    def said(gpu: Gpu, rows: int) -> str:
        monkeypatch.setattr(Gpu, "of", lambda _: gpu)
        with steered("cuda", torch.device("meta")):
            return linear.products_by(rows, products)[0]

    assert said(H200, 600) == (
        ", products by cuBLAS (CUDA C++ out: it was measured to be slower): a, e; "
        "by cuBLAS (CUDA C++ out: it takes weights of whole 32 by 16, this is 2040 by 2048): b; "
        "by cuBLAS (CUDA C++ out: 600 by 128 by 128 is too small to gain by it): c; "
        "by cuBLAS (CUDA C++ out: the rows of gate and up do not alternate by eights): d"
    )
    assert "(CUDA C++ out: it is tried from 129 to 32768 rows, these are 8): a" in said(H200, 8)
    reason = f"it needs compute capability 9.0, {RTX_4090.name} has 8.9"
    assert said(RTX_4090, 600) == f", products by cuBLAS (CUDA C++ out: {reason}): a, b, c, d, e"
