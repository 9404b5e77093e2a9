"""How the denoise kernels (`ops/cuda/denoise/`) deal out their work: grids, clusters, shared memory, and the sizes that
the source is compiled with. Plain arithmetic, which must agree with the source; it touches no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from vla_accel.models.pi0 import Pi0Config
from vla_accel.native.fold import round_up
from vla_accel.native.packing import CHUNK, split_of
from vla_accel.ops.cuda.runtime import source_of
from vla_accel.ops.cuda.wgmma import product

STAGE_BYTES, WARPS, KEYS = 32_768, 8, 64
THREADS = WARPS * 32
MAX_PORTABLE, MAX_CLUSTER = 8, 16
RANKS = 8
"""Blocks of `attend` that share a head."""
MULTIPROCESSORS, SHARED_LIMIT = 132, 232_448
"""Of an H200; shared memory a block may have, in bytes."""


def held_tiles(rows: int) -> int:
    """Tiles of 16 rows that a warp holds: all of up to two; of more, four warps take one each."""
    tiles = -(-rows // 16)
    return tiles if tiles <= 2 else 1


def shared_by(width: int, k: int, packed: int, tiles: int) -> int:
    """Blocks that share K of a product whose weights are packed for `packed` parts: where rows are many they weigh more
    than weights, and twice as many blocks share K."""
    twice = 2 * packed
    divides = width % (8 * twice) == 0 and k % (32 * twice) == 0 and k // packed <= CHUNK
    return twice if tiles > 2 and packed == 4 and divides else packed


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
    def of(cls, config: Pi0Config, batch: int, prefix_tokens: int) -> Attend | None:
        """None where it does not fit: several sequences, other heads, more keys than shared memory holds."""
        expert, tokens = config.expert, config.suffix_tokens
        d, in_front = expert.head_dim, 2 * expert.kv_heads * expert.head_dim // 16
        if batch != 1 or d % 128 or in_front % RANKS:
            return None
        prefix_keys, suffix_keys = (round_up(-(-n // RANKS), 8) for n in (prefix_tokens, tokens))
        keys = prefix_keys + suffix_keys
        rows, pitch, units = round_up(tokens, 16), 2 * (d + 8), d // 16 // RANKS
        shared = round_up(units * (STAGE_BYTES + 8) + 4 * (WARPS * held_tiles(rows) * 16 + rows), 16)
        shared += (keys + round_up(keys, 16) + rows) * pitch
        shared += 4 * rows * (2 * WARPS + 2 * RANKS) + 2 * rows * d // RANKS + 8
        probabilities = 2 * rows * (round_up(keys, 16) + 8)
        blocks = in_front + expert.heads * RANKS
        if shared > SHARED_LIMIT or blocks > MULTIPROCESSORS or probabilities > rows * pitch:
            return None
        key_warps = WARPS if rows <= 32 else WARPS // 4
        return cls(prefix_keys, suffix_keys, blocks, shared, -(-round_up(keys, 16) // (8 * key_warps)))


@dataclass(frozen=True)
class Schedule:
    """Blocks, blocks of a cluster and bytes of shared memory by kernel, and the macros of the source."""

    sizes: dict[str, int]
    blocks: dict[str, int]
    clusters: dict[str, int]
    shared: dict[str, int]
    attend: Attend | None

    @classmethod
    def of(cls, config: Pi0Config, batch: int, prefix_tokens: int) -> Schedule:
        """For `batch` sequences after `prefix_tokens` each; the model is one that `streamed.fits`."""
        expert, tokens, adaptive = config.expert, config.suffix_tokens, config.kind == "pi05"
        rows, attended = batch * tokens, expert.heads * expert.head_dim
        tiles, held, pairs = -(-rows // 16), held_tiles(rows), expert.mlp_dim // 8
        # As many units a block as leave all blocks of gate and up a place at once: two blocks a multiprocessor where
        # rows are few, one where they take its registers.
        units = min(3 if tiles <= 2 else 4, -(-pairs // 128))
        packed = [split_of(expert.width, k) for k in (expert.mlp_dim, attended, expert.width)]
        down, output, mix = (
            shared_by(expert.width, k, parts, tiles)
            for k, parts in zip((expert.mlp_dim, attended, expert.width), packed, strict=True)
        )
        # Blocks for a row between two evaluations: each has whole vectors of its columns.
        most = 8 if batch * config.action_horizon <= 16 else 4
        step_blocks = next(n for n in (8, 4, 2, 1) if n <= most and (n == 1 or expert.width % (128 * n) == 0))
        splits = (round_up(prefix_tokens, KEYS) + round_up(tokens, KEYS)) // KEYS
        tiled = -(-tokens * (expert.heads // expert.kv_heads) // 16) * batch * expert.kv_heads
        # A block for every tile of keys where the clusters all fit on the chip at once.
        cluster = splits if MAX_PORTABLE < splits <= MAX_CLUSTER and tiled <= 7 else MAX_PORTABLE
        attend = Attend.of(config, batch, prefix_tokens)
        sizes = {
            "MT": tiles, "M": rows, "BATCH": batch, "T": tokens, "HZ": config.action_horizon, "W": expert.width,
            "MLP": expert.mlp_dim, "H": expert.heads, "KV": expert.kv_heads, "D": expert.head_dim, "L": expert.depth,
            "A": config.action_dim, "GATE_UP_UNITS": units, "CLUSTER": cluster, "DOWN_SPLIT": down,
            "OUTPUT_SPLIT": output, "MIX_SPLIT": mix, "DOWN_PACKED": packed[0], "OUTPUT_PACKED": packed[1],
            "MIX_PACKED": packed[2], "STEP_BLOCKS": step_blocks, "ADAPTIVE": int(adaptive),
            "KEY_ROUNDS": 0 if attend is None else attend.rounds,
        }  # fmt: skip
        squares = 4 * 16 * (WARPS * held + tiles)

        def split(k: int, parts: int) -> int:
            part = k // parts
            weights, sums = part * parts * 16, WARPS * parts * held * 512
            return max(weights, sums) + 4 * parts * tiles * 128 + 8 * -(-part // CHUNK)

        blocks = {
            "gate_up": -(-pairs // units),
            "output": expert.width // 8,
            "down": expert.width // 8,
            "between": step_blocks * batch * (config.action_horizon + (0 if adaptive else 1)),
        }
        clusters = {"output": output, "down": down, "between": step_blocks}
        shared = {
            "gate_up": units * (STAGE_BYTES + 8) + squares,
            "output": split(attended, output),
            "down": split(expert.mlp_dim, down),
            "between": 0,
        }
        if not adaptive:
            blocks["mix"], clusters["mix"], shared["mix"] = expert.width // 8, mix, split(expert.width, mix)
        if attend is not None:
            blocks["attend"], clusters["attend"], shared["attend"] = attend.blocks, RANKS, attend.shared
        else:
            blocks["qkv"], shared["qkv"] = (
                (attended + 2 * expert.kv_heads * expert.head_dim) // 16,
                STAGE_BYTES + 8 + squares,
            )
            blocks["attention"], clusters["attention"], shared["attention"] = tiled * cluster, cluster, 0
        return cls(sizes, blocks, clusters, shared, attend)

    @property
    def source(self) -> str:
        """The kernels' source, sizes first."""
        defines = "".join(f"#define {name} {value}\n" for name, value in self.sizes.items())
        names = ("core", "products", "phases", "attention" if self.attend is None else "attend", "step")
        return source_of(defines, *(f"denoise/{name}" for name in names), generated=self._wide_products)

    @property
    def _wide_products(self) -> str:
        """Wrappers of the products of many rows, one for each number of columns."""
        if self.sizes["MT"] <= 2:
            return ""
        units = {1, self.sizes["GATE_UP_UNITS"], self.sizes["D"] // 16 // RANKS}
        columns = {16 * n for n in units if n} | {8 * self.sizes[f"{k}_SPLIT"] for k in ("DOWN", "OUTPUT", "MIX")}
        return "".join(product("wide_product", n, "bf16", registers=True) for n in sorted(columns))
