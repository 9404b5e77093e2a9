"""Tilings of the GEMM for a suffix's rows, some tens to some hundreds: there a product reads its weights in the time
that it multiplies, so that all multiprocessors must fetch, and the next product's blocks should find room to begin to.

This module only computes; `vla_accel.nn.kernel_choices` measures the configs.
"""

from __future__ import annotations

from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.hopper.tiling import Tiling
from vla_accel.kernels.gpu import Gpu
from vla_accel.numeric import round_up

ARCHITECTURE = "sm_90a"
LEAST, MOST = 33, 1024
"""Rows."""
SPLITS = (1, 2, 3, 4, 6, 8)
SHAPES, ALIKE = 4, 2
"""Shapes of tiles that are measured, each with one and with two blocks' room a multiprocessor; so many at most share K
alike."""
FIXED, EXCHANGE = 2500, 600
"""Cycles of a block beside its products, and of handing over parts of K, by estimate."""


def few(gpu: Gpu | None, rows: int, n: int, k: int, paired: int = 0) -> list[Tiling]:
    """Tilings for rows of 16-bit activations (rows, k) by a weight (n, k), the most promising first. `paired`: weight
    rows that are taken by pairs come in groups of so many, of which a tile has no two."""
    if gpu is None or gpu.architecture != ARCHITECTURE or not LEAST <= rows <= MOST or n % 64 or k % 8 or paired % 16:
        return []
    chunks = -(-k * 2 // 128)
    found: dict[Tiling, float] = {}
    for groups in (1, 2):
        if n % (64 * groups) or (paired and paired % (64 * groups)):
            continue
        for tiles in range(-(-rows // 256), max(2, rows // 24) + 1):
            width = round_up(-(-rows // tiles), 8)
            for split in SPLITS:
                if -(-chunks // split) * (split - 1) >= chunks:
                    continue
                for resident in (1, 2):
                    tiling = _deepest(groups, width, split, resident, -(-chunks // split))
                    if tiling is not None:
                        found.setdefault(tiling, _cost(gpu, tiling, rows, n, chunks))
    best = sorted(found, key=lambda tiling: (found[tiling], tiling.split, tiling.resident))
    return [tiling for room in (2, 1) for tiling in _different([t for t in best if t.resident == room])]


def _different(best: list[Tiling]) -> list[Tiling]:
    """The first of them that are not all alike."""
    kept: list[Tiling] = []
    for tiling in best:
        if sum(tiling.split == other.split for other in kept) < ALIKE and len(kept) < SHAPES:
            kept.append(tiling)
    return kept


def _deepest(groups: int, width: int, split: int, resident: int, chunks: int) -> Tiling | None:
    """With as many stages as there is room for and chunks to fill; None where the kernel cannot run it."""
    for stages in range(min(8, max(chunks, 3)), 2, -1):
        tiling = Tiling(groups, 1, 1, width, stages, split=split, resident=resident)
        ways = (
            tiling.why_not(residual=True),
            tiling.why_not(normed=True),
            tiling.why_not(Activation.GEGLU, normed=True),
        )
        # Before registers are shared out, a product's own and its operands' must fit beside each other.
        if not any(ways) and width // 2 + 32 <= tiling.registers[0]:
            return tiling
    return None


def _cost(gpu: Gpu, tiling: Tiling, rows: int, n: int, chunks: int) -> float:
    """Cycles: waves of blocks, each of which multiplies or fetches its chunks, and hands parts over."""
    blocks = -(-rows // tiling.tokens) * -(-n // tiling.weight_rows) * tiling.split
    waves = -(-blocks // gpu.multiprocessors)
    multiplied, fetched = tiling.weight_rows * tiling.tokens / 16, 128 * (tiling.weight_rows + tiling.tokens) / 40
    handed = EXCHANGE + tiling.weight_rows * tiling.tokens * 4 * (1 - 1 / tiling.split) / 30 if tiling.split > 1 else 0
    return waves * (FIXED + -(-chunks // tiling.split) * max(multiplied, fetched)) + handed
