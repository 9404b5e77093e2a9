"""What the demo checkpoint is trained to do: flow matching, plus auxiliary heads that exist in training only.

The heads (privileged positions, a direct action chunk) read the prefix's hidden states and are never saved: they make
a small vision tower precise long before flow matching alone would. Knows nothing of collection or optimisation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.libero.demo.collect import AUX_DIM, HORIZON
from vla_accel import ops
from vla_accel.models.gemma import AdaRmsNorm
from vla_accel.models.pi0 import Pi0, Pi0Config
from vla_accel.transforms.tokenizer import SmallTokenizer


class Heads(nn.Module):
    """Training-only heads that read the prefix's hidden states: privileged positions and a direct action chunk."""

    def __init__(self, width: int, queries: int = 4) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(queries, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.key_value = nn.Linear(width, 2 * width)
        self.mlp = nn.Sequential(nn.Linear(queries * width, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.aux = nn.Linear(512, AUX_DIM)
        self.chunk = nn.Linear(512, HORIZON * 7)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = hidden.shape
        key, value = self.key_value(self.norm(hidden)).view(batch, tokens, 2, 4, width // 4).unbind(2)
        query = self.query.to(key.dtype).view(1, -1, 4, width // 4).expand(batch, -1, -1, -1)
        pooled = self.mlp(ops.attention(query, key, value, None).flatten(1))
        return self.aux(pooled), self.chunk(pooled).view(batch, HORIZON, 7)


class Trainee(nn.Module):
    """Policy plus heads; `forward` is the loss, so that all of it compiles as one graph."""

    def __init__(self, config: Pi0Config, samples: int) -> None:
        super().__init__()
        self.block: Tensor
        self.policy, self.heads, self.samples = Pi0(config), Heads(config.prefix.width), samples
        count, steps = samples, config.action_horizon
        block = torch.eye(count, dtype=torch.bool).repeat_interleave(steps, 0).repeat_interleave(steps, 1)
        self.register_buffer("block", block, persistent=False)

    def forward(
        self, images: Tensor, tokens: Tensor, actions: Tensor, aux: Tensor, noise: Tensor, times: Tensor
    ) -> Tensor:
        """images uint8 (B, 2, 224, 224, 3), tokens (B, L), actions (B, H, A), aux (B, AUX_DIM), noise
        (B, K, H, A), times (B, K). Returns three losses, float32 (3,): flow, privileged, direct."""
        policy, config = self.policy, self.policy.config
        batch, steps = actions.shape[:2]
        pixels = augment(images).permute(0, 1, 4, 2, 3)
        image_tokens = policy.embed_images(pixels)
        x = torch.cat((image_tokens, policy.embed_tokens(tokens).to(image_tokens.dtype)), 1)
        positions = torch.arange(x.shape[1], device=x.device).expand(batch, -1)
        keys, values, hidden = policy.prefix.run(x, positions, None)
        guessed, direct = self.heads(hidden)

        target = noise - actions[:, None]
        noisy = times[..., None, None] * noise + (1 - times[..., None, None]) * actions[:, None]
        suffix = policy.action_in_proj(noisy.flatten(1, 2))
        # Two-step form of `conditioning`, per sample: each of the K copies has its own time.
        _, modulations = policy.conditioning(times.flatten())
        assert modulations is not None
        modulations = modulations.view(batch, self.samples, 1, *modulations.shape[1:])
        modulations = modulations.expand(-1, -1, steps, -1, -1).flatten(1, 2)
        offset = torch.arange(steps, device=x.device).repeat(self.samples)
        suffix_positions = (x.shape[1] + offset).expand(batch, -1)
        mask = F.pad(self.block, (x.shape[1], 0), value=True)[None]
        out = policy.expert(suffix, suffix_positions, keys, values, mask, modulations)
        velocity = policy.action_out_proj(out).view(batch, self.samples, steps, config.action_dim)
        error = (velocity.float() - target).square().mean((0, 1, 3))
        weight = torch.ones_like(error)
        weight[6:] = 0.5  # five of ten actions are executed
        return torch.stack(
            (
                (error * weight).mean(),
                F.smooth_l1_loss(guessed.float(), aux, beta=0.1),
                (direct.float() - actions[..., :7]).abs().mean(),
            )
        )


def augment(images: Tensor) -> Tensor:
    """uint8 to float [-1, 1] with random gain, offset and tint per view; geometry is left alone: millimetres count."""
    x = images.float() / 127.5 - 1
    shape = (*x.shape[:2], 1, 1, 1)
    gain = 1 + 0.12 * (torch.rand(shape, device=x.device) * 2 - 1)
    tint = 0.04 * torch.randn((*x.shape[:2], 1, 1, 3), device=x.device)
    offset = 0.08 * (torch.rand(shape, device=x.device) * 2 - 1)
    noise = 0.015 * torch.randn(x.shape, device=x.device)
    return ((x + 1) * gain - 1 + offset + tint + noise).clamp(-1, 1)


def initialise(policy: Pi0, tokenizer: SmallTokenizer, seed: int) -> None:
    """Initial weights: scaled normal, open gates, and state tokens that start as smooth functions of their value."""
    torch.manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if parameter.dim() >= 2 and "position" not in name:
            nn.init.normal_(parameter, std=0.7 / math.sqrt(parameter[0].numel()))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    nn.init.normal_(policy.vision.position_embedding, std=0.02)
    width = policy.config.prefix.width
    nn.init.normal_(policy.embed.weight, std=1 / math.sqrt(width))
    values = torch.linspace(-1, 1, 256)[:, None]
    first = tokenizer.vocab_size - tokenizer.state_dim * 256
    for i in range(tokenizer.state_dim):
        features = torch.cat([f(values * math.pi * k / 2) for k in (1, 2, 4, 8, 16) for f in (torch.sin, torch.cos)], 1)
        features = features @ torch.randn(features.shape[1], width) / math.sqrt(width * features.shape[1] / 2)
        rows = slice(first + 256 * i, first + 256 * (i + 1))
        policy.embed.weight.data[rows] = 0.3 * policy.embed.weight.data[rows] + features
    for module in policy.expert.modules():
        if isinstance(module, AdaRmsNorm):
            nn.init.normal_(module.dense.weight, std=0.02)
            module.dense.bias.data[2 * module.dense.out_features // 3 :] = 1.0  # gate
    nn.init.zeros_(policy.action_out_proj.weight)
