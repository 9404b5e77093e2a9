"""Ops on the rows of a residual stream: patches, embeddings, norms, activations, rotary positions.

Conventions of the ops: each writes into the buffers of its caller and allocates nothing on a GPU. Rows are flattened
tokens; a weight is (N, K). `inverse_scale`: x * inverse_scale is stored as float8_e4m3fn or int8, by the dtype of the
buffer, saturated at ±448 or ±127; None stores x in the dtype of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.fp8 import E4M3, INT8
from vla_accel.kernels import reference
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.dispatch import op
from vla_accel.kernels.image.pixels import levels

_TRITON = "rows.triton_rows"

# -- patches and embeddings -------------------------------------------------------------------------------------------


@op(_TRITON)
def patchify(images: Tensor, out: Tensor, patch: int, square: int = 1, pixel_maps: Tensor | None = None) -> None:
    """Write the patches of uint8 images (N, H, W, 3) to rows (N * patches, 2 * stride).

    A row holds the patch twice, in the order of a convolution's weight (channel, row, column), each padded with zeros
    to `stride`. Bytes are exact in BF16, so weights in two halves lose nothing.

    Args:
        square: patches come in squares of so many on a side, each row by row, so that patches that become one token are
            adjacent.
        pixel_maps: float32 (N, `pictures.MAP_WIDTH`). Rows then hold the mapped levels, rounded to the dtype of `out`.
            In BF16 the bars of lerobot 0.4, -255, are exact.
    """
    if pixel_maps is not None:
        images = levels(images, pixel_maps)
    n, height, width = images.shape[:3]
    side, stride = patch * square, out.shape[1] // 2
    split = images.permute(0, 3, 1, 2).reshape(n, 3, height // side, square, patch, width // side, square, patch)
    rows = split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(len(out), -1).to(out.dtype)
    rows = F.pad(rows, (0, stride - 3 * patch * patch))
    out.copy_(torch.cat((rows, rows), 1))


def by_squares(side: int, square: int) -> Tensor:
    """Return the cells (side * side,) of a grid, which is row by row, in the order of `square` x `square` blocks."""
    grid = torch.arange(side * side).view(side // square, square, side // square, square)
    return grid.transpose(1, 2).flatten()


@op(_TRITON)
def embed_norm(
    image_tokens: Tensor, tokens: Tensor, table: Tensor, x: Tensor, h: Tensor, *, eps: float,
    inverse_scale: float | None, state: Tensor | None = None, lengths: Tensor | None = None,
) -> None:  # fmt: skip
    """x = the rows of the image tokens (B, I, W), then of the embedded `tokens` (B, L) times √W; h = rmsnorm(x).

    `state` (B, W): one more row in each sequence. It is row lengths[b] - 1, the last real one, and fills the last row.
    """
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


@op(_TRITON)
def place_tokens(image_tokens: Tensor, tokens: Tensor, table: Tensor, order: Tensor, x: Tensor) -> None:
    """Write the rows x (B * S, W) of prompts: row s is number order[s] of the image tokens (B, I, W) followed by the
    embedded `tokens` (B, L) int64. order (S,) int64, S = I + L.
    """
    both = torch.cat((image_tokens, table[tokens].to(image_tokens.dtype)), 1)
    x.copy_(both[:, order].reshape(x.shape))


# -- norms and residuals ----------------------------------------------------------------------------------------------


@op(_TRITON)
def add_norm(
    x: Tensor, y: Tensor | None, x_out: Tensor, h: Tensor, *, layer: bool, eps: float, inverse_scale: float | None
) -> None:
    """x_out = x + y and h = norm(x_out). The norm has no weights: these are folded into the next product.

    Args:
        x, x_out: (R, W).
        y: (R', W), repeated to R rows; or None: x_out is not written.
        h: (R, W).
        layer: LayerNorm, otherwise RMSNorm.
    """
    if y is not None:
        x_out.copy_(x + y.repeat(x.shape[0] // y.shape[0], 1).to(x.dtype))
        x = x_out
    store(h, normed(x, layer, eps), inverse_scale)


@op(_TRITON)
def post_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    """out = LayerNorm(x + y) * weight + bias, of transformers whose norms follow the residuals.

    Args:
        x, out: (R, W). Their rows may lie apart, and those of x may be one row; `out` may be x.
        y: (R, W), contiguous.
        weight, bias: (W,) float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out.copy_(normed(x.to(wide) + y.to(wide), True, eps) * weight.to(wide) + bias.to(wide))


@op(_TRITON)
def project_normed(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, eps: float) -> None:
    """out = LayerNorm(x) weightᵀ + bias in float32, for a few columns. The norm has no weights.

    Args:
        x: (R, W).
        weight, bias: (A, W) and (A,) float32.
        out: (R, A) float32.
    """
    out.copy_(normed(x, True, eps).to(out.dtype) @ weight.to(out.dtype).T + bias.to(out.dtype))


@op(_TRITON)
def add_at(y: Tensor, places: Tensor, x: Tensor) -> None:
    """Add y (B, I, W) to the rows `places` (I,) int64, all different, of every S rows of x (B * S, W)."""
    x.view(len(y), -1, x.shape[1]).index_add_(1, places, y.to(x.dtype))


# -- activations ------------------------------------------------------------------------------------------------------


@op(_TRITON)
def geglu(
    gate_up: Tensor, out: Tensor, *, inverse_scale: float | None, paired: bool = False,
    activation: Activation = Activation.GEGLU,
) -> None:  # fmt: skip
    """out (R, H) = activation(gate) * up, for GEGLU or SWIGLU. `gate_up` (R, 2 H) has gate first; if `paired`, eight
    columns of gate and eight of up alternate.
    """
    if paired:
        gate_up = gate_up.unflatten(1, (-1, 2, 8)).transpose(1, 2).flatten(1)
    store(out, reference.activate(gate_up, activation), inverse_scale)


@op(_TRITON)
def gelu(x: Tensor, out: Tensor, *, inverse_scale: float | None, form: Activation = Activation.GELU) -> None:
    """out = GELU of x, which may be `out`, in one of its forms."""
    store(out, reference.activate(x, form), inverse_scale)


# -- rotary positions -------------------------------------------------------------------------------------------------


def rope_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0 … length - 1, each (length, head_dim / 2) float32."""
    cos, sin = reference.rope_tables(torch.arange(length, device=device), head_dim, torch.float32)
    return cos[:, 0].contiguous(), sin[:, 0].contiguous()


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of each head of q and of k; weights (d,) float32."""

    q: Tensor
    k: Tensor
    eps: float


@op(_TRITON)
def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, norms: HeadNorms | None = None, keys: Tensor | None = None,
    values: Tensor | None = None,
) -> None:  # fmt: skip
    """Norm and rotate q and k in `qkv` (B * T, (heads + 2 kv_heads) * d), q in place.

    Args:
        cos, sin: (T, d / 2) float32, or with a cache more positions.
        keys, values: the cache (B, T, kv_heads, d), contiguous, which receives k and v. None: k is rotated in place.
    """
    tokens, head_dim = len(cos) if keys is None else keys.shape[1], 2 * cos.shape[1]
    both = qkv.view(-1, tokens, qkv.shape[1] // head_dim, head_dim)
    kv_heads, wide = (both.shape[2] - heads) // 2, torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = both.split((heads, kv_heads, kv_heads), 2)
    c, s = (table[:tokens, None].to(wide) for table in (cos, sin))
    for part, out, weight in ((q, q, norms and norms.q), (k, k if keys is None else keys, norms and norms.k)):
        x = part.to(wide)
        x = x if norms is None or weight is None else normed(x, False, norms.eps) * weight
        out.copy_(reference.apply_rope(x, c, s))
    if values is not None:
        values.copy_(v)


@dataclass(frozen=True)
class NormedHeads:
    """Where keys and values go, contiguous and R * heads * d values each; and the weights (layers, heads * d) float32
    of the RMSNorm of keys."""

    k: Tensor
    v: Tensor
    norm: Tensor


@op(_TRITON)
def norm_heads(
    x: Tensor, into: NormedHeads, rope: tuple[Tensor, Tensor] | None, *, heads: int, eps: float, layers: int = 1
) -> None:
    """Norm the keys of rows x (R, 2 * heads * d) of keys and values over all their heads together, and rotate them.

    Args:
        rope: cos and sin (T, d / 2) float32 of a sequence's rows; None: nothing is rotated.
        layers: the rows of so many layers take turns. Outputs have all rows of the first layer first.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    k, v = (part.reshape(-1, layers, part.shape[1]) for part in x.chunk(2, 1))
    k = normed(k.to(wide), False, eps) * into.norm.view(layers, -1)
    if rope is not None:
        cos, sin = (table[:, None].to(wide) for table in rope)
        k = reference.apply_rope(k.view(-1, len(cos), heads, k.shape[2] // heads), cos, sin).view(k.shape)
    for part, out in ((k, into.k), (v, into.v)):
        out.copy_(part.transpose(0, 1).reshape(out.shape))


@op(_TRITON)
def norm_rows(x: Tensor, out: Tensor, *, heads: int, eps: float) -> None:
    """out = RMSNorm of the rows x (R, W) and then, of several `heads`, RMSNorm of each head. The norms have no
    weights."""
    value = normed(x, False, eps)
    if heads > 1:
        value = normed(value.unflatten(1, (heads, -1)), False, eps)
    out.copy_(value.reshape(out.shape))


# -- what references share --------------------------------------------------------------------------------------------


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
