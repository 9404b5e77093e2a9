"""How the toy is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tests.support.toy_family.family import REAL, TOY, ToyInputs, ToyTransforms
from tests.support.toy_family.network import Toy, ToyConfig
from vla_accel.families.bench import BenchCard


class ToyBench(BenchCard[ToyConfig, ToyInputs]):
    """The toy."""

    family = TOY
    sizes: ClassVar = {"toy": ToyConfig}

    def random(self, config: ToyConfig, *, seed: int, device: str, dtype: torch.dtype) -> Toy:
        model = Toy(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)
        return model.to(device).to_compute_dtype(dtype).requires_grad_(False).eval()

    def published(self, horizon: int | None = None) -> ToyConfig:
        return ToyConfig(action_horizon=horizon or 3)

    def dummy(self, config: ToyConfig, views: int) -> ToyTransforms:
        return ToyTransforms()

    def random_observation(self, transforms: ToyTransforms, rng: np.random.Generator) -> dict[str, Any]:
        return {"frame": rng.integers(0, 256, (4, 4, 3), dtype=np.uint8), "joints": rng.random(2)}

    def internals(self, config: ToyConfig, outputs: Mapping[str, Tensor], inputs: ToyInputs) -> dict[str, Tensor]:
        return {"latents": outputs["latents"][0, :REAL]}


CARDS = {"toy": ToyBench()}
