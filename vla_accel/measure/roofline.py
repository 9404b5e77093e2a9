"""The least time that a policy's arithmetic and bytes allow: what a measurement is held against.

Counts the products that must be computed (exact savings applied) and the weights that every denoise step must read.
Knows sizes, not how anything is run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vla_accel.models.pi0 import Pi0Config
from vla_accel.ops.gpu import Gpu


@dataclass(frozen=True)
class Work:
    """One call: operations (multiply and add count as two) of vision and prefix, bytes that denoising must read."""

    vision_flop: float
    prefix_flop: float
    denoise_bytes: float
    denoise_flop: float


@dataclass(frozen=True)
class Ceilings:
    """Rates of one GPU, measured: products in BF16 and FP8 (FLOP/s), and a device copy, read plus write (bytes/s)."""

    bf16_flops: float
    fp8_flops: float
    bytes_per_s: float


def work_of(config: Pi0Config, views: int, prompt_tokens: int, steps: int, *, batch: int = 1,
            weight_bytes: int = 2) -> Work:  # fmt: skip
    """The work of one call; `weight_bytes`: of one expert weight."""
    v, p, e = config.vision, config.prefix, config.expert
    image_tokens = views * v.tokens
    per_token = 4 * v.width * v.width + 2 * v.width * v.mlp_dim
    vision = v.depth * (2 * image_tokens * per_token + 4 * image_tokens * v.tokens * v.width)
    vision += 2 * image_tokens * (3 * v.patch_size**2 * v.width + v.width * p.width)
    tokens = image_tokens + prompt_tokens
    attended = p.heads * p.head_dim
    layer = p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
    last = p.width * 2 * p.kv_heads * p.head_dim
    prefix = 2 * tokens * ((p.depth - 1) * layer + last) + (p.depth - 1) * 4 * tokens * tokens * attended
    expert = e.depth * e.width * (e.qkv_dim + e.heads * e.head_dim + 3 * e.mlp_dim)
    cache = 2 * e.depth * tokens * e.kv_heads * e.head_dim * 2
    suffix = config.suffix_tokens
    attention = e.depth * 4 * suffix * (tokens + suffix) * e.heads * e.head_dim
    return Work(
        float(batch * vision),
        float(batch * prefix),
        float(steps * (expert * weight_bytes + batch * cache)),
        float(steps * batch * (2 * suffix * expert + attention)),
    )


def floors_ms(work: Work, ceilings: Ceilings, *, fp8_vision: bool, fp8_prefix: bool) -> dict[str, float]:
    """Milliseconds of each component at the ceilings; denoising by bytes or arithmetic, whichever is more."""
    vision = work.vision_flop / (ceilings.fp8_flops if fp8_vision else ceilings.bf16_flops)
    prefix = work.prefix_flop / (ceilings.fp8_flops if fp8_prefix else ceilings.bf16_flops)
    denoise = max(work.denoise_bytes / ceilings.bytes_per_s, work.denoise_flop / ceilings.bf16_flops)
    parts = {"vision": vision * 1e3, "kv_cache": prefix * 1e3, "denoise": denoise * 1e3}
    return {**parts, "total": sum(parts.values())}


def measure_ceilings(device: torch.device) -> Ceilings:
    """A large product in BF16 and in FP8, and a large copy, each the best of several on random data."""

    def best(run: object, amount: float, repeats: int = 8) -> float:
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()  # type: ignore[operator]
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return amount / min(times)

    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16 = best(lambda: a @ b, 2.0 * n**3)
    fp8 = bf16
    gpu = Gpu.of(device)
    if gpu is not None and gpu.fp8:
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        fp8 = best(
            lambda: torch._scaled_mm(a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                                     use_fast_accum=True), 2.0 * n**3
        )  # fmt: skip
    source = torch.randn(1 << 28, device=device)
    target = torch.empty_like(source)
    copied = best(lambda: target.copy_(source), 2.0 * source.numel() * 4)
    return Ceilings(bf16, fp8, copied)
