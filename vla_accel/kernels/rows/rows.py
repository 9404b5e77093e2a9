"""Ops on the rows of a residual stream: norms, activations, patches, embeddings, rotary positions.

Conventions of the ops: each writes into the buffers of its caller and allocates nothing on a GPU. Rows are flattened
tokens; a weight is (N, K). `inverse_scale`: x * inverse_scale is stored as float8_e4m3fn or int8, by the dtype of the
buffer, saturated at ±448 or ±127; None stores x in the dtype of the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.fp8 import E4M3, INT8
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import kernels, path
from vla_accel.kernels.image.pixels import levels


def patchify(
    images: Tensor, out: Tensor, patch: int, square: int = 1, pixel_maps: Tensor | None = None
) -> None:  # fmt: skip
    """Patches of uint8 images (N, S, S, 3) as rows (N * patches, 2 * stride): twice the row of a convolution's weight
    (channel, row, column), padded with zeros. Bytes are exact in BF16, so weights in two halves lose nothing.

    `square`: patches come square by square of so many on a side, each row by row, so that those that will be one token
    lie side by side. `pixel_maps` float32 (N, `pictures.MAP_WIDTH`): the rows hold the levels that they make of the
    bytes, rounded to the dtype of `out`. In BF16 the bars of lerobot 0.4, -255, are exact.
    """
    if path(images) != "reference":
        return kernels("rows.triton_rows").patchify(images, out, patch, square, pixel_maps)
    if pixel_maps is not None:
        images = levels(images, pixel_maps)
    n, size = images.shape[:2]
    side, stride = size // patch, out.shape[1] // 2
    rows = images.permute(0, 3, 1, 2).reshape(n, 3, side, patch, side, patch).permute(0, 2, 4, 1, 3, 5)
    rows = rows.reshape(n, side * side, -1)[:, by_squares(side, square).to(images.device)]
    rows = F.pad(rows.reshape(n * side * side, -1).to(out.dtype), (0, stride - 3 * patch * patch))
    out.copy_(torch.cat((rows, rows), 1))


def by_squares(side: int, square: int) -> Tensor:
    """Return the cells (side * side,) of a grid, which is row by row, in the order of `square` x `square` blocks."""
    grid = torch.arange(side * side).view(side // square, square, side // square, square)
    return grid.transpose(1, 2).flatten()


def add_norm(
    x: Tensor, y: Tensor | None, x_out: Tensor, h: Tensor, *, layer: bool, eps: float, inverse_scale: float | None,
) -> None:  # fmt: skip
    """x_out = x + y and h = norm(x_out). The norm has no weights: these are folded into the next product.

    Args:
        x, x_out: (R, W).
        y: (R', W), repeated to R rows; or None: x_out is not written.
        h: (R, W).
        layer: LayerNorm, otherwise RMSNorm.
    """
    if path(x) != "reference":
        return kernels("rows.triton_rows").add_norm(x, y, x_out, h, layer=layer, eps=eps, inverse_scale=inverse_scale)
    if y is not None:
        x_out.copy_(x + y.repeat(x.shape[0] // y.shape[0], 1).to(x.dtype))
        x = x_out
    store(h, normed(x, layer, eps), inverse_scale)


def embed_norm(
    image_tokens: Tensor, tokens: Tensor, table: Tensor, x: Tensor, h: Tensor, *, eps: float,
    inverse_scale: float | None, state: Tensor | None = None, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """x = the rows of the image tokens (B, I, W), then of the embedded `tokens` (B, L) times √W; h = rmsnorm(x).

    `state` (B, W): one more row in each sequence. It is row lengths[b] - 1, the last real one, and fills the last row.
    """
    if path(x) != "reference":
        return kernels("rows.triton_rows").embed_norm(
            image_tokens, tokens, table, x, h, eps=eps, inverse_scale=inverse_scale, state=state, lengths=lengths
        )
    embedded = table[tokens] * float(x.shape[1]) ** 0.5
    parts = [image_tokens, embedded.to(x.dtype)]
    if state is not None:
        assert lengths is not None
        parts.append(state[:, None].to(x.dtype))
        rows = torch.cat(parts, 1)
        last = torch.arange(rows.shape[1], device=x.device) == lengths[:, None] - 1
        parts = [torch.where(last[..., None], parts[-1], rows)]
    x.copy_(torch.cat(parts, 1).reshape(x.shape))
    store(h, normed(x, False, eps), inverse_scale)


def geglu(
    gate_up: Tensor, out: Tensor, *, inverse_scale: float | None, paired: bool = False,
    activation: Activation = Activation.GEGLU,
) -> None:  # fmt: skip
    """out (R, H) = activation(gate) * up, for GEGLU or SWIGLU. `gate_up` (R, 2 H) has gate first; if `paired`, eight
    columns of gate and eight of up alternate.
    """
    if path(gate_up) != "reference":
        return kernels("rows.triton_rows").geglu(
            gate_up, out, inverse_scale=inverse_scale, paired=paired, activation=activation
        )
    if paired:
        gate_up = gate_up.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    store(out, reference.activate(gate_up, activation), inverse_scale)


def gelu(x: Tensor, out: Tensor, *, inverse_scale: float | None) -> None:
    """out = gelu_tanh(x)."""
    if path(x) != "reference":
        return kernels("rows.triton_rows").gelu(x, out, inverse_scale=inverse_scale)
    store(out, reference.activate(x, Activation.GELU), inverse_scale)


def rope_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0 … length - 1, each (length, head_dim / 2) float32."""
    cos, sin = reference.rope_tables(torch.arange(length, device=device), head_dim, torch.float32)
    return cos[:, 0].contiguous(), sin[:, 0].contiguous()


def rope_cache(qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, heads: int) -> None:
    """Rotate q in `qkv` (B * S, (heads + 2 kv_heads) * d) in place, and write rotated k and v to the cache.

    keys, values (B, S, kv_heads, d), contiguous. Positions count the rows of each sequence.
    """
    if path(qkv) != "reference":
        return kernels("rows.triton_rows").rope_cache(qkv, cos, sin, keys, values, heads)
    batch, tokens, kv_heads, head_dim = keys.shape
    parts = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim)
    c, s = cos[:tokens, None].to(qkv.dtype), sin[:tokens, None].to(qkv.dtype)
    keys.copy_(reference.apply_rope(parts[:, :, heads : heads + kv_heads], c, s))
    values.copy_(parts[:, :, heads + kv_heads :])
    parts[:, :, :heads] = reference.apply_rope(parts[:, :, :heads], c, s)


def store(out: Tensor, value: Tensor, inverse_scale: float | None) -> None:
    """Store `value` in `out` as every op's reference does, quantised if there is a scale."""
    if inverse_scale is not None:
        form = INT8 if out.dtype == INT8.dtype else E4M3
        value = form.saturated(value.float() * inverse_scale)
    out.copy_(value.reshape(out.shape).to(out.dtype))


def normed(x: Tensor, layer: bool, eps: float) -> Tensor:
    """Reference of the norms without weights, in float32 or wider: LayerNorm if `layer`, otherwise RMSNorm."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if layer:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
