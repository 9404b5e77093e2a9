"""The Hopper GEMM in the emulator, against float32: what blocks fetch for each other and add up, every epilogue."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.cuda_emulator import EmulatedDriver, EmulatedModule
from tests.support.gpus import H200, MIG_SLICE
from tests.support.kernel_cases import moments_of
from vla_accel import fp8
from vla_accel.fp8 import E4M3
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import hopper
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.hopper import HopperTile
from vla_accel.kernels.gemm.hopper.config import few_rows
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.rows import rope_tables

BF16, FP16, FP8 = torch.bfloat16, torch.float16, E4M3.dtype
INT8 = fp8.INT8.dtype
_BEFORE = """
extern "C" __global__ void before(u16* tensor, int count) {
  volatile u16* out = tensor;  // A compiler would leave out what changes nothing.
  griddepcontrol_wait();
  for (int i = threadIdx.x; i < count; i += 256) out[i] = out[i];
}
"""


class EmulatedGemm:
    """Launches go to the emulator while `patch` holds. Kernels may touch what `touch` was last given alone, and some of
    it comes from a kernel before them in a chain, so that they must not read it before they have waited for it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.constant: list[Tensor] = []
        self.produced: list[Tensor] = []
        patch.setattr(nvrtc, "load_module", self._load)
        patch.setattr(nvrtc, "driver", EmulatedDriver)

    def touch(self, *arguments: Any) -> None:
        """Set what the next launch may touch: the tensors in its arguments. A kernel before it writes the rows, the
        outputs and the moments, so that the launch must not read them before it has waited."""
        x, weights, out, epilogue, norm = arguments
        produced = _tensors([x, out, epilogue.moments, norm and norm.moments])
        self.produced, addresses = produced, {tensor.data_ptr() for tensor in produced}
        self.constant = [one for one in _tensors([weights, epilogue, norm]) if one.data_ptr() not in addresses]

    def _load(self, source: str, shared: dict[str, int], *rest: Any) -> EmulatedModule:
        module = EmulatedModule(source + _BEFORE, {**shared, "before": 0}, *rest, folder=self.folder)
        module.allow(*self.constant, *self.produced)
        for i, tensor in enumerate(self.produced):
            count = ctypes.c_int(tensor.numel() * tensor.element_size() // 2)
            module.launch("before", 1, 256, (ctypes.c_void_p(tensor.data_ptr()), count), dependent=i > 0)
        return module


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in lists and dataclasses, too."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list) else []


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def buffer(rows: int, columns: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows to write, and these between rows of NaN that stay so."""
    whole = torch.full((rows + 2, columns), float("nan")).to(kind)
    return whole[1:-1], whole


def is_close(got: Tensor, want: Tensor, kind: torch.dtype) -> None:
    """Whether the root mean square of what they differ by is a rounding's."""
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < {FP8: 0.03, BF16: 0.004, FP16: 0.001}[kind], error


TILES = (
    HopperTile(1, 1, 1, 64, 4), HopperTile(2, 1, 1, 40, 3), HopperTile(1, 2, 1, 56, 3), HopperTile(2, 1, 2, 24, 3),
    HopperTile(1, 1, 1, 64, 3, 2, 1), HopperTile(2, 1, 1, 32, 3, 1, 2), HopperTile(1, 1, 1, 40, 3, 2, 2),
    HopperTile(2, 1, 1, 40, 3, split=2), HopperTile(1, 1, 1, 48, 3, 2, 1, 3), HopperTile(1, 1, 1, 40, 3, resident=2),
    HopperTile(2, 1, 1, 32, 3, persistent=True), HopperTile(1, 1, 2, 24, 3, 2, 1, persistent=True),
)  # fmt: skip
QUICK = (1, 6, 7, 10)
SOME = [t if i in QUICK else pytest.param(t, marks=pytest.mark.slow) for i, t in enumerate(TILES)]
FEWER = replace(MIG_SLICE, multiprocessors=6)
"""A GPU with fewer multiprocessors than there are tiles."""
EPS, HEAD, SEQUENCES = 1e-3, 128, {32: 2, 33: 3, 40: 2, 80: 2, 160: 4}
Multiply = Callable[..., None]


@pytest.fixture
def multiply(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    """`hopper.gemm` by an emulated kernel, as a dependent launch that may touch its operands alone."""
    gemms = EmulatedGemm(monkeypatch, emulated)

    def call(
        x: Tensor, weights: Linear, out: Tensor | Heads, tile: HopperTile, epilogue: Epilogue | None = None,
        norm: Norm | None = None, gpu: Any = H200,
    ) -> None:  # fmt: skip
        epilogue = epilogue or Epilogue()
        gemms.touch(x, weights, out, epilogue, norm)
        with Chain(gpu).resumed():
            hopper.gemm(x, weights, out, epilogue, norm, tile, gpu)

    return call


def wide(weights: Linear) -> Linear:
    """Weights for the reference in float32."""
    return replace(weights, weight=weights.weight.float(), weight_scale=None)


def scaled(kind: torch.dtype, *shape: int, bias: bool = False) -> Linear:
    """Weights whose products have a unit's size: with a scale if they are FP8."""
    if kind != FP8:
        return Linear((drawn(*shape, seed=1) * 0.05).to(kind), drawn(shape[0], seed=2).to(kind) if bias else None)
    one = torch.ones(())
    added = drawn(shape[0], seed=2).to(BF16) if bias else None
    return Linear(drawn(*shape, seed=1).to(FP8), added, one, one, 0.05)


def stored(kind: torch.dtype, *shape: int, bias: bool = False) -> Linear:
    """Weights of one byte for rows in BF16: in E4M3 every number that it has, in INT8 with a scale for each row."""
    added = drawn(shape[0], seed=2).bfloat16() if bias else None
    if kind == INT8:
        weight = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(1)).to(INT8)
        scales = drawn(shape[0], seed=4).abs() * 4e-4 + 2e-4  # unlike each other
        return Linear(weight, added, scales, torch.ones(()))
    bits = torch.randint(0, 254, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    weight = (bits + (bits >= 127).to(torch.uint8)).view(FP8)  # Two of the 256 are no numbers.
    return Linear(weight, added, torch.tensor(4e-4), torch.ones(()), 4e-4)


WIDENED = (
    HopperTile(1, 1, 1, 56, 4), HopperTile(2, 1, 1, 40, 3, split=2), HopperTile(1, 2, 2, 24, 3),
    HopperTile(1, 1, 1, 40, 3, 2, 2), HopperTile(1, 1, 1, 48, 5, split=3, resident=2),
    HopperTile(2, 1, 1, 32, 3, persistent=True),
)  # fmt: skip
"""Plain, K shared, several blocks and parts, both operands shared, two resident, persistent."""


@pytest.mark.slow
@pytest.mark.parametrize("tile", WIDENED)
@pytest.mark.parametrize("kind", [FP8, INT8])
def test_weights_of_one_byte_are_widened(tile: HopperTile, kind: torch.dtype, multiply: Multiply) -> None:
    rows, n, k = 101, 176, 64 * 3 * (tile.stages + 1) - 48
    x, weights = drawn(rows, k).bfloat16(), stored(kind, n, k, bias=True)
    (out, whole), want = buffer(rows, n, BF16), torch.empty(rows, n)
    gemm(x, weights, want)
    for gpu in (H200, FEWER):
        multiply(x, weights, out, tile, gpu=gpu)
        is_close(out, want, BF16)
        assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize("tile", SOME)
@pytest.mark.parametrize("kind", [BF16, pytest.param(FP16, marks=pytest.mark.slow), FP8])
def test_tiles_compute_the_product(tile: HopperTile, kind: torch.dtype, multiply: Multiply) -> None:
    rows, n, k = 101, 176, 528 if kind == FP8 else 272
    x, weights = drawn(rows, k).to(kind), scaled(kind, n, k, bias=True)
    out, whole = buffer(rows, n, BF16 if kind == FP8 else kind)
    want = torch.empty(rows, n)
    gemm(x.float(), wide(weights), want)
    for gpu in (H200, FEWER):
        multiply(x, weights, out, tile, gpu=gpu)
        is_close(out, want, out.dtype)
        assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize("tile", [TILES[0], TILES[7]])
def test_rows_may_lie_apart(tile: HopperTile, multiply: Multiply) -> None:
    x, weights = drawn(75, 2 * 256).to(BF16)[:, :256], scaled(BF16, 192, 256, bias=True)
    out, _ = buffer(75, 192, BF16)
    want = torch.empty(75, 192)
    gemm(x.float(), wide(weights), want)
    multiply(x, weights, out, tile)
    is_close(out, want, BF16)


ACTIVATIONS = (
    Activation.GELU, Activation.SWIGLU, Activation.GELU_ERF, Activation.QUICK_GELU, Activation.RELU, Activation.GEGLU,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "kind", "quantize"),
    [
        *((activation, BF16, None) for activation in ACTIVATIONS),
        *((activation, FP8, 40.0) for activation in ACTIVATIONS),
    ],
)
def test_activations(activation: Activation, kind: torch.dtype, quantize: float | None, multiply: Multiply) -> None:
    rows, n, k = 75, 192, 256
    weights = replace(scaled(kind, n, k, bias=not activation.gated), paired=activation.gated)
    x, columns = drawn(rows, k).to(kind), n // 2 if activation.gated else n
    out, _ = buffer(rows, columns, FP8 if quantize else BF16)
    want = torch.empty(rows, columns)
    gemm(x.float(), wide(weights), want, Epilogue(activation=activation), workspace=(torch.empty(rows, n),))
    for tile in (TILES[0], TILES[2], TILES[7]):
        multiply(x, weights, out, tile, Epilogue(activation=activation, quantize=quantize))
        is_close(out, want if quantize is None else (want * quantize).clamp(-448, 448), out.dtype)


def few(n: int, k: int, paired: int = 0) -> Any:
    """Rows, each with a tile whose blocks share no K; all tiles that are tried by a weight (n, k) of π0's expert, each
    once; the first and the best for 33 rows, which are no whole tiles, are quick."""
    plain = HopperTile(1, 1, 1, 24, 4)
    found, seen = [], set()
    for rows in SEQUENCES:
        for i, tile in enumerate((plain, *few_rows(H200, rows, n, k, paired))):
            if tile in seen and tile != plain:
                continue
            seen.add(tile)
            short = f"{tile.groups}x{tile.width} {tile.stages} {tile.split} {tile.resident}"
            marks = () if i <= 1 and rows == 33 else pytest.mark.slow
            found.append(pytest.param(rows, tile, id=f"{rows} {short}", marks=marks))
    return found


def in_turns(tiles: Iterable[Any], *variants: Any) -> list[Any]:
    """Each row of `tiles`, rows and a tile, with one of the variants, in turns."""
    found = []
    for one, variant in zip(tiles, itertools.cycle(variants)):
        marks, name = getattr(one, "marks", ()), getattr(one, "id", None)
        found.append(pytest.param(*getattr(one, "values", one), variant, id=name, marks=marks))
    return found


def width_for(tile: HopperTile) -> int:
    """The columns of x with which stages are used again, and the last block has a chunk less and 8 columns of its
    last."""
    return 64 * (tile.split * (tile.stages + 2) - 2) + 8


PREFIX = [pytest.param(101, *t.values, marks=t.marks) if hasattr(t, "values") else (101, t) for t in SOME]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("rows", "tile", "variant"),
    in_turns(
        [*PREFIX[:4], *PREFIX[5:9], *few(1024, 2048)],
        (BF16, True, "scaled"), (BF16, False, "plain"), (FP16, True, "none"),
    ),
)  # fmt: skip
def test_a_gated_residual_and_its_moments(
    rows: int, tile: HopperTile, variant: tuple[torch.dtype, bool, str], multiply: Multiply
) -> None:
    n, k = 192 if rows == 101 else 3 * tile.weight_rows, 320 if rows == 101 else width_for(tile)
    gate, scale = drawn(n, seed=2), drawn(n, seed=3) / 4
    kind, gated, written = variant
    x, weights = drawn(rows, k).to(kind), scaled(kind, n, k, bias=not gated)
    out, whole = buffer(rows, n, kind)
    want = out.copy_(drawn(rows, n, seed=5)).float()
    moments = None if written == "none" else Moments.like(out, 64, written == "scaled")
    epilogue = Epilogue(gate=gate if gated else None, residual=True, moments=moments, next_scale=scale)
    gemm(x.float(), wide(weights), want, replace(epilogue, moments=None))
    multiply(x, weights, out, tile, epilogue)
    is_close(out, want, kind)
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    if moments is not None:
        # They are moments of the rounded rows, so the product's own roundings do not matter.
        real = moments_of(out, scale if written == "scaled" else None, 64)
        torch.testing.assert_close(moments.sums, real.sums, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(moments.squares, real.squares, atol=1e-4, rtol=1e-4)
        assert moments.scaled is None or (real.scaled is not None and torch.equal(moments.scaled, real.scaled))


@pytest.mark.parametrize("tile", [TILES[1], TILES[7], TILES[10]])
def test_a_later_products_weights_are_prefetched(tile: HopperTile, multiply: Multiply) -> None:
    """No byte beyond them, and with a norm by a warp that also loads the norms."""
    rows, n, k = 101, 192, 192
    x, weights, out = drawn(rows, k).bfloat16(), scaled(BF16, n, k, bias=True), buffer(rows, n, BF16)[0]
    want = torch.empty(rows, n)
    gemm(x.float(), wide(weights), want)
    later = drawn(3, 4744).bfloat16()
    multiply(x, weights, out, tile, Epilogue(prefetch=later))
    is_close(out, want, BF16)
    if not tile.persistent:
        normed = F.rms_norm(x.float(), (k,), eps=1e-6)
        gemm(normed, wide(weights), want)
        multiply(x, weights, out, tile, Epilogue(prefetch=later), Norm(1e-6, moments_of(x, None, 64)))
        is_close(out, want, BF16)


@pytest.mark.parametrize("tile", SOME[:10])
@pytest.mark.parametrize("norm", [pytest.param("rms", marks=pytest.mark.slow), "layer", "gated"])
def test_norms_of_the_rows(tile: HopperTile, norm: str, multiply: Multiply) -> None:
    rows, n, k, activation = 101, 192, 192, Activation.GEGLU if norm == "gated" else Activation.NONE
    x, weights = (2 * drawn(rows, k) + 1).bfloat16(), replace(scaled(BF16, n, k), paired=norm == "gated")
    out, _ = buffer(rows, n // 2 if activation.gated else n, BF16)
    sums = weights.weight.float().sum(1) if norm == "layer" else None
    multiply(x, weights, out, tile, Epilogue(activation=activation), Norm(1e-6, moments_of(x, None, 64), sums=sums))
    normed, want = (F.layer_norm if norm == "layer" else F.rms_norm)(x.float(), (k,), eps=1e-6), torch.empty(out.shape)
    gemm(normed, wide(weights), want, Epilogue(activation=activation), workspace=(torch.empty(rows, n),))
    is_close(out, want, BF16)


@pytest.mark.parametrize("tile", WIDENED[:2])
@pytest.mark.parametrize("kind", [FP8, INT8])
def test_widened_weights_and_a_gated_residual(tile: HopperTile, kind: torch.dtype, multiply: Multiply) -> None:
    rows, n, k = 51, 256, 464
    x, weights, scale = drawn(rows, k).bfloat16(), stored(kind, n, k, bias=True), drawn(n, seed=3) / 4
    out, whole = buffer(rows, n, BF16)
    want = out.copy_(drawn(rows, n, seed=5)).float()
    moments = Moments.like(out, 64, True)
    epilogue = Epilogue(gate=drawn(n, seed=6), residual=True, moments=moments, next_scale=scale)
    gemm(x, weights, want, replace(epilogue, moments=None))
    multiply(x, weights, out, tile, epilogue)
    is_close(out, want, BF16)
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    torch.testing.assert_close(moments.squares, moments_of(out, scale, 64).squares, atol=1e-4, rtol=1e-4)


def check_modulated_layer_norm(rows: int, weights: Linear, tile: HopperTile, multiply: Multiply) -> None:
    """A scaled LayerNorm before a product with a shift and a GELU."""
    n, k = weights.weight.shape
    x, scale = (drawn(rows, k) + 1).bfloat16(), drawn(k, seed=1) / 4
    norm = Norm(EPS, moments_of(x, scale, 64), scale, (1.0 + scale) @ weights.true_weight(torch.float32).T)
    epilogue = Epilogue(drawn(n, seed=3), Activation.GELU)
    (out, whole), want = buffer(rows, n, BF16), torch.empty(rows, n)
    gemm(x, weights, want, epilogue, norm)
    multiply(x, weights, out, tile, epilogue, norm)
    is_close(out, want, BF16)
    assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize("tile", WIDENED[:2])
@pytest.mark.parametrize("kind", [FP8, INT8])
def test_widened_weights_behind_a_modulated_layer_norm(tile: HopperTile, kind: torch.dtype, multiply: Multiply) -> None:
    rows, n, k = 51, 256, 464
    check_modulated_layer_norm(rows, stored(kind, n, k), tile, multiply)


@pytest.mark.parametrize("paired", [False, True])
def test_widened_gate_and_up_of_normed_rows(paired: bool, multiply: Multiply) -> None:
    """With a scale for each weight row, which lie in halves or in turns."""
    rows, half, k = 51, 192, 464
    x, norm = modulated(rows, k, BF16)
    weights = replace(stored(INT8, 2 * half, k), paired=paired)
    epilogue = Epilogue(None if paired else drawn(2 * half, seed=3), Activation.SWIGLU)
    (out, whole), want = buffer(rows, half, BF16), torch.empty(rows, half)
    gemm(x, weights, want, epilogue, norm)
    multiply(x, weights, out, WIDENED[1], epilogue, norm)
    is_close(out, want, BF16)
    assert whole[0].isnan().all() and whole[-1].isnan().all()


def test_widened_and_rotated_heads_of_normed_rows(multiply: Multiply) -> None:
    batch, tokens, k, heads, kv_heads = 3, 17, 464, 3, 2
    x, norm = modulated(batch * tokens, k, BF16)
    cos, sin = rope_tables(90 + tokens, HEAD, torch.device("cpu"))
    weights = stored(INT8, (heads + 2 * kv_heads) * HEAD, k)
    rope = Rotation(cos, sin, torch.tensor([90, 5, 31], dtype=torch.int32))
    out, want = (
        Heads(*(torch.empty(batch, tokens, count, HEAD, dtype=kind) for count in (heads, kv_heads, kv_heads)))
        for kind in (BF16, torch.float32)
    )
    gemm(x, weights, want, Epilogue(rope=rope), norm)
    multiply(x, weights, out, WIDENED[0], Epilogue(rope=rope), norm)
    for name in "qkv":
        is_close(getattr(out, name), getattr(want, name), BF16)


def modulated(rows: int, k: int, kind: torch.dtype) -> tuple[Tensor, Norm]:
    """Rows of any size, and their norm with moments of 32 columns each."""
    x, scale = (drawn(rows, k) * (1 + torch.arange(rows)[:, None] % 5)).to(kind), drawn(k, seed=1) / 4
    return x, Norm(EPS, moments_of(x, scale, 32), scale)


@pytest.mark.parametrize(("rows", "tile"), few(6144, 1536))
def test_a_modulated_layer_norm_before_an_activation(rows: int, tile: HopperTile, multiply: Multiply) -> None:
    """GR00T's products: the rows come scaled, and the shift is a constant of the step."""
    n, k = 3 * tile.weight_rows, width_for(tile)
    weights = Linear((drawn(n, k, seed=2) * k**-0.5).bfloat16())
    check_modulated_layer_norm(rows, weights, tile, multiply)


@pytest.mark.parametrize(("rows", "tile"), few(9216, 1024))
def test_moments_of_a_normed_product(rows: int, tile: HopperTile, multiply: Multiply) -> None:
    """FastWAM's queries and keys: their own norm is over all heads, which no block has."""
    n, k = 3 * tile.weight_rows - 32, width_for(tile)
    x, scale = (drawn(rows, k) + 1).bfloat16(), drawn(k, seed=1) / 4
    weights = Linear((drawn(n, k, seed=2) * k**-0.5).bfloat16())
    norm = Norm(EPS, moments_of(x, scale, 64), scale, (1.0 + scale) @ weights.weight.float().T)
    epilogue, want = Epilogue(drawn(n, seed=3)), torch.empty(rows, n)
    gemm(x, weights, want, epilogue, norm)
    out, _ = buffer(rows, n, BF16)
    moments = Moments.like(out, 64)
    for part in (moments.sums, moments.squares):
        part.fill_(float("nan"))
    multiply(x, weights, out, tile, replace(epilogue, moments=moments), norm)
    is_close(out, want, BF16)
    real = moments_of(out, None, 64)
    torch.testing.assert_close(moments.sums, real.sums, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(moments.squares, real.squares, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "tile", "variant"),
    in_turns(
        few(8192, 1024, 8192),
        (BF16, Activation.GEGLU, True), (BF16, Activation.SWIGLU, False), (FP16, Activation.SWIGLU, True),
    ),
)  # fmt: skip
def test_gate_and_up_of_normed_rows(
    rows: int, tile: HopperTile, variant: tuple[torch.dtype, Activation, bool], multiply: Multiply
) -> None:
    half, k = 3 * tile.weight_rows // 2, width_for(tile)
    kind, activation, shifted = variant
    x, norm = modulated(rows, k, kind)
    weights = Linear(drawn(2 * half, k, seed=2).to(kind) * k**-0.5)
    epilogue = Epilogue(shift=drawn(2 * half, seed=3) if shifted else None, activation=activation)
    (out, whole), want = buffer(rows, half, kind), torch.empty(rows, half)
    gemm(x, weights, want, epilogue, norm)
    multiply(x, weights, out, tile, epilogue, norm)
    is_close(out, want, kind)
    assert whole[0].isnan().all() and whole[-1].isnan().all()


@pytest.mark.parametrize(("rows", "tile", "variant"), in_turns(few(2560, 1024, 256), (BF16, True), (FP16, False)))
def test_rotated_heads_of_normed_rows(
    rows: int, tile: HopperTile, variant: tuple[torch.dtype, bool], multiply: Multiply
) -> None:
    """Sequences begin after prefixes of different lengths."""
    batch, k, heads, kv_heads = SEQUENCES[rows], width_for(tile), 3, 2
    tokens, n = rows // batch, (heads + 2 * kv_heads) * HEAD
    cos, sin = rope_tables(90 + tokens, HEAD, torch.device("cpu"))
    rope = Rotation(cos, sin, torch.tensor([90, 5, 31, 64][:batch], dtype=torch.int32))
    kind, shifted = variant
    x, norm = modulated(rows, k, kind)
    weights = Linear(drawn(n, k, seed=2).to(kind) * k**-0.5)
    made = [buffer(rows, count * HEAD, kind) for count in (heads, kv_heads, kv_heads)]
    out = Heads(*(one.view(batch, tokens, -1, HEAD) for one, _ in made))
    want = Heads(*(torch.empty(one.shape) for one in (out.q, out.k, out.v)))
    epilogue = Epilogue(shift=drawn(n, seed=3) if shifted else None, rope=rope)
    gemm(x, weights, want, epilogue, norm)
    multiply(x, weights, out, tile, epilogue, norm)
    for name in "qkv":
        is_close(getattr(out, name), getattr(want, name), kind)
    assert all(whole[0].isnan().all() and whole[-1].isnan().all() for _, whole in made)
