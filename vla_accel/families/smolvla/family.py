"""SmolVLA as a model family: vision → image_tokens → kv_cache → keys, values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from vla_accel.checkpoints.checkpoint import is_own
from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.families import stand_in
from vla_accel.families.family import Work, products_of, weight_bytes
from vla_accel.families.prompted import DenoisingFamily, PromptShape
from vla_accel.families.smolvla import lerobot as smolvla_lerobot
from vla_accel.families.smolvla.checkpoint import SIGNS, load_folder
from vla_accel.families.smolvla.components import smolvla_kv_cache_component
from vla_accel.families.smolvla.native import SmolVlaStore
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, smolvla, smolvla_demo
from vla_accel.transforms.processing import Inputs, Processor


class SmolVlaFamily(DenoisingFamily):
    """SmolVLA, whatever its sizes and whichever of its layers cross."""

    name = "smolvla"
    network_class, store_class = SmolVla, SmolVlaStore
    sizes: ClassVar[Mapping[str, Callable[..., SmolVlaConfig]]] = {"smolvla": smolvla, "smolvla_demo": smolvla_demo}
    baselines = tuple(smolvla_lerobot.MODES)

    # -- running it -----------------------------------------------------------------------------------------------

    def kv_cache(self, model: SmolVla, shape: PromptShape, store: SmolVlaStore | None, scales: Any) -> Component:
        return smolvla_kv_cache_component(model, shape.batch, shape.views, shape.tokens, shape.padded, store)

    # -- measuring it ---------------------------------------------------------------------------------------------

    def work(
        self, config: SmolVlaConfig, inputs: Inputs, steps: int, specs: Mapping[str, EngineSpec]
    ) -> dict[str, Work]:  # fmt: skip
        """The exact savings are applied: the last prefix layer stops after its keys and values, and what a crossing
        layer makes of them is made once."""
        v, p, e = config.vision, config.prefix, config.expert
        views, tokens = len(inputs.images), config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        crossing = sum(map(config.crosses, range(e.depth)))
        kv = p.kv_heads * p.head_dim
        attended = p.heads * p.head_dim
        per_patch = 4 * v.width * v.width + 2 * v.width * v.mlp_dim
        vision = v.depth * (2 * per_patch + 4 * v.tokens * v.width) + 2 * 3 * v.patch_size**2 * v.width
        vision = views * v.tokens * (vision + 2 * v.width * p.width)
        layer = p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
        prefix = 2 * tokens * ((p.depth - 1) * layer + p.width * 2 * kv + crossing * 2 * kv * kv)
        prefix += (p.depth - 1) * 4 * tokens * tokens * attended
        expert = e.depth * e.width * (2 * attended + 3 * e.mlp_dim) + (e.depth - crossing) * e.width * 2 * kv
        suffix = config.action_horizon
        attention = 4 * suffix * attended * (e.depth * tokens + (e.depth - crossing) * suffix)
        read = expert * weight_bytes(specs["denoise"]) + 2 * e.depth * tokens * kv * 2

        return {
            "vision": Work(float(vision), precision=products_of(specs["vision"])),
            "kv_cache": Work(float(prefix), float(p.depth * layer * 2), precision=products_of(specs["kv_cache"])),
            "denoise": Work(float(steps * (2 * suffix * expert + attention)), float(steps * read)),
        }

    def published(self, horizon: int | None = None) -> SmolVlaConfig:
        return smolvla(action_horizon=horizon or 50)

    def stand_in(self, config: SmolVlaConfig, views: int) -> Processor:
        return stand_in.processor(config, views, padded_state=config.state_dim, prompt_form="line")

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Callable[[Mapping[str, Any]], Any]:
        return smolvla_lerobot.sampler(horizon, device, name, steps)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if is_own(content):
            return content.get("family") == self.name
        if "type" in content and "input_features" in content:  # lerobot's
            return content["type"] == self.name
        return all(name in shapes for name in SIGNS)

    load = staticmethod(load_folder)


SMOLVLA = SmolVlaFamily()
