"""The kernel and tile config of each op of a denoise loop, measured when the loop is built, and remembered.

Every config is correct; the fastest depends on the GPU, the rows and the weights. An op is measured over all layers, as
the loop runs it, so that its weights come from memory and not from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import CrossShape, CrossTile, KeySplit, SuffixShape
from vla_accel.kernels.autotune import remembered
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.gemm import suffix, suffix_tilings
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.suffix_tilings import Product, Skinny, Tiling
from vla_accel.runtime import current

TileConfig = Tiling | KeySplit | CrossTile
Backends = Literal["triton", "whole k", "all"]
"""Kernels to try for a product: Triton's; those of them whose programs do not share K; Triton's, cuBLAS and the own
GEMM, for many rows, if the product reads or writes moments."""


@dataclass(frozen=True)
class Choice:
    """A tile config, the workspace of its programs, and the moments that they write for the next norm."""

    tile_config: TileConfig
    workspace: Any = None
    moments: Moments | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the op."""
        return {"cut": self.tile_config, "workspace": self.workspace}


class KernelChoices:
    """The choices of one loop by kind of op: `choices["down"]`."""

    def __init__(self, device: torch.device, chain: Chain) -> None:
        """`chain`: of the loop. Ops are measured as launches inside it."""
        self.device, self.chain = device, chain
        self.chosen: dict[str, Choice] = {}
        self._measured: dict[str, str] = {}

    def __getitem__(self, kind: str) -> Choice:
        return self.chosen[kind]

    @property
    def detail(self) -> str:
        """The measured configs, for the ledger; empty if none was measured."""
        return "".join(f"; {kind} {config}" for kind, config in self._measured.items())

    def product(
        self, kind: str, product: Product, run: Callable[[], object], *, backends: Backends = "triton",
        moments: Callable[[int], Moments] | None = None,
    ) -> None:  # fmt: skip
        """Choose the config of a product.

        Args:
            run: runs the product in all layers with the current choices.
            moments: allocates the moments that the product writes, in tiles of so many columns. Products of `Skinny`
                write none.
        """
        gpu = current(self.device).gpu

        def among(what: str, configs: Sequence[Tiling]) -> Tiling:
            choices = []
            for config in configs:
                writes = moments is not None and not isinstance(config, Skinny)
                written = moments(suffix_tilings.moments_columns(product, config)) if writes else None  # type: ignore[arg-type, misc]
                choices.append(Choice(config, suffix.product_workspace(product, self.device, config), written))
            return self._choose(kind, what, choices, run, 1).tile_config  # type: ignore[return-value]

        candidates = suffix_tilings.unshared if backends == "whole k" else suffix_tilings.candidates
        best = among(str(product), candidates(gpu, product))
        best = among(f"{product}, {best}", suffix_tilings.variants(gpu, product, best))  # type: ignore[arg-type]
        others = suffix_tilings.beside(gpu, product) if backends == "all" else []
        if others:
            among(f"{product}, {best}, without Triton", [best, *others])

    def attention(self, kind: str, sizes: SuffixShape, run: Callable[[], object]) -> None:
        """Choose the config of `suffix_attention`. `run`: as of `product`."""
        configs = attention_config.key_splits(current(self.device).gpu, sizes)
        choices = [Choice(config, suffix.suffix_workspace(sizes, self.device, config)) for config in configs]
        self._choose(kind, str(sizes), choices, run, 20)

    def crossing(self, kind: str, sizes: CrossShape, run: Callable[[], object]) -> None:
        """Choose the config of `cross_attention`. `run`: as of `product`."""
        choices = [Choice(config) for config in attention_config.cross_tiles(current(self.device).gpu, sizes)]
        self._choose(kind, str(sizes), choices, run, 1)

    def _choose(
        self, kind: str, what: str, choices: Sequence[Choice], run: Callable[[], object], repeats: int
    ) -> Choice:
        by_name = {str(choice.tile_config): choice for choice in choices}

        def call(choice: Choice) -> Callable[[], None]:
            def run_with() -> None:
                self.chosen[kind] = choice
                run()

            return run_with

        with self.chain.resumed():
            ways = {name: call(choice) for name, choice in by_name.items()}
            found = remembered(f"{kind} of {what}", ways, current(self.device), repeats)
        self.chosen[kind] = by_name[found.candidate]
        if found.times:
            self._measured[kind] = found.candidate
        return self.chosen[kind]
