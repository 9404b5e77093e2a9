"""How the denoise kernels deal out their work on a GPU: grids, clusters, shared memory, and the sizes that the source
is compiled with. Plain arithmetic, which must agree with the source; it asks no device."""

from __future__ import annotations

from dataclasses import dataclass

from vla_accel.kernels.activation import MACROS
from vla_accel.kernels.gpu import PORTABLE_CLUSTER, Gpu
from vla_accel.kernels.loop.arguments import Call, Model
from vla_accel.kernels.loop.packing import CHUNK, split_of
from vla_accel.kernels.loop.tables import Sizes
from vla_accel.kernels.nvrtc import source_of
from vla_accel.kernels.wgmma import wgmma
from vla_accel.numeric import round_up

WARPS, KEYS = 8, 64
THREADS = WARPS * 32
MAX_CLUSTER = 16
MOST_ROUNDS = 8
"""Blocks of 16 keys whose scores a warp of `grouped` holds."""
LEAST_PART = 128
"""Columns of K that are worth a block where rows are many: weights that are packed whole may be shared so far."""
RANKS = 8
"""Blocks of `attend` that share a head."""
STAGE_BYTES = 2 * 8 * 1024 * 2
"""Of a unit's weights: two tiles of eight columns of at most 1024, in BF16."""
NOTHING_YET = -1
"""The bits of two of the suffix's keys and values that nobody has stored yet."""
CONSTANTS = {
    "WARPS": WARPS, "KEYS": KEYS, "RANKS": RANKS, "CHUNK": CHUNK, "STAGE_BYTES": STAGE_BYTES,
    "NOTHING_YET": NOTHING_YET,
}  # fmt: skip


def held_tiles(rows: int) -> int:
    """Tiles of 16 rows that a warp holds: all of up to two; of more, four warps take one each."""
    tiles = -(-rows // 16)
    return tiles if tiles <= 2 else 1


def normed_room(units: int, tiles: int, least: int = 0) -> int:
    """Bytes of a block's weights in a product behind a norm, of the sums that take their place, and of `least` for what
    takes it afterwards (`Room` of products.cu)."""
    together = min(units, 2 if tiles == 2 else 4)
    sums = WARPS * together * 2 * held_tiles(16 * tiles) * 512
    return max(units * STAGE_BYTES, (units - 1) // together * together * STAGE_BYTES + sums, least)


def shared_by(width: int, k: int, packed: int, tiles: int) -> int:
    """Blocks that share K of a product whose weights are packed for `packed` parts: where rows are many they weigh more
    than weights, and twice as many blocks share K, or as many as leave each a part that is worth it."""
    if tiles <= 2:
        return packed
    if packed == 1 and k <= CHUNK:
        # Each half of the warps has as many blocks of 32: a product that one half ends before the other is serialised.
        parts = range(8, 1, -1)
        return next((n for n in parts if width % (8 * n) == 0 and k % (64 * n) == 0 and k // n >= LEAST_PART), 1)
    twice = 2 * packed
    divides = width % (8 * twice) == 0 and k % (32 * twice) == 0 and k // packed <= CHUNK
    return twice if packed == 4 and divides else packed


@dataclass(frozen=True)
class Attend:
    """How `attend`, q/k/v and attention in one kernel, deals out its work. `prefix_keys`, `suffix_keys`: keys of each
    block of a cluster; `rounds`: tiles of eight of them a warp; `shared`: bytes."""

    prefix_keys: int
    suffix_keys: int
    blocks: int
    shared: int
    rounds: int

    @classmethod
    def of(cls, sizes: Sizes, batch: int, prefix_tokens: int, gpu: Gpu) -> Attend | str:
        """How, or why not: several sequences, other heads, more keys than shared memory holds, a GPU that does not hold
        all its blocks at once, which wait for each other."""
        d, in_front = sizes.head_dim, 2 * sizes.kv_heads * sizes.head_dim // 16
        if batch != 1:
            return f"it is for one sequence, not {batch}"
        if sizes.causal or sizes.self_every != 1:
            return "it is for layers that attend to all of the suffix"
        if d % 128 or in_front % RANKS:
            return f"it is not for {sizes.kv_heads} key heads of {d}"
        prefix_keys, suffix_keys = (round_up(-(-n // RANKS), 8) for n in (prefix_tokens, sizes.tokens))
        keys = prefix_keys + suffix_keys
        rows, pitch, units = round_up(sizes.tokens, 16), 2 * (d + 8), d // 16 // RANKS
        shared = round_up(units * (STAGE_BYTES + 8) + 4 * (WARPS * held_tiles(rows) * 16 + rows), 16)
        shared += (keys + round_up(keys, 16) + rows) * pitch
        shared += 4 * rows * (2 * WARPS + 2 * RANKS) + 2 * rows * d // RANKS + 2 * 8
        probabilities = 2 * rows * (round_up(keys, 16) + 8)
        blocks = in_front + sizes.heads * RANKS
        if shared > gpu.shared_per_block:
            return f"its keys need {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}"
        if probabilities > rows * pitch:
            return f"it has no room for the probabilities of {keys} keys a block"
        clusters, room = blocks // RANKS, gpu.clusters_at_once(RANKS)
        if blocks > gpu.multiprocessors or clusters > room:
            return (
                f"its {clusters} clusters of {RANKS} blocks must run at once, {gpu.name} has {gpu.multiprocessors} "
                f"multiprocessors, which surely hold {room}"
            )
        key_warps = WARPS if rows <= 32 else WARPS // 4
        return cls(prefix_keys, suffix_keys, blocks, shared, -(-round_up(keys, 16) // (8 * key_warps)))


@dataclass(frozen=True)
class Grouped:
    """How `grouped`, q/k/v and attention in one kernel for small heads and few keys, deals out its work. `ranks`:
    blocks that share a key head; `units`: of q/k/v a block; `tiles`: of 16 rows a block; `rounds`: blocks of 16 keys a
    warp; `shared`: bytes."""

    ranks: int
    units: int
    tiles: int
    rounds: int
    blocks: int
    shared: int

    @classmethod
    def of(cls, sizes: Sizes, batch: int, prefix_tokens: int, gpu: Gpu, largest_cluster: int) -> Grouped | str:
        """How, or why not: several sequences, large heads, more keys than shared memory or registers hold."""
        d, group = sizes.head_dim, sizes.heads // sizes.kv_heads
        if batch != 1:
            return f"it is for one sequence, not {batch}"
        if d > 128:
            return f"it is not for heads of {d}"
        all_units, all_tiles = (group + 2) * d // 16, -(-sizes.tokens * group // 16)
        # A tile of rows and two units of weights are a block's share, where clusters may be so large.
        ranks = min(largest_cluster, max(all_tiles, -(-all_units // 2)))
        units, tiles = -(-all_units // ranks), -(-all_tiles // ranks)
        rows, pitch = -(-sizes.tokens // 16), 2 * (d + 8)
        keys = round_up(prefix_tokens, 16) + round_up(sizes.tokens, 16)
        product = normed_room(units, rows, WARPS * 16 * 2 * pitch)
        product += 8 * units + 4 * 16 * (WARPS * held_tiles(sizes.tokens) + rows)
        shared = round_up(product, 16) + (2 * keys + 16 * tiles) * pitch
        shared += 32 * units * sizes.tokens + 8 * 16 * WARPS + 8
        rounds = -(-keys // (16 * WARPS))
        if shared > gpu.shared_per_block:
            return f"its keys need {shared} bytes of shared memory a block, {gpu.name} has {gpu.shared_per_block}"
        if rounds > MOST_ROUNDS:
            return f"its warps hold {16 * WARPS * MOST_ROUNDS} keys, not {keys}"
        return cls(ranks, units, tiles, rounds, ranks * sizes.kv_heads, shared)


@dataclass(frozen=True)
class Schedule:
    """Blocks, blocks of a cluster and bytes of shared memory by kernel, and the macros of the source.

    `attend` or `grouped`: how q/k/v and attention run as one kernel; both None where they run as two, for the reason
    `apart`.
    """

    macros: dict[str, int]
    blocks: dict[str, int]
    clusters: dict[str, int]
    shared: dict[str, int]
    attend: Attend | None
    grouped: Grouped | None = None
    apart: str | None = None

    @classmethod
    def of(
        cls, sizes: Sizes, batch: int, prefix_tokens: int, gpu: Gpu, *, apart: str | None = None,
        largest_cluster: int = MAX_CLUSTER,
    ) -> Schedule:  # fmt: skip
        """For `batch` sequences after `prefix_tokens` each, on a GPU that `why_not` accepts with these sizes.

        What the device itself answered: `apart`, why `attend` does not fit it; `largest_cluster`, of blocks.
        """
        tokens, adaptive = sizes.tokens, sizes.adaptive
        rows, attended = batch * tokens, sizes.heads * sizes.head_dim
        tiles, held, pairs = -(-rows // 16), held_tiles(rows), sizes.mlp_dim // 8
        # As many units a block as leave all blocks of gate and up a place at once: two blocks a multiprocessor where
        # rows are few, one where they take its registers.
        units = min(3 if tiles <= 2 else 4, -(-pairs // 128))
        # Two warps share K, and a batch has two blocks of 32 of it each. Measured with 1024 columns; SmolVLA's 768 are
        # quicker with all registers.
        batched = tiles > 2 and sizes.width % 128 == 0 and sizes.width >= 1024
        packed = [split_of(sizes.width, k) for k in (sizes.mlp_dim, attended, sizes.width)]
        down, output, mix = (
            shared_by(sizes.width, k, parts, tiles)
            for k, parts in zip((sizes.mlp_dim, attended, sizes.width), packed, strict=True)
        )
        # Blocks for a row between two evaluations: each has whole vectors of its columns.
        most = 8 if batch * sizes.horizon <= 16 else 4
        step_blocks = next(n for n in (8, 4, 3, 2, 1) if n <= most and (n == 1 or sizes.width % (128 * n) == 0))
        splits = (round_up(prefix_tokens, KEYS) + round_up(tokens, KEYS)) // KEYS
        tiled = -(-tokens * (sizes.heads // sizes.kv_heads) // 16) * batch * sizes.kv_heads
        # A block for every tile of keys where the clusters all fit on the chip at once.
        beyond = PORTABLE_CLUSTER < splits <= largest_cluster and tiled < gpu.clusters_at_once(splits)
        cluster = splits if beyond else PORTABLE_CLUSTER
        forced = apart is not None
        found = Attend.of(sizes, batch, prefix_tokens, gpu) if apart is None else apart
        attend, apart = (None, found) if isinstance(found, str) else (found, None)
        grouped = None
        if attend is None and not forced:
            other = Grouped.of(sizes, batch, prefix_tokens, gpu, largest_cluster)
            grouped, apart = (None, f"{apart}; grouped: {other}") if isinstance(other, str) else (other, None)
        macros = CONSTANTS | MACROS | {
            "MT": tiles, "M": rows, "BATCH": batch, "T": tokens, "HZ": sizes.horizon,
            "W": sizes.width,
            "MLP": sizes.mlp_dim, "H": sizes.heads, "KV": sizes.kv_heads, "D": sizes.head_dim, "L": sizes.depth,
            "A": sizes.action_dim, "GATE_UP_UNITS": units, "CLUSTER": cluster, "DOWN_SPLIT": down,
            "OUTPUT_SPLIT": output, "MIX_SPLIT": mix, "DOWN_PACKED": packed[0], "OUTPUT_PACKED": packed[1],
            "MIX_PACKED": packed[2], "STEP_BLOCKS": step_blocks, "ADAPTIVE": int(adaptive),
            "NORMED": sizes.normed, "CAUSAL": int(sizes.causal), "ACTIVATION": sizes.activation.code,
            "SELF_EVERY": sizes.self_every, "GROUP_RANKS": 0 if grouped is None else grouped.ranks,
            "KEY_ROUNDS": next((way.rounds for way in (attend, grouped) if way is not None), 0),
            "BATCHED_ROWS": int(batched),
        }  # fmt: skip
        squares = 4 * 16 * (WARPS * held + tiles)

        def split(k: int, parts: int) -> int:
            part = k // parts
            weights, sums = part * parts * 8 * 2, WARPS * parts * held * 512
            return max(weights, sums) + 4 * parts * tiles * 128 + 8 * (-(-part // CHUNK) + 1)

        blocks = {
            "gate_up": -(-pairs // units),
            "output": sizes.width // 8,
            "down": sizes.width // 8,
            "between": step_blocks * batch * tokens,
        }
        clusters = {"output": output, "down": down, "between": step_blocks}
        shared = {
            "gate_up": normed_room(units, tiles) + (2 * sizes.width if batched else 0) + 8 * units + squares,
            "output": split(attended, output),
            "down": split(sizes.mlp_dim, down),
            "between": 0,
        }
        if not adaptive:
            blocks["mix"], clusters["mix"], shared["mix"] = sizes.width // 8, mix, split(sizes.width, mix)
        if attend is not None:
            blocks["attend"], clusters["attend"], shared["attend"] = attend.blocks, RANKS, attend.shared
        elif grouped is not None:
            blocks["grouped"], clusters["grouped"], shared["grouped"] = grouped.blocks, grouped.ranks, grouped.shared
        else:
            blocks["qkv"], shared["qkv"] = (
                (attended + 2 * sizes.kv_heads * sizes.head_dim) // 16,
                normed_room(1, tiles) + 8 + squares,
            )
            blocks["attention"], clusters["attention"], shared["attention"] = tiled * cluster, cluster, 0
        return cls(macros, blocks, clusters, shared, attend, grouped, apart)

    @property
    def source(self) -> str:
        """The kernels' source, sizes first."""
        attention = next((name for name in ("attend", "grouped") if name in self.blocks), "attention")
        names = ("core", "products", "phases", attention, "step")
        return source_of(
            self.macros, *(f"loop/{name}" for name in names), generated=Model.cpp + Call.cpp + self._wide_products
        )

    @property
    def _wide_products(self) -> str:
        """Wrappers of the products of many rows, one for each number of columns."""
        if self.macros["MT"] <= 2:
            return ""
        units = {1, self.macros["GATE_UP_UNITS"], self.macros["D"] // 16 // RANKS}
        if self.grouped is not None:
            units.add(min(self.grouped.units, 4))
        columns = {16 * n for n in units if n} | {8 * self.macros[f"{k}_SPLIT"] for k in ("DOWN", "OUTPUT", "MIX")}
        return "".join(wgmma("wgmma", n, "bf16", registers=True) for n in sorted(columns))
