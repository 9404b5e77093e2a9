"""`pytest --round-otherwise`: matrix products, convolutions and attention on the CPU sum and round in another order.

CPUs differ here: one multiplies BF16 in AMX tiles, the next in AVX512 or AVX2, and libraries sum in blocks of their
own. A bound that holds in both orders does not hang on either. Every sum is cut into pieces; each piece is rounded to
the result's dtype, and they are added from the last to the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PIECES = 4
_library: torch.library.Library | None = None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _summed(left: Tensor, right: Tensor, product: Callable[[Tensor, Tensor], Tensor], dims: tuple[int, int]) -> Tensor:
    """The sum over `dims` of `left` and `right`, piece by piece, before its last rounding."""
    size = max(1, -(-left.shape[dims[0]] // PIECES))
    pieces = list(zip(left.split(size, dims[0]), right.split(size, dims[1]), strict=True))
    wide = _wide(left.dtype)
    parts = [product(a.to(wide), b.to(wide)).to(left.dtype).to(wide) for a, b in reversed(pieces)]
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def round_otherwise() -> None:
    """From here on, in this process."""
    global _library
    if _library is not None:
        return
    bmm = torch.library.get_kernel("aten::bmm", "CPU")
    convolution = torch.library.get_kernel("aten::convolution", "CPU")
    library = torch.library.Library("aten", "IMPL")

    def summed(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        if not a.is_floating_point() or 0 in a.shape:
            return bmm.call_boxed(keys, a, b)
        return _summed(a, b, lambda x, y: bmm.call_boxed(keys, x, y), (2, 1))

    def product(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        return summed(keys, a, b).to(a.dtype)

    def biased(keys: Any, bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
        out = alpha * summed(keys, a, b)
        return (out if beta == 0 else out + beta * bias.to(out.dtype)).to(a.dtype)

    def convolved(
        keys: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any,
        transposed: bool, output_padding: Any, groups: int,
    ) -> Tensor:  # fmt: skip
        def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            rest = (stride, padding, dilation, transposed, output_padding, groups)
            return convolution.call_boxed(keys, x, weight, bias, *rest)

        if transposed or groups != 1:
            return call(x, weight, bias)
        out = _summed(x, weight, call, (1, 1))
        if bias is not None:
            out = out + bias.to(out.dtype).view(-1, *[1] * (x.ndim - 2))
        like = call(x[:1], weight)
        order = (
            torch.channels_last if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last) else None
        )
        return out.to(x.dtype, memory_format=order or torch.contiguous_format)

    def attention(
        keys: Any, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
        attn_mask: Tensor | None = None, scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # Heads share keys and values where there are fewer of those.
        flat = [t.repeat_interleave(q.shape[1] // t.shape[1], 1).flatten(0, 1) for t in (q, k, v)]
        scores = summed(keys, flat[0], flat[1].mT).unflatten(0, q.shape[:2])
        scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        weights = scores.softmax(-1).to(v.dtype).flatten(0, 1)
        out = product(keys, weights, flat[2]).unflatten(0, q.shape[:2])
        return torch.empty_like(q).copy_(out), scores.logsumexp(-1)

    for name, kernel in {
        "bmm": product,
        "mm": lambda keys, a, b: product(keys, a[None], b[None])[0],
        "addmm": lambda keys, bias, a, b, **more: biased(
            keys, bias.expand(a.shape[0], b.shape[1]), a[None], b[None], **more
        )[0],
        "baddbmm": biased,
        "convolution": convolved,
        "_scaled_dot_product_flash_attention_for_cpu": attention,
    }.items():
        library.impl(name, kernel, "CPU", with_keyset=True)
    _library = library
