"""GR00T N1.7 at any size: one definition for inference and for training.

Knows nothing about robots, prompts or engines. Same mathematics as lerobot 0.6.1's and Isaac-GR00T's, with the exact
savings applied: q, k, v and gate, up are single products; padding and missing views are dropped before anything is
computed; layers whose output nothing reads are not there; what depends on the observation or on the step alone is
computed once for all steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.families.groot.head import GrootHead, HeadConfig
from vla_accel.nn.dit import Cache, DitNetwork
from vla_accel.nn.qwen_language import Places, QwenConfig, QwenLanguage
from vla_accel.nn.qwen_vision import QwenVision, QwenVisionConfig


@dataclass(frozen=True)
class GrootConfig:
    """Architecture and sizes.

    `action_dim`, `state_dim` and `action_horizon` are the model's own (padded) sizes; `num_steps`: denoising steps that
    the checkpoint asks for; `max_token_len`: the longest prompt in tokens, those of images left out; `ramp`: how fast
    real-time chunking lets go of the previous chunk.
    """

    vision: QwenVisionConfig = field(default_factory=QwenVisionConfig)
    language: QwenConfig = field(default_factory=QwenConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    action_dim: int = 132
    state_dim: int = 132
    action_horizon: int = 40
    num_steps: int = 4
    max_token_len: int = 128
    ramp: float = 6.0

    def __post_init__(self) -> None:
        if not self.vision.out_width == self.language.width == self.head.vl_width:
            raise ConfigError(
                f"vision.out_width {self.vision.out_width}, language.width {self.language.width} and head.vl_width "
                f"{self.head.vl_width} must be equal"
            )
        if len(self.vision.deepstack) > self.language.depth:
            raise ConfigError(f"vision.deepstack: expected at most {self.language.depth}, got {self.vision.deepstack}")
        if self.action_horizon > self.head.longest_chunk:
            raise ConfigError(f"action_horizon: expected at most {self.head.longest_chunk}, got {self.action_horizon}")


def groot_n17(**changes: object) -> GrootConfig:
    """GR00T N1.7 at the published size (3 B with all embodiments)."""
    return GrootConfig(**changes)  # type: ignore[arg-type]


class Groot(DitNetwork):
    """The model. Module names are the canonical checkpoint keys (see `vla_accel.families.groot.checkpoint`)."""

    config: GrootConfig
    head: GrootHead

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = QwenVision(config.vision)
        self.embed = nn.Embedding(config.language.vocab_size, config.language.width)
        self.language = QwenLanguage(config.language)
        self.head = GrootHead(config.head, config.state_dim, config.action_dim)

    def read(
        self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, places: Places, lengths: Tensor | None = None
    ) -> Cache:
        """What the action head attends to, from the result of `QwenVision.views` and text tokens (B, L) int64, of which
        the first `lengths` (B,) of each row are real; None: all."""
        text = self.embed(tokens).to(image_tokens.dtype)
        x = torch.cat((image_tokens, text), 1)[:, places.order]
        hidden = self.language(x, places.positions, places.order, deepstack)
        real = None
        if lengths is not None:
            real = torch.arange(len(places.order), device=tokens.device) < (len(places.image) + lengths)[:, None]
        features = self.head.features(hidden, real)
        return self.head.cache(text=features[:, places.text], image=features[:, places.image])


def overlap_weights(previous: int, delay: int, horizon: int, ramp: float, until: int | None) -> Tensor:
    """Weights (horizon,) float32 of `DitNetwork.integrate` for a previous chunk of which `previous` actions are left
    and `delay` are sure to be executed: 1 for these, then falling as exp(-ramp u) to none after `until` (None: all).

    Source: lerobot 0.6.1, `GR00TN17ActionHead.get_action_with_features`, whose factors of the velocity are one less
    these.
    """
    overlap = min(previous, horizon, previous if until is None else until)
    frozen = min(delay, overlap)
    place = torch.linspace(0.0, 1.0, overlap - frozen + 2)[1:-1]
    weights = torch.zeros(horizon)
    weights[:frozen] = 1.0
    weights[frozen:overlap] = 1.0 - torch.expm1(-ramp * place) / math.expm1(-ramp)
    return weights
