"""One op API for every model. Models call these; which implementation runs is decided below the API.

Today each op is its torch reference (`reference.py`), which runs on any device and is what faster versions are
judged against.
"""

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
