"""π0 and π0.5 at any size: one definition for inference and for training the demo checkpoint.

Same mathematics as openpi's PyTorch model (Physical Intelligence, openpi, Apache-2.0), with exact savings: q, k, v and
gate, up are single products; the last prefix layer stops after its keys and values; time conditioning is computed once
for all steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.errors import ConfigError
from vla_accel.nn.flow import FlowNetwork, sinusoidal_embedding
from vla_accel.nn.gemma import GemmaConfig, GemmaExpert
from vla_accel.nn.paligemma import PaliGemma, PaliGemmaSizes
from vla_accel.nn.siglip import SiglipConfig

Kind = Literal["pi0", "pi05"]


@dataclass(frozen=True)
class Pi0Config(PaliGemmaSizes):
    """Architecture and sizes.

    `kind` decides two things: π0 feeds state and time into the suffix tokens; π0.5 feeds time through adaptive norms
    and the state, if at all, through the prompt (`discrete_state_input`). `action_dim` and `action_horizon` are the
    model's own (padded) sizes; `max_token_len` is the longest prompt in tokens. `num_steps`: denoising steps, unless a
    policy's configuration has others. `trained_delay`: the longest delay that real-time chunking was trained with, 0 if
    it was not; None where the checkpoint does not say.
    """

    kind: Kind = "pi05"
    vision: SiglipConfig = field(default_factory=SiglipConfig)
    prefix: GemmaConfig = field(default_factory=lambda: GemmaConfig(2048, 18, 16384))
    expert: GemmaConfig = field(default_factory=lambda: GemmaConfig(1024, 18, 4096))
    vocab_size: int = 257_152
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int = 200
    discrete_state_input: bool = True
    num_steps: int = 10
    trained_delay: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("pi0", "pi05"):
            raise ConfigError(f"model.kind: expected 'pi0' or 'pi05', got {self.kind!r}")
        for name in ("depth", "heads", "kv_heads", "head_dim"):
            a, b = getattr(self.prefix, name), getattr(self.expert, name)
            if a != b:
                raise ConfigError(f"prefix.{name} {a} and expert.{name} {b} must be equal: they share attention")

    @property
    def suffix_tokens(self) -> int:
        """Tokens of the suffix: the actions, and in π0 the state before them."""
        return self.action_horizon + (1 if self.kind == "pi0" else 0)


def pi05(**changes: object) -> Pi0Config:
    """π0.5 at the published size (SigLIP So400m/14, Gemma 2B prefix, 300M expert)."""
    return Pi0Config(**{"kind": "pi05", "max_token_len": 200, **changes})  # type: ignore[arg-type]


def pi0(**changes: object) -> Pi0Config:
    """π0 at the published size."""
    fixed = {"kind": "pi0", "max_token_len": 48, "discrete_state_input": False}
    return Pi0Config(**{**fixed, **changes})  # type: ignore[arg-type]


def pi05_demo(**changes: object) -> Pi0Config:
    """π0.5 small enough to ship (about 12 M parameters) and to run on two CPU cores. libero_spatial only."""
    small: dict[str, object] = {
        "kind": "pi05",
        "vision": SiglipConfig(width=256, depth=5, mlp_dim=1024, heads=4, patch_size=16),
        "prefix": GemmaConfig(width=256, depth=6, mlp_dim=896, heads=4, head_dim=64),
        "expert": GemmaConfig(width=128, depth=6, mlp_dim=512, heads=4, head_dim=64),
        "vocab_size": 2176,
        "action_dim": 8,
        "action_horizon": 10,
        "max_token_len": 64,
        "discrete_state_input": True,
    }
    return Pi0Config(**{**small, **changes})  # type: ignore[arg-type]


SIZES = {"pi0": pi0, "pi05": pi05, "pi05_demo": pi05_demo}


def suffix_attention(kind: Kind, tokens: int, device: torch.device) -> Tensor | None:
    """Who attends to whom inside the suffix, (tokens, tokens) bool; None when everyone attends to everyone.

    In π0 the first token is the state, a block of its own that cannot see the actions.
    """
    if kind == "pi05":
        return None
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    allowed[0, 1:] = False
    return allowed


class Pi0(PaliGemma, FlowNetwork):
    """The model. Module names are the canonical checkpoint keys (see `vla_accel.checkpoints.checkpoint`)."""

    config: Pi0Config

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        self.takes_state = config.kind == "pi0"
        self.make_prefix()
        width = config.expert.width
        self.expert = GemmaExpert(config.expert, adaptive=config.kind == "pi05")
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        if config.kind == "pi05":
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    @staticmethod
    def kept_wide(name: str) -> bool:
        """What openpi keeps in float32: PaliGemma's, and the small action, state and time projections."""
        return name.startswith(("action_", "state_", "time_")) or PaliGemma.kept_wide(name)

    # -- suffix ---------------------------------------------------------------------------------------------------

    def conditioning(self, times: Tensor) -> tuple[Tensor, Tensor | None]:
        """All that depends on time only. times (n,) gives the time embedding (n, width) (π0 uses it in its action
        tokens) and, for π0.5, every adaptive norm's `dense` of the time (n, 2 * depth + 1, 3 * width), else None."""
        weight = (self.time_mlp_in if self.config.kind == "pi05" else self.action_time_mlp_in).weight
        embedding = sinusoidal_embedding(times, self.config.expert.width).to(weight.dtype)
        if self.config.kind == "pi0":
            return embedding, None
        with self.present("time_mlp_in", "time_mlp_out"):
            cond = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedding))))
        modulations = []
        for name in self.expert.norm_names():
            dense = f"{name}.dense"
            with self.present(f"expert.{dense}"):
                modulations.append(self.expert.get_submodule(dense)(cond))
        return embedding, torch.stack(modulations, dim=-2)

    def embed_suffix(self, noisy: Tensor, time_embedding: Tensor, state: Tensor | None) -> Tensor:
        """Suffix tokens (B, T, expert width) from noisy actions (B, H, action_dim).

        π0 also takes `time_embedding` (width,) or (B, 1, width), and `state` (B, action_dim).
        """
        actions = self.action_in_proj(noisy.to(self.action_in_proj.weight.dtype))
        if self.config.kind == "pi05":
            return actions
        if state is None:
            raise ConfigError("π0 needs the state, got None")
        time = time_embedding.to(actions.dtype).expand_as(actions)
        hidden = F.silu(self.action_time_mlp_in(torch.cat((actions, time), dim=-1)))
        state_token = self.state_proj(state.to(actions.dtype))[:, None]
        return torch.cat((state_token, self.action_time_mlp_out(hidden)), dim=1)

    def velocity(
        self, noisy: Tensor, time_embedding: Tensor, modulations: Tensor | None, state: Tensor | None, keys: Tensor,
        values: Tensor, prefix_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `FlowNetwork.velocity`; the time-only inputs are one row of `conditioning`."""
        x = self.embed_suffix(noisy, time_embedding, state).to(self.dtype)
        batch, tokens = x.shape[:2]
        prefix_tokens = keys.shape[2]
        offset = torch.arange(tokens, device=x.device)
        inner = suffix_attention(self.config.kind, tokens, x.device)
        if prefix_mask is None:
            positions = (prefix_tokens + offset).expand(batch, tokens)
        else:
            positions = prefix_mask.sum(1, keepdim=True) + offset
        mask = None
        if prefix_mask is not None or inner is not None:
            outer = keys.new_ones(batch, prefix_tokens, dtype=torch.bool) if prefix_mask is None else prefix_mask
            inner = keys.new_ones(tokens, tokens, dtype=torch.bool) if inner is None else inner
            mask = torch.cat((outer[:, None].expand(batch, tokens, -1), inner.expand(batch, tokens, tokens)), dim=2)
        x = self.expert(x, positions, keys, values, mask, modulations)
        x = x[:, -self.config.action_horizon :]
        return self.action_out_proj(x.to(self.action_out_proj.weight.dtype))
