"""VLA-JEPA at any size: Qwen3-VL, whose outputs at the last tokens of the prompt are all that a diffusion transformer
reads. starVLA's QwenGR00T is the same network, which reads the outputs at all tokens.

Same mathematics as lerobot 0.6.1's, with the exact savings applied: the prompt ends with those tokens, as no token sees
a later one; missing views are left out; the world model, which is for training, is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.families.groot.images import whole_tokens
from vla_accel.nn.dit import Cache, DitConfig, DitHead, DitNetwork
from vla_accel.nn.qwen_language import Places, QwenConfig, QwenLanguage
from vla_accel.nn.qwen_vision import QwenVision, QwenVisionConfig

Size = tuple[int, int]
"""Height and width of an image."""


@dataclass(frozen=True)
class VlaJepaConfig:
    """Architecture and sizes.

    `condition`: tokens at the end of a prompt whose outputs the transformer reads, 0 for all; `layerwise`: each block
    reads the output of the language layer of its own number, not of the last one; `resize`: the size that images get
    by `filter` before they are resized to whole tokens, None for their own; `num_steps`: the checkpoint's
    denoising steps; `max_token_len`: the longest prompt in tokens without those of images.
    """

    vision: QwenVisionConfig = field(default_factory=QwenVisionConfig)
    language: QwenConfig = field(default_factory=lambda: QwenConfig(depth=28))
    head: DitConfig = field(
        default_factory=lambda: DitConfig(
            width=768, depth=16, heads=12, head_dim=64, mlp_dim=3072, text_every=0, future=32
        )
    )
    condition: int = 32
    layerwise: bool = False
    resize: tuple[int, int] | None = (224, 224)
    filter: Literal["area", "bicubic"] = "area"
    action_dim: int = 7
    state_dim: int = 8
    action_horizon: int = 7
    num_steps: int = 4
    max_token_len: int = 192

    def __post_init__(self) -> None:
        if not self.vision.out_width == self.language.width == self.head.vl_width:
            raise ConfigError(
                f"vision.out_width {self.vision.out_width}, language.width {self.language.width} and head.vl_width "
                f"{self.head.vl_width} must be equal"
            )
        if self.layerwise and (self.condition or self.language.depth <= self.head.blocks("all")[-1]):
            raise ConfigError(f"layerwise: expected a language layer for each block, got {self.language.depth}")
        if self.action_horizon > self.head.longest_chunk:
            raise ConfigError(f"action_horizon: expected at most {self.head.longest_chunk}, got {self.action_horizon}")

    def image_size(self, size: Size) -> Size:
        """The size of the model's image for a camera's."""
        return whole_tokens(*(self.resize or size), self.vision.unit)


def vla_jepa(**changes: object) -> VlaJepaConfig:
    """VLA-JEPA at the published size (2.3 B without the world model)."""
    return VlaJepaConfig(**changes)  # type: ignore[arg-type]


class VlaJepa(DitNetwork):
    """The model. Module names are the canonical checkpoint keys."""

    config: VlaJepaConfig

    def __init__(self, config: VlaJepaConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = QwenVision(config.vision)
        self.embed = nn.Embedding(config.language.vocab_size, config.language.width)
        self.language = QwenLanguage(config.language)
        self.head = DitHead(config.head, config.state_dim, config.action_dim)

    def read(
        self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, places: Places, lengths: Tensor | None = None
    ) -> Cache:
        """What the transformer attends to, from the result of `QwenVision.views` and text tokens (B, L) int64, of which
        the first `lengths` (B,) of each row are real; None: all."""
        text = self.embed(tokens).to(image_tokens.dtype)
        x = torch.cat((image_tokens, text), 1)[:, places.order]
        if self.config.layerwise:
            layers = [*self.language.outputs(x, places.positions, places.order, deepstack)]
            return self.head.cache(all=[layers[index] for index in self.config.head.blocks("all")])
        hidden = self.language(x, places.positions, places.order, deepstack)
        if not self.config.condition:
            return self.head.cache(all=hidden)
        rows = condition_rows(self.config.condition, places, len(tokens), lengths)
        return self.head.cache(all=hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[2])))


def condition_rows(count: int, places: Places, batch: int, lengths: Tensor | None) -> Tensor:
    """The rows of a prompt's last `count` real tokens, int64 (B, count)."""
    device = places.order.device
    real = torch.full((batch,), len(places.text), device=device) if lengths is None else lengths.long()
    return (len(places.image) + real - count)[:, None] + torch.arange(count, device=device)
