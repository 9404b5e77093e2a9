"""How π0-FAST is measured: always the same number of tokens, which any tokens decode into a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from vla_accel.families.bench import PromptedBench, dummy_processor
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.network import Pi0FastConfig, pi0_fast
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastProcessor, FastTokenizer


class Pi0FastBench(PromptedBench[Pi0FastConfig]):
    """π0-FAST."""

    family = PI0_FAST
    sizes: ClassVar = {"pi0_fast": pi0_fast}
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


CARDS = {"pi0_fast": Pi0FastBench()}
