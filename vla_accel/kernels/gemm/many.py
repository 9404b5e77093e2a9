"""Products of many rows of a suffix, by cuBLAS with kernels around it, or by Hopper's own GEMM.

The ops are those of `vla_accel.kernels.gemm.suffix`, for rows that come with their moments. The product multiplies
x ∘ (1 + scale), stored with the moments, or x, and the norm is a factor of the sums. cuBLAS rounds the sums to the
dtype of the rows before that; the own GEMM rounds them only before it adds them to a residual.
"""

from __future__ import annotations

from torch import Tensor

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import kernels
from vla_accel.kernels.gemm.linear import library_product
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Library, Own
from vla_accel.kernels.gemm.suffix_types import Heads, Rotation
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import current


def qkv_rope(
    x: Tensor, layer: Linear, shift: Tensor | None, rotation: Rotation, out: Heads, *,
    eps: float, cut: Library | Own, workspace: tuple[Tensor, ...] | None,
    moments: Moments | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.qkv_rope`."""
    assert moments is not None
    x = x if moments.scaled is None else moments.scaled
    if isinstance(cut, Own):
        from vla_accel.kernels.gemm.hopper import suffix

        return suffix.heads(
            x, layer.weight, moments.squares, shift, rotation, out, gpu=_gpu(x), tiling=cut.tiling,
            eps=eps,
        )  # fmt: skip
    y = _product(x, layer, workspace)
    kernels("gemm.triton_around").heads(y, moments, x.shape[1], shift, rotation, out, eps=eps)


def gate_up_geglu(
    x: Tensor, layer: Linear, shift: Tensor | None, out: Tensor, *, eps: float, activation: Activation,
    cut: Library | Own, workspace: tuple[Tensor, ...] | None, moments: Moments | None,
) -> None:  # fmt: skip
    """See `vla_accel.kernels.gemm.suffix.gate_up_geglu`."""
    assert moments is not None
    x = x if moments.scaled is None else moments.scaled
    if isinstance(cut, Own):
        from vla_accel.kernels.gemm.hopper import suffix

        return suffix.gated(
            x,
            layer.weight,
            moments.squares,
            shift,
            out,
            gpu=_gpu(x),
            tiling=cut.tiling,
            eps=eps,
            activation=activation,
        )
    y = _product(x, layer, workspace)
    kernels("gemm.triton_around").geglu(y, moments, x.shape[1], shift, out, eps=eps, activation=activation)


def project(
    a: Tensor, layer: Linear, gate: Tensor | None, x: Tensor, *, residual: bool, skip_every: int,
    cut: Library | Own, workspace: tuple[Tensor, ...] | None, moments: Moments | None, next_scale: Tensor | None,
) -> None:  # fmt: skip
    """See `suffix.project`. The own GEMM supports only a residual, no bias and no skipped rows."""
    if isinstance(cut, Own):
        from vla_accel.kernels.gemm.hopper import suffix

        assert residual and not skip_every and layer.bias is None
        return suffix.onto(a, layer.weight, gate, x, moments, next_scale, gpu=_gpu(x), tiling=cut.tiling)
    kernels("gemm.triton_around").onto(
        _product(a, layer, workspace), gate, x, residual=residual, skip_every=skip_every,
        moments=moments, next_scale=next_scale,
    )  # fmt: skip


def _product(x: Tensor, layer: Linear, workspace: tuple[Tensor, ...] | None) -> Tensor:
    assert workspace is not None
    library_product(x, layer, workspace[0])
    return workspace[0]


def _gpu(x: Tensor) -> Gpu:
    gpu = current(x).gpu
    assert gpu is not None
    return gpu
