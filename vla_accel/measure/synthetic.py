"""Policies of the published sizes with random weights, and random observations for them: speed and agreement where no
checkpoint can be had. Success cannot be measured on these."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from vla_accel.components.calibration import calibration
from vla_accel.components.precision import needs_scales
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.fp8 import Scales
from vla_accel.models.pi0 import PRESETS, Pi0, Pi0Config
from vla_accel.models.random_weights import random_model
from vla_accel.policy import OptimizedPolicy
from vla_accel.policy.optimized import resolve_device, resolve_precision
from vla_accel.quantize import calibrate
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import LIBERO

Kind = Literal["pi0", "pi05"]
VIEWS = ("observation/image", "observation/wrist_image", "observation/right_wrist_image", "observation/back_image")
PROMPT = "pick up the black bowl between the plate and the ramekin and place it on the plate"


def published(kind: Kind, horizon: int) -> Pi0Config:
    """The published architecture with an action horizon; π0.5 without the state in its prompt, as in pi05_libero."""
    if kind not in ("pi0", "pi05"):
        raise ConfigError(f"model: expected pi0 or pi05, got {kind!r}")
    return PRESETS[kind](action_horizon=horizon, discrete_state_input=False)


@dataclass(frozen=True)
class _Words:
    """A stand-in for PaliGemma's tokenizer, whose files cannot be bundled: a token a word, about as many as that."""

    vocab_size: int

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        words = text.replace("\n", " \n").split(" ")
        ids = [3 + zlib.crc32(word.encode()) % (self.vocab_size - 3) for word in words if word]
        return [2, *ids] if add_bos else ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def synthetic_processor(config: Pi0Config, views: int) -> Processor:
    """LIBERO's transforms with any number of views and statistics that change nothing."""
    if not 1 <= views <= len(VIEWS):
        raise ConfigError(f"views: expected 1 to {len(VIEWS)}, got {views}")
    unit = Normaliser("mean_std", np.zeros(8), np.ones(8))
    return Processor(
        tokenizer=_Words(config.vocab_size),
        state=unit,
        actions=Normaliser("mean_std", np.zeros(7), np.ones(7)),
        image_size=config.vision.image_size,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        discrete_state=False,
        preset=replace(LIBERO, images=VIEWS[:views], ignored_images=()),
    )


def random_observation(processor: Processor, rng: np.random.Generator) -> dict[str, Any]:
    """Noise for images, a standard normal state, a LIBERO prompt of about 20 tokens."""
    size = processor.image_size
    images = {k: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for k in processor.preset.images}
    state = rng.standard_normal(processor.preset.state_dim)
    return {**images, processor.preset.state[0]: state, processor.preset.prompt: PROMPT}


def random_observations(policy: OptimizedPolicy, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`count` observations that suit a policy with one state key."""
    rng = np.random.default_rng(seed)
    return [random_observation(policy.processor, rng) for _ in range(count)]


def random_policy(
    kind: Kind,
    settings: PolicyConfig,
    *,
    horizon: int | None = None,
    views: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    device: str | None = None,
    with_reference: bool = False,
    model: Pi0 | None = None,
    scales: Scales | None = None,
) -> tuple[OptimizedPolicy, OptimizedPolicy | None]:
    """A policy of the published size, and with `with_reference` its FP32 eager twin of the same weights.

    Defaults: π0.5 two views and horizon 10, π0 three views and horizon 50. FP8 scales are calibrated on random
    observations where some component asks for them and none are given. `model`: weights to share, not copied.
    """
    settings = replace(settings, device=device or settings.device, num_steps=steps or settings.num_steps)
    config = model.config if model is not None else published(kind, horizon or (10 if kind == "pi05" else 50))
    views = views or (2 if kind == "pi05" else 3)
    processor = synthetic_processor(config, views)
    where = resolve_device(settings.device)
    dtype = resolve_precision(settings, where)
    exact = None
    if model is None:
        model = random_model(config, seed=seed, device=str(where), dtype=torch.float32 if with_reference else dtype)
    if with_reference:
        from vla_accel.measure.parity import reference_of

        twin = random_model(config, seed=seed, device=str(where), dtype=torch.float32)
        exact = reference_of(settings, processor, twin, name=f"random {kind}")
    if scales is None and needs_scales(settings):
        rng = np.random.default_rng(seed)
        prepared = [processor.prepare(random_observation(processor, rng)) for _ in range(8)]
        model = model.to_compute_dtype(dtype)
        inputs = [(p.images, p.tokens) for p in prepared]
        scales = calibrate(model, calibration(model), inputs, "random observations")
    return OptimizedPolicy(model, processor, settings, name=f"random {kind}", scales=scales), exact
