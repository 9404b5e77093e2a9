"""A script: the native image programs in float16 on the kernels themselves, in Triton's interpreter, against float32.

Prints one line a model: cosine and name. Run by test_image_ops.py in a process of its own.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from vla_accel.diffusion.models import random_model
from vla_accel.models.autoencoder import split_autoencoder
from vla_accel.models.unet import Unet
from vla_accel.native.autoencoder import NativeHalf
from vla_accel.native.unet import NativeUnet
from vla_accel.ops import image as ops

CPU = torch.device("cpu")


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


@torch.inference_mode()
def results() -> dict[str, float]:
    """Name to cosine."""
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
    ops.INTERPRET = True
    NativeUnet(Unet(narrow))(half, {"noise": out})
    ops.INTERPRET = False
    found["tiny-sd-unet"] = cosine(out, want)
    for name, frames in (("tiny-qwen-vae", (1,)), ("tiny-sd-vae", ())):
        pairs = [split_autoencoder(random_model(name, dtype=d, device=CPU)) for d in (torch.float16, torch.float32)]
        sources = (torch.rand(1, 3, *frames, 32, 48) * 2 - 1, torch.randn(1, 4, *frames, 4, 6))
        for side, half_module, wide_module, x in zip(("encoder", "decoder"), *pairs, sources, strict=True):
            want = wide_module(x)
            out = torch.empty_like(want, dtype=torch.float16)
            ops.INTERPRET = True
            NativeHalf(half_module)({"x": x.half()}, {"y": out})
            ops.INTERPRET = False
            found[f"{name} {side}"] = cosine(out, want)
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    for case, value in results().items():
        print(f"{value:.7f} {case}")
