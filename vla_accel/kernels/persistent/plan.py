"""How the persistent kernel divides its work: its products, its shared memory, and the sizes that its source is
compiled with. Plain arithmetic, without a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vla_accel.errors import EngineError
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop.tables import ExpertSpec
from vla_accel.kernels.nvrtc import source_of
from vla_accel.kernels.persistent.arguments import Call, Model
from vla_accel.numeric import round_up

WARPS = 8
"""Warps that compute; one more warp copies."""
THREADS = (WARPS + 1) * 32
MOST_ROWS = 16
"""Rows of a tensor-core product."""
CHUNK = 32 * WARPS
"""Columns of K in a unit: 32 for each warp."""
UNIT_BYTES = 8 * CHUNK * 2
KEYS = 8 * WARPS
"""Prefix keys of an item of attention."""
MOST_STAGES = 12
HOPS, HOP_STRIDE = 7, 32


@dataclass(frozen=True)
class Tuning:
    """Knobs of the ring and the products.

    Args:
        under_way: units of 4 KB that a block copies at once, at most. More of them delay what blocks exchange through
            L2.
        stage_units: units of a stage of the ring, 4 or 8: attention reads an item's values from at most two stages.
        together: tiles of q/k/v, and of gate and up, that a block multiplies at once.
        loaded: chunks of an input that a thread loads at once, a multiple of `stage_units`: a stage lies in one load.
    """

    under_way: int = 4
    stage_units: int = 4
    together: tuple[int, int] = (4, 8)
    loaded: int = 8

    def __post_init__(self) -> None:
        if self.stage_units not in (4, 8) or self.loaded % self.stage_units:
            raise EngineError(f"denoise: expected stages of 4 or 8 units that divide `loaded`, got {self}")


@dataclass(frozen=True)
class Product:
    """A product with a weight (N, K).

    Args:
        half: distance between the two columns that an output combines; 4 if it has one column.
        together: tiles of eight columns that a block multiplies at once.
        owned: whether its columns are those of the residual stream, each of which belongs to one block.
    """

    name: str
    n: int
    k: int
    half: int
    together: int
    owned: bool

    def cpp(self, stage_units: int) -> str:
        """The structure that describes it in the source."""
        stage_tiles = min(self.together, stage_units)
        fields = {
            "N": self.n, "K": self.k, "HALF": self.half, "TILES": self.n // 8, "CHUNKS": -(-self.k // CHUNK),
            "TOGETHER": self.together, "OWNED": int(self.owned), "STAGE_TILES": stage_tiles,
            "STAGE_CHUNKS": stage_units // stage_tiles,
        }  # fmt: skip
        return f"struct {self.name} {{ enum {{ {', '.join(f'{k} = {v}' for k, v in fields.items())} }}; }};\n"


@dataclass(frozen=True)
class Plan:
    """The kernel of an expert for a batch, on a GPU; for any number of prefix tokens.

    Args:
        steps: number of Euler steps.
        trained: whether some actions are pinned (`StepTables.trained`).
    """

    spec: ExpertSpec
    batch: int
    steps: int
    trained: bool
    gpu: Gpu
    tuning: Tuning = Tuning()

    @property
    def rows(self) -> int:
        return self.batch * self.spec.tokens

    @property
    def blocks(self) -> int:
        """One for each multiprocessor; they must all run at once."""
        return self.gpu.multiprocessors

    @property
    def products(self) -> tuple[Product, ...]:
        s = self.spec
        attended, heads = s.heads * s.head_dim, s.heads + 2 * s.kv_heads
        qkv, gate_up = self.tuning.together
        return (
            Product("Qkv", heads * s.head_dim, s.width, s.head_dim // 2, qkv, False),
            Product("Output", s.width, attended, 4, 1, True),
            Product("GateUp", 2 * s.mlp_dim, s.width, s.mlp_dim, gate_up, False),
            Product("Down", s.width, s.mlp_dim, 4, 1, True),
            Product("Mix", s.width, s.width, 4, 1, True),
        )

    def items(self, prefix_tokens: int) -> int:
        """Items of attention: heads, and parts of the keys."""
        return self.batch * self.spec.heads * (-(-prefix_tokens // KEYS) + 1)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where the areas of shared memory begin. The scratch areas of products and attention share their bytes."""
        s, rows, found = self.spec, self.rows, {}
        own = -(-s.width // 8 // self.blocks) * rows * 8 * 4
        sums = WARPS * max(p.together for p in self.products) * rows * 8 * 4
        head = MOST_ROWS * s.head_dim * 2
        statistics = MOST_ROWS * WARPS * 4
        found["OWN_AT"], found["SQUARES_AT"] = 0, round_up(own, 16)
        found["BARRIERS_AT"] = found["SQUARES_AT"] + statistics
        scratch = found["BARRIERS_AT"] + round_up(2 * MOST_STAGES * 8, 16)
        found |= {"SUMS_AT": scratch, "Q_AT": scratch, "K_AT": scratch + head, "V_AT": scratch + 2 * head}
        found["P_AT"] = scratch + 3 * head
        found["MAXIMA_AT"] = found["P_AT"] + MOST_ROWS * (KEYS + 8) * 2
        found["TOTALS_AT"] = found["MAXIMA_AT"] + statistics
        found["RING_AT"] = round_up(max(scratch + sums, found["TOTALS_AT"] + statistics), 128)
        return found

    @property
    def stages(self) -> int:
        """Stages of the ring that fit, at most `MOST_STAGES`."""
        left = self.gpu.shared_per_block - self.offsets["RING_AT"]
        return min(MOST_STAGES, left // (self.tuning.stage_units * UNIT_BYTES))

    @property
    def least_stages(self) -> int:
        """Stages of an item's values, which are read together, and one that is copied meanwhile."""
        return KEYS // 8 // self.tuning.stage_units + 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.offsets["RING_AT"] + self.stages * self.tuning.stage_units * UNIT_BYTES

    @property
    def source(self) -> str:
        """The source of the kernel, with its sizes at the beginning."""
        s, pairs = self.spec, 2 if self.trained else 1
        macros = {
            "BATCH": self.batch, "TOKENS": s.tokens, "HORIZON": s.horizon, "ROWS": self.rows,
            "ACTION_DIM": s.action_dim, "WIDTH": s.width, "MLP_DIM": s.mlp_dim, "HEADS": s.heads,
            "KV_HEADS": s.kv_heads, "HEAD_DIM": s.head_dim, "DEPTH": s.depth, "STEPS": self.steps,
            "ADAPTIVE": int(s.adaptive), "TRAINED": int(self.trained), "PAIRS": pairs if s.adaptive else 1,
            "INPUT_PAIRS": 1 if s.adaptive else pairs, "WARPS": WARPS, "KEYS": KEYS, "STAGES": self.stages,
            "STAGE_UNITS": self.tuning.stage_units, "UNDER_WAY": self.tuning.under_way,
            "LOADED_CHUNKS": self.tuning.loaded, "HOPS": HOPS, "HOP_STRIDE": HOP_STRIDE, **self.offsets,
        }  # fmt: skip
        generated = Model.cpp + Call.cpp + "".join(p.cpp(self.tuning.stage_units) for p in self.products)
        names = ("blocks", "core", "ring", "product", "epilogues", "attention", "kernel")
        return source_of(macros, "tensor_cores", *(f"persistent/{name}" for name in names), generated=generated)
