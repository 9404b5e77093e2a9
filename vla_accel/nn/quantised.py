"""The products of a network with a prefix that run in FP8, by component and engine; for the ledger, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.fp8 import Products

# TensorRT takes islands, modules of their own; the output projection is inside none.
_MLP = Products(("gate_up_proj", "down_proj"), power_of_two=True, precisions=("fp8",))
_WEIGHTS = Products(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), activations=False)

QUANTISED: Mapping[str, Mapping[str, Products]] = {
    "vision": {"native": Products(("qkv_proj", "out_proj", "fc1", "fc2"))},
    # Never q/k/v: keys and values are what the expert reads, and rounding them costs more agreement than all other
    # products together, for two hundredths of the prefix's time.
    "kv_cache": {
        "native": Products(("o_proj", "gate_up_proj", "down_proj")),
        **dict.fromkeys(("tensorrt", "tensorrt_rtx", "torch_tensorrt"), _MLP),
    },
    "denoise": {"native": _WEIGHTS},
    # The head stays as it is: it decides which token is the largest.
    "decode": {"native": _WEIGHTS},
}
"""By component, then engine. All other products are computed in the policy's precision."""


def calibrated_products(config: Any) -> list[str]:
    """Every product of vision and prefix whose input is measured, by its name in the model, q/k/v included. The last
    prefix layer stops after its keys and values."""
    vision = ("qkv_proj", "out_proj", "fc1", "fc2")
    prefix = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    last = config.prefix.depth - 1
    return [
        *(f"vision.layers.{i}.{n}" for i in range(config.vision.depth) for n in vision),
        *(f"prefix.layers.{i}.{n}" for i in range(last + 1) for n in (prefix if i < last else prefix[:1])),
    ]
