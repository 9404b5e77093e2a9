"""Launches of the Hopper GEMM (`gemm.cu`, `epilogue.cu`): source, tensor maps, arguments and checks.

Every config that `HopperTile.why_not` accepts is correct for every product that `why_not` accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.kernels.activation import MACROS, Activation
from vla_accel.kernels.chain import launch_cuda
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm
from vla_accel.kernels.gemm.hopper.arguments import Call
from vla_accel.kernels.gemm.hopper.config import ARCHITECTURE, HopperSizes, HopperTile, Use, why_not_on
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.nvrtc import source_of
from vla_accel.kernels.reference import MOMENTS_OF
from vla_accel.kernels.tensor_map import TensorMap, tensor_map
from vla_accel.kernels.wgmma import wgmma

EIGHT = 8
"""Rows of a side that are next to each other in a tile of pairs."""
_KINDS = {torch.bfloat16: (0, "bf16"), torch.float16: (1, "f16"), torch.float8_e4m3fn: (2, "e4m3")}
_FP8 = torch.float8_e4m3fn
_WIDENED = {torch.float8_e4m3fn: 1, torch.int8: 2}
"""Weights of BF16 rows that become BF16 in registers, by their code in `widen.cu`."""
_ACTIVATIONS = (
    Activation.NONE, Activation.GELU, Activation.GELU_ERF, Activation.QUICK_GELU, Activation.RELU, Activation.GEGLU,
    Activation.SWIGLU,
)  # fmt: skip
"""What `epilogue.cu` computes."""


def source(
    kind: torch.dtype, tile: HopperTile, epilogue: Epilogue, norm: Norm | None = None, *, fp8_out: bool = False,
    half: int = 0, weight: torch.dtype | None = None,
) -> str:  # fmt: skip
    """Return the CUDA C++ source of one kernel.

    Args:
        kind: dtype of the rows.
        fp8_out: whether the output is FP8.
        half: distance of the two weight rows of a pair, 0 without pairs.
        weight: dtype of the weights. None: that of the rows.
    """
    activation, widen = epilogue.activation, 0 if weight is None or weight == kind else _WIDENED[weight]
    memory = tile.memory(activation.gated, norm is not None, widen > 0)
    number, name = _KINDS[kind]
    product = f"wgmma_{name}_by_registers" if widen else f"wgmma_{name}"
    macros = {
        "KIND": number, "WIDEN": widen, "NARROW": int(fp8_out), "ACTIVATION": activation.code,
        "GROUPS": tile.groups, "BLOCKS": tile.blocks, "PARTS": tile.parts, "WIDTH": tile.width, "STAGES": tile.stages,
        "ACROSS": tile.across, "ALONG": tile.along, "SPLIT": tile.split, "W_ROWS": tile.shares[0],
        "T_ROWS": tile.shares[1],
        **dict(zip(("LIMIT", "FETCHING", "MULTIPLYING"), tile.registers, strict=True)),
        "STAGING": memory.staging, "EXCHANGE": memory.exchange, "BARRIERS": memory.barriers,
        "RESIDUAL": int(epilogue.residual),
        "MEASURED": int(epilogue.moments is not None and not epilogue.residual),
        "ADAPTIVE": int(epilogue.gate is not None or epilogue.next_scale is not None),
        "NORM": 0 if norm is None else 1 if norm.sums is None else 2,
        "PAIRS": int(half > 0), "ROPE": int(epilogue.rope is not None), "WGMMA": product, **MACROS,
    }  # fmt: skip
    generated = Call.cpp + wgmma(product, tile.width, name, registers=widen > 0)
    files = ("epilogue", "widen", "gemm") if widen else ("epilogue", "gemm")
    return source_of(macros, *(f"gemm/hopper/{file}" for file in files), generated=generated)


def why_not(gpu: Gpu, x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue) -> str | None:
    """Explain why the kernel does not take these matrices on a GPU; None if it does."""
    weight, activation = weights.weight, epilogue.activation
    if reason := why_not_on(gpu):
        return reason
    if activation not in _ACTIVATIONS:
        return f"it computes the activations {', '.join(map(str, _ACTIVATIONS))}, got {activation}"
    if x.dtype not in _KINDS or not (weight.dtype == x.dtype or _is_widened(x, weights)):
        return (
            "it needs x and the weight in BF16, FP16 or FP8, both the same, or x in BF16 and the weight in FP8 or "
            f"INT8, got {x.dtype} and {weight.dtype}"
        )
    wide = torch.bfloat16 if x.dtype == _FP8 else x.dtype
    if out.dtype not in (wide, _FP8):
        return f"for x in {x.dtype} it needs out in {wide} or FP8, got {out.dtype}"
    (rows, k), (n, k_weight) = x.shape, weight.shape
    columns = n // 2 if activation.gated else n
    if k != k_weight or (epilogue.rope is None and out.shape != (rows, columns)) or (activation.gated and n % 16):
        return f"shapes do not fit: x {tuple(x.shape)}, weight {tuple(weight.shape)}, out {tuple(out.shape)}"
    if k * weight.element_size() % 16 or k * x.element_size() % 16 or columns * out.element_size() % 16 or not rows:
        return "it needs rows of x, of the weight and of out of a multiple of 16 bytes"
    # The rows of x may lie apart: the copy engine takes them by their distance.
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or (rows > 1 and x.stride(0) < k):
        return "it needs contiguous rows of x that do not overlap, a multiple of 16 bytes apart"
    if not (weight.is_contiguous() and out.is_contiguous()):
        return "it needs a contiguous weight and a contiguous out"
    if any(matrix.data_ptr() % 16 for matrix in (x, weight, out)):
        return "it needs matrices aligned to 16 bytes"
    if activation.gated and weights.bias is not None:
        return "it computes gated products without a bias"
    return None


def why_not_tile(
    x: Tensor, weights: Linear, epilogue: Epilogue, norm: Norm | None, tile: HopperTile, half: int
) -> str | None:
    """Explain why the kernel cannot run a product with a config; None if it can. `half`: as of `source`."""
    (rows, k), n = x.shape, len(weights.weight)
    if half and (tile.across * tile.along > 1 or tile.persistent or tile.parts * tile.blocks > 1):
        return f"{tile} shares its operands between blocks, or runs several tiles"
    if half and (n % tile.weight_rows or half % EIGHT or 2 * half % tile.weight_rows):
        return f"tiles of {tile.weight_rows} weight rows do not fill {n}, by pairs {half} apart"
    use = Use(epilogue.activation.gated, epilogue.residual, norm is not None)
    return tile.why_not(None, HopperSizes(rows, n, k, x.element_size(), (use,), widened=_is_widened(x, weights)))


def gemm(
    x: Tensor, weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, tile: HopperTile, gpu: Gpu
) -> None:
    """See `vla_accel.kernels.gemm.gemm`. The norm's moments are required, and a residual is of 16 bits.

    Raises:
        EngineError: the kernel does not take these arguments.
    """
    from vla_accel.kernels.nvrtc import load_module

    first = out.q if isinstance(out, Heads) else out
    x = x if norm is None else norm.rows(x)
    half = _half(weights, out, epilogue)
    reason = why_not(gpu, x, weights, first, epilogue) or why_not_tile(x, weights, epilogue, norm, tile, half)
    if reason := reason or _why_no_epilogue(x, weights, first, epilogue, norm):
        raise EngineError(f"gemm: {reason}")
    weight = weights.weight
    text = source(x.dtype, tile, epilogue, norm, fp8_out=first.dtype == _FP8, half=half, weight=weight.dtype)
    shared = tile.memory(epilogue.activation.gated, norm is not None, _is_widened(x, weights)).size
    module = load_module(text, {"gemm": shared}, ARCHITECTURE, x.device)
    rows, n, columns = len(x), len(weight), 128 // x.element_size()
    boxes = [share // 2 if share > 256 else share for share in tile.shares]
    of_weight = paired_map(weight, half, boxes[0], columns) if half else rows_map(weight, boxes[0], columns)
    token_tiles = -(-rows // (tile.tokens * tile.along))
    tiles = token_tiles * -(-n // (tile.weight_rows * tile.across))
    call = Call(
        out=first.data_ptr(), scale=weights.input_scale_value * weights.weight_scale_value,
        inverse=epilogue.quantize or 1.0, rows=rows, columns=n // 2 if epilogue.activation.gated else n,
        chunks=-(-x.shape[1] * x.element_size() // 128), token_tiles=token_tiles, tiles=tiles,
        **_fields(weights, out, epilogue, norm, half),
    )  # fmt: skip
    if norm is not None:
        call.width = x.shape[1]
    clusters = min(tiles, gpu.multiprocessors * tile.resident // tile.cluster) if tile.persistent else tiles
    arguments = (of_weight, rows_map(x, boxes[1], columns), call)
    launch_cuda(module, "gemm", clusters * tile.cluster, tile.threads, arguments, cluster=tile.cluster)


def rows_map(matrix: Tensor, rows: int, columns: int) -> TensorMap:
    """Return the tensor map of a row-major matrix for boxes of `rows` rows by `columns` columns, 64 or 128 bytes."""
    return tensor_map(matrix, (rows, columns))


def paired_map(weight: Tensor, half: int, rows: int, columns: int) -> TensorMap:
    """Return the tensor map of a weight (N, K) of groups of two sides of `half` rows.

    Boxes are `rows` rows by `columns` columns, eight rows of the first side and eight of the second in turns."""
    n, k = weight.shape
    pairs = weight.view(n // (2 * half), 2, half // EIGHT, EIGHT, k).transpose(1, 2)
    return tensor_map(pairs, (1, rows // (2 * EIGHT), 2, EIGHT, columns))


def _is_widened(x: Tensor, weights: Linear) -> bool:
    """Whether the weights become BF16 in registers."""
    return x.dtype == torch.bfloat16 and weights.weight.dtype in _WIDENED


def _half(weights: Linear, out: Tensor | Heads, epilogue: Epilogue) -> int:
    """Return the distance of the two weight rows of a pair; 0 if there are none, or they are `paired` in memory."""
    if isinstance(out, Heads):
        return out.q.shape[3] // 2
    return len(weights.weight) // 2 if epilogue.activation.gated and not weights.paired else 0


def _fields(
    weights: Linear, out: Tensor | Heads, epilogue: Epilogue, norm: Norm | None, half: int
) -> dict[str, int | float | None]:
    """Return the fields of the argument block for what surrounds the product."""
    e, tensors = epilogue, {"bias": weights.bias, "shift": epilogue.shift, "gate": epilogue.gate}
    if weights.weight_scale is not None and weights.weight_scale.ndim:
        tensors["scales"] = weights.weight_scale
    fields: dict[str, int | float | None] = {"half": half}
    if e.prefetch is not None:
        tensors["prefetch"] = e.prefetch
        fields["prefetch_bytes"] = e.prefetch.numel() * e.prefetch.element_size()
    if e.moments is not None:
        tensors |= {"sums_out": e.moments.sums, "squares_out": e.moments.squares}
        if e.moments.scaled is not None and e.next_scale is not None:
            tensors |= {"scaled": e.moments.scaled, "next_scale": e.next_scale}
    if norm is not None and norm.moments is not None:
        tensors |= {"sums": norm.moments.sums, "squares": norm.moments.squares, "weight_sums": norm.sums}
        fields |= {"eps": norm.eps, "moment_tiles": len(norm.moments.squares)}
    if isinstance(out, Heads) and e.rope is not None:
        tensors |= {"cos": e.rope.cos, "sin": e.rope.sin, "starts": e.rope.starts, "k": out.k, "v": out.v}
        fields |= {"tokens": out.q.shape[1], "heads": out.q.shape[2], "kv_heads": out.k.shape[2]}
    return fields | {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}


def _why_no_epilogue(x: Tensor, weights: Linear, out: Tensor, epilogue: Epilogue, norm: Norm | None) -> str | None:
    """Explain why the kernel cannot run this norm and this epilogue; None if it can."""
    e = epilogue
    if e.pinned is not None or e.skip_every:
        return "it has no rows with constants of their own"
    if e.shift is not None and weights.paired:
        return "a paired weight has no shift"
    if not e.residual and (e.gate is not None or e.next_scale is not None):
        return "a gate and the next norm's scale come with a residual"
    if e.residual and (e.activation is not Activation.NONE or out.dtype == _FP8 or norm is not None):
        return f"only a plain product is added to a residual, got {e.activation} into {out.dtype}"
    if e.moments is not None and (e.activation.gated or e.rope is not None or out.dtype == _FP8):
        return "moments are of rows of 16 bits, neither gated nor rotated"
    if e.moments is not None and (reason := _why_no_moments(e.moments, out)):
        return reason
    if e.moments is not None and e.moments.columns != MOMENTS_OF:
        return f"it needs moments of {MOMENTS_OF} columns, got {e.moments.columns}"
    if norm is None:
        return None
    if norm.moments is None:
        return "rows that are normed come with moments"
    if x.dtype == _FP8:
        return f"only BF16 and FP16 rows are normed, got {x.dtype}"
    if norm.sums is not None and e.activation.gated:
        return f"only an RMSNorm comes before a gated product, got a LayerNorm before {e.activation}"
    if norm.sums is not None and (norm.sums.shape != (len(weights.weight),) or norm.sums.dtype != torch.float32):
        return f"sums of {len(weights.weight)} weight rows, got {norm.sums.dtype} {tuple(norm.sums.shape)}"
    return _why_no_moments(norm.moments, x)


def _why_no_moments(moments: Moments, rows: Tensor) -> str | None:
    """Explain why these are no moments of the rows; None if they are."""
    expected = (-(-rows.shape[1] // moments.columns), len(rows))
    for got in (moments.sums, moments.squares):
        if tuple(got.shape) != expected or got.dtype != torch.float32 or not got.is_contiguous():
            columns = rows.shape[1]
            return (
                f"moments of {columns} columns are a contiguous float32 {expected}, got {got.dtype} {tuple(got.shape)}"
            )
    return None
