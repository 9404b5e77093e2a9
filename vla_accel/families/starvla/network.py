"""starVLA's frameworks with Qwen3-VL, at any size.

QwenGR00T is VLA-JEPA's network (`vla_accel.families.vla_jepa.network`), whose transformer reads the outputs at all
tokens. QwenPI is the same, but each of its blocks reads another layer's outputs. QwenOFT has no flow: a small MLP makes
each action of the output at one token of the prompt's end. Same mathematics as starVLA's code (MIT), with the same
exact savings as VLA-JEPA.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vla_accel.errors import ConfigError
from vla_accel.families.vla_jepa.network import VlaJepaConfig, condition_rows
from vla_accel.nn.dit import DitConfig
from vla_accel.nn.mlp_head import MlpHead
from vla_accel.nn.network import Network
from vla_accel.nn.qwen_language import Places, QwenConfig, QwenLanguage
from vla_accel.nn.qwen_vision import QwenVision, QwenVisionConfig

Size = tuple[int, int]
_VISION = QwenVisionConfig(out_width=2560)
_LANGUAGE = QwenConfig(width=2560, depth=36, mlp_dim=9728, heads=32)
"""Qwen3-VL-4B."""


def starvla_groot(**changes: object) -> VlaJepaConfig:
    """QwenGR00T on Qwen3-VL-4B at the published size, without a state, as for LIBERO."""
    head = DitConfig(
        vl_width=2560, width=768, depth=16, heads=12, head_dim=64, mlp_dim=3072, text_every=0, state=False, future=32
    )
    sizes: dict[str, object] = {
        "vision": _VISION, "language": _LANGUAGE, "head": head, "condition": 0, "filter": "bicubic", "state_dim": 7,
        "action_horizon": 8,
    }  # fmt: skip
    return VlaJepaConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def starvla_pi(**changes: object) -> VlaJepaConfig:
    """QwenPI on Qwen3-VL-4B at the published size, without a state. No block reads the last language layer."""
    head = DitConfig(
        vl_width=2560, width=2560, depth=36, heads=40, head_dim=64, mlp_dim=10240, text_every=0, state=False,
        final=False, future=32,
    )  # fmt: skip
    sizes = {"head": head, "language": replace(_LANGUAGE, depth=35), "layerwise": True, "action_horizon": 8}
    return starvla_groot(**{**sizes, **changes})


@dataclass(frozen=True)
class OftConfig(VlaJepaConfig):
    """Sizes of QwenOFT. `condition` is `action_horizon`; of `head` only `vl_width` and `hidden`, the MLP's, count."""

    vision: QwenVisionConfig = field(default_factory=lambda: _VISION)
    language: QwenConfig = field(default_factory=lambda: _LANGUAGE)
    head: DitConfig = field(default_factory=lambda: DitConfig(vl_width=2560, hidden=5120, state=False))
    filter: str = "bicubic"  # type: ignore[assignment]
    condition: int = 8
    action_horizon: int = 8
    num_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.condition != self.action_horizon:
            raise ConfigError(f"action_horizon: expected condition, {self.condition}, got {self.action_horizon}")


def starvla_oft(**changes: object) -> OftConfig:
    """QwenOFT on Qwen3-VL-4B at the published size."""
    return OftConfig(**changes)  # type: ignore[arg-type]


class QwenOft(Network):
    """QwenOFT. Module names are the canonical checkpoint keys."""

    config: OftConfig

    def __init__(self, config: OftConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = QwenVision(config.vision)
        self.embed = nn.Embedding(config.language.vocab_size, config.language.width)
        self.language = QwenLanguage(config.language)
        self.head = MlpHead(config.language.width, config.head.hidden, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the large products."""
        return self.get_parameter("language.layers.0.qkv_proj.weight").dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        """Patch and position embeddings."""
        return name.startswith(("vision.patch_", "vision.position_"))

    def read(
        self, image_tokens: Tensor, deepstack: Tensor, tokens: Tensor, places: Places, lengths: Tensor | None = None
    ) -> Tensor:
        """The actions (B, H, action_dim), from the result of `QwenVision.views` and text tokens (B, L) int64, of which
        the first `lengths` (B,) of each row are real; None: all."""
        text = self.embed(tokens).to(image_tokens.dtype)
        x = torch.cat((image_tokens, text), 1)[:, places.order]
        hidden = self.language(x, places.positions, places.order, deepstack)
        rows = condition_rows(self.config.condition, places, len(tokens), lengths)
        return self.head(hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[2])))
