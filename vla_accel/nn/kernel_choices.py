"""The kernel and tile config of each op of a denoise loop, measured when the loop is built, and remembered.

Every config is correct; the fastest depends on the GPU, the rows and the weights. An op is measured over all layers, as
the loop runs it, so that its weights come from memory and not from the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vla_accel.kernels.attention import config as attention_config
from vla_accel.kernels.attention.config import CrossShape, SuffixShape
from vla_accel.kernels.attention.suffix import suffix_workspace
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.config import Choice as Measured
from vla_accel.kernels.config import measure
from vla_accel.kernels.gemm import config as gemm_config
from vla_accel.kernels.gemm.config import GemmConfig, GemmSizes, OneRow, Skinny
from vla_accel.kernels.gemm.moments import Moments
from vla_accel.kernels.gemm.ops import gemm_workspace
from vla_accel.runtime import current

_VARIANTS_WITHIN = 1.5
"""Variants of Triton's fastest kernel are measured only if it takes at most so many times as long as the fastest of
all: each variant is a kernel to compile."""


@dataclass(frozen=True)
class Choice:
    """A tile config, the workspace of its programs, and the moments that they write for the next norm."""

    config: Any
    workspace: Any = None
    moments: Moments | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the op."""
        return {"config": self.config, "workspace": self.workspace}


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
        self, kind: str, sizes: GemmSizes, run: Callable[[], object], *, every_backend: bool = False,
        moments: Callable[[int], Moments | None] | None = None,
    ) -> None:  # fmt: skip
        """Choose the config of a product.

        Args:
            run: runs the product in all layers with the current choices.
            every_backend: whether to measure cuBLAS and the Hopper GEMM as well, for many rows. The product must read
                or write moments, or have weights of one byte, which cuBLAS does not take.
            moments: allocates the moments that the product writes, in tiles of so many columns, or returns None if
                these do not fit. Products of `Skinny` write none before `few_rows_moments`.
        """
        gpu = current(self.device).gpu

        def among(what: str, configs: Sequence[GemmConfig]) -> Measured:
            choices = []
            for config in configs:
                written = None
                if moments is not None and not isinstance(config, (OneRow, Skinny)):
                    written = moments(gemm_config.moments_columns(sizes, config))
                choices.append(Choice(config, gemm_workspace(sizes, self.device, config), written))
            return self._choose(kind, what, choices, run, 1)

        best = found = among(str(sizes), gemm_config.candidates(gpu, sizes)).config
        if others := gemm_config.without_triton(gpu, sizes) if every_backend else []:
            compared = among(f"{sizes}, {best}, without Triton", [best, *others])
            # A kernel that could not run has no time.
            times = compared.times
            if times and times.get(str(best), math.inf) > _VARIANTS_WITHIN * min(times.values()):
                return
            found = compared.config
        if tried := [one for one in gemm_config.variants(gpu, sizes, best) if one != best]:
            among(f"{sizes}, {found}, variants of {best}", [found, *tried])

    def few_rows_moments(
        self, products: Mapping[str, tuple[GemmSizes, Callable[[int], Moments | None]]], run: Callable[[], object]
    ) -> None:
        """Choose whether products of `Skinny` write moments as well, so that those after them do not compute these.

        Args:
            products: by kind, those whose output is normed, as of `product`.
            run: runs all products in all layers with the current choices.
        """
        plain, written = {}, {}
        for kind, (sizes, moments) in products.items():
            choice = self[kind]
            if isinstance(choice.config, Skinny):
                made = moments(gemm_config.moments_columns(sizes, choice.config))
                if made is not None:
                    plain[kind], written[kind] = choice, replace(choice, moments=made)
        if not plain:
            return
        ways = {"computed": plain, "written": written}

        def run_with(way: str) -> None:
            self.chosen |= ways[way]
            run()

        what = ", ".join(f"{kind} of {products[kind][0]}, {choice.config}" for kind, choice in plain.items())
        with self.chain.resumed():
            found = measure(f"moments after {what}", list(ways), run_with, self.device, 1)
        self.chosen |= ways[found.config]
        if found.times:
            self._measured["moments"] = found.config

    def attention(self, kind: str, sizes: SuffixShape, run: Callable[[], object]) -> None:
        """Choose the config of `suffix_attention`. `run`: as of `product`."""
        configs = attention_config.key_splits(current(self.device).gpu, sizes)
        choices = [Choice(config, suffix_workspace(sizes, self.device, config)) for config in configs]
        self._choose(kind, str(sizes), choices, run, 20)

    def crossing(self, kind: str, sizes: CrossShape, run: Callable[[], object]) -> None:
        """Choose the config of `cross_attention`. `run`: as of `product`."""
        self.config(kind, sizes, attention_config.cross_tiles(current(self.device).gpu, sizes), run)

    def config(self, kind: str, sizes: object, configs: Sequence[Any], run: Callable[[], object]) -> None:
        """Choose one of `configs` for an op that needs no workspace, such as `normed_attention`. `run`: as of
        `product`."""
        self._choose(kind, str(sizes), [Choice(config) for config in configs], run, 1)

    def _choose(
        self, kind: str, what: str, choices: Sequence[Choice], run: Callable[[], object], repeats: int
    ) -> Measured:
        by_config = {choice.config: choice for choice in choices}

        def run_with(config: Any) -> None:
            self.chosen[kind] = by_config[config]
            run()

        with self.chain.resumed():
            found = measure(f"{kind} of {what}", list(by_config), run_with, self.device, repeats)
        self.chosen[kind] = by_config[found.config]
        if found.times:
            self._measured[kind] = str(found.config)
        return found
