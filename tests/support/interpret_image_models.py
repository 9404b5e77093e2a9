"""The native image programs in float16 in Triton's interpreter, compared with float32 (`interpreter`, test_image_ops).
`main` prints for each model its error, as a multiple of the plain module's in float16, and its name."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.agreement import rms
from tests.support.runtimes import steered
from vla_accel.images.autoencoder import split_autoencoder
from vla_accel.images.models import random_model
from vla_accel.images.native_autoencoder import NativeHalf
from vla_accel.images.native_unet import NativeUnet
from vla_accel.images.unet import Unet

CPU = torch.device("cpu")


def relative_error(got: Tensor, plain: Tensor, exact: Tensor) -> float:
    assert bool(torch.isfinite(got).all())
    return rms(got.double() - exact) / rms(plain.double() - exact)


def main() -> None:
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
    found["tiny-sd-unet"] = relative_error(out, Unet(narrow)(*half.values()), want)
    for name, frames in (("tiny-qwen-vae", (1,)), ("tiny-wan22-vae", (1,)), ("tiny-sd-vae", ())):
        pairs = [split_autoencoder(random_model(name, dtype=d, device=CPU)) for d in (torch.float16, torch.float32)]
        sources = (
            torch.rand(1, 3, *frames, 32, 48) * 2 - 1,
            torch.randn(1, 4, *frames, *(2, 3) if "wan22" in name else (4, 6)),
        )
        for side, half_module, wide_module, x in zip(("encoder", "decoder"), *pairs, sources, strict=True):
            want = wide_module(x)
            out = torch.empty_like(want, dtype=torch.float16)
            with steered("triton"):
                NativeHalf(half_module)({"x": x.half()}, {"y": out})
            found[f"{name} {side}"] = relative_error(out, half_module(x.half()), want)
    for case, value in found.items():
        print(f"{value:.3f} {case}")
