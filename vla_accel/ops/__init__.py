"""One op API. The networks in `models` call the torch references that are named here, which run on any device; native
programs call the fused ops of this folder's modules, each of which has its reference beside its kernels."""

from vla_accel.ops.reference import (
    adaptive_layer_norm,
    adarms,
    apply_rope,
    attention,
    gated_residual,
    geglu,
    layer_norm,
    rms_norm,
    rope_tables,
    swiglu,
)

__all__ = [
    "adaptive_layer_norm",
    "adarms",
    "apply_rope",
    "attention",
    "gated_residual",
    "geglu",
    "layer_norm",
    "rms_norm",
    "rope_tables",
    "swiglu",
]
