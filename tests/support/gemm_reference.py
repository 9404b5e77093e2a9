"""What the own GEMM computes, in float32 by torch: for its tests on a GPU and in the emulator."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels.activation import Activation


def product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, activation: Activation) -> Tensor:
    y = x.float() @ weight.float().T * scale
    y = y if bias is None else y + bias.float()
    if activation is Activation.GELU:
        return F.gelu(y, approximate="tanh")
    if activation.gated:
        gate, up = y.unflatten(1, (-1, 2, 8)).unbind(2)
        return ((F.silu(gate) if activation is Activation.SWIGLU else F.gelu(gate, approximate="tanh")) * up).flatten(1)
    return y
