"""Policies and pipelines with random weights on a GPU, for the tests there: small ones whose expert the streamed
kernels run and ones that they cannot, what they are given, and how near their answers are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.streamed_support import streamable
from tests.support.tiny import TOKENIZER, statistics
from vla_accel import EngineSpec, OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.engines.auto import choose
from vla_accel.families.pi0.family import PI0, PI05
from vla_accel.families.pi0.native import Pi0Store
from vla_accel.families.pi0.network import Pi0, Pi0Config
from vla_accel.families.prompted import PromptShape
from vla_accel.kernels.loop import StreamedLoop
from vla_accel.ledger import Ledger
from vla_accel.nn.flow import Schedule
from vla_accel.nn.loop import SuffixLoop
from vla_accel.nn.memory import Counted
from vla_accel.nn.random_weights import random_model
from vla_accel.policy.pipeline import Feed, Pipelines, Plan
from vla_accel.runtime import Runtime

DEVICE = "cuda"
BF16_COSINE = 0.9995
PARTS = ("vision", "kv_cache", "denoise")
NATIVE = PolicyConfig(num_steps=3, device=DEVICE).with_specs(dict.fromkeys(PARTS, EngineSpec("native")))
EAGER = PolicyConfig(num_steps=3, device=DEVICE, precision="fp32").with_specs(dict.fromkeys(PARTS, EngineSpec("eager")))
PROMPTS = ("pick up the bowl", "pick up the black bowl on the plate and place it on the stove", "place it")
NAN = float("nan")


SMALL: dict[str, Pi0Config] = {
    # The first two run the streamed loop, the others the Triton loop.
    "pi05": streamable("pi05", width=128, mlp=512, heads=4),
    "pi0": streamable("pi0", width=128, mlp=512, heads=4, kv_heads=2),
    "pi05 awkward": streamable("pi05", width=72, mlp=200, heads=3, head_dim=40, horizon=7),
    "pi0 awkward": streamable("pi0", width=136, mlp=264, heads=6, kv_heads=3, head_dim=72, horizon=50),
}


def load(path: Path | str, config: PolicyConfig = NATIVE) -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained(path, config)


def demo_observation(policy: OptimizedPolicy, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    one = policy.processor.example()
    for key, value in one.items():
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            one[key] = rng.integers(0, 256, value.shape, dtype=np.uint8)
    return one


def noise_for(policy: OptimizedPolicy, batch: int, seed: int = 0) -> np.ndarray:
    config = policy.model.config
    shape = (batch, config.action_horizon, config.action_dim)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def actions_of(
    policy: OptimizedPolicy, observations: list[dict[str, Any]], noise: np.ndarray, **options: Any
) -> np.ndarray:
    """Robot actions without what the normalisation adds, which would flatter the cosine."""
    results = policy.infer_batch(observations, noise=noise, **options)
    processor = policy.processor
    offsets = [processor.unnormalize_actions(np.zeros_like(noise[0]), processor.prepare(o)) for o in observations]
    return np.stack([r["actions"] - o for r, o in zip(results, offsets, strict=True)])


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """By the first axis."""
    x, y = a.reshape(len(a), -1).astype(np.float64), b.reshape(len(b), -1).astype(np.float64)
    return (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)


def used(policy: OptimizedPolicy) -> dict[str, str]:
    return {name: entry.used for name, entry in policy.ledger.entries.items()}


def on_gpu(model: Pi0) -> Pi0:
    return model.to(DEVICE).to_compute_dtype(torch.bfloat16)


def padded(batch: int, views: int, tokens: int, steps: int) -> PromptShape:
    return PromptShape(batch=batch, schedule=Schedule.uniform(steps), views=views, tokens=tokens, padded=True)


def feed_of(model: Pi0, shape: PromptShape, seed: int) -> Feed:
    """Random inputs of a shape; rows differ in length."""
    rng, config = np.random.default_rng(seed), model.config
    size, images = config.vision.image_size, shape.views * config.vision.tokens
    return Feed(
        {
            "images": list(rng.integers(0, 256, (shape.batch * shape.views, size, size, 3), dtype=np.uint8)),
            "tokens": list(rng.integers(0, config.vocab_size, (shape.batch, shape.tokens))),
            "lengths": (images + rng.integers(1, shape.tokens + 1, shape.batch)).astype(np.int32),
            "state": list(rng.standard_normal((shape.batch, config.action_dim)).astype(np.float32)),
        },
        noise=rng.standard_normal((shape.batch, config.action_horizon, config.action_dim)).astype(np.float32),
    )


def pipelines_of(model: Pi0, config: PolicyConfig, store: Pi0Store | None = None) -> Pipelines:
    family = {"pi0": PI0, "pi05": PI05}[model.config.kind]
    device = torch.device(DEVICE)
    choices = choose(config.specs(PARTS), device, model.dtype)
    return Pipelines(Plan(family, model, config, choices, store or Pi0Store(model), Runtime.of(device), Ledger()))


def run(pipelines: Pipelines, shape: PromptShape, feed: Feed) -> np.ndarray:
    with torch.inference_mode():
        pipeline = pipelines.get(shape)
        pipeline.start(feed.inputs)
        return pipeline.finish(feed, torch.Generator(DEVICE))[0].copy()


def prepared_bytes(store: Any) -> int:
    """Bytes of what a store has prepared."""
    return Counted("cuda").add(itertools.chain(*store.tensors().values()))


def save(config: Pi0Config, folder: Path) -> None:
    """A checkpoint with random weights and all that belongs to it."""
    config = replace(config, vocab_size=TOKENIZER.vocab_size)
    save_checkpoint(random_model(Pi0, config).state_dict(), config, folder)
    TOKENIZER.save(folder / "tokenizer.json")
    (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics()}))


# What programs write before they read.
SCRATCH = (
    "patches", "embedded", "x", "y", "h", "h_mlp", "qkv", "last_kv", "context", "hidden", "active", "last",
    "q", "k", "v", "state_token",
)  # fmt: skip


def scratch_of(program: Any) -> Iterator[Tensor]:
    """What a program writes before it reads. Not the padding of values, which must stay zero, nor the counters."""
    for holder in (program, getattr(program, "loop", program), getattr(program, "stack", program)):
        for name in SCRATCH:
            buffer = vars(holder).get(name)
            if isinstance(buffer, Tensor):
                yield buffer
    loop = getattr(program, "loop", None)
    if isinstance(loop, SuffixLoop):
        for kind, taken in loop.choices.chosen.items():
            yield from taken.workspace[: 2 if kind == "attention" else 1] if taken.workspace is not None else ()
    elif isinstance(loop, StreamedLoop):
        tokens = loop._buffers["q"].shape[0] // loop._buffers["vts"].shape[0]
        for name, buffer in loop._buffers.items():
            yield buffer[..., :tokens] if name == "vts" else buffer
        if loop.values_t is not None:
            yield loop.values_t[..., : loop.prefix_tokens]


def poison(policy: OptimizedPolicy) -> None:
    """NaN into every buffer of every shape that a call must have written before it reads."""
    poisoned = 0
    with torch.inference_mode():
        for pipeline, _ in policy.pipelines._kept.values():
            assert pipeline._noise is not None
            buffers: list[Tensor] = [pipeline.result, pipeline._noise]
            for _, engine in pipeline.engines:
                buffers += [*engine.inputs.values(), *engine.outputs.values(), *scratch_of(engine.program)]  # type: ignore[attr-defined]
            for buffer in buffers:
                if buffer.dtype == torch.float8_e4m3fn:
                    buffer.view(torch.uint8).fill_(0x7F)
                else:
                    buffer.fill_(NAN if buffer.is_floating_point() else 1)
                poisoned += 1
    assert poisoned > 30
