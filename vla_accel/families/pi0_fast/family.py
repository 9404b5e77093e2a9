"""π0-FAST as a model family: vision → image_tokens → kv_cache → keys, values → decode → action_tokens, which the
transforms make actions of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from vla_accel.component import Component
from vla_accel.config import EngineSpec
from vla_accel.errors import of_one
from vla_accel.families import stand_in
from vla_accel.families.family import Work, weight_bytes
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.checkpoint import load_folder
from vla_accel.families.pi0_fast.decode import RESULT, decode_component
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig, pi0_fast
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastProcessor, FastTokenizer
from vla_accel.families.prompted import PromptedFamily, PromptShape, prefix_work
from vla_accel.transforms.processing import Inputs


class Pi0FastFamily(PromptedFamily):
    """Its steps are tokens."""

    name = "pi0_fast"
    network_class, store_class = Pi0Fast, Pi0FastStore
    parts = ("vision", "kv_cache", "decode")
    settings = ("action_tokenizer", "relaxed_actions")
    sizes: ClassVar[Mapping[str, Callable[..., Pi0FastConfig]]] = {"pi0_fast": pi0_fast}
    result = RESULT
    sweep = (64,)
    systems: ClassVar = {
        "native-fp8": {"kv_cache": "fp8"}, "native-fp8-decode": {"kv_cache": "fp8", "decode": "fp8"},
        "native-int8-decode": {"decode": "int8"},
    }  # fmt: skip

    # -- the network ----------------------------------------------------------------------------------------------

    def steps(self, config: Pi0FastConfig) -> int:
        """Tokens that are decoded at most."""
        return config.max_steps

    def sweep_of(self, config: Pi0FastConfig) -> tuple[int, ...]:
        """The same number of tokens for every checkpoint."""
        return self.sweep

    def shallow(self, config: Pi0FastConfig, depth: int) -> Pi0FastConfig:
        """Gemma; vision stays whole."""
        return replace(config, prefix=replace(config.prefix, depth=depth))

    # -- running it -----------------------------------------------------------------------------------------------

    def last(self, model: Pi0Fast, shape: PromptShape, store: Pi0FastStore | None, rtc: Any) -> Component:
        return decode_component(model, shape.batch, shape.views, shape.tokens, shape.steps, shape.padded, store)

    def normalised(self, transforms: FastProcessor, result: np.ndarray) -> np.ndarray:
        chunks = []
        for index, tokens in enumerate(result):
            with of_one(index, len(result)):
                chunks.append(transforms.detokeniser.chunk(tokens))
        return np.stack(chunks)

    # -- measuring it ---------------------------------------------------------------------------------------------

    def work(
        self, config: Pi0FastConfig, inputs: Inputs, steps: int, specs: Mapping[str, EngineSpec]
    ) -> dict[str, Work]:  # fmt: skip
        """Every token reads all of Gemma, the head, and what keys and values there are; of `steps` tokens."""
        p = config.prefix
        attended = p.heads * p.head_dim
        stack = p.depth * p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
        head = p.width * config.vocab_size
        before = config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        # The n-th token sees those before it: the sum over all of them.
        seen = steps * before + steps * (steps - 1) // 2
        flop = 2 * steps * (stack + head) + 4 * p.depth * attended * seen
        cache = 2 * p.depth * p.kv_heads * p.head_dim * 2 * seen
        read = steps * (stack * weight_bytes(specs["decode"]) + 2 * head) + cache
        return {**prefix_work(config, inputs, specs), "decode": Work(float(flop), float(read))}

    def published(self, horizon: int | None = None) -> Pi0FastConfig:
        """Without a stop token: so many tokens as are asked for."""
        return pi0_fast(action_horizon=horizon or 50)

    def stand_in(self, config: Pi0FastConfig, views: int) -> FastProcessor:
        """Any tokens make a chunk."""
        fast = FastTokenizer(lambda ids: "".join(chr(i % 21) for i in ids), config.vocab_size, 10.0, -10)
        detokeniser = Detokeniser(
            fast, (-1, -1), -1, config.vocab_size - 1, config.action_horizon, config.action_dim, opened=False,
            relaxed=True,
        )  # fmt: skip
        return stand_in.processor(
            config, views, kind=FastProcessor, discrete_state=True, prompt_form="fast", detokeniser=detokeniser
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return "input_features" in content and content.get("type") == self.name

    load = staticmethod(load_folder)


PI0_FAST = Pi0FastFamily()
