"""How the denoise kernels divide their work on a GPU: grids, clusters, shared memory, and the sizes that the source is
compiled with. Plain arithmetic, without a device.

A layout of shared memory is decided here alone: the kernels get sizes as macros and offsets in an argument block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vla_accel.kernels.activation import MACROS
from vla_accel.kernels.gpu import PORTABLE_CLUSTER, Gpu
from vla_accel.kernels.loop.arguments import AttendWork, Call, GroupedWork, Model
from vla_accel.kernels.loop.packing import CHUNK, split_of
from vla_accel.kernels.loop.tables import ExpertSpec
from vla_accel.kernels.nvrtc import source_of
from vla_accel.kernels.struct import Block
from vla_accel.kernels.wgmma import wgmma
from vla_accel.numeric import round_up

WARPS, KEYS = 8, 64
THREADS = WARPS * 32
MAX_CLUSTER = 16
MOST_ROUNDS = 8
"""Blocks of 16 keys whose scores a warp of `grouped` holds."""
LEAST_SHARED_PART = 128
"""The fewest columns of K that are worth a block if there are many rows and the weights are packed whole."""
RANKS = 8
"""Blocks of `attend` that share a head."""
STAGE_BYTES = 2 * 8 * 1024 * 2
"""The weights of a unit: two tiles of eight columns of at most 1024, in BF16."""
NOTHING_YET = -1
"""The bits of two of the suffix's keys and values that no block has stored yet."""
BARRIER = 8
CONSTANTS = {
    "WARPS": WARPS, "KEYS": KEYS, "RANKS": RANKS, "CHUNK": CHUNK, "STAGE_BYTES": STAGE_BYTES,
    "NOTHING_YET": NOTHING_YET,
}  # fmt: skip


def divide(n: int, by: int) -> int:
    """Divide and round up."""
    return -(-n // by)


@dataclass(frozen=True)
class Tiling:
    """How the warps of a block divide the rows of a product: with few rows all of them share K, and each has all rows;
    with more than 32, four take a tile of rows each, and two share K.

    `tiles`: of 16 rows; `held`: of them a warp; `pairs`: output tiles whose sums fit in registers at once.
    """

    tiles: int

    @property
    def many(self) -> bool:
        return self.tiles > 2

    @property
    def held(self) -> int:
        return 1 if self.many else self.tiles

    @property
    def row_warps(self) -> int:
        return 4 if self.many else 1

    @property
    def pairs(self) -> int:
        return 2 if self.tiles == 2 else 4

    @property
    def macros(self) -> dict[str, int]:
        return {
            "ROW_TILES": self.tiles, "HELD_TILES": self.held, "ROW_WARPS": self.row_warps, "PAIRS": self.pairs,
            "K_WARPS": WARPS // self.row_warps,
        }  # fmt: skip

    def normed_bytes(self, units: int, least: int = 0) -> int:
        """Bytes of an area of shared memory that holds, in turn, the weights of a product after a norm, its sums, and
        `least` bytes."""
        together = min(units, self.pairs)
        sums = WARPS * together * 2 * self.held * 512
        return max(units * STAGE_BYTES, (units - 1) // together * together * STAGE_BYTES + sums, least)

    def behind_normed(self, units: int) -> int:
        """Bytes after these: the barriers, the squares of the rows, and the norms' factors."""
        return BARRIER * units + 4 * 16 * (WARPS * self.held + self.tiles)

    def split_bytes(self, k: int, parts: int) -> int:
        """Bytes of a block's weights in a split product, and of the sums that replace them."""
        return max(k // parts * parts * 8 * 2, WARPS * parts * self.held * 512)

    def behind_split(self, k: int, parts: int) -> int:
        """Bytes after these: the parts of the cluster's blocks, and the barriers."""
        return 4 * parts * self.tiles * 128 + BARRIER * (divide(k // parts, CHUNK) + 1)


def offsets(areas: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each area of shared memory, a multiple of 16, and the bytes of all."""
    found, at = {}, 0
    for name, size in areas.items():
        at = round_up(at, 16)
        found[name] = at
        at += size
    return found, at


def shared_by(width: int, k: int, packed: int, tiles: int) -> int:
    """Return how many blocks share K of a product whose weights are packed for `packed` parts.

    With many rows, activations cost more than weights: twice as many blocks share K, or as many as leave each a part
    that is worth it.
    """
    if tiles <= 2:
        return packed
    if packed == 1 and k <= CHUNK:
        # Each half of the warps has as many blocks of 32: a product that one half ends before the other is serialised.
        parts = range(8, 1, -1)
        suits = (n for n in parts if width % (8 * n) == 0 and k % (64 * n) == 0 and k // n >= LEAST_SHARED_PART)
        return next(suits, 1)
    twice = 2 * packed
    divides = width % (8 * twice) == 0 and k % (32 * twice) == 0 and k // packed <= CHUNK
    return twice if packed == 4 and divides else packed


@dataclass(frozen=True)
class Fused:
    """How one kernel computes q/k/v and attention.

    `kernel`: "attend" or "grouped"; `cluster`: blocks; `units`: of q/k/v a block; `rounds`: tiles of keys a warp;
    `work`: the argument block; `macros`: of this kernel.
    """

    kernel: str
    blocks: int
    cluster: int
    shared: int
    units: int
    rounds: int
    work: Block
    macros: dict[str, int] = field(default_factory=dict)


def attend(spec: ExpertSpec, batch: int, prefix_tokens: int, gpu: Gpu) -> Fused | str:
    """Plan `attend`, or explain why it cannot run: several sequences, other heads, more keys than shared memory holds,
    or a GPU that does not hold all its blocks at once, which wait for each other."""
    d, in_front = spec.head_dim, 2 * spec.kv_heads * spec.head_dim // 16
    if batch != 1:
        return f"it is for one sequence, not {batch}"
    if spec.causal or spec.self_every != 1:
        return "it is for layers that attend to all of the suffix"
    if d % 128 or in_front % RANKS:
        return f"it is not for {spec.kv_heads} key heads of {d}"
    prefix_keys, suffix_keys = (round_up(divide(n, RANKS), 8) for n in (prefix_tokens, spec.tokens))
    keys = prefix_keys + suffix_keys
    padded_keys = round_up(keys, 16)
    tiling = Tiling(divide(spec.tokens, 16))
    rows, pitch, units = 16 * tiling.tiles, 2 * (d + 8), d // 16 // RANKS
    product = units * STAGE_BYTES
    places, shared = offsets({
        "product": product + tiling.behind_normed(units), "keys": keys * pitch, "values": padded_keys * pitch,
        "queries": rows * pitch, "maxima": 4 * WARPS * rows, "totals": 4 * WARPS * rows,
        "statistics": 8 * RANKS * rows, "own_queries": 2 * rows * d // RANKS, "barriers": 2 * BARRIER,
    })  # fmt: skip
    del places["product"]
    if shared > gpu.shared_per_block:
        return f"its keys need {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}"
    if 2 * (padded_keys + 8) > pitch:
        return f"its shared memory is too small for the probabilities of {keys} keys a block"
    blocks = in_front + spec.heads * RANKS
    clusters, held = blocks // RANKS, gpu.clusters_at_once(RANKS)
    if blocks > gpu.multiprocessors or clusters > held:
        return (
            f"its {clusters} clusters of {RANKS} blocks must run at once, {gpu.name} has {gpu.multiprocessors} "
            f"multiprocessors, which surely hold {held}"
        )
    work = AttendWork(prefix_keys=prefix_keys, suffix_keys=suffix_keys, **places)
    rounds = divide(padded_keys, 8 * WARPS // tiling.row_warps)
    return Fused("attend", blocks, RANKS, shared, units, rounds, work, {"ATTEND_BYTES": product})


def grouped(spec: ExpertSpec, batch: int, prefix_tokens: int, gpu: Gpu, largest_cluster: int) -> Fused | str:
    """Plan `grouped`, for small heads and few keys, or explain why it cannot run: several sequences, large heads, more
    keys than shared memory or registers hold."""
    d, group = spec.head_dim, spec.heads // spec.kv_heads
    if batch != 1:
        return f"it is for one sequence, not {batch}"
    if d > 128:
        return f"it is not for heads of {d}"
    all_units, all_tiles = (group + 2) * d // 16, divide(spec.tokens * group, 16)
    # A tile of rows and two units of weights are a block's share, if clusters may be so large.
    ranks = min(largest_cluster, max(all_tiles, divide(all_units, 2)))
    units, tiles = divide(all_units, ranks), divide(all_tiles, ranks)
    tiling, pitch = Tiling(divide(spec.tokens, 16)), 2 * (d + 8)
    keys = round_up(prefix_tokens, 16) + round_up(spec.tokens, 16)
    # Every warp's part of a tile's result replaces the weights, but never their barriers: values stored in the place
    # of a barrier are sometimes lost if processes share the GPU in turns.
    product = tiling.normed_bytes(units, WARPS * 16 * 2 * pitch)
    places, shared = offsets({
        "product": product + tiling.behind_normed(units), "keys": keys * pitch, "values": keys * pitch,
        "queries": 16 * tiles * pitch, "made": 32 * units * spec.tokens, "statistics": 8 * 16 * WARPS,
        "barrier": BARRIER,
    })  # fmt: skip
    del places["product"]
    rounds = divide(keys, 16 * WARPS)
    if shared > gpu.shared_per_block:
        return f"its keys need {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}"
    if rounds > MOST_ROUNDS:
        return f"its warps hold {16 * WARPS * MOST_ROUNDS} keys, not {keys}"
    macros = {"GROUP_RANKS": ranks, "GROUPED_BYTES": product, "UNITS_EACH": units, "TILES_EACH": tiles}
    return Fused("grouped", ranks * spec.kv_heads, ranks, shared, units, rounds, GroupedWork(**places), macros)


@dataclass(frozen=True)
class Schedule:
    """By kernel the blocks, the blocks of a cluster and the bytes of shared memory, and the macros of the source.

    `fused`: how q/k/v and attention run as one kernel; None if they run as two, for the reason `apart`.
    """

    macros: dict[str, int]
    blocks: dict[str, int]
    clusters: dict[str, int]
    shared: dict[str, int]
    fused: Fused | None = None
    apart: str | None = None

    @classmethod
    def of(
        cls, spec: ExpertSpec, batch: int, prefix_tokens: int, gpu: Gpu, *, apart: str | None = None,
        largest_cluster: int = MAX_CLUSTER,
    ) -> Schedule:  # fmt: skip
        """Plan for `batch` sequences after `prefix_tokens` each, on a GPU that `why_not` accepts.

        Args:
            apart: why the device does not hold the clusters of `attend`, if it reported that.
            largest_cluster: blocks of a cluster that the device holds.
        """
        tokens, rows, attended = spec.tokens, batch * spec.tokens, spec.heads * spec.head_dim
        tiling, pairs = Tiling(divide(rows, 16)), spec.mlp_dim // 8
        # As many units a block as let all blocks of gate and up run at once: two blocks a multiprocessor if rows are
        # few, one if many rows take most of its registers.
        units = min(4 if tiling.many else 3, divide(pairs, 128))
        # Two warps share K, and a batch has two blocks of 32 of it each. Measured with 1024 columns; SmolVLA's 768 are
        # faster with all registers.
        batched = tiling.many and spec.width % 128 == 0 and spec.width >= 1024
        # Blocks for a row between two evaluations: each has whole vectors of its columns.
        most = 8 if batch * spec.horizon <= 16 else 4
        step_blocks = next(n for n in (8, 4, 3, 2, 1) if n <= most and (n == 1 or spec.width % (128 * n) == 0))
        fused, why = _fused(spec, batch, prefix_tokens, gpu, apart, largest_cluster)
        macros = CONSTANTS | MACROS | tiling.macros | {
            "ROWS": rows, "BATCH": batch, "TOKENS": tokens, "HORIZON": spec.horizon, "WIDTH": spec.width,
            "MODEL_WIDTH": spec.model_width, "MLP_DIM": spec.mlp_dim, "HEADS": spec.heads, "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim, "DEPTH": spec.depth, "ACTION_DIM": spec.action_dim,
            "ADAPTIVE": int(spec.adaptive), "CAUSAL": int(spec.causal), "ACTIVATION": spec.activation.code,
            "SELF_EVERY": spec.self_every, "GATE_UP_UNITS": units, "GATE_UP_BYTES": tiling.normed_bytes(units),
            "STEP_BLOCKS": step_blocks, "BATCHED_ROWS": int(batched), "GROUP_RANKS": 0, "KEY_ROUNDS": 0,
        }  # fmt: skip
        factors = 2 * spec.width if batched else 0
        blocks = {"gate_up": divide(pairs, units), "between": step_blocks * rows}
        clusters = {"between": step_blocks}
        shared = {"gate_up": macros["GATE_UP_BYTES"] + factors + tiling.behind_normed(units), "between": 0}
        split = {"output": attended, "down": spec.mlp_dim} | ({} if spec.adaptive else {"mix": spec.width})
        for kernel, k in split.items():
            packed = split_of(spec.width, k)
            parts = shared_by(spec.width, k, packed, tiling.tiles)
            size = tiling.split_bytes(k, parts)
            name = kernel.upper()
            macros |= {f"{name}_SPLIT": parts, f"{name}_PACKED": packed, f"{name}_BYTES": size}
            blocks[kernel], clusters[kernel] = spec.width // 8, parts
            shared[kernel] = size + tiling.behind_split(k, parts)
        if fused is not None:
            macros |= fused.macros | {"KEY_ROUNDS": fused.rounds}
            blocks[fused.kernel], clusters[fused.kernel] = fused.blocks, fused.cluster
            shared[fused.kernel] = fused.shared
            return cls(macros, blocks, clusters, shared, fused)
        splits = (round_up(prefix_tokens, KEYS) + round_up(tokens, KEYS)) // KEYS
        tiled = divide(tokens * (spec.heads // spec.kv_heads), 16) * batch * spec.kv_heads
        # A block for every tile of keys if all clusters fit on the chip at once.
        beyond = PORTABLE_CLUSTER < splits <= largest_cluster and tiled < gpu.clusters_at_once(splits)
        cluster = splits if beyond else PORTABLE_CLUSTER
        macros |= {"CLUSTER": cluster, "QKV_BYTES": tiling.normed_bytes(1)}
        blocks |= {"qkv": (attended + 2 * spec.kv_heads * spec.head_dim) // 16, "attention": tiled * cluster}
        clusters["attention"] = cluster
        shared |= {"qkv": macros["QKV_BYTES"] + tiling.behind_normed(1), "attention": 0}
        return cls(macros, blocks, clusters, shared, None, why)

    @property
    def source(self) -> str:
        """The source of the kernels, with the sizes at its beginning."""
        names = ("core", "products", "phases", "attention" if self.fused is None else self.fused.kernel, "step")
        blocks = "".join(b.cpp for b in (Model, Call, AttendWork, GroupedWork))
        paths = ("tensor_cores", *(f"loop/{name}" for name in names))
        return source_of(self.macros, *paths, generated=blocks + self._wide_products)

    @property
    def _wide_products(self) -> str:
        """Wrappers of the products of many rows, one for each number of columns."""
        if self.macros["ROW_TILES"] <= 2:
            return ""
        units = {1, self.macros["GATE_UP_UNITS"]} | ({min(self.fused.units, 4)} if self.fused is not None else set())
        splits = {self.macros.get(f"{kernel}_SPLIT", 0) for kernel in ("DOWN", "OUTPUT", "MIX")}
        columns = {16 * n for n in units} | {8 * n for n in splits if n}
        return "".join(wgmma("wgmma", n, "bf16", registers=True) for n in sorted(columns))


def _fused(
    spec: ExpertSpec, batch: int, prefix_tokens: int, gpu: Gpu, apart: str | None, largest_cluster: int
) -> tuple[Fused | None, str | None]:
    """Return the kernel of q/k/v and attention, or why there is none."""
    if apart is not None:
        return None, apart
    first = attend(spec, batch, prefix_tokens, gpu)
    if isinstance(first, Fused):
        return first, None
    second = grouped(spec, batch, prefix_tokens, gpu, largest_cluster)
    return (second, None) if isinstance(second, Fused) else (None, f"{first}; grouped: {second}")
