"""π0 and π0.5 written out slowly from the mathematics: float64, one sample at a time, nothing dropped, nothing fused.

Masked views and padding are computed and masked, as in openpi (Physical Intelligence, openpi, Apache-2.0). Shares no
code with the package: of the package's it only reads a canonical state dict and the sizes in a `Pi0Config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.families.pi0.network import Pi0Config
from vla_accel.nn.siglip import SiglipConfig

MASKED = -2.3819763e38
State = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """One observation, without a batch axis: images (V, 3, H, W), image_mask (V,), tokens (L,), token_mask (L,)."""

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor
    noise: Tensor


def allowed(pad: list[bool], block_starts: list[int]) -> list[list[bool]]:
    """Who may attend to whom: token j is seen by i if j's block is not later, and both are real."""
    block, blocks = 0, []
    for start in block_starts:
        block += start
        blocks.append(block)
    n = len(pad)
    return [[blocks[j] <= blocks[i] and pad[i] and pad[j] for j in range(n)] for i in range(n)]


def positions_of(pad: list[bool]) -> list[int]:
    """The running count of real tokens, minus one."""
    count, result = 0, []
    for real in pad:
        count += real
        result.append(count - 1)
    return result


def suffix_blocks(kind: str, horizon: int) -> list[int]:
    """π0: the state is a block, the actions are one; π0.5: the actions are one."""
    return ([1] if kind == "pi0" else []) + [1] + [0] * (horizon - 1)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def linear(w: State, name: str, x: Tensor) -> Tensor:
    y = torch.einsum("oi,ti->to", w[f"{name}.weight"], x)
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def layer_norm(w: State, name: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def rms_norm(w: State, name: str, x: Tensor, eps: float, cond: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """The normed x and the gate of the residual that follows."""
    normed = x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)
    if cond is None:
        return normed * (1 + w[f"{name}.weight"]), 1.0
    width = x.shape[-1]
    m = linear(w, f"{name}.dense", cond[None])[0]
    return normed * (1 + m[:width]) + m[width : 2 * width], m[2 * width :]


def rotate(x: Tensor, positions: list[int]) -> Tensor:
    """x (T, d): pair (i, i + d/2) turned by position * 10000 ** (-2 i / d)."""
    half = x.shape[1] // 2
    rows = []
    for row, position in zip(x, positions, strict=True):
        angle = torch.tensor([position * 10_000.0 ** (-2 * i / x.shape[1]) for i in range(half)], dtype=torch.float64)
        a, b = row[:half], row[half:]
        rows.append(
            torch.cat((a * torch.cos(angle) - b * torch.sin(angle), b * torch.cos(angle) + a * torch.sin(angle)))
        )
    return torch.stack(rows)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: list[list[bool]] | None) -> Tensor:
    """One head: q (T, d), k and v (S, d)."""
    scores = torch.einsum("td,sd->ts", q, k) * q.shape[1] ** -0.5
    if mask is not None:
        scores = scores + torch.where(torch.tensor(mask), 0.0, MASKED).double()
    rows = []
    for row in scores:
        weights = torch.exp(row - row.max())
        rows.append(torch.einsum("s,sd->d", weights / weights.sum(), v))
    return torch.stack(rows)


def tower(w: State, c: SiglipConfig, image: Tensor) -> Tensor:
    """One view (3, H, W) through SigLIP: (patches, width)."""
    p = c.patch_size
    side = c.image_size // p
    patches = [image[:, r * p : (r + 1) * p, s * p : (s + 1) * p] for r in range(side) for s in range(side)]
    kernel, bias = w["vision.patch_embedding.weight"], w["vision.patch_embedding.bias"]
    x = torch.stack([torch.einsum("oyij,yij->o", kernel, patch) + bias for patch in patches])
    x = x + w["vision.position_embedding"]
    d = c.width // c.heads
    for i in range(c.depth):
        name = f"vision.layers.{i}"
        q, k, v = linear(w, f"{name}.qkv_proj", layer_norm(w, f"{name}.layer_norm1", x, c.eps)).split(c.width, 1)
        heads = [slice(h * d, (h + 1) * d) for h in range(c.heads)]
        attended = torch.cat([attend(q[:, s], k[:, s], v[:, s], None) for s in heads], 1)
        x = x + linear(w, f"{name}.out_proj", attended)
        hidden = gelu_tanh(linear(w, f"{name}.fc1", layer_norm(w, f"{name}.layer_norm2", x, c.eps)))
        x = x + linear(w, f"{name}.fc2", hidden)
    return layer_norm(w, "vision.post_layernorm", x, c.eps)


def view_tokens(w: State, config: Pi0Config, image: Tensor) -> Tensor:
    """One view (3, H, W) through SigLIP and the projector: (tokens, prefix width)."""
    return linear(w, "projector", tower(w, config.vision, image))


def block(
    w: State,
    config: Pi0Config,
    name: str,
    x: Tensor,
    positions: list[int],
    mask: list[list[bool]],
    cond: Tensor | None = None,
    cached: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One Gemma block: new x, and the keys and values (T, kv_heads, d) of its own tokens."""
    c = config.expert if name.startswith("expert") else config.prefix
    d = c.head_dim
    normed, gate = rms_norm(w, f"{name}.input_layernorm", x, c.eps, cond)
    q, k, v = linear(w, f"{name}.qkv_proj", normed).split((c.heads * d, c.kv_heads * d, c.kv_heads * d), 1)
    keys = torch.stack([rotate(k[:, h * d : (h + 1) * d], positions) for h in range(c.kv_heads)], 1)
    values = torch.stack([v[:, h * d : (h + 1) * d] for h in range(c.kv_heads)], 1)
    all_k = keys if cached is None else torch.cat((cached[0], keys))
    all_v = values if cached is None else torch.cat((cached[1], values))
    heads = []
    for h in range(c.heads):
        shared = h // (c.heads // c.kv_heads)
        heads.append(attend(rotate(q[:, h * d : (h + 1) * d], positions), all_k[:, shared], all_v[:, shared], mask))
    x = x + linear(w, f"{name}.o_proj", torch.cat(heads, 1)) * gate
    normed, gate = rms_norm(w, f"{name}.post_attention_layernorm", x, c.eps, cond)
    g, u = linear(w, f"{name}.gate_up_proj", normed).split(c.mlp_dim, 1)
    return x + linear(w, f"{name}.down_proj", gelu_tanh(g) * u) * gate, keys, values


def prefix_pad(config: Pi0Config, sample: Sample) -> list[bool]:
    views = [bool(m) for m in sample.image_mask for _ in range(config.vision.tokens)]
    return views + [bool(m) for m in sample.token_mask]


def prefix_cache(w: State, config: Pi0Config, sample: Sample) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every prefix layer, each (S, kv_heads, d), masked tokens included."""
    text = torch.stack([w["embed.weight"][int(t)] for t in sample.tokens]) * math.sqrt(config.prefix.width)
    x = torch.cat([*(view_tokens(w, config, image) for image in sample.images), text])
    pad = prefix_pad(config, sample)
    cache = []
    for i in range(config.prefix.depth):
        mask = allowed(pad, [0] * len(pad))
        x, keys, values = block(w, config, f"prefix.layers.{i}", x, positions_of(pad), mask)
        cache.append((keys, values))
    return cache


def time_embedding(time: float, width: int) -> Tensor:
    periods = [4e-3 * (4.0 / 4e-3) ** (i / (width // 2 - 1)) for i in range(width // 2)]
    angles = [2 * math.pi * time / period for period in periods]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def velocity(
    w: State, config: Pi0Config, sample: Sample, noisy: Tensor, time: float, cache: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """The flow's velocity (horizon, action_dim) at `noisy` and `time`."""
    embedded = time_embedding(time, config.expert.width)
    cond = None
    x = linear(w, "action_in_proj", noisy)
    if config.kind == "pi05":
        cond = silu(linear(w, "time_mlp_out", silu(linear(w, "time_mlp_in", embedded[None]))))[0]
    else:
        x = torch.cat((x, embedded.expand(len(x), -1)), 1)
        x = linear(w, "action_time_mlp_out", silu(linear(w, "action_time_mlp_in", x)))
        x = torch.cat((linear(w, "state_proj", sample.state[None]), x))
    pad = prefix_pad(config, sample)
    whole = allowed(pad + [True] * len(x), [0] * len(pad) + suffix_blocks(config.kind, config.action_horizon))
    positions = [sum(pad) + i for i in range(len(x))]
    for i in range(config.expert.depth):
        x, _, _ = block(w, config, f"expert.layers.{i}", x, positions, whole[len(pad) :], cond, cache[i])
    x, _ = rms_norm(w, "expert.norm", x, config.expert.eps, cond)
    return linear(w, "action_out_proj", x[-config.action_horizon :])


def sample_actions(w: State, config: Pi0Config, sample: Sample, num_steps: int) -> Tensor:
    """Euler from t = 1 to 0: (horizon, action_dim)."""
    cache = prefix_cache(w, config, sample)
    x, time, dt = sample.noise, 1.0, -1.0 / num_steps
    while time >= -dt / 2:
        x = x + dt * velocity(w, config, sample, x, time, cache)
        time += dt
    return x
