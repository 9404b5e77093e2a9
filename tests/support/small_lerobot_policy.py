"""A policy object with lerobot's interface and a small SmolVLA inside, where lerobot itself is not installed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import tiny_smolvla
from tests.support.whole_calls import smolvla_actions

STATE, TOKENS = 6, 7


class Config:
    """A policy's config, as lerobot saves it."""

    rtc_config: Any = None

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.content))


class Policy(nn.Module):
    """SmolVLA: weights under lerobot's names, and the calls of its class. `moved` is added to its actions; `calls`
    counts how often it computed some."""

    moved, calls = 0.0, 0

    def __init__(self) -> None:
        super().__init__()
        with tempfile.TemporaryDirectory() as folder:
            self.network = [tiny_smolvla.write_lerobot(Path(folder))]  # in a list: its weights have other names
            self.config = Config(json.loads((Path(folder) / "config.json").read_text()))
        for name, value in tiny_smolvla.tensors_of(self.network[0]).items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))

    def predict_action_chunk(self, batch: dict[str, Tensor], **others: Any) -> Tensor:
        return self._get_action_chunk(batch, **others)

    def _get_action_chunk(self, batch: dict[str, Tensor], noise: Tensor | None = None, **others: Any) -> Tensor:
        self.calls += 1
        (network,) = self.network
        config, images = network.config, torch.stack([batch[name] for name in tiny_smolvla.CAMERAS], 1)
        state = nn.functional.pad(batch["observation.state"], (0, config.state_dim - STATE))
        if noise is None:
            shape = (len(state), config.action_horizon, config.action_dim)
            noise = torch.normal(0.0, 1.0, shape, device=state.device)
        tokens, mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        return smolvla_actions(network, 2 * images - 1, tokens, mask, state, noise)[..., :STATE] + self.moved


def batch_of(count: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch as lerobot's preprocessor makes it, with prompts of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    images = {
        name: torch.randint(0, 256, (count, 3, 32, 32), generator=generator).float() / 255
        for name in tiny_smolvla.CAMERAS
    }
    lengths = torch.tensor([TOKENS, 3, 5])[:count, None]
    return {
        **images,
        "observation.state": torch.randn(count, STATE, generator=generator),
        "observation.language.tokens": torch.randint(1, 40, (count, TOKENS), generator=generator),
        "observation.language.attention_mask": torch.arange(TOKENS)[None] < lengths,
    }
