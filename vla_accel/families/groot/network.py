"""GR00T N1.7, N1.6 and N1.5 at any size: one definition for inference and for training.

Same mathematics as lerobot's and Isaac-GR00T's, with the exact savings
applied: q, k, v and gate, up are single products; padding and missing views are dropped before anything is
computed; layers whose output nothing reads are not there; what depends on the observation or on the step alone is
computed once for all steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.families.groot.head import GrootHead, HeadConfig
from vla_accel.nn.dit import Cache, DitNetwork
from vla_accel.nn.eagle_vision import EagleVision, EagleVisionConfig
from vla_accel.nn.qwen_language import Arrangement, Layout, Places, QwenConfig, QwenLanguage
from vla_accel.nn.qwen_vision import Grid, QwenVision, QwenVisionConfig


@dataclass(frozen=True)
class GrootConfig:
    """Architecture and sizes.

    `action_dim`, `state_dim` and `action_horizon` are the model's own (padded) sizes; `num_steps`: the
    checkpoint's denoising steps; `max_token_len`: the longest prompt in tokens without images; `ramp`: how fast
    real-time chunking leaves the previous chunk.
    """

    vision: QwenVisionConfig = field(default_factory=QwenVisionConfig)
    language: QwenConfig = field(default_factory=QwenConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    arrangement: Arrangement = field(default_factory=Arrangement)
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
        if self.arrangement.text_first and self.head.vl_depth:
            raise ConfigError(f"head.vl_depth: expected 0 where the text comes first, got {self.head.vl_depth}")
        if self.action_horizon > self.head.longest_chunk:
            raise ConfigError(f"action_horizon: expected at most {self.head.longest_chunk}, got {self.action_horizon}")

    def text_lengths(self, layout: Layout, lengths: Any) -> Any:
        """The text tokens of prompts, from the tokens of the head's first source: text, or images and text."""
        return lengths if self.head.text_every else lengths - layout.images


def groot_n17(**changes: object) -> GrootConfig:
    """GR00T N1.7 at the published size (3 B with all embodiments)."""
    return GrootConfig(**changes)  # type: ignore[arg-type]


_QWEN3 = QwenConfig(vocab_size=151_680, theta=1e6, sections=(64, 0, 0), final_norm=True)


def groot_n16(**changes: object) -> GrootConfig:
    """GR00T N1.6 at the published size (3 B with all embodiments)."""
    sizes: dict[str, Any] = {
        "vision": EagleVisionConfig(merge=2, joined=True), "language": _QWEN3, "head": HeadConfig(vl_depth=0),
        "arrangement": Arrangement(3, 7, text_first=True, flat=True), "action_dim": 128, "state_dim": 128,
        "action_horizon": 50,
    }  # fmt: skip
    return GrootConfig(**{**sizes, **changes})


def groot_n15(**changes: object) -> GrootConfig:
    """GR00T N1.5 at the published size (3 B with all embodiments)."""
    sizes: dict[str, Any] = {
        "vision": EagleVisionConfig(), "language": replace(_QWEN3, depth=12),
        "head": HeadConfig(depth=16, text_every=0, future=32), "arrangement": Arrangement(20, 7, flat=True),
        "action_dim": 32, "state_dim": 64, "action_horizon": 16,
    }  # fmt: skip
    return GrootConfig(**{**sizes, **changes})


class Groot(DitNetwork):
    """The model. Module names are the canonical checkpoint keys (see `vla_accel.families.groot.checkpoint`)."""

    config: GrootConfig
    head: GrootHead

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        self.config = config
        vision = config.vision
        self.vision = EagleVision(vision) if isinstance(vision, EagleVisionConfig) else QwenVision(vision)
        self.embed = nn.Embedding(config.language.vocab_size, config.language.width)
        self.language = QwenLanguage(config.language)
        self.head = GrootHead(config.head, config.state_dim, config.action_dim)

    def layout(self, views: int, grid: Grid, text: int) -> Layout:
        """The layout of a prompt of `text` tokens and `views` images of `grid` tokens."""
        return Layout(views, grid, text, self.config.arrangement)

    def read(
        self, layout: Layout, image_tokens: Tensor, deepstack: Tensor | None, tokens: Tensor,
        lengths: Tensor | None = None, places: Places | None = None,
    ) -> Cache:  # fmt: skip
        """What the action head attends to, from the result of `QwenVision.views` and text tokens (B, L) int64 in the
        layout's order.

        Args:
            layout: Of the prompt.
            lengths: (B,), the tokens of the head's first source that are no padding; None: all. Padding is stored last.
            places: The layout's, to compute them once.
        """
        places = layout.places(tokens.device) if places is None else places
        text = self.embed(tokens).to(image_tokens.dtype)
        x = torch.cat((image_tokens, text), 1)[:, places.order]
        real = None if lengths is None else layout.real(self.config.text_lengths(layout, lengths))
        hidden = self.language(
            x, places.positions, places.order, deepstack, real if layout.arrangement.text_first else None
        )
        features = self.head.features(hidden, real)
        parts = {"text": features[:, places.text], "image": features[:, places.image]}
        if not self.config.head.text_every:
            parts["all"] = torch.cat((parts["image"], parts["text"]), 1)
        return self.head.cache(**parts)


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
