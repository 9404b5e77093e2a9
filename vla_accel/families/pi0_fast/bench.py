"""How π0-FAST is measured: always the same number of tokens, which any tokens decode into a chunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from vla_accel.config import EngineSpec
from vla_accel.families.bench import PromptedBench, Work, dummy_processor, prefix_work, weight_bytes
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.network import Pi0FastConfig, pi0_fast
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastProcessor, FastTokenizer
from vla_accel.transforms.processing import Inputs


class Pi0FastBench(PromptedBench[Pi0FastConfig]):
    """π0-FAST."""

    family = PI0_FAST
    sweep = (64,)
    own_steps = False
    quantised = ("native_fp8", "native_fp8_decode")
    aliases: ClassVar = {"native_int8_decode": "native_int8_denoise"}

    def shallow(self, config: Pi0FastConfig, depth: int) -> Pi0FastConfig:
        """Change Gemma; vision keeps its depth."""
        return replace(config, prefix=replace(config.prefix, depth=depth))

    def published(self, horizon: int | None = None) -> Pi0FastConfig:
        """Without a stop token, so that every requested token is decoded."""
        return pi0_fast(action_horizon=horizon or 50)

    def dummy(self, config: Pi0FastConfig, views: int) -> FastProcessor:
        fast = FastTokenizer(lambda ids: "".join(chr(i % 21) for i in ids), config.vocab_size, 10.0, -10)
        detokeniser = Detokeniser(
            fast, (-1, -1), -1, config.vocab_size - 1, config.action_horizon, config.action_dim, opened=False,
            relaxed=True,
        )  # fmt: skip
        return dummy_processor(
            config, views, kind=FastProcessor, discrete_state=True, prompt_form="fast", detokeniser=detokeniser
        )

    def work(
        self, config: Pi0FastConfig, inputs: Inputs, steps: int, specs: Mapping[str, EngineSpec]
    ) -> dict[str, Work]:
        """Every token reads all of Gemma, the head, and the keys and values before it."""
        p = config.prefix
        attended = p.heads * p.head_dim
        stack = p.depth * p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
        head = p.width * config.vocab_size
        before = config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        # Keys that all tokens attend to: each one's prefix and the tokens before it.
        seen = steps * before + steps * (steps - 1) // 2
        flop = 2 * steps * (stack + head) + 4 * p.depth * attended * seen
        cache = 2 * p.depth * p.kv_heads * p.head_dim * 2 * seen
        read = steps * (stack * weight_bytes(specs["decode"]) + 2 * head) + cache
        return {**prefix_work(config, inputs, specs), "decode": Work(float(flop), float(read))}


CARDS = {"pi0_fast": Pi0FastBench()}
