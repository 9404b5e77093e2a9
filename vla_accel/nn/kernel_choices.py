"""Tile configs of the ops of a denoise loop, measured when the loop is built, and remembered.

Every config is correct; the fastest depends on the GPU, the rows and the weights. One kind of op is measured in all
layers, as the loop runs it, so that weights come from memory and not from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import CrossShape, CrossTile, KeySplit, SuffixShape
from vla_accel.kernels.attention.suffix import suffix_workspace
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.config import measure
from vla_accel.kernels.gemm import config as gemm_config
from vla_accel.kernels.gemm.config import GemmConfig, GemmSizes, Skinny
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm_workspace
from vla_accel.runtime import current

Config = GemmConfig | KeySplit | CrossTile


@dataclass(frozen=True)
class Taken:
    """A tile config, the workspace of its programs, and the moments that they write."""

    config: Config
    workspace: Any
    moments: Moments | None = None


class Cuts:
    """The tile configs of one loop by kind of op."""

    def __init__(self, device: torch.device, chain: Chain) -> None:
        """`chain`: of the loop. Ops are measured with the launches that they have inside it."""
        self.device, self.chain = device, chain
        self.taken: dict[str, Taken] = {}
        self.told: dict[str, str] = {}

    @property
    def detail(self) -> str:
        """The measured configs, for the ledger; empty if none was measured."""
        return "".join(f"; {kind} {way}" for kind, way in self.told.items())

    def options(self, kind: str) -> dict[str, Any]:
        """Return the arguments `config` and `workspace` of an op of this kind."""
        taken = self.taken[kind]
        return {"config": taken.config, "workspace": taken.workspace}

    def alone(self, kind: str) -> Any:
        """Return the config of an op without a workspace."""
        return self.taken[kind].config

    def moments(self, kind: str) -> Moments | None:
        """Return the moments that a product of this kind writes for the next norm, or None."""
        return self.taken[kind].moments

    def read_by(self, layer: int, first: Moments) -> Moments | None:
        """Return the moments of the rows that a layer reads: those that "down" of the layer before wrote, or `first` in
        layer 0. None if that kind writes no moments.
        """
        written = self.moments("down")
        return first if layer == 0 and written is not None else written

    def products(
        self, kind: str, sizes: GemmSizes, run: Callable[[], object], *, of: Tensor | None = None,
        scaled: bool = False, beside: bool = False,
    ) -> None:  # fmt: skip
        """Choose the config of a product.

        Args:
            run: runs the product in all layers with the current `options`, `alone` and `moments`.
            of: the rows whose moments the product writes, or None; `scaled`: whether the next norm has a scale.
            beside: whether to try cuBLAS and the own GEMM as well, for many rows; the product must read or write
            moments.
        """
        gpu = current(self.device).gpu

        def among(what: str, configs: Sequence[GemmConfig]) -> Any:
            ways = []
            for config in configs:
                moments = None
                if of is not None and not isinstance(config, Skinny):
                    moments = Moments.like(of, gemm_config.moments_columns(sizes, config), scaled)
                ways.append(Taken(config, gemm_workspace(sizes, self.device, config), moments))
            self._choose(kind, what, ways, run, 1)
            return self.alone(kind)

        best = among(str(sizes), gemm_config.candidates(gpu, sizes))
        best = among(f"{sizes}, {best}", gemm_config.variants(gpu, sizes, best))
        others = gemm_config.without_triton(gpu, sizes) if beside else []
        if others:
            among(f"{sizes}, {best}, without Triton", [best, *others])

    def attention(self, kind: str, sizes: SuffixShape, run: Callable[[], object]) -> None:
        """Choose the config of `suffix_attention`. Arguments as `products`."""
        cuts = attention_config.key_splits(current(self.device).gpu, sizes)
        self._choose(kind, str(sizes), [Taken(c, suffix_workspace(sizes, self.device, c)) for c in cuts], run, 20)

    def crossing(self, kind: str, sizes: CrossShape, run: Callable[[], object]) -> None:
        """Choose the config of `cross_attention`. Arguments as `products`."""
        cuts = attention_config.cross_tiles(current(self.device).gpu, sizes)
        self._choose(kind, str(sizes), [Taken(cut, None) for cut in cuts], run, 1)

    def _choose(self, kind: str, what: str, ways: Sequence[Taken], run: Callable[[], object], repeats: int) -> None:
        by_config = {way.config: way for way in ways}

        def run_with(config: Config) -> None:
            self.taken[kind] = by_config[config]
            run()

        with self.chain.resumed():
            choice = measure(f"{kind} of {what}", list(by_config), run_with, self.device, repeats)
        self.taken[kind] = by_config[choice.config]
        if choice.times:
            self.told[kind] = str(choice.config)
