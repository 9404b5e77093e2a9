"""Cases of `ops.sequence` and `ops.dit`, as those of kernel_cases.py: awkward shapes, and GR00T's own at few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.support.kernel_calls import EPS, FP8, Call, Draw, Empty, Part, Same, eight_bit
from tests.support.kernel_cases import moments_of
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention.config import FlashTile, NormedTile
from vla_accel.kernels.attention.maps import Windows
from vla_accel.kernels.attention.normed import HeadsNorm, Keys
from vla_accel.kernels.gemm.config import GemmConfig, Pipelined, Skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.rows.flow import ActionInput, EulerStep, Guidance
from vla_accel.kernels.rows.mix import Head, Mix, MixedInput
from vla_accel.kernels.rows.rows import HeadNorms, NormedHeads, rope_tables


def _patchify(images: int, rows: int, columns: int, patch: int, merge: int, stride: int) -> Callable:
    def call(draw: Draw) -> Call:
        side = patch * merge
        pixels = draw.integers(256, images, rows * side, columns * side, 3, dtype=torch.uint8)
        out = Empty((images * rows * columns * merge**2, 2 * stride), draw.dtype)
        return Call("patchify", {"images": pixels, "out": out, "patch": patch, "square": merge}, ("out",))

    return call


def _place(batch: int, images: int, length: int, width: int) -> Callable:
    def call(draw: Draw) -> Call:
        order = torch.randperm(images + length, generator=draw.generator)
        arguments = {
            "image_tokens": draw(batch, images, width), "tokens": draw.integers(9, batch, length),
            "table": draw(9, width), "order": order, "x": Empty((batch * (images + length), width), draw.dtype),
        }  # fmt: skip
        return Call("place_tokens", arguments, ("x",))

    return call


def _add_at(batch: int, tokens: int, count: int, width: int) -> Callable:
    def call(draw: Draw) -> Call:
        places = torch.randperm(tokens, generator=draw.generator)[:count]
        arguments = {"y": draw(batch, count, width), "places": places, "x": draw(batch * tokens, width)}
        return Call("add_at", arguments, ("x",))

    return call


def _norm_rope(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool) -> Callable:
    def call(draw: Draw) -> Call:
        norms = HeadNorms(draw.wide(head_dim), draw.wide(head_dim), EPS) if norm else None
        angles = draw.wide(tokens, head_dim // 2, scale=3.0)
        arguments = {
            "qkv": draw(batch * tokens, (heads + 2 * kv_heads) * head_dim), "norms": norms, "cos": angles.cos(),
            "sin": angles.sin(), "heads": heads,
        }  # fmt: skip
        return Call("rotate", arguments, ("qkv",))

    return call


def _causal(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, padding: tuple[int, ...] | None = None,
    islands: tuple[slice, ...] = (), scale: float | None = None, tile: FlashTile | None = None,
) -> Callable:  # fmt: skip
    """`padding`: rows before the first real one; `islands`: rows that see each other; `scale`: of an FP8 output."""

    def call(draw: Draw) -> Call:
        whole = draw(batch, tokens, heads + 2 * kv_heads, head_dim)
        ends = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        parts = {
            name: Part(whole, lambda t, a=a, b=b: t[:, :, a:b])
            for name, a, b in zip("qkv", ends[:-1], ends[1:], strict=True)
        }
        out = Empty((batch, tokens, heads * head_dim), draw.dtype if scale is None else FP8)
        starts = None if padding is None else torch.tensor(padding, dtype=torch.int32)
        together = torch.zeros(tokens, dtype=torch.int32) if islands else None
        for island in islands:
            together[island] = 1  # type: ignore[index]
        more = {"out": out, "starts": starts, "together": together, "inverse_scale": scale, "tile": tile}
        return Call("causal_attention", {**parts, **more}, ("out",))

    return call


def _gelu(rows: int, width: int) -> Callable:
    def call(draw: Draw) -> Call:
        x = draw(rows, width, scale=2.0)
        return Call("gelu", {"x": x, "out": Same("x"), "inverse_scale": None, "form": Activation.GELU_ERF}, ("out",))

    return call


def _product(rows: int, n: int, k: int, what: str, config: GemmConfig | None = None) -> Callable:
    """`what`: letters of norm, quadratic mean alone, scale, gelu, relu, 8-bit (FP8) or integers; moments that come with
    the rows; constant rows, whose variance rounds to less than zero, times weights of zero."""

    def call(draw: Draw) -> Call:
        layer, scale = draw.linear(n, k, weights=eight_bit(what)), draw.wide(k, scale=0.3) if "s" in what else None
        if "c" in what:
            layer = replace(layer, weight=torch.zeros_like(layer.weight))
        stored = layer.true_weight(torch.float32)
        sums = (stored if scale is None else stored * (1.0 + scale)).sum(1)
        x, shift = draw(rows, k) + 0.5, draw.wide(n)
        x = 100.0 * x[:, :1].expand(rows, k).contiguous() if "c" in what else x
        activation = Activation.GELU if "g" in what else Activation.RELU if "r" in what else Activation.NONE
        moments = moments_of(x, scale, 32) if "m" in what else None
        arguments = {
            "x": x, "weights": layer, "out": Empty((rows, n), draw.dtype), "epilogue": Epilogue(shift, activation),
            "norm": Norm(EPS, moments, scale, None if "q" in what else sums) if "n" in what else None, "config": config,
        }  # fmt: skip
        return Call("gemm", arguments, ("out",))

    return call


def _measured(rows: int, width: int, scaled: bool) -> Callable:
    def call(draw: Draw) -> Call:
        room = [Empty((1, rows), torch.float32) for _ in range(2)]
        out = Moments(*room, Empty((rows, width), draw.dtype) if scaled else None, width)  # type: ignore[arg-type]
        arguments = {"x": draw(rows, width) + 0.5, "scale": draw.wide(width, scale=0.3) if scaled else None, "out": out}
        return Call("measure", arguments, ("out.sums", "out.squares", *(("out.scaled",) if scaled else ())))

    return call


def _wide_norm(batch: int, tokens: int, heads: int, head_dim: int, rotated: bool, layers: int) -> Callable:
    def call(draw: Draw) -> Call:
        rows, width = batch * tokens * layers, heads * head_dim
        keys, values = (Empty((rows, width), draw.dtype) for _ in range(2))
        into = NormedHeads(keys, values, 1.0 + draw.wide(layers, width, scale=0.3))  # type: ignore[arg-type]
        arguments = {
            "x": draw(rows, 2 * width), "into": into,
            "rope": rope_tables(tokens, head_dim, torch.device("cpu")) if rotated else None, "heads": heads,
            "eps": EPS, "layers": layers,
        }  # fmt: skip
        return Call("norm_heads", arguments, ("into.k", "into.v"))

    return call


def normed_attention(
    batch: int, tokens: int, source: int, heads: int, head_dim: int, what: str, columns: int, tile: NormedTile | None
) -> Callable:
    """`what`: letters of own keys, rope, bias and cache. `columns`: of the moments' tiles; 0: parts are rows."""

    def call(draw: Draw) -> Call:
        width, parts = heads * head_dim, 3 if "k" in what else 1
        x = draw(batch * tokens, parts * width)
        moments = moments_of(x, None, columns) if columns else moments_of(x.view(-1, width), None, width)
        q_norm, k_norm = (1.0 + draw.wide(width, scale=0.3) for _ in range(2))
        rope = rope_tables(tokens, head_dim, torch.device("cpu")) if "r" in what else None
        prefix, cache = None, None
        if source:
            bias = draw.wide(batch, source)
            bias[:, 1::3] = -float("inf")
            keys, values = (draw(batch, source, heads, head_dim) for _ in range(2))
            prefix = Keys(keys, values, bias if "b" in what else None)
        if "c" in what:
            cache = Keys(*(Empty((batch, tokens, heads, head_dim), draw.dtype) for _ in range(2)))  # type: ignore[arg-type]
        arguments = {
            "x": x, "moments": moments,
            "norm": HeadsNorm(EPS, q_norm, k_norm if "k" in what else None, rope),
            "out": Empty((batch, tokens, heads, head_dim), draw.dtype), "prefix": prefix, "cache": cache, "tile": tile,
        }  # fmt: skip
        return Call("normed_attention", arguments, ("out", *(("cache.keys", "cache.values") if cache else ())))

    return call


def _flow(batch: int, tokens: int, horizon: int, width: int, actions: int, what: str) -> Callable:
    """`what`: letters of first, last, plain for no activation, relu with positions, and guided instead of pinned."""

    def call(draw: Draw) -> Call:
        shape, last = (batch, horizon, actions), "l" in what
        weights = draw.wide(batch, horizon).clamp(0, 1)
        hidden = draw(batch * tokens, width)
        arguments = {
            "velocity": draw.wide(batch * tokens, actions), "before": draw.wide(*shape),
            "guidance": Guidance(draw.wide(*shape), weights, pinned="g" not in what),
            "into": ActionInput(
                draw.wide(actions, width, scale=actions**-0.5), draw.wide(width),
                Activation.NONE if "p" in what else Activation.RELU if "r" in what else Activation.SILU,
                draw.wide(horizon, width) if "r" in what else None,
            ),
            "after": Empty(shape, torch.float32), "hidden": hidden,
            "at": EulerStep(0.25, 0.75, 0.5, first="f" in what, last=last), "tokens": tokens,
        }  # fmt: skip
        return Call("flow_step", arguments, ("after",) if last else ("after", "hidden"))

    return call


def _mixed(batch: int, tokens: int, horizon: int, width: int, actions: int, what: str) -> Callable:
    """`what`: letters of first, last and 8 for rows in FP8."""

    def call(draw: Draw) -> Call:
        shape, last, rows = (batch, horizon, actions), "l" in what, (batch * tokens, width)
        arguments = {
            "x": Empty(rows, draw.dtype) if "f" in what else draw(*rows),
            "h": Empty(rows, FP8 if "8" in what else draw.dtype),
            "head": Head(draw.wide(actions, width, scale=width**-0.5), draw.wide(actions), EPS),
            "noise": draw.wide(*shape),
            "into": MixedInput(
                draw.wide(actions, width, scale=actions**-0.5), draw.wide(batch, horizon, width), draw.wide(width),
                draw(batch, tokens - horizon, width),
            ),
            "actions": Empty(shape, torch.float32), "at": Mix(0.75, first="f" in what, last=last),
            "inverse_scale": 30.0 if "8" in what else None,
        }  # fmt: skip
        return Call("mix_step", arguments, ("actions",) if last else ("x", "h"))

    return call


def _by_windows(maps: int, height: int, width: int, side: int, heads: int, head_dim: int) -> Callable:
    def call(draw: Draw) -> Call:
        pixels, columns = height * width, heads * head_dim
        arguments = {
            "qkv": draw(maps, pixels, 3 * columns), "padding": draw(3 * columns),
            "out": Empty((maps, pixels, columns), draw.dtype), "windows": Windows(height, width, side), "heads": heads,
        }  # fmt: skip
        return Call("window_attention", arguments, ("out",))

    return call


def _by_channels(maps: int, pixels: int, groups: int, channels: int) -> Callable:
    def call(draw: Draw) -> Call:
        out = Empty((maps, pixels, groups * channels), draw.dtype)
        arguments = {"qkv": draw(maps, pixels, 3 * groups * channels), "out": out, "groups": groups}
        return Call("channel_attention", arguments, ("out",))

    return call


def _cases() -> Iterator[tuple[str, Callable[[Draw], Call]]]:
    for shape in ((2, 2, 3, 4, 2, 48), (1, 1, 2, 5, 1, 80)):
        yield f"patchify in squares {shape}", _patchify(*shape)
    for shape in ((2, 5, 7, 12), (1, 1, 1, 40)):
        yield f"place_tokens {shape}", _place(*shape)
        yield f"add_at {shape}", _add_at(shape[0], shape[1] + shape[2], shape[1], shape[3])
    for shape in ((2, 5, 3, 1, 12, True), (1, 33, 2, 2, 16, False), (1, 7, 4, 2, 6, True)):
        yield f"rotate {shape}", _norm_rope(*shape)
    for shape, rotated, layers in (
        ((2, 5, 3, 24), True, 1), ((1, 7, 4, 6), False, 1), ((3, 2, 2, 16), False, 3), ((2, 3, 1, 128), True, 1),
    ):  # fmt: skip
        yield f"norm_heads {shape} {rotated=}", _wide_norm(*shape, rotated, layers)
    for case in (
        (2, 5, 7, 3, 24, "kr", 8, None), (1, 33, 40, 2, 16, "krb", 16, NormedTile(16, 16, 16, 4)),
        (2, 20, 0, 3, 8, "krc", 4, NormedTile(16, 16, 16, 4)), (1, 7, 70, 2, 48, "b", 32, NormedTile(16, 64, 16, 4)),
        (2, 3, 20, 1, 16, "", 0, None), (1, 18, 3, 2, 6, "krc", 0, None),
    ):  # fmt: skip
        yield f"normed_attention {case}", normed_attention(*case)
    causal: list[tuple[Any, ...]] = [
        (2, 33, 4, 2, 16),
        (1, 1, 2, 1, 6),
        (1, 130, 2, 1, 12),
        (3, 150, 4, 2, 16, (0, 5, 149)),
        (2, 150, 4, 2, 16, None, (slice(3, 40), slice(70, 141))),
    ]
    for shape in causal:
        yield f"causal_attention {shape}", _causal(*shape)
    for wide in (FlashTile(128, 64, 8, 2), FlashTile(64, 128, 4, 2)):
        yield f"causal_attention {wide}", _causal(1, 200, 2, 1, 12, None, (slice(140, 150),), tile=wide)
    yield "causal_attention fp8", _causal(1, 40, 4, 2, 16, scale=200.0)
    for shape in ((3, 20), (1, 6)):
        yield f"gelu, exact {shape}", _gelu(*shape)
    for rows, n, k, what in (
        (41, 40, 48, "nsg"), (41, 40, 48, "nsgm"), (3, 20, 33, "nm"),
        (41, 40, 48, "nqs"), (41, 40, 48, "nqsm"), (3, 20, 33, "nqi"),
        (41, 24, 72, "ns8"), (41, 24, 72, "nsi"), (17, 132, 40, "nmi"), (3, 20, 33, "n"), (9, 20, 136, "nqs"),
        (16, 40, 72, "ns8"), (82, 132, 40, "r"), (17, 16, 24, ""),
    ):  # fmt: skip
        yield f"product {rows}x{k}x{n} {what}", _product(rows, n, k, what)
    by_tma = Pipelined(64, 32, 64, stages=2, tma=True)
    yield f"product 70x144x40 n8 {by_tma}", _product(70, 40, 144, "n8", by_tma)
    first = Pipelined(16, 64, 64, stages=2, weights_first=True)
    for what in ("ns", "nmi"):
        yield f"product 41x72x132 {what} {first}", _product(41, 132, 72, what, first)
    for config in (Skinny(16, 1, 64, 16, 0), Pipelined(16, 16, 32)):
        for what in ("nc", "nmc"):
            yield f"product 16x72x24 {what} {config}", _product(16, 24, 72, what, config)
    for rows, width, scaled in ((5, 33, False), (41, 48, True)):
        yield f"measure {rows}x{width} scaled={scaled}", _measured(rows, width, scaled)
    for what in ("f", "", "l", "p", "gr", "fgr", "gl"):
        yield f"flow_step {what}", _flow(2, 6, 5, 40, 9, what)
    for what in ("f", "", "l", "8", "f8"):
        yield f"mix_step {what}", _mixed(2, 7, 3, 40, 9, what)
    yield "mix_step of one row", _mixed(1, 2, 1, 64, 16, "")
    # Windows that are whole, cut on both sides, and of a pixel alone.
    for shape in ((2, 5, 7, 4, 3, 6), (1, 14, 14, 12, 2, 32), (1, 8, 4, 4, 1, 16), (1, 9, 17, 8, 2, 12)):
        yield f"window_attention {shape}", _by_windows(*shape)
    for shape in ((2, 35, 3, 6), (1, 150, 2, 32), (1, 1100, 1, 16)):
        yield f"channel_attention {shape}", _by_channels(*shape)


CASES: dict[str, Callable[[Draw], Call]] = dict(_cases())
