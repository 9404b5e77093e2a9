"""Max pooling in a ResNet's stem, with the shift and the activation after it, in one kernel: `max_pool`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import op


@op("image.triton_pool")
def max_pool(x: Tensor, shift: Tensor | None = None, *, activation: Activation = Activation.NONE) -> Tensor:
    """Return act(maximum + `shift`) of windows of 3 x 3 pixels, two apart, of which the first begins one pixel outside.

    Args:
        x: (B, H, W, C), contiguous.
        shift: float32, (C,).
    """
    most = F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1).permute(0, 2, 3, 1).contiguous()
    if shift is None:
        return reference.activate(most, activation)
    return reference.activate(most + shift, activation).to(x.dtype)
