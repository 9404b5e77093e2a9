"""The tensors of a batch as the inputs of this package's networks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError, ObservationError
from vla_accel.transforms.normalisation import Normaliser

TOKENS, MASK = "observation.language.tokens", "observation.language.attention_mask"
_ROUNDING = 0.01


def pixels(images: Tensor, name: str, scale: Normaliser | None = None) -> np.ndarray:
    """Return uint8 (..., H, W, 3) of images (..., 3, H, W) in [0, 1] or, with a `scale`, normalized."""
    if images.shape[-3] != 3:
        raise ObservationError(f"{name}: expected shape (..., 3, height, width), got {tuple(images.shape)}")
    if images.dtype != torch.uint8:
        levels = images.float()
        if scale is not None:
            low, span = (
                torch.as_tensor(v, device=images.device).float()[:, None, None] for v in (scale.low, scale.span)
            )
            levels = ((levels + 1.0) / 2.0 if scale.kind == "quantile" else levels) * span + low
        levels = levels * 255.0
        lowest, highest = levels.aminmax()
        if not (float(lowest) >= -_ROUNDING and float(highest) <= 255.0 + _ROUNDING):
            raise ObservationError(
                f"{name}: expected values in [0, 1], got {float(lowest) / 255} to {float(highest) / 255}"
            )
        images = levels.round().to(torch.uint8)
    return images.movedim(-3, -1).contiguous().cpu().numpy()


def prompt_tokens(ids: Tensor, mask: Tensor, name: str) -> list[np.ndarray]:
    """Return the tokens int64 (n,) of each prompt without its padding, which follows it or comes before it."""
    rows, kept = ids.cpu().numpy().astype(np.int64), mask.cpu().numpy().astype(bool)
    # Between two kept tokens there is no other: the mask changes at most twice.
    if (np.diff(np.pad(kept, ((0, 0), (1, 1))).astype(int)).clip(0).sum(1) != 1).any():
        raise ConfigError(f"{name}: expected padding on one side of each prompt, got it between tokens")
    return [row[one] for row, one in zip(rows, kept, strict=True)]


def finite_state(state: Tensor, size: int, name: str) -> np.ndarray:
    """Return normalized states (B, n) as float32 (B, size). Raises ObservationError for numbers that are not finite and
    for states that are longer."""
    values = state.float().cpu().numpy()
    if values.ndim != 2 or values.shape[1] > size or not np.isfinite(values).all():
        raise ObservationError(f"{name}: expected finite numbers of shape (B, n), n at most {size}, got {values.shape}")
    return np.pad(values, ((0, 0), (0, size - values.shape[1])))
