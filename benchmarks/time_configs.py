"""Time every tile config of the products and the attention of the denoising loop, at full size.

    python -m benchmarks.time_configs --output runs/configs.jsonl [--rows 10 50 51 80 160 320] [--gpu here portable]
    TRITON_INTERPRET=1 python -m benchmarks.time_configs --tiny --output runs/configs.jsonl  # on a CPU: is it correct?

For each number of rows it measures the configs that a build on this GPU (and on it as a portable one) tries, an older
fixed config, and the library's product alone. There are weights of 18 layers, so that they come from memory. Each JSON
line has op, rows, config, microseconds a call and the worst difference from the reference. The exit status is 1 if one
is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import options_parser, reason, write_rows
from eval.script import concluded
from tests.support import kernel_calls as calls
from tests.support.gpus import assumed
from tests.support.kernel_calls import Draw
from tests.support.runtimes import steered
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import KeySplit, SuffixShape
from vla_accel.kernels.attention.suffix import AttentionWorkspace, Prefix, suffix_attention, suffix_workspace
from vla_accel.kernels.autotune import milliseconds, unfit
from vla_accel.kernels.gemm.config import GemmConfig, GemmSizes, Skinny, candidates, gemm_sizes, skinny
from vla_accel.kernels.gemm.epilogue import Epilogue, Heads, Norm, Rotation, Workspace
from vla_accel.kernels.gemm.ops import gemm, gemm_workspace
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.machine import resolve_device

EPS, WORST = 1e-6, 0.02
"""Largest error of an element, relative to itself and the root mean square: rounding of sums and of GeGLU's input."""


@dataclass(frozen=True)
class Full:
    """Sizes of the expert of π0 and π0.5."""

    width: int = 1024
    mlp_dim: int = 4096
    heads: int = 8
    head_dim: int = 256
    prefix_tokens: int = 800
    depth: int = 18


TINY = Full(64, 128, 2, 64, 96, 2)


class Bench:
    """The operands for one number of rows on a device, and the ops over all layers."""

    def __init__(self, size: Full, rows: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = Draw(f"{rows} rows", dtype)
        self.size, self.rows, self.device = size, rows, device
        columns = (size.heads + 2) * size.head_dim

        def linears(n: int, k: int) -> list[Linear]:
            # Roll one random weight for each layer: drawing takes longer than timing.
            first = draw(n, k, scale=k**-0.5).to(device)
            return [Linear(first.roll(i, 0)) for i in range(size.depth)]

        self.x, self.context = draw(rows, size.width).to(device), draw(rows, size.heads * size.head_dim).to(device)
        self.active = draw(rows, size.mlp_dim).to(device)
        self.scale, self.gate = (draw.wide(size.width, scale=0.3).to(device) for _ in range(2))
        self.shifts = {"qkv": draw.wide(columns).to(device), "gate_up": draw.wide(2 * size.mlp_dim).to(device)}
        self.layers = {
            "qkv": linears(columns, size.width), "o": linears(size.width, size.heads * size.head_dim),
            "gate_up": linears(2 * size.mlp_dim, size.width), "down": linears(size.width, size.mlp_dim),
        }  # fmt: skip
        self.q = draw(1, rows, size.heads, size.head_dim).to(device)
        self.k, self.v = (draw(1, rows, 1, size.head_dim).to(device) for _ in range(2))
        self.out = {
            "qkv": [torch.empty_like(t) for t in (self.q, self.k, self.v)], "o": [torch.empty_like(self.x)],
            "gate_up": [torch.empty_like(self.active)], "down": [torch.empty_like(self.x)],
        }  # fmt: skip
        self.keys, self.values = (draw(1, size.prefix_tokens, 1, size.head_dim).to(device) for _ in range(2))
        self.lengths = torch.tensor([size.prefix_tokens - 12], dtype=torch.int32, device=device)
        self.cos, self.sin = rope_tables(size.prefix_tokens + rows, size.head_dim, device)

    def product(self, name: str) -> GemmSizes:
        """What kind of product an op makes."""
        layer = self.layers[name][0]
        heads = Heads(self.q, self.k, self.v) if name == "qkv" else None
        rows = {"o": self.context, "down": self.active}.get(name, self.x)
        return gemm_sizes(rows, layer, heads, gated=name == "gate_up")

    def run(self, name: str, index: int, config: GemmConfig | None, workspace: Workspace | None) -> None:
        """An op in one layer, into `out`."""
        layer, out, norm = self.layers[name][index], self.out[name], Norm(EPS, None, self.scale)
        if name == "qkv":
            epilogue = Epilogue(self.shifts[name], rope=Rotation(self.cos, self.sin, self.lengths))
            gemm(self.x, layer, Heads(*out), epilogue, norm, config)
        elif name == "gate_up":
            gemm(self.x, layer, out[0], Epilogue(self.shifts[name], Activation.GEGLU), norm, config)
        else:
            a = self.context if name == "o" else self.active
            gemm(a, layer, out[0], Epilogue(gate=self.gate, residual=True), None, config, workspace)

    def result(self, name: str, config: GemmConfig | None, workspace: Workspace | None) -> Tensor:
        """What an op gives in the first layer, all its outputs in one row."""
        for out in self.out[name]:
            out.copy_(self.x if name in ("o", "down") else torch.full_like(out, float("nan")))
        self.run(name, 0, config, workspace)
        return torch.cat([out.flatten() for out in self.out[name]]).float()

    def in_float32(self, name: str) -> Tensor:
        """`result` of the float32 reference."""
        wide = copy.copy(self)
        for field, value in vars(self).items():
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                setattr(wide, field, value.float())
        wide.layers = {name: [Linear(self.layers[name][0].weight.float())]}
        wide.out = {name: [out.float() for out in self.out[name]]}
        with steered("reference", self.device):
            return wide.result(name, None, None)

    def library(self, name: str) -> Callable[[], object]:
        """The library's product alone, without norm, activation or residual."""
        a = {"o": self.context, "down": self.active}.get(name, self.x)
        return lambda: [torch.mm(a, layer.weight.t()) for layer in self.layers[name]]


@contextlib.contextmanager
def _kernels(device: torch.device) -> Iterator[None]:
    with steered("triton") if device.type == "cpu" else contextlib.nullcontext():
        yield


def until_now(product: GemmSizes) -> Skinny:
    """The only config of older versions for more than 16 rows, whatever shared memory a GPU has."""
    if product.rows <= 16:
        return skinny(product, None)
    config = skinny(replace(product, rows=16), None)
    block_k = min(1 << (product.k - 1).bit_length(), 256)
    return Skinny(config.columns, max(1, min(8, block_k // 16)), block_k, 32 if product.rows <= 32 else 64, 1)


def products(bench: Bench, gpu: Gpu | None) -> Iterator[dict[str, Any]]:
    """A row for each config of each product."""
    for name, layers in bench.layers.items():
        product = bench.product(name)
        want = bench.in_float32(name)
        for config in dict.fromkeys((until_now(product), *candidates(gpu, product))):
            with _kernels(bench.device):
                workspace = gemm_workspace(product, bench.device, config)
                one = functools.partial(bench.result, name, config, workspace)
                layer = functools.partial(bench.run, name, config=config, workspace=workspace)
                row = {"op": name, "rows": bench.rows, "config": str(config), "until_now": config == until_now(product)}
                yield row | _measured(one, want, [functools.partial(layer, i) for i in range(len(layers))], bench)
        if bench.device.type == "cuda":
            ms = milliseconds(bench.library(name), bench.device, 1)
            yield {"op": name, "rows": bench.rows, "config": "library, product alone", "us": 1e3 * ms / len(layers)}


def attention(bench: Bench, gpu: Gpu | None) -> Iterator[dict[str, Any]]:
    """A row for each config of the attention."""
    size = bench.size
    sizes = SuffixShape(1, bench.rows, size.prefix_tokens, size.heads, 1, size.head_dim, bench.q.element_size())
    before = KeySplit(16, 64, 1, 1, 4) if sizes.rows <= 128 else KeySplit(64, 64, 1, 1, 8)

    out = bench.x.new_empty(bench.rows, size.heads * size.head_dim)

    def run(config: KeySplit | None, workspace: AttentionWorkspace, wide: bool = False) -> Tensor:
        tensors = (bench.q, bench.keys, bench.values, bench.k, bench.v)
        q, keys, values, k, v = (x.float() for x in tensors) if wide else tensors
        into = out.float() if wide else out
        prefix = Prefix(keys, values, bench.lengths)
        suffix_attention(Heads(q, k, v), prefix, into, workspace, state_first=True, config=config)
        return into

    with steered("reference", bench.device):
        want = run(None, suffix_workspace(sizes, bench.device), wide=True)
    for config in dict.fromkeys((before, *attention_config.key_splits(gpu, sizes))):
        with _kernels(bench.device):
            one = functools.partial(run, config, suffix_workspace(sizes, bench.device, config))
            row = {"op": "attention", "rows": bench.rows, "config": str(config), "until_now": config == before}
            yield row | _measured(one, want, [one] * size.depth, bench)


def _measured(
    one: Callable[[], Tensor], want: Tensor, layers: list[Callable[[], object]], bench: Bench
) -> dict[str, Any]:  # fmt: skip
    """The difference of two calls from the reference, and microseconds a layer; or why it cannot run."""
    try:
        worst = max(calls.difference(one().float(), want).worst for _ in range(2))
        ms = (
            milliseconds(lambda: [layer() for layer in layers], bench.device, 1)
            if bench.device.type == "cuda"
            else None
        )
    except unfit() as error:
        return {"error": reason(error)}
    return {"worst": worst, "right": worst <= WORST, "us": None if ms is None else 1e3 * ms / len(layers)}


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10, 50, 51, 80, 160, 320])
    parser.add_argument("--gpu", nargs="+", choices=("here", "portable"), default=["here", "portable"])
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU, in Triton's interpreter")
    options = parser.parse_args()
    device = resolve_device("cpu" if options.tiny else "cuda")
    here = Gpu.of(device)
    gpus = {"here": here, "portable": None if here is None else here.portable}

    def measured() -> Iterator[dict[str, Any]]:
        for name in ["here"] if options.tiny else options.gpu:
            for rows in options.rows:
                bench = Bench(TINY if options.tiny else Full(), rows, device)
                with assumed(gpus[name]):
                    for make in (products, attention):
                        yield from ({"as": name, **row} for row in make(bench, gpus[name]))

    _, wrong = write_rows(options.output, measured(), "none" if here is None else here.name)
    print(json.dumps({"wrong": wrong, "seconds": round(time.process_time(), 1), "rows": options.rows}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(concluded(main))
