"""What every Triton kernel of the native engine is checked on, and how its result is compared with the reference.

Shapes are awkward on purpose: widths that fill no block, one row, rows that fill no tile, lengths shorter than their
buffer. Every tensor lies between margins of NaN, so that reading or writing past its end shows; what a kernel must not
read is NaN, and so is every output before the run. Imports no triton: `test_kernels.py` runs the cases through the
interpreter, `test_gpu_kernels.py` on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.gpus import RTX_4090
from tests.support.kernel_calls import EPS, FP8, Call, Draw, Empty, Part, Same, Workspace, eight_bit
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import CrossTile, FlashTile, KeySplit, SuffixShape, key_splits
from vla_accel.kernels.attention.suffix import Prefix
from vla_accel.kernels.gemm.config import (
    GemmConfig,
    GemmSizes,
    Library,
    OneRow,
    Pipelined,
    Skinny,
    default,
    moments_columns,
)
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.moments import write as write_moments
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.rows.flow import ActionInput, ActionOutput, EulerStep, Guidance
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.pictures import ChannelScale, PixelValues


def _add_norm(rows: int, width: int, y: int | None, layer: bool, scale: float | None, alias: bool) -> Callable:
    """`y`: rows of it."""

    def call(draw: Draw) -> Call:
        # LayerNorm must take away a mean that is large compared with the spread; the embedding's stream is float32.
        x = draw.wide(rows, width) if not alias else draw(rows, width)
        arguments = {
            "x": x + 3.0, "y": None if y is None else draw(y, width),
            "x_out": Same("x") if alias else Empty((rows, width), draw.dtype),
            "h": Empty((rows, width), FP8 if scale else draw.dtype), "layer": layer, "eps": EPS, "inverse_scale": scale,
        }  # fmt: skip
        return Call("add_norm", arguments, ("h",) if y is None else ("x_out", "h"))

    return call


def _post_norm(rows: int, width: int, alias: bool, one: bool = False) -> Callable:
    """`one`: one row of x for all of y. Rows of x lie apart, as in a buffer that also has their positions."""

    def call(draw: Draw) -> Call:
        x = draw(1 if one else rows, 2 * width)[:, :width].expand(rows, width)
        arguments = {
            "x": x, "y": draw(rows, width), "weight": draw.wide(width), "bias": draw.wide(width),
            "out": Same("x") if alias else Empty((rows, width), draw.dtype), "eps": EPS,
        }  # fmt: skip
        return Call("post_norm", arguments, ("out",))

    return call


def _project_normed(rows: int, width: int, columns: int) -> Callable:
    def call(draw: Draw) -> Call:
        arguments = {
            "x": draw(rows, width), "weight": draw.wide(columns, width), "bias": draw.wide(columns),
            "out": Empty((rows, columns), torch.float32), "eps": EPS,
        }  # fmt: skip
        return Call("project_normed", arguments, ("out",))

    return call


def _embed_norm(
    batch: int, images: int, length: int, width: int, scale: float | None, lengths: list[int] | None = None
) -> Callable:
    """`lengths`: with a state in the last of them."""

    def call(draw: Draw) -> Call:
        rows = batch * (images + length + (lengths is not None))
        arguments = {
            "image_tokens": draw(batch, images, width), "tokens": draw.integers(9, batch, length),
            "table": draw(9, width, scale=width**-0.5), "x": Empty((rows, width), draw.dtype),
            "h": Empty((rows, width), FP8 if scale else draw.dtype), "eps": EPS, "inverse_scale": scale,
        }  # fmt: skip
        if lengths is not None:
            arguments |= {"state": draw(batch, width), "lengths": torch.tensor(lengths, dtype=torch.int32)}
        return Call("embed_norm", arguments, ("x", "h"))

    return call


def _activation(
    op: str, rows: int, hidden: int, scale: float | None, paired: bool = False, silu: bool = False
) -> Callable:
    def call(draw: Draw) -> Call:
        # Wide enough for both tails of GELU; in FP8 some saturate.
        x = draw(rows, hidden * (2 if op == "geglu" else 1), scale=4.0)
        out = Empty((rows, hidden), FP8 if scale else draw.dtype)
        arguments = {"gate_up" if op == "geglu" else "x": x, "out": out, "inverse_scale": scale}
        if paired:
            arguments["paired"] = True
        if silu:
            arguments["activation"] = Activation.SWIGLU
        return Call(op, arguments, ("out",))

    return call


def _pixel_maps(images: int, size: int) -> Tensor:
    """Of cameras of several aspect ratios, some scaled, some clipped."""
    scaled = ChannelScale((60.0, 90.5, 120.0), (1.5, -0.7, 3.25), -20.0)
    values = (
        PixelValues(outside=-255.0, clipped=(-255.0, 255.0)), PixelValues(cameras=(scaled,)),
        PixelValues(clipped=(0.0, 255.0), cameras=(scaled,)),
    )  # fmt: skip
    sizes = [(size, 2 * size), (3 * size, size), (size, size + 1)]
    maps = [values[n % 3].maps([(0, *sizes[n % 3])], size, "bilinear") for n in range(images)]
    return torch.from_numpy(np.concatenate(maps))


def _patchify(images: int, size: int, patch: int, stride: int, square: int = 1, mapped: bool = False) -> Callable:
    def call(draw: Draw) -> Call:
        rows = images * (size // patch) ** 2
        pixels = draw.integers(256, images, size, size, 3, dtype=torch.uint8)
        arguments = {"images": pixels, "out": Empty((rows, 2 * stride), draw.dtype), "patch": patch}
        arguments |= {"square": square} if square > 1 else {}
        arguments |= {"pixel_maps": _pixel_maps(images, size)} if mapped else {}
        return Call("patchify", arguments, ("out",))

    return call


def _rope_cache(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Callable:
    def call(draw: Draw) -> Call:
        # Tables longer than the sequence, as a larger shape would leave them.
        cos, sin = rope_tables(tokens + 5, head_dim, torch.device("cpu"))
        cache = Empty((batch, tokens, kv_heads, head_dim), draw.dtype)
        arguments = {
            "qkv": draw(batch * tokens, (heads + 2 * kv_heads) * head_dim), "cos": cos, "sin": sin, "keys": cache,
            "values": cache, "heads": heads,
        }  # fmt: skip
        return Call("rotate", arguments, ("qkv", "keys", "values"))

    return call


def _beyond(lengths: Tensor, total: int, heads: int, head_dim: int) -> Tensor:
    """True behind each row's length, (B, S, heads, d)."""
    return (torch.arange(total) >= lengths[:, None])[:, :, None, None].expand(-1, -1, heads, head_dim)


def _attention(
    tokens: int, source: int, heads: int, kv_heads: int, head_dim: int, lengths: list[int] | None,
    scale: float | None = None, last: bool = False, tile: FlashTile | None = None, counted: bool = False,
) -> Callable:  # fmt: skip
    """q is a view of q/k/v; k and v are the cache's. `counted`: the first key counts for 90, the last of a row not."""

    def call(draw: Draw) -> Call:
        batch = 2 if lengths is None else len(lengths)
        real = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        k, v = (draw(batch, source, kv_heads, head_dim) for _ in range(2))
        q = Part(draw(batch, tokens, heads + 3, head_dim, scale=2.0), lambda whole: whole[:, :, 1 : heads + 1])
        out = Empty((batch, tokens, heads * head_dim), FP8 if scale else draw.dtype)
        hidden = {} if real is None else dict.fromkeys("kv", _beyond(real, source, kv_heads, head_dim))
        arguments = {"q": q, "k": k, "v": v, "out": out, "lengths": real, "inverse_scale": scale}
        arguments |= ({"last": True} if last else {}) | ({"tile": tile} if tile else {})
        if counted:
            bias = torch.zeros(batch, source)
            bias[:, 0], bias[0, -1] = 4.5, -torch.inf
            arguments["bias"] = bias
        return Call("attention", arguments, ("out",), hidden)

    return call


def _self_attention(
    images: int, tokens: int, heads: int, head_dim: int, scale: float | None = None, tile: FlashTile | None = None
) -> Callable:
    """q, k and v are views of one product, as in the vision tower."""

    def call(draw: Draw) -> Call:
        qkv = draw(images, tokens, 3, heads, head_dim, scale=1.5)
        parts = {name: Part(qkv, lambda whole, i=i: whole.unbind(2)[i]) for i, name in enumerate("qkv")}
        out = Empty((images, tokens, heads * head_dim), FP8 if scale else draw.dtype)
        arguments = {**parts, "out": out, "lengths": None, "inverse_scale": scale, **({"tile": tile} if tile else {})}
        return Call("attention", arguments, ("out",))

    return call


def _prefix_attention(
    tokens: int, prefix: int, heads: int, head_dim: int, lengths: list[int], config: KeySplit | None = None,
    eps: float | None = None,
) -> Callable:  # fmt: skip
    def call(draw: Draw) -> Call:
        batch, real = len(lengths), torch.tensor(lengths, dtype=torch.int32)
        sizes = SuffixShape(batch, tokens, prefix, heads, heads, head_dim, draw.dtype.itemsize, own=False)
        taken = config or key_splits(None, sizes)[0]
        keys, values = (draw(batch, prefix, heads, head_dim) for _ in range(2))
        arguments = {
            "q": draw(batch, tokens, heads, head_dim, scale=2.0), "prefix": Prefix(keys, values, real),
            "out": Empty((batch * tokens, heads * head_dim), draw.dtype), "workspace": Workspace(sizes, taken),
            "config": taken, "eps": eps,
        }  # fmt: skip
        beyond = _beyond(real, prefix, heads, head_dim)
        return Call("prefix_attention", arguments, ("out",), {"keys": beyond, "values": beyond})

    return call


def _suffix_attention(
    tokens: int,
    prefix: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lengths: list[int],
    state_first: bool,
    config: KeySplit | None = None,
    causal: bool = False,
) -> Callable:
    def call(draw: Draw) -> Call:
        batch, real = len(lengths), torch.tensor(lengths, dtype=torch.int32)
        sizes = SuffixShape(batch, tokens, prefix, heads, kv_heads, head_dim, draw.dtype.itemsize)
        taken = config or key_splits(None, sizes)[0]
        keys, values, k, v = (draw(batch, n, kv_heads, head_dim) for n in (prefix, prefix, tokens, tokens))
        arguments = {
            "suffix": Heads(draw(batch, tokens, heads, head_dim, scale=2.0), k, v),
            "prefix": Prefix(keys, values, real), "out": Empty((batch * tokens, heads * head_dim), draw.dtype),
            "workspace": Workspace(sizes, taken), "state_first": state_first, "config": taken,
        }  # fmt: skip
        arguments |= {"causal": True} if causal else {}
        beyond = _beyond(real, prefix, kv_heads, head_dim)
        return Call("suffix_attention", arguments, ("out",), {"keys": beyond, "values": beyond})

    return call


def _qkv_rope(
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    adaptive: bool,
    weights: str = "",
    config: GemmConfig | None = None,
    moments: int = 0,
    pinned: bool = False,
) -> Callable:
    """`moments`: columns of their tiles, 0 for rows without moments."""

    def call(draw: Draw) -> Call:
        columns = (heads + 2 * kv_heads) * head_dim
        lengths = torch.arange(7, 7 + 20 * batch, 20, dtype=torch.int32)
        cos, sin = rope_tables(int(lengths[-1]) + tokens, head_dim, torch.device("cpu"))
        out = Heads(*(Empty((batch, tokens, n, head_dim), draw.dtype) for n in (heads, kv_heads, kv_heads)))  # type: ignore
        layer = draw.linear(columns, width, weights=weights)
        rope = Rotation(cos, sin, lengths)
        return _pair_call(draw, layer, (batch * tokens, width), out, adaptive, config, moments, pinned, rope=rope)

    return call


def _pair_call(
    draw: Draw, layer: Linear, shape: tuple[int, int], out: Any, adaptive: bool, config: GemmConfig | None,
    moments: int, pinned: bool, **epilogue: Any,
) -> Call:  # fmt: skip
    """A product of pairs of normed rows."""
    (rows, width), n, two = shape, len(layer.weight), (2,) if pinned else ()
    x = draw(rows, width, scale=2.0)
    scale = draw.wide(*two, width, scale=0.3) if adaptive else None
    epilogue |= {"shift": draw.wide(*two, n) if adaptive else None}
    epilogue |= {"pinned": draw.integers(2, rows, dtype=torch.int32) if pinned else None}
    arguments = {
        "x": x, "weights": layer, "out": out, "epilogue": Epilogue(**epilogue),
        "norm": Norm(EPS, moments_of(x, scale, moments) if moments else None, scale), "config": config,
    }  # fmt: skip
    if isinstance(config, Library):
        arguments["workspace"] = Workspace(GemmSizes(rows, width, n), config)
    return Call("gemm", arguments, ("out.q", "out.k", "out.v") if isinstance(out, Heads) else ("out",))


def _cross_attention(
    tokens: int, source: int, width: int, heads: int, kv_heads: int, head_dim: int, lengths: list[int],
    weights: str = "", moments: int = 0, config: CrossTile | None = None,
) -> Callable:  # fmt: skip
    def call(draw: Draw) -> Call:
        batch, real = len(lengths), torch.tensor(lengths, dtype=torch.int32)
        rope = rope_tables(tokens + 3, head_dim, torch.device("cpu"))
        keys, values = (draw(batch, source, kv_heads, head_dim) for _ in range(2))
        arguments: dict[str, Any] = {
            "x": draw(batch * tokens, width, scale=2.0), "rope": rope, "prefix": Prefix(keys, values, real),
            "weights": draw.linear(heads * head_dim, width, weights=weights),
            "out": Empty((batch * tokens, heads * head_dim), draw.dtype),
        }  # fmt: skip
        if config is not None:
            arguments["config"] = config
        arguments["norm"] = Norm(EPS, moments_of(arguments["x"], None, moments) if moments else None)
        beyond = _beyond(real, source, kv_heads, head_dim)
        return Call("cross_attention", arguments, ("out",), {"keys": beyond, "values": beyond})

    return call


def _gate_up(
    rows: int, width: int, hidden: int, adaptive: bool, weights: str = "", config: GemmConfig | None = None,
    silu: bool = False, moments: int = 0, pinned: bool = False,
) -> Callable:  # fmt: skip
    def call(draw: Draw) -> Call:
        layer, out = draw.linear(2 * hidden, width, weights=weights), Empty((rows, hidden), draw.dtype)
        activation = Activation.SWIGLU if silu else Activation.GEGLU
        return _pair_call(draw, layer, (rows, width), out, adaptive, config, moments, pinned, activation=activation)

    return call


def moments_of(x: Tensor, scale: Tensor | None, columns: int) -> Moments:
    moments = Moments.like(x, columns, scale is not None)
    write_moments(x, scale, moments)
    return moments


def _project(rows: int, n: int, k: int, tokens: int, what: str, config: GemmConfig | None = None) -> Callable:
    """`what`: letters of gate, bias, residual, skip the first, 8-bit (FP8) or integers, pinned; moments of what it
    writes, next norm's scale."""
    two, sizes = (2,) if "p" in what else (), GemmSizes(rows, k, n)

    def call(draw: Draw) -> Call:
        tile, outputs, moments = config, ["out"], None
        next_scale = draw.wide(n, scale=0.3) if "n" in what else None
        if "m" in what:
            assert tile is not None and not isinstance(tile, OneRow)
            columns = moments_columns(sizes, tile)
            sums, squares = (Empty((-(-n // columns), rows), torch.float32) for _ in range(2))
            scaled = Empty((rows, n), draw.dtype) if "n" in what else None
            moments = Moments(sums, squares, scaled, columns)  # type: ignore[arg-type]
            outputs += [f"epilogue.moments.{name}" for name in ("sums", "squares", *(["scaled"] if scaled else []))]
        epilogue = Epilogue(
            gate=draw.wide(*two, n) if "g" in what else None, residual="r" in what,
            skip_every=tokens if "s" in what else 0, moments=moments, next_scale=next_scale,
            pinned=draw.integers(2, rows, dtype=torch.int32) if two else None,
        )  # fmt: skip
        if tile is None:
            tile = default(RTX_4090, dataclasses.replace(sizes, row_bytes=draw.dtype.itemsize))  # fits any GPU
        arguments = {
            "x": draw(rows, k), "weights": draw.linear(n, k, weights=eight_bit(what), bias="b" in what),
            "out": draw(rows, n), "epilogue": epilogue, "config": tile,
            "workspace": Workspace(sizes, tile) if isinstance(tile, (Pipelined, Library)) else None,
        }  # fmt: skip
        return Call("gemm", arguments, tuple(outputs))

    return call


def _library_cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    """What stands around a library's product: moments in one tile and in several, with and without shift and scale."""
    for shape in ((1, 5, 96, 2, 1, 64), (3, 13, 128, 3, 2, 72)):
        for adaptive, columns in ((True, 32), (False, shape[2])):
            name = f"qkv_rope {shape} adaptive={adaptive} by the library"
            yield name, _qkv_rope(*shape, adaptive, "", Library(), columns)
    for rows, width, hidden in ((7, 128, 72), (39, 64, 600)):
        for adaptive, silu in ((True, False), (False, True)):
            name = f"gate_up_geglu {rows}x{width}x{hidden} silu={silu} by the library"
            yield name, _gate_up(rows, width, hidden, adaptive, "", Library(), silu, 16)
    for shape in ((5, 72, 100, 1, "grmn"), (39, 200, 64, 1, "rm"), (21, 24, 64, 7, "bs"), (6, 128, 40, 1, "gbr")):
        yield f"project {shape} by the library", _project(*shape, Library())


def _step(batch: int, tokens: int, horizon: int, width: int, actions: int, what: str) -> Callable:
    """`what`: letters of first, last, norm shift, SiLU, pinned, two rows of input."""

    def call(draw: Draw) -> Call:
        stream = draw(batch * tokens, width, scale=3.0)
        # Only the actions' tokens may be looked at.
        hidden = (torch.arange(batch * tokens) % tokens < tokens - horizon)[:, None].expand_as(stream)
        output = ActionOutput(
            draw.wide(width, scale=0.3),
            draw.wide(width) if "n" in what else None,
            draw.wide(actions, width, scale=width**-0.5),
            draw.wide(actions),
            EPS,
        )
        before = draw.wide(batch, horizon, actions)
        guidance = Guidance(draw.wide(batch, horizon, actions), draw.wide(batch, horizon), "p" in what)
        activation = Activation.SILU if "s" in what else Activation.NONE
        bias = draw.wide(*((2,) if "2" in what else ()), width)
        arguments = {
            "x": stream, "output": output, "actions": before, "guidance": guidance,
            "into": ActionInput(draw.wide(actions, width), bias, activation),
            "following": draw(batch * tokens, width),
            "at": EulerStep(-0.1, 0.7, 2.5, "f" in what, "l" in what), "tokens": tokens,
        }  # fmt: skip
        return Call("step", arguments, ("actions", "following"), {"x": hidden})

    return call


def _cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    for layer in (False, True):
        kind = "layer" if layer else "rms"
        for rows, width, y in ((1, 1152, 1), (3, 4304, 3), (10, 256, 5), (16, 6, 16), (17, 72, None), (51, 1152, None)):
            for scale in (None, 30.0):
                name = f"add_norm {kind} {rows}x{width} y={y} fp8={scale is not None}"
                yield name, _add_norm(rows, width, y, layer, scale, alias=False)
                if y == rows:
                    yield f"{name} in place", _add_norm(rows, width, y, layer, scale, alias=True)
    for rows, width, alias in ((3, 512, True), (10, 64, False), (17, 72, True)):
        yield f"post_norm {rows}x{width}", _post_norm(rows, width, alias)
    yield "post_norm of one row 7x64", _post_norm(7, 64, False, one=True)
    yield "project_normed 5x96 to 7", _project_normed(5, 96, 7)
    yield "project_normed 3x512 to 14", _project_normed(3, 512, 14)
    for shape in ((2, 5, 3, 64), (1, 1, 10, 1152), (2, 4, 1, 4304)):
        for scale in (None, 30.0):
            yield f"embed_norm {shape} fp8={scale is not None}", _embed_norm(*shape, scale)
    for op in ("geglu", "gelu"):
        for rows, hidden in ((1, 4304), (3, 1152), (17, 20), (100, 72)):
            for scale in (None, 60.0):
                yield f"{op} {rows}x{hidden} fp8={scale is not None}", _activation(op, rows, hidden, scale)
    for rows, hidden in ((1, 4352), (17, 72)):
        for scale in (None, 60.0):
            name = f"geglu paired {rows}x{hidden} fp8={scale is not None}"
            yield name, _activation("geglu", rows, hidden, scale, paired=True)
    for shape in ((2, 28, 14, 592), (3, 32, 16, 768), (1, 42, 14, 640)):
        yield f"patchify {shape}", _patchify(*shape)
    yield "patchify (3, 28, 14, 592) mapped", _patchify(3, 28, 14, 592, mapped=True)
    yield "patchify (3, 24, 4, 48) by twos, mapped", _patchify(3, 24, 4, 48, 2, mapped=True)
    for shape in ((1, 3, 8, 1, 256), (2, 17, 4, 2, 64), (2, 10, 3, 3, 72), (1, 100, 0, 1, 256), (2, 5, 0, 2, 6)):
        yield f"rotate into a cache {shape}", _rope_cache(*shape)
    for shape in (
        (1, 1, 1, 1, 64, [1]), (3, 70, 8, 1, 256, [50]), (17, 33, 4, 2, 72, [33, 7]), (64, 100, 4, 1, 64, [64, 65]),
        (33, 130, 2, 2, 6, [129, 1]), (100, 100, 2, 1, 72, None), (10, 17, 2, 2, 256, None),
    ):  # fmt: skip
        yield f"attention {shape}", _attention(*shape)
    yield "attention fp8", _attention(51, 64, 8, 1, 64, [40, 64], 200.0)
    for shape in ((5, 34, 2, 2, 64, None), (20, 130, 4, 2, 72, None)):
        yield f"counted attention {shape}", _attention(*shape, counted=True)
    for shape in ((2, 16, 4, 72), (1, 51, 2, 64), (2, 100, 3, 72)):
        yield f"self-attention {shape}", _self_attention(*shape)
    yield "self-attention fp8", _self_attention(1, 64, 2, 72, 200.0)
    for tile in (FlashTile(64, 32, 4, 3), FlashTile(128, 64, 8, 2)):
        yield f"self-attention whole {tile}", _self_attention(1, 128, 2, 64, tile=tile)
        yield f"attention padded {tile}", _attention(100, 130, 2, 1, 72, [129, 64], tile=tile)
    for shape in (
        (10, 70, 8, 1, 64, [70, 40], False), (17, 100, 8, 1, 256, [90], True), (10, 64, 4, 2, 64, [64], True),
        (1, 3, 1, 1, 256, [2], False), (3, 65, 6, 3, 72, [65, 1], True), (16, 130, 8, 1, 72, [129], False),
        (17, 40, 8, 1, 64, [7], True), (64, 17, 2, 1, 64, [17, 0], True), (100, 64, 1, 1, 64, [63], False),
    ):  # fmt: skip
        yield f"suffix_attention {shape}", _suffix_attention(*shape)
    for split in (None, KeySplit(16, 32, 2, 2, 4), KeySplit(64, 32, 8, 1, 8)):
        yield f"prefix_attention {split}", _prefix_attention(50, 130, 2, 112, [130, 7], split)
    for split in (None, KeySplit(16, 32, 2, 2, 4)):
        yield f"prefix_attention normed {split}", _prefix_attention(10, 100, 2, 24, [90], split, EPS)
    yield "prefix_attention of one", _prefix_attention(5, 20, 3, 24, [20])
    # Weights of one byte are widened alike at every shape: FP8 and INT8 take turns.
    for shape, weights in zip((
        (1, 1, 1152, 2, 1, 64), (1, 3, 128, 2, 1, 256), (2, 5, 64, 4, 2, 64), (1, 16, 72, 3, 3, 72),
        (1, 17, 320, 1, 1, 72), (1, 51, 256, 2, 1, 64), (1, 64, 1152, 1, 1, 64), (2, 50, 96, 1, 1, 256),
    ), itertools.cycle(("fp8", "int8")), strict=False):  # fmt: skip
        yield f"qkv_rope {shape} adaptive=True plain", _qkv_rope(*shape, True)
        yield f"qkv_rope {shape} adaptive=False {weights}", _qkv_rope(*shape, False, weights)
    for shape, weights in zip((
        (1, 1152, 96), (3, 128, 136), (10, 1024, 128), (16, 72, 20), (17, 1152, 72), (51, 256, 320), (64, 4304, 40),
        (100, 64, 136),
    ), itertools.cycle(("int8", "fp8")), strict=False):  # fmt: skip
        yield f"gate_up_geglu {shape} adaptive=True {weights}", _gate_up(*shape, True, weights)
        yield f"gate_up_geglu {shape} adaptive=False plain", _gate_up(*shape, False)
    for shape in (
        (1, 64, 4304, 1, "gr"), (3, 200, 128, 3, "gr8"), (10, 128, 2048, 5, "gr"), (10, 20, 4096, 10, "r"),
        (16, 72, 72, 4, "bs"), (17, 40, 1152, 17, "rb"), (51, 200, 256, 51, "bs"), (64, 24, 4304, 32, "gr8"),
        (100, 100, 320, 50, "gbrs"), (102, 64, 64, 51, "bs8"),
        (3, 200, 128, 3, "gri"), (10, 20, 4096, 10, "ri"), (51, 200, 256, 51, "bsi"), (64, 24, 4304, 32, "gri"),
    ):  # fmt: skip
        yield f"project {shape}", _project(*shape)
    for shape in (
        (1, 1, 1, 128, 8, "fn"), (2, 5, 5, 1152, 8, "n"), (1, 10, 10, 72, 32, "ln"), (1, 51, 50, 256, 32, "s"),
        (2, 4, 3, 64, 7, "fs"), (2, 17, 16, 1024, 32, "ls"),
    ):  # fmt: skip
        yield f"step {shape}", _step(*shape)
    yield from _smolvla_cases()
    yield from _library_cases()
    yield from _pinned_cases()
    yield from _one_row_cases()
    yield from _ready_cases()


def _smolvla_cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    """What SmolVLA adds: SwiGLU, a state at the end, causal actions, heads of no power of two, layers that cross."""
    yield "geglu silu 3x100", _activation("geglu", 3, 100, None, silu=True)
    yield "geglu silu paired fp8", _activation("geglu", 5, 72, 60.0, paired=True, silu=True)
    yield "embed_norm with a state", _embed_norm(3, 4, 5, 60, None, [10, 6, 8])
    yield "patchify (2, 32, 4, 48) by squares", _patchify(2, 32, 4, 48, 4)
    yield "patchify (1, 24, 4, 48) by twos", _patchify(1, 24, 4, 48, 2)
    yield "attention (40, 40, 6, 2, 24) last", _attention(40, 40, 6, 2, 24, [40, 7], last=True)
    yield "attention last fp8", _attention(20, 20, 3, 1, 16, [18], 200.0, last=True)
    for tokens in (5, 21):
        yield f"suffix_attention {tokens} causal", _suffix_attention(tokens, 40, 6, 2, 24, [40, 3], False, causal=True)
    yield "qkv_rope (1, 18, 60, 6, 2, 24)", _qkv_rope(1, 18, 60, 6, 2, 24, False)
    for rows in (9, 17):
        yield f"gate_up_geglu {rows} silu", _gate_up(rows, 60, 72, False, silu=True)
    for shape in ((21, 70, 60, 6, 2, 24, [70, 3]), (5, 9, 96, 3, 1, 64, [9]), (16, 64, 300, 2, 2, 16, [1])):
        for weights in ("", "fp8", "int8"):
            yield f"cross_attention {shape} {weights or 'plain'}", _cross_attention(*shape, weights)
        yield f"cross_attention {shape} moments", _cross_attention(*shape, moments=32)
    # More keys than are prefetched.
    yield "cross_attention 300 keys", _cross_attention(18, 300, 40, 2, 1, 16, [290], moments=16)
    for config, weights in ((CrossTile(16, 128, 2, 16), ""), (CrossTile(32, 16, 3, 64), "int8")):
        yield f"cross_attention {config}", _cross_attention(40, 50, 136, 3, 1, 16, [50, 17], weights, 8, config)


def _pinned_cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    """What a model trained with clean prefixes adds: a row of x takes the step's constants or those of t = 0."""
    for rows, config in ((9, None), (21, None), (40, Pipelined(16, 32, 64))):
        yield (
            f"qkv_rope {rows} pinned",
            _qkv_rope(1, rows, 72, 2, 1, 24, True, "fp8" if rows == 21 else "", config, pinned=True),
        )
        yield (
            f"gate_up_geglu {rows} pinned",
            _gate_up(rows, 72, 40, True, "int8" if rows == 9 else "", config, pinned=True),
        )
        yield f"project {rows} pinned", _project(rows, 40, 136, 1, "grp", config)
    yield "project of parts pinned", _project(33, 24, 320, 1, "gp", Pipelined(16, 16, 64, split=2))
    for what in ("fp", "np", "lnp", "fsp2", "sp2"):
        yield f"step pinned {what}", _step(2, 6, 5, 72, 7, what)


def _ready_cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    """Weights that are in the tensor cores' layout before the wait: all of them, or the first chunks."""
    for weights, early in (("", 4), ("fp8", 2), ("int8", 1)):
        config = Skinny(16, 4, 64, 16, early, ready=True)
        yield f"project {weights} {config} moments", _project(9, 40, 200, 1, "gbrmn", config)
        yield f"qkv_rope {weights} {config}", _qkv_rope(1, 9, 200, 2, 1, 24, True, weights, config)
        yield f"qkv_rope {weights} {config} moments", _qkv_rope(1, 9, 200, 2, 1, 24, True, weights, config, 16)
        yield f"gate_up_geglu {weights} {config}", _gate_up(9, 200, 20, True, weights, config)
        yield (
            f"project {weights} {config}",
            _project(9, 20, 200, 1, "gr" + {"fp8": "8", "int8": "i"}.get(weights, ""), config),
        )


def _one_row_cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    """π0-FAST's token: products without tensor cores, by programs that take one tile of columns, or several of which
    the last is not full."""
    for weights, config in (("", OneRow(4, 1)), ("fp8", OneRow(2, 3)), ("int8", OneRow(8, 2))):
        said = f"{weights} {config}"
        yield f"qkv_rope {said}", _qkv_rope(1, 1, 1152, 2, 1, 64, True, weights, config)
        yield f"gate_up_geglu {said}", _gate_up(1, 1152, 100, False, weights, config)
        yield f"project {said}", _project(1, 60, 4304, 1, "gr" + {"": "b", "fp8": "8", "int8": "i"}[weights], config)


CASES: dict[str, Callable[[Draw], Call]] = dict(_cases())


def call_of(name: str, dtype: torch.dtype) -> Call:
    """The case's call, the same every time."""
    return CASES[name](Draw(name, dtype))
