"""The denoise loop in CUDA C++ (`ops/cuda/denoise.cu`): packs the weights, holds the buffers, launches the phases.

For Hopper, BF16 weights and up to 64 suffix rows; `fits` says why not otherwise. Each phase is a kernel that fetches
its weights while its predecessors still run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vla_accel.models.pi0 import Pi0Config
from vla_accel.native.constants import StepTables
from vla_accel.native.fold import round_up
from vla_accel.ops.fused import Linear

CAPABILITY = (9, 0)
ARCHITECTURE = "sm_90a"
MAX_ROWS = 64
STAGE_BYTES, WARPS, KEYS = 32_768, 8, 64
MAX_PORTABLE, MAX_CLUSTER = 8, 16
GATE_UP_UNITS = 3
THREADS = WARPS * 32
_SOURCE = Path(__file__).parents[1] / "ops" / "cuda" / "denoise.cu"


def fits(config: Pi0Config, batch: int, dtype: torch.dtype, narrow: bool, device: torch.device) -> str:
    """Empty when the streamed kernels can run this; otherwise the reason."""
    expert = config.expert
    attended = expert.heads * expert.head_dim
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "it needs compute capability 9.0"
    if dtype != torch.bfloat16 or narrow:
        return "it takes BF16 weights"
    if batch * config.suffix_tokens > MAX_ROWS:
        return f"{batch} x {config.suffix_tokens} suffix rows are more than {MAX_ROWS}"
    sizes = (expert.width % 32, attended % 32, expert.mlp_dim % 32, expert.head_dim % 64)
    whole = (attended <= 2048 or attended % 2048 == 0) and (expert.mlp_dim <= 1024 or expert.mlp_dim % 1024 == 0)
    if any(sizes) or not whole or expert.width > 1024 or expert.head_dim > 256 or config.action_dim > 256:
        return "its tiles do not fit these widths"
    return ""


def pack(tiles: Tensor, k_chunk: int) -> Tensor:
    """Weights in the order in which the kernel reads them.

    tiles (units, T, 8, K): T tiles of eight output rows a unit. Returns bytes: unit, chunk of K, block of 32, tile,
    lane, eight values; lane 4 g + t holds row g, columns 8 t … 8 t + 7 of the block.
    """
    units, count, _, k = tiles.shape
    chunks = k // k_chunk
    parts = tiles.reshape(units, count, 8, chunks, k_chunk // 32, 4, 8)
    return parts.permute(0, 3, 4, 1, 2, 5, 6).contiguous().view(torch.uint8).flatten()


def pair_tiles(weight: Tensor, apart: int, block: int) -> Tensor:
    """(units, 2, 8, K) of a (N, K) weight: rows r and r + apart of every `block` rows share a unit."""
    k = weight.shape[1]
    blocks = weight.view(-1, block // apart, apart // 8, 8, k)
    return blocks.transpose(1, 2).reshape(-1, 2, 8, k)


def k_chunk(k: int) -> int:
    """Columns of K in one stage of the ring, for single tiles."""
    return min(k, 2048)


@dataclass(frozen=True)
class Packed:
    """All layers' weights in one buffer of bytes, and where each product starts."""

    data: Tensor
    layer_at: int
    layer_bytes: int
    o_at: int
    gate_up_at: int
    down_at: int

    @classmethod
    def of(cls, layers: list[tuple[Linear, Linear, Linear, Linear]], mix: Linear | None, head_dim: int) -> Packed:
        """`layers`: q/k/v, o, gate/up and down of each layer, BF16."""
        parts: list[Tensor] = []
        if mix is not None:
            parts.append(_single(mix))
        layer_at = parts[0].numel() if parts else 0
        offsets = (0, 0, 0)
        for qkv, o, gate_up, down in layers:
            four = (
                pack(pair_tiles(qkv.weight, head_dim // 2, head_dim), qkv.weight.shape[1]),
                _single(o),
                pack(pair_tiles(gate_up.weight, gate_up.weight.shape[0] // 2, gate_up.weight.shape[0]),
                     gate_up.weight.shape[1]),
                _split(down),
            )  # fmt: skip
            sizes = [part.numel() for part in four]
            offsets = (sizes[0], sum(sizes[:2]), sum(sizes[:3]))
            parts.extend(four)
        data = torch.cat(parts)
        return cls(data, layer_at, (data.numel() - layer_at) // len(layers), *offsets)


def _single(layer: Linear) -> Tensor:
    n, k = layer.weight.shape
    return pack(layer.weight.view(n // 8, 1, 8, k), k_chunk(k))


def split_of(width: int, k: int) -> int:
    """Blocks that share K of the MLP's last product: as many as leave each a part that is worth a block."""

    def suits(n: int) -> bool:
        part = k // n
        return width % (8 * n) == 0 and k % (32 * n) == 0 and part >= 512 and (part <= 1024 or part % 1024 == 0)

    return next((n for n in (4, 2) if suits(n)), 1)


def _split(layer: Linear) -> Tensor:
    """The last product's weight by cluster, part of K, chunk, then as `pack`."""
    n, k = layer.weight.shape
    split = split_of(n, k)
    part = k // split
    tiles = layer.weight.view(n // (8 * split), split, 8, split, part).permute(0, 3, 1, 2, 4)
    return pack(tiles.reshape(-1, split, 8, part), min(part, 1024))


_P, _U64 = ctypes.c_void_p, ctypes.c_uint64


class _Model(ctypes.Structure):
    _fields_ = [
        ("weights", _P),
        *((name, _U64) for name in ("layer_at", "layer_bytes", "o_at", "gate_up_at", "down_at")),
        *((name, _P) for name in ("in_scale", "in_shift", "in_gate", "post_scale", "post_shift", "post_gate")),
        *((name, _P) for name in ("final_scale", "final_shift", "b_in")),
        *((name, _P) for name in ("w_in", "w_out", "b_out", "mix_bias", "cos", "sin")),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("keys", "values_t", "lengths", "state", "actions", "xf", "xb", "hidden", "q")),
        *((name, _P) for name in ("ks", "vts", "context", "active")),
        *((name, ctypes.c_int) for name in ("s", "sp", "steps")),
    ]


class StreamedLoop:
    """The loaded kernels and their buffers for a batch and a number of prefix tokens."""

    def __init__(
        self, config: Pi0Config, packed: Packed, tables: StepTables, w_out: Tensor, b_out: Tensor,
        mix_bias: Tensor | None, batch: int, prefix_tokens: int,
    ) -> None:  # fmt: skip
        from vla_accel.ops import fused
        from vla_accel.ops.cuda.runtime import load_module

        expert, tokens = config.expert, config.suffix_tokens
        device, rows = w_out.device, batch * tokens
        tiles = -(-rows // 16)
        self.adaptive = config.kind == "pi05"
        self.depth, self.steps, self.prefix_tokens = expert.depth, tables.steps, prefix_tokens
        row_tiles = -(-tokens * (expert.heads // expert.kv_heads) // 16)
        pairs = expert.mlp_dim // 8
        # A few units a block: fewer would fetch the activations too often, more leave too little room to overlap.
        units = min(GATE_UP_UNITS, -(-pairs // 128))
        split = split_of(expert.width, expert.mlp_dim)
        part = expert.mlp_dim // split
        splits = (round_up(prefix_tokens, KEYS) + round_up(tokens, KEYS)) // KEYS
        tiled = row_tiles * batch * expert.kv_heads
        # A block for every tile of keys where the clusters all fit on the chip at once.
        self.cluster = splits if MAX_PORTABLE < splits <= MAX_CLUSTER and tiled <= 7 else MAX_PORTABLE
        self.split = split
        self.blocks = {
            "qkv": (expert.heads + 2 * expert.kv_heads) * expert.head_dim // 16,
            "attention": tiled * self.cluster,
            "output": expert.width // 8,
            "gate_up": -(-pairs // units),
            "down": expert.width // 8,
            "mix": expert.width // 8,
            "between": batch * config.action_horizon + (0 if self.adaptive else batch),
        }
        sizes = {
            "MT": tiles, "M": rows, "BATCH": batch, "T": tokens, "HZ": config.action_horizon, "W": expert.width,
            "MLP": expert.mlp_dim, "H": expert.heads, "KV": expert.kv_heads, "D": expert.head_dim, "L": expert.depth,
            "A": config.action_dim, "GATE_UP_UNITS": units, "CLUSTER": self.cluster, "SPLIT": split,
            "ADAPTIVE": int(self.adaptive),
        }  # fmt: skip
        defines = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
        squares = 4 * WARPS * 16 * tiles

        def staged(count: int, extra: int = 0) -> int:
            return count * (STAGE_BYTES + 8) + extra

        shared = {
            "qkv": staged(1, squares),
            "attention": 0,
            "output": staged(-(-expert.heads * expert.head_dim // 2048)),
            "gate_up": staged(units, squares),
            "down": max(part * split * 16, WARPS * tiles * 512) + 4 * split * tiles * 128 + 8 * -(-part // 1024),
            "mix": staged(1),
            "between": 0,
        }
        self.module = load_module(defines + _SOURCE.read_text(), shared, ARCHITECTURE, device)

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        head = (expert.kv_heads, expert.head_dim)
        self.padded = round_up(prefix_tokens, KEYS)
        self.values_t = zeros(expert.depth, batch, *head, self.padded)
        # Kept alive here: the kernels see bare addresses.
        self._buffers = {
            "xf": zeros(rows, expert.width, dtype=torch.float32), "xb": zeros(rows, expert.width),
            "hidden": zeros(rows, expert.width), "q": zeros(rows, expert.heads, expert.head_dim),
            "ks": zeros(rows, *head), "vts": zeros(batch, *head, round_up(tokens, KEYS)),
            "context": zeros(rows, expert.heads * expert.head_dim), "active": zeros(rows, expert.mlp_dim),
        }  # fmt: skip
        cos, sin = fused.rope_tables(prefix_tokens + tokens, expert.head_dim, device)
        self._constants = {
            "weights": packed.data, "in_scale": tables.input_scale, "in_shift": tables.input_shift,
            "in_gate": tables.input_gate, "post_scale": tables.post_scale, "post_shift": tables.post_shift,
            "post_gate": tables.post_gate, "final_scale": tables.final_scale, "final_shift": tables.final_shift,
            "b_in": tables.b_in, "w_in": tables.w_in, "w_out": w_out, "b_out": b_out.contiguous(),
            "mix_bias": mix_bias, "cos": cos, "sin": sin,
        }  # fmt: skip
        offsets = {n: getattr(packed, n) for n in ("layer_at", "layer_bytes", "o_at", "gate_up_at", "down_at")}
        self._model = _Model(**{n: _address(t) for n, t in self._constants.items()}, **offsets)
        self._eps = ctypes.c_float(expert.eps)

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the loop: `actions` (B, H, A) float32 hold the noise and are integrated in place."""
        # Products want the keys along the contiguous axis. The padding beyond the prefix stays zero.
        self.values_t[..., : self.prefix_tokens].copy_(inputs["values"].permute(0, 1, 3, 4, 2))
        buffers = {n: _address(t) for n, t in self._buffers.items()}
        call = _Call(
            keys=_address(inputs["keys"]), values_t=_address(self.values_t), lengths=_address(inputs["lengths"]),
            state=_address(state_token), actions=_address(actions), **buffers, s=self.prefix_tokens, sp=self.padded,
            steps=self.steps,
        )  # fmt: skip

        def launch(name: str, *rest: object, cluster: int = 1, dependent: bool = True) -> None:
            arguments = (self._model, call, *(ctypes.c_int(r) if isinstance(r, int) else r for r in rest))
            self.module.launch(name, self.blocks[name], THREADS, arguments, cluster=cluster, dependent=dependent)

        for step in range(self.steps):
            # The first waits for all that came before, so that the others may read the prefix ahead of their wait.
            launch("between", self._eps, step, dependent=step > 0)
            if not self.adaptive:
                launch("mix")
            for layer in range(self.depth):
                launch("qkv", self._eps, step, layer)
                launch("attention", layer, cluster=self.cluster)
                launch("output", step, layer)
                launch("gate_up", self._eps, step, layer)
                launch("down", step, layer, cluster=self.split)
        launch("between", self._eps, self.steps)


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "the kernels read dense buffers"
    return tensor.data_ptr()
