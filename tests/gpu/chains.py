"""Vision and prefix of π0.5 as chains of kernels to measure: the programs themselves at full width, some layers of
random weights, in a CUDA graph, whose GEMMs take other tilings than today's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vla_accel.fp8 import E4M3
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm import config, ops
from vla_accel.kernels.gemm.epilogue import Epilogue, Norm
from vla_accel.kernels.gemm.hopper import HopperTile, launch
from vla_accel.kernels.gemm.hopper.config import HopperSizes, Use
from vla_accel.kernels.gemm.weights import Linear, make_linear, pair, with_sums
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.native_prefix import NativePrefix, PrefixWeights
from vla_accel.nn.native_vision import NativeVision, VisionWeights
from vla_accel.nn.siglip import SiglipConfig
from vla_accel.nn.weights import BlockWeights, StackWeights

DTYPE, FP8, DEVICE = torch.bfloat16, E4M3.dtype, torch.device("cuda")
WIDTH, MLP, HEADS, TOKENS = 1152, 4352, 16, 256
"""SigLIP's, its MLP padded as at load."""
PREFIX_WIDTH, PREFIX_MLP, PREFIX_HEADS, HEAD_DIM, PROMPT = 2048, 16_384, 8, 256, 32
LAYERS, DEPTHS = {"vision": 9, "prefix": 4}, {"vision": 27, "prefix": 17}
"""Layers of a chain, whose weights are more than an L2 cache holds; those of the model with all four products."""


@dataclass(frozen=True)
class Product:
    """A product of a chain, as its kernel is launched there."""

    name: str
    kind: torch.dtype
    activation: Activation
    rows: int
    n: int
    k: int
    residual: bool = False
    norm: str = "none"

    @property
    def key(self) -> tuple[torch.dtype, str, int, int]:
        return self.kind, self.activation, self.n, self.k

    @property
    def chunks(self) -> int:
        return -(-self.k * self.kind.itemsize // 128)

    @property
    def narrow(self) -> bool:
        """Whether it writes FP8."""
        return self.kind == FP8 and self.activation is not Activation.NONE

    def source(self, tiling: HopperTile) -> str:
        norm = None if self.norm == "none" else Norm(1e-6, sums=torch.zeros(1) if self.norm == "layer" else None)
        epilogue = Epilogue(activation=self.activation, residual=self.residual)
        return launch.source(self.kind, tiling, epilogue, norm, fp8_out=self.narrow)

    def fits(self, tiling: HopperTile) -> bool:
        """Whether the kernel takes it."""
        use = Use(self.activation.gated, self.residual, self.norm != "none")
        return tiling.why_not(None, HopperSizes(self.rows, self.n, self.k, self.kind.itemsize, (use,))) is None


@dataclass
class Chain:
    """A program with random weights. `taken`: the tilings that take the place of today's, by product."""

    name: str
    run: Callable[[], None]
    out: Tensor
    products: list[Product]
    weights: dict[str, list[Linear]]
    depth: int
    layers: int
    program: NativeVision | NativePrefix
    taken: dict[tuple[torch.dtype, str, int, int], HopperTile] = field(default_factory=dict)

    def graph(self, taken: Mapping[tuple[torch.dtype, str, int, int], HopperTile]) -> torch.cuda.CUDAGraph:
        """The program with these tilings, run once and captured."""
        self.taken.clear()
        self.taken.update(taken)
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self.taken.clear()
        return graph


def steer(at_hand: list[Chain]) -> None:
    """From now on the GEMM takes what the last of these chains says, or else what it takes today."""
    known = config.known

    def taken(
        device: torch.device,
        kind: torch.dtype,
        activation: Activation,
        rows: int,
        n: int,
        k: int,
        *,
        inside: bool = False,
    ) -> HopperTile | None:
        mine = at_hand[-1].taken.get((kind, activation, n, k)) if at_hand else None
        return mine or known(device, kind, activation, rows, n, k, inside=inside)

    ops.known = taken


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE) * scale


def layer_of(n: int, k: int, bias: bool, amax: float | None) -> Linear:
    return make_linear(normal(n, k, scale=k**-0.5), normal(n, scale=0.1) if bias else None, DTYPE, amax)


def products_of(products: Sequence[Product], layers: Sequence[BlockWeights]) -> dict[str, list[Linear]]:
    """The weights of the four products in all layers."""
    names = ("qkv", "out", "up", "down")
    return {p.name: [getattr(layer, name) for layer in layers] for p, name in zip(products, names, strict=True)}


def vision(views: int, fp8: bool) -> Chain:
    amax = (lambda value: value) if fp8 else (lambda value: None)
    layers = tuple(
        BlockWeights(
            with_sums(layer_of(3 * WIDTH, WIDTH, True, amax(5.0))), layer_of(WIDTH, WIDTH, True, amax(1.0)),
            with_sums(layer_of(MLP, WIDTH, True, amax(5.0))), layer_of(WIDTH, MLP, True, amax(5.0)),
        )
        for _ in range(LAYERS["vision"])
    )  # fmt: skip
    weights = VisionWeights(
        normal(WIDTH, 2 * 592, scale=0.001), normal(TOKENS, WIDTH).float(),
        StackWeights(SiglipConfig().block, layers, DTYPE), layer_of(PREFIX_WIDTH, WIDTH, True, None), 224, 14, 1,
    )  # fmt: skip
    program = NativeVision(weights, 1, views)
    images = torch.randint(0, 256, (1, views, 224, 224, 3), dtype=torch.uint8, device=DEVICE)
    out = torch.empty(1, views * TOKENS, PREFIX_WIDTH, dtype=DTYPE, device=DEVICE)
    rows, kind, inside = views * TOKENS, FP8 if fp8 else DTYPE, program.stack.mlp_norm_inside
    norm = "layer" if inside else "none"
    products = [
        Product("qkv", kind, Activation.NONE, rows, 3 * WIDTH, WIDTH, norm=norm),
        Product("out", kind, Activation.NONE, rows, WIDTH, WIDTH, residual=inside),
        Product("fc1", kind, Activation.GELU, rows, MLP, WIDTH, norm=norm),
        Product("fc2", kind, Activation.NONE, rows, WIDTH, MLP, residual=inside),
    ]
    of = products_of(products, layers)
    return Chain(
        f"vision {'fp8' if fp8 else 'bf16'}", lambda: program({"images": images}, {"image_tokens": out}), out, products,
        of, DEPTHS["vision"], LAYERS["vision"], program,
    )  # fmt: skip


def prefix(views: int, fp8: bool) -> Chain:
    amax, d, columns = (lambda value: value) if fp8 else (lambda value: None), HEAD_DIM, PREFIX_HEADS + 2
    w, mlp = PREFIX_WIDTH, PREFIX_MLP
    layers = [
        BlockWeights(
            layer_of(columns * d, w, False, None), layer_of(w, PREFIX_HEADS * d, False, amax(1.0)),
            pair(layer_of(2 * mlp, w, False, amax(5.0))), layer_of(w, mlp, False, amax(5.0)),
        )
        for _ in range(LAYERS["prefix"])
    ]  # fmt: skip
    block = GemmaConfig(w, len(layers) + 1, mlp, PREFIX_HEADS, 1, d).block()
    stack = StackWeights(block, tuple(layers), DTYPE, layer_of(2 * d, w, False, None))
    weights = PrefixWeights(normal(1000, w, scale=w**-0.5), stack)
    program = NativePrefix(weights, 1, views * TOKENS, PROMPT)
    rows, kind = views * TOKENS + PROMPT, FP8 if fp8 else DTYPE
    inputs = {
        "image_tokens": normal(1, views * TOKENS, w),
        "tokens": torch.randint(0, 1000, (1, PROMPT), device=DEVICE),
        "lengths": torch.full((1,), rows - 12, dtype=torch.int32, device=DEVICE),
    }
    out = torch.zeros(2, len(layers) + 1, 1, rows, 1, d, dtype=DTYPE, device=DEVICE)
    inside, mlp_inside = program.stack.attention_norm_inside, program.stack.mlp_norm_inside
    products = [
        Product("qkv", DTYPE, Activation.NONE, rows, columns * d, w, norm="rms" if inside else "none"),
        Product("o", kind, Activation.NONE, rows, w, PREFIX_HEADS * d, residual=mlp_inside),
        Product("gate_up", kind, Activation.GEGLU, rows, 2 * mlp, w, norm="rms" if mlp_inside else "none"),
        Product("down", kind, Activation.NONE, rows, w, mlp, residual=inside),
    ]
    of = products_of(products, layers)
    return Chain(
        f"prefix {'fp8' if fp8 else 'bf16'}", lambda: program(inputs, {"keys": out[0], "values": out[1]}), out,
        products, of, DEPTHS["prefix"], LAYERS["prefix"], program,
    )  # fmt: skip


CHAINS: dict[str, Callable[[int], Chain]] = {
    "vision bf16": lambda views: vision(views, False), "vision fp8": lambda views: vision(views, True),
    "prefix bf16": lambda views: prefix(views, False), "prefix fp8": lambda views: prefix(views, True),
}  # fmt: skip
