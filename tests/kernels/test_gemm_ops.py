"""The op `gemm` on the CPU, and the choice between the Hopper GEMM and cuBLAS."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.test_gemm import BF16, FP8, GEGLU, GELU, NONE, SWIGLU, TILES
from tests.support.gpus import H200, RTX_4090
from tests.support.runtimes import pinned, steered
from vla_accel.errors import EngineError
from vla_accel.kernels import config as configs
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.autotune import Fastest
from vla_accel.kernels.gemm import choice, hopper, ops
from vla_accel.kernels.gemm.choice import has_hopper_gemm, is_inside, norm_trial, products_by, trial, tune
from vla_accel.kernels.gemm.config import Library, Pipelined, Skinny, known
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair, with_sums
from vla_accel.kernels.gpu import Gpu

META = torch.device("meta")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the op ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [Pipelined(16, 16, 32), Skinny(16, 1, 64, 16, 0)], ids=["pipelined", "skinny"])
def test_a_gated_product_without_a_norm_is_refused_in_triton(config: Any) -> None:
    kernel = pytest.importorskip(f"vla_accel.kernels.gemm.triton_{type(config).__name__.lower()}")
    x, weights, out = draw(4, 32), make_linear(draw(32, 32), None, torch.float32), torch.empty(4, 16)
    more = (None,) if isinstance(config, Pipelined) else ()
    with pytest.raises(EngineError, match="norm"):
        kernel.product(x, weights, out, Epilogue(activation=GEGLU), None, config, *more)


@pytest.mark.parametrize("fp8", [False, True])
def test_paired_gate_and_up_are_the_same_product(fp8: bool) -> None:
    x, weight, bias = draw(5, 32), draw(48, 32, seed=1), draw(48, seed=2)
    whole = make_linear(weight, bias, torch.float32, 4.0 if fp8 else None)
    paired = pair(whole)
    assert paired.paired and paired.weight.shape == whole.weight.shape and paired.bytes == whole.bytes
    # Gate's first eight rows, up's first eight, gate's next eight …
    bits = (lambda t: t.view(torch.uint8)) if fp8 else (lambda t: t)
    for at, from_ in ((0, 0), (8, 24), (40, 40)):
        assert torch.equal(bits(paired.weight)[at : at + 8], bits(whole.weight)[from_ : from_ + 8])
    x = x.to(FP8) if fp8 else x
    scale = whole.input_scale_value * whole.weight_scale_value
    gate, up = F.linear(x.float() * scale, whole.weight.float(), bias).chunk(2, 1)
    want, sums = F.gelu(gate, approximate="tanh") * up, torch.empty(5, 48)
    for weights in (whole, paired):
        got, narrow = torch.empty(5, 24), torch.empty(5, 24).to(FP8)
        gemm(x, weights, got, Epilogue(activation=GEGLU), workspace=(sums,))
        torch.testing.assert_close(got, want)
        gemm(x, weights, narrow, Epilogue(activation=GEGLU, quantize=10.0), workspace=(sums,))
        assert torch.equal(narrow.float(), (got * 10).clamp(-448, 448).to(FP8).float())


def test_halves_that_are_no_eights_stay_as_they_are() -> None:
    weights = make_linear(draw(24, 8), None, torch.float32)
    assert pair(weights) is weights


def test_gelu_follows_the_product_and_may_be_quantised() -> None:
    x, weights = draw(3, 16), make_linear(draw(32, 16, seed=1), draw(32, seed=2), torch.float32)
    want = F.gelu(F.linear(x, weights.weight, weights.bias), approximate="tanh")
    out, narrow = torch.empty(3, 32), torch.empty(3, 32).to(FP8)
    gemm(x, weights, out, Epilogue(activation=GELU))
    torch.testing.assert_close(out, want)
    gemm(x, weights, narrow, Epilogue(activation=GELU, quantize=30.0), workspace=(torch.empty(3, 32),))
    assert torch.equal(narrow.float(), (out * 30).clamp(-448, 448).to(FP8).float())


@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_norms_inside_the_products_are_the_norms(offset: float) -> None:
    """A residual with a large mean, too."""
    rows, width, hidden = 7, 192, 40
    x, a = draw(rows, width) + offset, draw(rows, 32, seed=1)
    first = make_linear(draw(width, 32, seed=2), draw(width, seed=3), torch.float32)
    second = with_sums(make_linear(draw(hidden, width, seed=4), draw(hidden, seed=5), torch.float32))
    moments, residual = Moments.like(x), x.clone()
    gemm(a, first, residual, Epilogue(residual=True, moments=moments))
    want = x + F.linear(a, first.weight, first.bias)
    torch.testing.assert_close(residual, want)
    torch.testing.assert_close(moments.sums.T, want.view(rows, 3, 64).sum(2))
    torch.testing.assert_close(moments.squares.T, want.view(rows, 3, 64).square().sum(2))
    out = torch.empty(rows, hidden)
    for layer_norm, activation in itertools.product((False, True), (NONE, GELU)):
        norm = Norm(1e-6, moments, sums=second.sums if layer_norm else None)
        gemm(want, second, out, Epilogue(activation=activation), norm)
        normed = F.layer_norm(want, (width,), eps=1e-6) if layer_norm else F.rms_norm(want, (width,), eps=1e-6)
        expected = F.linear(normed, second.weight, second.bias)
        expected = F.gelu(expected, approximate="tanh") if activation is GELU else expected
        torch.testing.assert_close(out, expected, atol=2e-3 if offset else 2e-5, rtol=1e-3 if offset else 1e-4)


def test_normed_rows_have_moments_that_change_nothing() -> None:
    x, weights = F.layer_norm(draw(5, 128), (128,)), with_sums(make_linear(draw(16, 128, seed=1), None, torch.float32))
    moments, out = Moments.of_normed(x, 1e-3), torch.empty(5, 16)
    for sums in (None, weights.sums):
        gemm(x, weights, out, norm=Norm(1e-3, moments, sums=sums))
        torch.testing.assert_close(out, F.linear(x, weights.weight))


@pytest.mark.parametrize("activation", [GEGLU, SWIGLU])
def test_a_norm_inside_gate_and_up_is_the_norm(activation: Activation) -> None:
    rows, width, hidden = 7, 128, 24
    x, weights = draw(rows, width), make_linear(draw(2 * hidden, width, seed=3), None, torch.float32)
    moments, first = Moments.like(x), make_linear(draw(width, 32, seed=2), None, torch.float32)
    gemm(draw(rows, 32, seed=1), first, x, Epilogue(residual=True, moments=moments))
    want, got = torch.empty(rows, hidden), torch.empty(rows, hidden)
    normed, sums = F.rms_norm(x, (width,), eps=1e-6), torch.empty(rows, 2 * hidden)
    gemm(normed, weights, want, Epilogue(activation=activation), workspace=(sums,))
    gemm(x, pair(weights), got, Epilogue(activation=activation), Norm(1e-6, moments))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# -- the choice --------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs on an H200 that launches nothing. Returns the launches of the Hopper GEMM."""
    launched: list[dict[str, Any]] = []

    def record(x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, norm: Norm | None, *rest: Any) -> None:
        launched.append({"weights": weights, "out": out, "epilogue": epilogue, "norm": norm, "tile": rest[0]})

    monkeypatch.setattr(Gpu, "of", lambda _: H200)
    monkeypatch.setattr(hopper, "why_not", lambda *_: None)
    monkeypatch.setattr(hopper, "gemm", record)
    monkeypatch.setattr(configs, "_MEASURED", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launched


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[list[str]]]:
    """A measurement whose fastest candidate is the one of the given index. Returns what was measured."""
    seen: list[list[str]] = []

    def choose(index: int) -> list[list[str]]:
        def remembered(what: str, ways: dict[str, Any], device: object, repeats: int) -> Fastest:
            seen.append([what, *ways])
            return Fastest(list(ways)[index])

        monkeypatch.setattr(configs, "remembered", remembered)
        return seen

    return choose


def plain(n: int = 2048, k: int = 2048, kind: torch.dtype = BF16) -> Linear:
    return Linear(torch.empty(n, k, dtype=kind, device="meta"))


def measured(rows: int, weights: Linear | None = None, *, inside: bool = False) -> HopperTile | None:
    weights = weights or plain()
    tune(weights, NONE, rows, inside=inside)
    return known(weights.weight.device, BF16, NONE, rows, *weights.weight.shape, inside=inside)


def test_the_hopper_gemm_gets_the_epilogue(on_h200: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "planned", lambda *_: TILES[0])
    weights = Linear(torch.zeros(32, 16).to(FP8), torch.ones(32), torch.tensor(0.5), torch.tensor(0.25), 0.5, 0.25)
    x, out = torch.zeros(2, 16).to(FP8), torch.zeros(2, 32).to(FP8)
    epilogue = Epilogue(activation=GELU, quantize=3.0)
    with steered("cuda"):
        gemm(x, weights, out, epilogue)
    assert [(call["weights"], call["epilogue"], call["tile"]) for call in on_h200] == [(weights, epilogue, TILES[0])]


def test_norms_go_inside_where_every_product_is_the_hopper_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [(make_linear(torch.zeros(n, 64), None, BF16), NONE) for n in (64, 128)]
    assert not is_inside(8, *products)
    for sizes in ((64,), (64, 128)):
        monkeypatch.setattr(hopper, "planned", lambda *s, sizes=sizes: TILES[0] if s[4] in sizes else None)
        with steered("cuda"):
            assert is_inside(8, *products) == (len(sizes) == 2)


def test_unpaired_or_quantised_gates_take_no_norm_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "planned", lambda *_: TILES[0])
    whole, quantised = make_linear(draw(64, 64), None, BF16), pair(make_linear(draw(64, 64), None, BF16, 4.0))
    out, odd = (whole, NONE), (make_linear(draw(80, 64), None, BF16), NONE)
    with steered("cuda"):
        assert is_inside(8, out, (pair(whole), SWIGLU))
        assert not is_inside(8, out, (whole, SWIGLU))
        assert not is_inside(8, out, (quantised, SWIGLU))
        assert not is_inside(8, odd, (pair(whole), SWIGLU)), "moments are of 64 columns"
        monkeypatch.setattr(hopper, "planned", lambda *_: HopperTile(2, 1, 2, 136, 3, persistent=True))
        assert has_hopper_gemm(8, pair(whole), SWIGLU)
        assert not is_inside(8, out, (pair(whole), SWIGLU)), "a block has the norms of one tile"


def test_a_norm_without_configs_of_a_table_is_inside_where_that_is_faster(
    on_h200: list[Any], asked: Callable[[int], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "trial", lambda *_: lambda _: None)
    monkeypatch.setattr(choice, "norm_trial", lambda *_: lambda _: None)
    products = [(plain(), NONE), (plain(2560), NONE)]
    with steered("cuda", META):
        for index, rows in enumerate((600, 608)):
            seen = asked(index)
            assert is_inside(rows, *products) == (index == 0)
            assert seen[-1][1:] == ["inside", "apart"] and "cuBLAS" not in seen[-5][1:], "both can, the norm is extra"
        count = len(seen)
        assert is_inside(544, *products) and len(seen) == count, "the table's were timed in chains"


@pytest.mark.parametrize(("activation", "layer"), [(NONE, False), (NONE, True), (GELU, True), (GEGLU, False)])
def test_a_norm_is_measured_with_what_surrounds_it(activation: Activation, layer: bool) -> None:
    """Inside and apart compute the same."""
    first, second = (make_linear(draw(n, 64), draw(n), BF16) for n in (64, 128))
    second = with_sums(second) if layer else second
    second = pair(make_linear(draw(128, 64), None, BF16)) if activation.gated else second
    found = [norm_trial(6, (first, NONE), (second, activation))(way).float() for way in ("inside", "apart")]
    assert float((found[0] - found[1]).abs().max()) < 0.02 * float(found[0].abs().max()) > 0


def test_a_product_is_measured_once_while_a_program_is_built(
    on_h200: list[Any], asked: Callable[[int], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, meta = asked(1), META
    monkeypatch.setattr(choice, "trial", lambda *_: lambda _: None)
    assert known(meta, BF16, NONE, 576, 2048, 2048) is None and not seen, "a call measures nothing"
    found = measured(576)
    assert found is known(meta, BF16, NONE, 576, 2048, 2048)
    assert found == hopper.searched(H200, BF16, NONE, 576, 2048, 2048)[0]
    assert seen[0][:2] == ["GEMM torch.bfloat16 none 576x2048x2048", "cuBLAS"] and len(seen[0]) > 2
    assert measured(576) is found and len(seen) == 1
    asked(0)
    assert measured(584) is measured(584) is None and len(seen) == 2, "cuBLAS is an answer, too"
    with pinned(META):
        assert measured(576) is None and measured(592) is None and measured(544) is not None, "only the table counts"
    assert len(seen) == 2 and measured(576) is found
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert measured(600) is None and len(seen) == 2, "a graph is not disturbed"


def test_the_table_decides_inside_a_chain_and_is_measured_elsewhere(
    on_h200: list[Any], asked: Callable[[int], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = asked(0)
    monkeypatch.setattr(choice, "trial", lambda *_: lambda _: None)
    table = hopper.planned(H200, BF16, NONE, 544, 2048, 2048)
    assert table is not None and measured(544, inside=True) == table and not seen
    assert measured(544) is None and seen == [["GEMM torch.bfloat16 none 544x2048x2048", "cuBLAS", str(table)]]
    assert measured(544, inside=True) == table
    with steered("cuda", META):
        products = {"a": (plain(), NONE), "b": (plain(), NONE)}
        said = ", products by cuBLAS (CUDA C++ out: it was measured to be slower): a; in CUDA C++: b"
        assert products_by(544, products, {"b"}) == (said, True)
        # The launches follow the choice.
        x, out = (torch.zeros(544, 2048, dtype=BF16, device="meta") for _ in range(2))
        library: list[Tensor] = []
        monkeypatch.setattr(ops, "_reference_product", lambda *arguments: library.append(arguments[2]))
        gemm(x, plain(), out)
        gemm(x, plain(), out, norm=Norm(1e-6, Moments.like(x)))
        gemm(x, plain(), out, Epilogue(residual=True, moments=Moments.like(out)))
    assert len(library) == 1 and [call["norm"] is not None for call in on_h200] == [True, False]


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("kind", [torch.float32, BF16])
def test_only_an_output_of_the_weights_dtype_goes_to_the_library(
    on_h200: list[Any], monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, backend: Any
) -> None:
    """cuBLAS has no BF16 product with a bias and a float32 result, such as a loop's velocities."""
    launched: list[str] = []
    monkeypatch.setattr(ops, "_reference_product", ops.library_product)
    monkeypatch.setattr(ops, "kernels", lambda name: SimpleNamespace(product=lambda *_: launched.append(name)))
    x, weights, out = draw(2, 16).to(BF16), make_linear(draw(8, 16), draw(8), BF16), torch.zeros(2, 8, dtype=kind)
    with steered(backend):
        gemm(x, weights, out)
    assert [bool(launched), bool(out.any())] == [kind == torch.float32, kind == BF16]


def test_a_norm_without_a_kernel_is_an_error(on_h200: list[Any]) -> None:
    x, out = torch.zeros(8, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
    with steered("cuda"), pytest.raises(EngineError, match="no kernel adds 8 rows"):
        gemm(x, make_linear(torch.zeros(64, 64), None, BF16), out, Epilogue(residual=True, moments=Moments.like(out)))


def test_moments_without_a_residual_are_written_or_refused(on_h200: list[Any]) -> None:
    x, weights, out = draw(5, 32), make_linear(draw(128, 32, seed=1), None, torch.float32), torch.empty(5, 128)
    moments = Moments.like(out)
    gemm(x, weights, out, Epilogue(moments=moments))
    torch.testing.assert_close(moments.sums.T, out.view(5, 2, 64).sum(2))
    torch.testing.assert_close(moments.squares.T, out.view(5, 2, 64).square().sum(2))
    narrow = replace(weights, weight=weights.weight.to(BF16))
    with steered("cuda"), pytest.raises(EngineError, match="or writes their moments"):
        gemm(x.to(BF16), narrow, out.to(BF16), Epilogue(moments=moments))


def test_measured_calls_read_fewer_weights_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, clone, made = make_linear(draw(8, 16), None, BF16), Tensor.clone, list[Tensor]()

    def short(tensor: Tensor) -> Tensor:
        if len(made) == 2:
            raise torch.OutOfMemoryError
        made.append(clone(tensor))
        return made[-1]

    monkeypatch.setattr(Tensor, "clone", short)
    layers = [layer.weight.data_ptr() for layer in itertools.islice(choice.in_turns(weights), 6)]
    assert layers[:3] == layers[3:] == [weights.weight.data_ptr(), *(one.data_ptr() for one in made)]


def test_measured_calls_read_other_weights_in_turns(on_h200: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's layers do not find their weights in the cache."""
    weights = make_linear(draw(64, 32), draw(64), BF16)
    monkeypatch.setattr(choice, "_CACHED", 3 * weights.bytes)
    call = trial(weights, NONE, 6, H200)
    for _ in range(6):
        call(TILES[0])
    read = [launch["weights"] for launch in on_h200]
    assert read[0] is weights and [one.weight.data_ptr() for one in read[:3]] == [w.weight.data_ptr() for w in read[3:]]
    assert len({one.weight.data_ptr() for one in read}) == 3 and all(
        torch.equal(w.weight, weights.weight) for w in read
    )
    monkeypatch.setattr(choice, "_CACHED", 1)
    assert len({id(layer) for layer in itertools.islice(choice.in_turns(weights), 4)}) == 1


@pytest.mark.parametrize("activation", [NONE, GELU, GEGLU, SWIGLU])
@pytest.mark.parametrize("fp8", [False, True])
def test_the_product_is_measured_with_its_activation(
    activation: Activation, fp8: bool, on_h200: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_linear(draw(64, 32), None if activation.gated else draw(64), BF16, 4.0 if fp8 else None)
    call = trial(weights, activation, 6, H200)
    call(TILES[0])
    out = on_h200[0]["out"]
    call(Library())
    assert out.shape == (6, 32 if activation.gated else 64)
    assert out.dtype == (FP8 if fp8 and activation is not NONE else BF16)
    x = draw(6, 32).to(weights.weight.dtype).float() * weights.input_scale_value
    y = x @ weights.true_weight(torch.float32).T + (0 if weights.bias is None else weights.bias.float())
    if activation is GELU:
        y = F.gelu(y, approximate="tanh")
    elif activation.gated:
        y = (F.silu(y[:, :32]) if activation is SWIGLU else F.gelu(y[:, :32], approximate="tanh")) * y[:, 32:]
    assert float((out.float() - y).abs().max() / y.abs().max()) < (0.07 if out.dtype == FP8 else 0.02)


def test_the_ledger_names_the_kernels_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_linear(torch.zeros(128, 64), None, BF16)
    products = {"a": (weights, NONE), "b": (weights, GELU)}
    assert products_by(8, products) == ("", False), "on a CPU there is no choice"
    monkeypatch.setattr(hopper, "planned", lambda *s: TILES[0] if s[2] is NONE else None)
    with steered("cuda"):
        said, library = ", products in CUDA C++: a; ", "by cuBLAS (CUDA C++ out: there is no GPU): b"
        assert products_by(8, products) == (said + library, True)
        alone = products_by(8, {"b": products["b"]})
        assert alone == (f", products {library}", False), "dependent launches do not pay off"


def test_the_ledger_says_why_cublas_runs_a_product(
    on_h200: list[Any], asked: Callable[[int], list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(0)
    monkeypatch.setattr(choice, "trial", lambda *_: lambda _: None)
    large, odd, small = plain(), plain(2040), plain(128, 128)
    products = {"a": (large, NONE), "b": (odd, NONE), "c": (small, NONE), "d": (large, GEGLU), "e": (large, GELU)}
    with steered("cuda", META):
        said = products_by(600, products)[0]
        for reason, names in (
            ("it was measured to be slower", "a, e"),
            ("multiples of 32 by 16, got 2040 by 2048", "b"),
            ("600 by 128 by 128 is too small", "c"),
            ("the rows of gate and up do not alternate by eights", "d"),
        ):
            assert any(reason in part and part.endswith(f": {names}") for part in said.split("; ")), (reason, said)
        assert "from 33 to 32768 rows, got 8" in products_by(8, products)[0]
    monkeypatch.setattr(Gpu, "of", lambda _: RTX_4090)
    with steered("cuda", META):
        said = products_by(600, products)[0]
    assert f"compute capability 9.0, {RTX_4090.name} has 8.9" in said and said.endswith(": a, b, c, d, e")
