"""Policies with random weights, and random observations for them, to measure speed and agreement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vla_accel.config import PolicyConfig
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Family, family_named
from vla_accel.families.loading import Checkpoint
from vla_accel.fp8 import Scales
from vla_accel.machine import resolve_device
from vla_accel.nn.network import Network
from vla_accel.numeric import resolve_dtype
from vla_accel.policy import OptimizedPolicy


def random_observations(policy: OptimizedPolicy, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`count` observations that suit a policy."""
    rng = np.random.default_rng(seed)
    card = bench_card(policy.family)
    return [card.random_observation(policy.processor, rng) for _ in range(count)]


def random_observation(family: str | Family) -> dict[str, Any]:
    """One that suits a policy of a family's published size, which is not made for it."""
    card = bench_card(family_named(family) if isinstance(family, str) else family)
    return card.random_observation(card.dummy(card.published(), card.views), np.random.default_rng(0))


def random_policy(
    family: str | Family,
    settings: PolicyConfig,
    *,
    horizon: int | None = None,
    views: int | None = None,
    seed: int = 0,
    device: str | None = None,
    with_reference: bool = False,
    model: Network | None = None,
    scales: Scales | None = None,
) -> tuple[OptimizedPolicy, OptimizedPolicy | None]:
    """A policy of a family's published size, and with `with_reference` an FP32 eager policy of the same weights.
    `model`: weights to share, without a copy; `scales`: by default calibrated on random observations if a component
    needs them."""
    if isinstance(family, str):
        family = family_named(family)
    settings = replace(settings, device=device or settings.device)
    card = bench_card(family)
    config = model.config if model is not None else card.published(horizon)
    processor = card.dummy(config, views or card.views)
    where = resolve_device(settings.device)
    dtype = resolve_dtype(settings.precision, where)
    name, exact = f"random {family.name}", None
    if model is None:
        model = card.random(config, seed=seed, device=str(where), dtype=dtype)
    if with_reference:
        from vla_accel.measure.parity import reference_of

        twin = card.random(config, seed=seed, device=str(where), dtype=torch.float32)
        exact = reference_of(settings, Checkpoint(name, family, twin, processor, settings=settings))
    if scales is None and family.capabilities.needs_scales(settings.specs(family.parts)):
        scales = calibrate_on_noise(family, model.placed(None, dtype), processor, seed=seed)
    checkpoint = Checkpoint(name, family, model, processor, calibrated=scales, settings=settings)
    return OptimizedPolicy(checkpoint, settings), exact


def noise_scales(
    family: Family, settings: PolicyConfig, *, horizon: int | None = None, views: int | None = None,
    device: str | None = None,
) -> Scales | None:  # fmt: skip
    """The scales that `random_policy` would calibrate for these settings, beforehand; None where it needs none."""
    if not family.capabilities.needs_scales(settings.specs(family.parts)):
        return None
    where = resolve_device(device or settings.device)
    card = bench_card(family)
    config, dtype = card.published(horizon), resolve_dtype(settings.precision, where)
    model = card.random(config, seed=0, device=str(where), dtype=dtype)
    return calibrate_on_noise(family, model, card.dummy(config, views or card.views))


def calibrate_on_noise(family: Family, model: Network, processor: Any, *, count: int = 8, seed: int = 0) -> Scales:
    """FP8 scales from random observations: for measuring, not for acting."""
    rng = np.random.default_rng(seed)
    card = bench_card(family)
    prepared = [processor.prepare(card.random_observation(processor, rng)) for _ in range(count)]
    return card.calibrate(model, prepared, "random observations")
