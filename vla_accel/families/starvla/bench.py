"""How starVLA's frameworks are measured. starVLA is no package: there is no code of others to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from vla_accel.families.bench import BenchCard, dummy_transforms, libero_observation
from vla_accel.families.qwen_bench import QueryTokenizer
from vla_accel.families.starvla.checkpoint import END, QUERY, oft_suffix
from vla_accel.families.starvla.family import STARVLA_GROOT, STARVLA_OFT, STARVLA_PI, StarVlaFamily
from vla_accel.families.starvla.network import starvla_groot, starvla_oft, starvla_pi
from vla_accel.families.vla_jepa.network import VlaJepaConfig
from vla_accel.families.vla_jepa.transforms import VlaJepaProcessor
from vla_accel.nn.random_weights import DrawnDit
from vla_accel.transforms.processing import Inputs

_TEMPLATE = (
    "Your task is {instruction}. To identify the key objects for your task. Locate their bounding boxes in "
    "[x1,y1,x2,y2] format."
)


class StarVlaBench(BenchCard[VlaJepaConfig, Inputs]):
    """A framework of starVLA."""

    drawn = DrawnDit

    def __init__(self, family: StarVlaFamily, size: Callable[..., VlaJepaConfig]) -> None:
        self.family, self.sizes, self._size = family, {size.__name__: size}, size
        if family.flow:
            self.sweep, self.quantised = (4, 2, 1), ("native_fp8",)
            self.aliases = {"native_fp8": "native_fp8_denoise"}
        else:
            self.sweep, self.own_steps = (1,), False

    def shallow(self, config: VlaJepaConfig, depth: int) -> VlaJepaConfig:
        """Change language and transformer; vision keeps its depth. The transformer keeps blocks of both kinds."""
        language = replace(config.language, depth=max(depth, len(config.vision.deepstack)))
        return replace(config, language=language, head=replace(config.head, depth=2 * depth))

    def published(self, horizon: int | None = None) -> VlaJepaConfig:
        if horizon is None:
            return self._size()
        return self._size(action_horizon=horizon, **({"condition": horizon} if self._size().condition else {}))

    def dummy(self, config: VlaJepaConfig, views: int) -> VlaJepaProcessor:
        template = _TEMPLATE.replace("{instruction}", "{instruction}" + oft_suffix(config.condition))
        return dummy_transforms(
            VlaJepaProcessor, config, views, QueryTokenizer(config.language.vocab_size, QUERY), config=config,
            template=template + END, condition=0 if config.condition else None, clipped=False,
        )  # fmt: skip

    def random_observation(self, transforms: VlaJepaProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, transforms.image_shape, rng)

    def internals(self, config: VlaJepaConfig, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), `deepstack` (n, I, W), and of QwenGR00T keys and values of real tokens (n, tokens,
        heads, d)."""
        found = {"image_tokens": outputs["image_tokens"][0], "deepstack": outputs["deepstack"][:, 0]}
        real = len(found["image_tokens"]) + len(inputs.tokens)
        names = [name for name in ("all_keys", "all_values") if name in outputs]
        return {**found, **{name: outputs[name][:, 0, :real] for name in names}}


CARDS = {
    "starvla_groot": StarVlaBench(STARVLA_GROOT, starvla_groot),
    "starvla_pi": StarVlaBench(STARVLA_PI, starvla_pi),
    "starvla_oft": StarVlaBench(STARVLA_OFT, starvla_oft),
}
