"""What the demo checkpoint is trained to do: flow matching, plus auxiliary heads that exist in training only.

The heads (privileged positions, a direct action chunk) read the prefix's hidden states and are never saved: they make
a small vision tower precise long before flow matching alone would. Knows nothing of collection or optimisation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.demo.collect import AUX_DIM, HORIZON
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.kernels import reference
from vla_accel.nn.flow import FlowNetwork
from vla_accel.nn.reference import AdaRmsNorm
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
        pooled = self.mlp(reference.attention(query, key, value, None).flatten(1))
        return self.aux(pooled), self.chunk(pooled).view(batch, HORIZON, 7)


class Trainee(nn.Module):
    """Policy plus heads; `forward` is the loss, so that all of it compiles as one graph."""

    def __init__(self, policy: FlowNetwork, samples: int) -> None:
        super().__init__()
        self.policy, self.heads, self.samples = policy, Heads(policy.config.prefix.width), samples

    def forward(
        self, images: Tensor, tokens: Tensor, state: Tensor, actions: Tensor, aux: Tensor, noise: Tensor, times: Tensor
    ) -> Tensor:
        """images uint8 (B, 2, S, S, 3), tokens (B, L), state (B, state_dim), actions (B, H, A), aux (B, AUX_DIM), noise
        (B, K, H, A), times (B, K). Returns three losses, float32 (3,): flow, privileged, direct."""
        policy = self.policy
        keys, values, hidden = remember(policy, augment(images), tokens, state)
        guessed, direct = self.heads(hidden)
        clean, t = actions[:, None], times[..., None, None]
        noisy, target = t * noise + (1 - t) * clean, noise - clean
        # Each draw is a row of its own, with the time of its own.
        embedding, modulations = policy.conditioning(times.flatten())
        keys, values = (x.repeat_interleave(self.samples, dim=1) for x in (keys, values))
        rows = None if modulations is None else modulations[:, None]
        velocity = policy.velocity(noisy.flatten(0, 1), embedding[:, None], rows, None, keys, values)
        error = (velocity.float() - target.flatten(0, 1)).square().mean((0, 2))
        weight = torch.ones_like(error)
        weight[6:] = 0.5  # five of ten actions are executed
        return torch.stack(
            (
                (error * weight).mean(),
                F.smooth_l1_loss(guessed.float(), aux, beta=0.1),
                (direct.float() - actions[..., :7]).abs().mean(),
            )
        )


def remember(policy: FlowNetwork, images: Tensor, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """images float (B, V, S, S, 3) in [-1, 1], tokens (B, L), state (B, state_dim) to keys and values (depth, B, S,
    kv_heads, d) as the expert reads them, and what the last layer of the prefix saw (B, S, width)."""
    image_tokens = policy.embed_images(images.permute(0, 1, 4, 2, 3)).to(policy.dtype)
    keys, values, hidden = policy.prefix.run(*policy.prefix_rows(image_tokens, tokens, state))
    if isinstance(policy, SmolVla):
        return *policy.expert.projected(keys, values), hidden
    return torch.stack(keys), torch.stack(values), hidden


def augment(images: Tensor) -> Tensor:
    """uint8 to float [-1, 1] with random gain, offset and tint per view; geometry is left alone: millimetres count."""
    x = images.float() / 127.5 - 1
    shape = (*x.shape[:2], 1, 1, 1)
    gain = 1 + 0.12 * (torch.rand(shape, device=x.device) * 2 - 1)
    tint = 0.04 * torch.randn((*x.shape[:2], 1, 1, 3), device=x.device)
    offset = 0.08 * (torch.rand(shape, device=x.device) * 2 - 1)
    noise = 0.015 * torch.randn(x.shape, device=x.device)
    return ((x + 1) * gain - 1 + offset + tint + noise).clamp(-1, 1)


@torch.no_grad()
def initialise(policy: FlowNetwork, tokenizer: SmallTokenizer, seed: int) -> None:
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
    policy.projector.weight /= policy.config.image_scale
    values = torch.linspace(-1, 1, 256)[:, None]
    first = tokenizer.vocab_size - tokenizer.state_dim * 256
    for i in range(tokenizer.state_dim):
        features = torch.cat([f(values * math.pi * k / 2) for k in (1, 2, 4, 8, 16) for f in (torch.sin, torch.cos)], 1)
        features = features @ torch.randn(features.shape[1], width) / math.sqrt(width * features.shape[1] / 2)
        rows = slice(first + 256 * i, first + 256 * (i + 1))
        policy.embed.weight[rows] = 0.3 * policy.embed.weight[rows] + features
    for module in policy.get_submodule("expert").modules():
        if isinstance(module, AdaRmsNorm):
            nn.init.normal_(module.dense.weight, std=0.02)
            module.dense.bias[2 * module.dense.out_features // 3 :] = 1.0  # gate
    nn.init.zeros_(policy.get_parameter("action_out_proj.weight"))
