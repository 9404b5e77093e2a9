"""π0-FAST: vision → image_tokens → kv_cache → keys, values → decode → action_tokens, which the transforms decode into
actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.component import Component
from vla_accel.errors import of_one
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.checkpoint import load_folder
from vla_accel.families.pi0_fast.decode import RESULT, decode_component
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig, pi0_fast
from vla_accel.families.pi0_fast.transforms import FastProcessor
from vla_accel.families.prompted import PromptedFamily, PromptShape, prompt_capabilities


class Pi0FastFamily(PromptedFamily[Pi0FastConfig]):
    """Its steps are tokens."""

    name = "pi0_fast"
    network_class, store_class = Pi0Fast, Pi0FastStore
    parts = ("vision", "kv_cache", "decode")
    capabilities = prompt_capabilities(parts)
    settings = ("action_tokenizer", "relaxed_actions")
    sizes: ClassVar[Mapping[str, Callable[..., Pi0FastConfig]]] = {"pi0_fast": pi0_fast}
    result = RESULT

    def last(self, model: Pi0Fast, shape: PromptShape, store: Pi0FastStore | None, rtc: Any) -> Component:
        return decode_component(model, shape.batch, shape.views, shape.tokens, shape.steps, shape.padded, store)

    def normalised(self, transforms: FastProcessor, result: np.ndarray) -> np.ndarray:
        chunks = []
        for index, tokens in enumerate(result):
            with of_one(index, len(result)):
                chunks.append(transforms.detokeniser.chunk(tokens))
        return np.stack(chunks)

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return is_lerobot_config(content) and content["type"] == self.name

    load = staticmethod(load_folder)


PI0_FAST = Pi0FastFamily()
