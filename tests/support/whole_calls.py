"""A network's whole call in plain PyTorch, from pixels and tokens to its result: what engines and other projects' code
are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_accel.families.pi0.network import Pi0
from vla_accel.families.pi0_fast.network import Pi0Fast, last_tokens
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.nn.flow import Schedule


@torch.no_grad()
def pi0_actions(
    model: Pi0,
    images: Tensor,
    image_mask: Tensor,
    tokens: Tensor,
    token_mask: Tensor,
    state: Tensor | None,
    noise: Tensor,
    num_steps: int = 10,
) -> Tensor:
    """One observation batch to normalised actions (B, H, action_dim), float32.

    Args: images (B, V, 3, H, W) float in [-1, 1]; image_mask (B, V) bool; tokens (B, L) int64; token_mask (B, L)
    bool; state (B, action_dim) (π0; ignored by π0.5); noise (B, H, action_dim).
    Views and token columns that no row uses are dropped before anything is computed, which is exact: positions
    are the running count of real tokens.
    """
    views, columns = image_mask.any(0), token_mask.any(0)
    images, image_mask = images[:, views], image_mask[:, views]
    tokens, token_mask = tokens[:, columns], token_mask[:, columns]
    image_tokens = model.embed_images(images.to(model.vision.patch_embedding.weight.dtype)).to(model.dtype)
    mask = None
    if not (image_mask.all() and token_mask.all()):
        mask = torch.cat((image_mask.repeat_interleave(model.config.image_tokens, 1), token_mask), 1)
    keys, values = model.prefix_cache(image_tokens, tokens, mask)
    schedule = Schedule.uniform(num_steps)
    rows = model.conditioning(model.times(schedule, noise.dtype).to(noise.device))
    return model.integrate(noise, *rows, keys, values, state, mask, schedule=schedule)


@torch.no_grad()
def smolvla_actions(
    model: SmolVla,
    images: Tensor,
    tokens: Tensor,
    token_mask: Tensor,
    state: Tensor,
    noise: Tensor,
    num_steps: int = 10,
) -> Tensor:
    """One observation batch to normalised actions (B, H, action_dim), float32.

    Args: images (B, V, 3, H, W) float in [-1, 1], of the views that are there; tokens (B, L) int64; token_mask
    (B, L) bool, real tokens first; state (B, state_dim); noise (B, H, action_dim).
    """
    images = images.to(model.vision.patch_embedding.weight.dtype)
    image_tokens = model.embed_images(images).to(model.dtype)
    lengths = image_tokens.shape[1] + token_mask.sum(1) + 1
    keys, values = model.prefix_cache(image_tokens, tokens, state, lengths)
    mask = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]
    schedule = Schedule.uniform(num_steps)
    rows = model.conditioning(model.times(schedule, noise.dtype).to(noise.device))
    return model.integrate(noise, *rows, keys, values, None, mask, schedule=schedule)


@torch.no_grad()
def pi0_fast_tokens(model: Pi0Fast, images: Tensor, tokens: Tensor, token_mask: Tensor, steps: int) -> Tensor:
    """One observation batch to at most so many tokens (B, steps) int64.

    Args: images (B, V, 3, H, W) float in [-1, 1], of the views that are there; tokens (B, L) int64 that end in
    <bos>; token_mask (B, L) bool, real tokens first.
    """
    images = images.to(model.vision.patch_embedding.weight.dtype)
    image_tokens = model.embed_images(images).to(model.dtype)
    total = image_tokens.shape[1] + tokens.shape[1]
    first, lengths = last_tokens(tokens, total, image_tokens.shape[1] + token_mask.sum(1))
    mask = torch.arange(total, device=tokens.device) < lengths[:, None]
    keys, values = model.prefix_cache(image_tokens, tokens, mask)
    return model.decode(first, lengths, keys, values, steps)
