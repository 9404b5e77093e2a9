"""A script: the native image programs in float16 on the kernels themselves, in Triton's interpreter, against float32.

Prints one line a model: how far off it is, in parts of how far off the plain module is in float16, and its name. Run by
test_image_ops.py in a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.support.agreement import rms
from tests.support.interpreter import patch_once
from tests.support.runtimes import steered
from vla_accel.images.autoencoder import split_autoencoder
from vla_accel.images.models import random_model
from vla_accel.images.native_autoencoder import NativeHalf
from vla_accel.images.native_unet import NativeUnet
from vla_accel.images.unet import Unet

CPU = torch.device("cpu")


def beside(got: Tensor, plain: Tensor, exact: Tensor) -> float:
    assert bool(torch.isfinite(got).all())
    return rms(got.double() - exact) / rms(plain.double() - exact)


@torch.inference_mode()
def results() -> dict[str, float]:
    """Name to ratio."""
    found: dict[str, float] = {}
    narrow, wide = (random_model("tiny-sd-unet", dtype=d, device=CPU) for d in (torch.float16, torch.float32))
    one = torch.randn(1, 4, 8, 8)
    inputs = {
        "sample": torch.cat((one, one)),
        "timestep": torch.tensor(371),
        "encoder_hidden_states": torch.randn(2, 77, 32),
    }
    want = Unet(wide)(*inputs.values())
    out = torch.empty(2, 4, 8, 8, dtype=torch.float16)
    half = {k: v.half() if v.is_floating_point() else v for k, v in inputs.items()}
    with steered("triton"):
        NativeUnet(Unet(narrow))(half, {"noise": out})
    found["tiny-sd-unet"] = beside(out, Unet(narrow)(*half.values()), want)
    for name, frames in (("tiny-qwen-vae", (1,)), ("tiny-sd-vae", ())):
        pairs = [split_autoencoder(random_model(name, dtype=d, device=CPU)) for d in (torch.float16, torch.float32)]
        sources = (torch.rand(1, 3, *frames, 32, 48) * 2 - 1, torch.randn(1, 4, *frames, 4, 6))
        for side, half_module, wide_module, x in zip(("encoder", "decoder"), *pairs, sources, strict=True):
            want = wide_module(x)
            out = torch.empty_like(want, dtype=torch.float16)
            with steered("triton"):
                NativeHalf(half_module)({"x": x.half()}, {"y": out})
            found[f"{name} {side}"] = beside(out, half_module(x.half()), want)
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    patch_once()
    for case, value in results().items():
        print(f"{value:.3f} {case}")
