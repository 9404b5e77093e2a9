"""More cases of kernel_cases.py: row counts up to 1024 at every op, with the models' own widths and awkward ones (4304,
head size 72). `WIDE` is for a GPU; `TALL`, many rows of little width, and `CONFIGS`, the tile configs, are also fast in
the interpreter, where the time is that of the programs: as many as show what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from tests.support import molmo_cases, sequence_cases
from tests.support.gpus import H200
from tests.support.kernel_calls import Call, Draw, check, outputs_of
from tests.support.kernel_cases import (
    CASES,
    _activation,
    _add_norm,
    _attention,
    _embed_norm,
    _gate_up,
    _patchify,
    _project,
    _qkv_rope,
    _rope_cache,
    _self_attention,
    _step,
    _suffix_attention,
)
from vla_accel.kernels.attention.config import KeySplit, NormedShape, normed_tiles
from vla_accel.kernels.gemm.config import Pipelined

Cases = Iterator[tuple[str, Callable[[Draw], Call]]]
# Around every size of tile, and up to four views of 256 tokens.
ROWS = (1, 2, 16, 17, 33, 64, 65, 128, 257, 544, 800, 1023, 1024)
# Prefixes and towers of the full-size models, two and three views; tiles that end early; one key; batches.
PREFIXES = (
    (544, 544, [532]), (544, 544, [544]), (800, 800, [790]), (544, 544, [1]), (1024, 1024, [1000, 3]),
    (544, 544, [272, 273]), (100, 100, [97, 16, 100]), (9, 1023, [1023]), (1, 64, [63]), (513, 17, [17]), (8, 16, [16]),
)  # fmt: skip
TOWERS = (
    (2, 256, 16, 72), (3, 256, 16, 72), (1, 256, 1, 72), (5, 255, 2, 72), (1, 129, 3, 80), (4, 256, 4, 64),
    (2, 200, 3, 40), (1, 257, 3, 72), (1, 1024, 2, 72), (1, 33, 2, 16), (1, 262, 16, 64), (2, 320, 2, 64),
    (1, 300, 2, 80), (1, 321, 2, 64),
)  # fmt: skip


def _tall() -> Cases:
    for rows in (128, 257):
        for layer in (False, True):
            yield f"add_norm layer={layer} {rows}x12", _add_norm(rows, 12, rows, layer, None, alias=False)
        yield f"geglu {rows}x20", _activation("geglu", rows, 20, 60.0)
        yield f"gelu {rows}x6", _activation("gelu", rows, 6, None)
    yield "embed_norm (4, 40, 30, 12)", _embed_norm(4, 40, 30, 12, None)
    yield "rotate into a cache (2, 65, 2, 1, 6)", _rope_cache(2, 65, 2, 1, 6)
    yield "attention (257, 300, 2, 1, 6)", _attention(257, 300, 2, 1, 6, [300, 1])
    yield "self-attention (1, 256, 2, 72)", _self_attention(1, 256, 2, 72)
    yield "suffix_attention (65, 33, 2, 1, 6)", _suffix_attention(65, 33, 2, 1, 6, [33, 3], True)
    for rows in (128, 129, 513):
        yield f"qkv_rope {rows}x32", _qkv_rope(1, rows, 32, 1, 1, 16, True)
        yield f"gate_up_geglu {rows}x40", _gate_up(rows, 40, 24, True)
        yield f"project {rows}x24", _project(rows, 24, 72, 1, "gr")
    yield "step (3, 66, 65)", _step(3, 66, 65, 20, 7, "n")


def _configs() -> Cases:
    """Every kind of config but the default: tiles that end early, K in parts of which some are empty, keys in several
    tiles, lengths that end in the first of them."""
    for config, narrow in (
        (Pipelined(16, 16, 64), "fp8"), (Pipelined(32, 64, 32, stages=2), "int8"),
        (Pipelined(64, 32, 128, warps=8), "fp8"),
    ):  # fmt: skip
        for adaptive, weights in ((True, ""), (False, narrow)):
            name = f"{config} adaptive={adaptive} {weights or 'plain'}"
            yield f"qkv_rope 2x9x72 {name}", _qkv_rope(2, 9, 72, 2, 1, 72, adaptive, weights, config)
            yield f"qkv_rope 1x50x128 {name}", _qkv_rope(1, 50, 128, 1, 1, 64, adaptive, weights, config)
            yield f"gate_up_geglu 10x128 {name}", _gate_up(10, 128, 100, adaptive, weights, config)
            yield f"gate_up_geglu 51x72 {name}", _gate_up(51, 72, 40, adaptive, weights, config)
        for adaptive in (True, False):
            name = f"{config} adaptive={adaptive}, moments"
            yield f"qkv_rope 50x128 {name}", _qkv_rope(1, 50, 128, 1, 1, 64, adaptive, "", config, 32)
            yield f"gate_up_geglu 51x72 {name}", _gate_up(51, 72, 40, adaptive, "int8", config, moments=16)
        for split, what in ((1, "grm"), (2, "brmn"), (8, "grmn")):
            shared = dataclasses.replace(config, split=split)
            yield f"project {what} {shared}", _project(35, 72, 520, 35, what, shared)
        for split in (1, 2, 8):
            shared = dataclasses.replace(config, split=split)
            for shape in (
                (10, 40, 320, 1, "gr"), (35, 72, 72, 35, "gbrs"), (100, 24, 520, 50, "bs8"), (35, 72, 520, 35, "gri"),
            ):  # fmt: skip
                yield f"project {shape} {shared}", _project(*shape, shared)
    # By TMA a tile may end beyond its head or its side: of q/k/v in the next head, of gates in what is up. And weights
    # as the first operand, which are widened there.
    for config, narrow in (
        (Pipelined(16, 32, 64, tma=True), "fp8"), (Pipelined(64, 16, 128, tma=True), "int8"),
        (Pipelined(16, 64, 64, weights_first=True), "fp8"),
        (Pipelined(64, 32, 64, warps=8, tma=True, weights_first=True), "int8"),
    ):  # fmt: skip
        yield f"qkv_rope 2x9x144 {config}", _qkv_rope(2, 9, 144, 2, 1, 40, True, "", config)
        yield f"qkv_rope 50x128 {config}, {narrow}, moments", _qkv_rope(1, 50, 128, 1, 1, 64, False, narrow, config, 32)
        yield f"gate_up_geglu 51x144 {config}, {narrow}", _gate_up(51, 144, 40, True, narrow, config)
        yield f"gate_up_geglu 70x128 {config}, moments", _gate_up(70, 128, 100, True, "", config, moments=16)
        yield f"project 51x528 {config}", _project(51, 100, 528, 51, "gr" + narrow[0].replace("f", "8"), config)
        shared = dataclasses.replace(config, split=4)
        yield f"project 10x528 {shared}", _project(10, 40, 528, 1, "brmn", shared)
    # Joined: of two parts, of one, and of one where the suffix's keys fill several tiles.
    joined = (KeySplit(16, 32, 2, 2, 4, True), KeySplit(16, 32, 4, 2, 4, True), KeySplit(64, 16, 8, 1, 8, True))
    for sizes in ((16, 32, 2, 2, 4), (64, 16, 4, 1, 8), (32, 16, 8, 3, 4), (16, 64, 1, 1, 4), *joined):
        config = sizes if isinstance(sizes, KeySplit) else KeySplit(*sizes)
        for shape in (
            (10, 70, 8, 1, 64, [70, 40], False), (17, 100, 4, 1, 72, [90, 1], True), (51, 33, 2, 2, 16, [33, 0], True),
        ):  # fmt: skip
            yield f"suffix_attention {shape} {config}", _suffix_attention(*shape, config)


def _wide() -> Cases:
    for rows in ROWS:
        for width in (72, 1152, 2048, 4304):
            fp8 = 30.0 if rows % 2 else None
            yield f"add_norm {rows}x{width}", _add_norm(rows, width, rows, width % 1152 == 0, fp8, alias=rows % 3 == 0)
        for hidden in (72, 4304, 16384):
            yield f"geglu {rows}x{hidden}", _activation("geglu", rows, hidden, 60.0 if rows % 2 else None)
        yield f"gelu {rows}x4304", _activation("gelu", rows, 4304, 60.0 if rows % 2 else None)
        yield f"rotate into a cache {rows} of 256", _rope_cache(1, rows, 8, 1, 256)
        yield f"rotate into a cache {rows} of 72", _rope_cache(1, rows, 3, 3, 72)
        yield f"attention {rows} of 256", _attention(rows, rows, 8, 1, 256, [max(1, rows - 12)])
        yield f"attention {rows} of 72", _attention(rows, rows, 4, 2, 72, [rows, max(1, rows // 3)])
        yield f"self-attention {rows}", _self_attention(1, rows, 3, 72, 200.0 if rows % 2 else None)
        yield f"suffix_attention {rows}", _suffix_attention(rows, 544, 8, 1, 256, [532], bool(rows % 2))
        yield f"suffix_attention {rows} of 72", _suffix_attention(rows, 65, 6, 3, 72, [65, 1], bool(rows % 2))
        one, other = ("fp8", "int8") if rows % 2 else ("int8", "")
        yield f"qkv_rope {rows}", _qkv_rope(1, rows, 1024, 8, 1, 256, True, one)
        yield f"qkv_rope {rows} of 72", _qkv_rope(1, rows, 1152, 3, 3, 72, False, other)
        yield f"gate_up_geglu {rows}", _gate_up(rows, 1024, 4096, True, one)
        yield f"gate_up_geglu {rows}x4304", _gate_up(rows, 1152, 4304, False, other)
        yield f"gate_up_geglu {rows} of 4304", _gate_up(rows, 4304, 40, True, "" if rows % 2 else "fp8")
        yield f"project {rows}", _project(rows, 1024, 4096, 1, "gr8" if rows % 2 else "gri")
        yield f"project {rows} of 4304", _project(rows, 1152, 4304, rows, "bs")
        yield f"step {rows}", _step(1, rows, rows, 1024, 32, "ns" if rows % 2 else "l")
    for batch, tokens, source, what in ((1, 32, 98, "kr"), (1, 98, 0, "krc"), (1, 98, 64, "b"), (2, 120, 130, "krcb")):
        shape = NormedShape(batch, tokens, source, 24, 128, own="k" in what)
        for tile in normed_tiles(H200, shape):
            case = batch, tokens, source, 24, 128, what, 64, tile
            yield f"normed_attention {case}", sequence_cases.normed_attention(*case)
    for shape in ((1, 512, 32, 2048), (1, 768, 32, 2048), (4, 200, 56, 4304), (16, 60, 4, 72)):
        yield f"embed_norm {shape}", _embed_norm(*shape, 30.0 if shape[0] > 1 else None)
    for images in (1, 2, 3, 4):
        yield f"patchify {images}", _patchify(images, 224, 14, 592)
    for tokens, source, lengths in PREFIXES:
        for scale in (None, 200.0):
            name = f"attention {tokens}x{source} {lengths} fp8={scale is not None}"
            yield name, _attention(tokens, source, 8, 1, 256, lengths, scale)
        yield f"attention {tokens}x{source} {lengths} grouped", _attention(tokens, source, 8, 2, 256, lengths)
    for shape in TOWERS:
        for scale in (None, 200.0):
            yield f"self-attention {shape} fp8={scale is not None}", _self_attention(*shape, scale)


TALL: dict[str, Callable[[Draw], Call]] = {**sequence_cases.CASES, **molmo_cases.CASES, **dict(_tall())}
CONFIGS: dict[str, Callable[[Draw], Call]] = dict(_configs())
WIDE: dict[str, Callable[[Draw], Call]] = {**TALL, **CONFIGS, **dict(_wide())}
assert len(WIDE) == len(TALL) + len(CONFIGS) + len(dict(_wide())) and not WIDE.keys() & CASES.keys(), (
    "two cases have one name"
)


def call_of(name: str, dtype: torch.dtype) -> Call:
    """The call of a case, of these or of kernel_cases.py, the same every time."""
    return (CASES.get(name) or WIDE[name])(Draw(name, dtype))


def named(*ops: str) -> list[str]:
    """The cases of `WIDE` that are of these ops, which their names begin with."""
    return [name for name in WIDE if name.split()[0] in ops]


def check_on_gpu(name: str) -> None:
    """The kernel of a case computes what its reference does, as a dependent launch and as another."""
    call = call_of(name, torch.bfloat16)
    for early in (False, True):
        repeat = 3 if call.op == "suffix_attention" else 1
        got = outputs_of(call, torch.device("cuda"), kernel=True, early=early, repeat=repeat)
        # The rounding of BF16 alone reaches 0.0226 among the outputs of 1023 gated rows.
        check(call, got, 0.025, 0.003, 0.006)
