"""`OptimizedPolicy`: a drop-in for openpi's `Policy` that says what each component cost and which path really ran.

    preprocess → vision → kv_cache → denoise → postprocess

Owns no mathematics: models compute, engines run, `processing` converts. Calls from several threads are taken in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel import latency
from vla_accel.checkpoints.checkpoint import describe
from vla_accel.checkpoints.loading import NAMED, find, load
from vla_accel.components.precision import needs_scales
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError, EngineError, ObservationError
from vla_accel.fp8 import Scales, scales_for
from vla_accel.ledger import Ledger
from vla_accel.models.pi0 import Pi0
from vla_accel.models.rtc import chunk_weights
from vla_accel.native import NativeStore
from vla_accel.policy.pipeline import Feed, Pipeline, Pipelines, Shape
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.transforms.numbers import real_numbers
from vla_accel.transforms.processing import Inputs, Processor

__all__ = ["NAMED", "OptimizedPolicy"]

TOKEN_BUCKET = 32
"""The native engine pads prompts to multiples of this, so that few graphs serve every prompt. The padding is masked."""


class OptimizedPolicy:
    """A policy ready to act. Make one with `from_pretrained`.

    `infer` may be called from several threads; calls are serialised. `metadata` says what was loaded and what runs.
    """

    def __init__(
        self,
        model: Pi0,
        processor: Processor,
        config: PolicyConfig,
        *,
        name: str,
        scales: Scales | None = None,
        store: NativeStore | None = None,
    ) -> None:
        self.config, self.name = config, name
        self.device = resolve_device(config.device)
        self.model = model.to(self.device).to_compute_dtype(resolve_precision(config, self.device))
        self.processor = processor
        self.ledger = Ledger(strict=config.strict)
        self.latency = latency.LatencyLog()
        self.scales = scales
        self.store = store or NativeStore(self.model, scales)
        self.pipelines = Pipelines(self.model, config, self.store, self.device, self.ledger, scales)
        self._lock = threading.RLock()
        self._noise = torch.Generator(self.device).manual_seed(config.seed)
        self._padded = config.pads_prompts

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        config: PolicyConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        device: str | None = None,
        num_steps: int | None = None,
        seed: int | None = None,
    ) -> OptimizedPolicy:
        """Load a checkpoint folder, a bundled checkpoint ("demo") or one on the hub by name (`checkpoints.loading`).

        Args: `config`: a `PolicyConfig`, a mapping, a YAML/JSON file or the name of a shipped one ("native_fp8");
        `device`, `num_steps` and `seed` override it. Raises CheckpointError for anything incomplete, ConfigError for
        settings that cannot be.
        """
        settings = load_config(config)
        overrides = {"device": device, "num_steps": num_steps, "seed": seed}
        settings = replace(settings, **{k: v for k, v in overrides.items() if v is not None})
        where = resolve_device(settings.device)
        model, processor = load(path_or_name, settings, device=where, dtype=resolve_precision(settings, where))
        scales = scales_for(model, find(path_or_name)) if needs_scales(settings) else None
        policy = cls(model, processor, settings, name=str(path_or_name), scales=scales)
        policy.warm_up()
        return policy

    # -- acting ---------------------------------------------------------------------------------------------------

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        prev_chunk: np.ndarray | None = None,
        inference_delay: int | None = None,
    ) -> dict[str, Any]:
        """One observation to one chunk of actions.

        Args: `observation`: openpi's LIBERO keys: `observation/image`, `observation/wrist_image` uint8
        (224, 224, 3), `observation/state` (8,), `prompt` str. `noise`: (horizon, action_dim), else drawn from the
        policy's seeded generator. Real-time chunking: `prev_chunk` (k, 7), what an earlier `infer` returned, from the
        action on that is due at this observation, k at most the horizon; `inference_delay`: how many of them will be
        executed before the answer is used. The new chunk is guided to begin with those, and to leave them gradually
        (`PolicyConfig.rtc`); with a delay of k or more, all of them are kept, as in lerobot.
        Returns: `actions` float64 (horizon, 7); `state` float64 (8,) as given; `policy_timing` in milliseconds:
        `infer_ms`, and per component; `engines`: the ledger.
        Raises ObservationError for a bad observation or noise, EngineError for non-finite actions.
        """
        return self.infer_batch(
            [observation],
            noise=None if noise is None else real_numbers(noise, "noise")[None],
            prev_chunks=[prev_chunk],
            inference_delays=[inference_delay],
        )[0]

    @torch.inference_mode()
    def infer_batch(
        self,
        observations: Sequence[Mapping[str, Any]],
        *,
        noise: np.ndarray | None = None,
        prev_chunks: Sequence[np.ndarray | None] | None = None,
        inference_delays: Sequence[int | None] | None = None,
    ) -> list[dict[str, Any]]:
        """Several independent observations in one pass; noise (batch, horizon, action_dim); `prev_chunks`,
        `inference_delays`: one for each observation, or None. Returns as `infer`."""
        if not observations:
            raise ObservationError("observations: expected at least one, got none")
        with self._lock:
            began = time.perf_counter()
            inputs = [self.processor.prepare(o) for o in observations]
            pipeline, feed = self._feed(inputs, noise, *self._guidance(inputs, prev_chunks, inference_delays))
            pipeline.feed(feed, self._noise)
            launched = time.perf_counter()
            actions, times = pipeline.run()
            returned = time.perf_counter()
            if not np.isfinite(actions).all():
                raise EngineError("denoise.actions: non-finite values; compare engines with the eager one")
            robot = [self.processor.finish(a, i) for a, i in zip(actions, inputs, strict=True)]
            ended = time.perf_counter()
            sections = {
                "preprocess": (launched - began) * 1e3,
                **times,
                "postprocess": (ended - returned) * 1e3,
            }
            sample = latency.Sample(sections, (ended - began) * 1e3)
            self.latency.add(sample)
            timing = {"infer_ms": sample.total_ms, "total_ms": sample.total_ms}
            timing |= {f"{name}_ms": value for name, value in sections.items()}
            # Nothing is shared between results, so that one may be changed.
            return [
                {"actions": a, "state": i.raw_state, "policy_timing": timing.copy(), "engines": self.ledger.as_list()}
                for a, i in zip(robot, inputs, strict=True)
            ]

    def infer_with_internals(
        self, observation: Mapping[str, Any], *, noise: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """`infer`, and besides it, float32: normalised `actions` (H, A), `image_tokens` (I, W), `keys` and `values`
        (depth, S, kv_heads, d) of the real tokens. For comparing paths; copies much, so do not time it."""
        with self._lock:
            result = self.infer(observation, noise=noise)
            pipeline = self.pipelines.newest
            real = int(pipeline.lengths[0])
            kept = {
                "actions": pipeline.denoise.outputs["actions"][0],
                "image_tokens": pipeline.vision.outputs["image_tokens"][0],
                "keys": pipeline.kv_cache.outputs["keys"][:, 0, :real],
                "values": pipeline.kv_cache.outputs["values"][:, 0, :real],
            }
            # Copies: the next call overwrites the buffers.
            return result, {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in kept.items()}

    def reset(self) -> None:
        """Start an episode: the noise begins anew from the configured seed."""
        with self._lock:
            self._noise.manual_seed(self.config.seed)

    def warm_up(self) -> None:
        """Build the engines of an ordinary observation and run them once, so that the ledger is complete, a strict
        fallback raises now, and the first call is not the slow one. Leaves noise and latency log untouched."""
        config = self.model.config
        noise = np.zeros((config.action_horizon, config.action_dim), np.float32)
        with self._lock:
            samples = list(self.latency.samples)
            self.infer(self.processor.example(), noise=noise)
            self.latency.samples[:] = samples

    def with_steps(self, num_steps: int) -> OptimizedPolicy:
        """The same weights with another number of denoising steps, and a latency log of its own."""
        config = replace(self.config, num_steps=num_steps)
        return OptimizedPolicy(self.model, self.processor, config, name=self.name, scales=self.scales, store=self.store)

    def async_runner(self, hz: float, **options: Any) -> AsyncRunner:
        """A control loop at `hz` that is kept fed: the next chunk is computed while this one is executed.

        `options` as `vla_accel.remote.async_runner.AsyncRunner` takes them; nobody else may use the policy meanwhile.
        """
        return AsyncRunner(self, hz, **options)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, Any]:
        """What was loaded and which path runs, as plain data; sent to clients on connect."""
        config = self.model.config
        return {
            "policy": self.name,
            "model": describe(config, self.model),
            "action_horizon": config.action_horizon,
            "action_dim": config.action_dim,
            "num_steps": self.config.num_steps,
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engines": self.ledger.as_list(),
        }

    def latency_report(self) -> dict[str, Any]:
        """The breakdown JSON over the calls so far (schema `vla_accel.breakdown/1`)."""
        return latency.breakdown(
            model={"name": self.name, **describe(self.model.config, self.model)},
            engines=self.ledger.as_list(),
            steps=self.config.num_steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _given_noise(self, noise: np.ndarray, batch: int) -> np.ndarray:
        config = self.model.config
        shape = (batch, config.action_horizon, config.action_dim)
        noise = real_numbers(noise, "noise")
        if noise.shape != shape:
            raise ObservationError(f"noise: expected shape {shape[1:]}, got {noise.shape[1:]}")
        return noise.astype(np.float32)

    def _guidance(
        self,
        inputs: list[Inputs],
        chunks: Sequence[np.ndarray | None] | None,
        delays: Sequence[int | None] | None,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Targets and weights of a `Feed`; None each when no observation brings a previous chunk."""
        nothing = [None] * len(inputs)
        chunks, delays = nothing if chunks is None else chunks, nothing if delays is None else delays
        for name, given in (("prev_chunks", chunks), ("inference_delays", delays)):
            if len(given) != len(inputs):
                raise ObservationError(f"{name}: expected one for each of {len(inputs)} observations, got {len(given)}")
        target = weights = None
        horizon = self.model.config.action_horizon
        for row, (one, chunk, delay) in enumerate(zip(inputs, chunks, delays, strict=True)):
            if chunk is None and delay is None:
                continue
            if chunk is None or delay is None:
                missing = "prev_chunk" if chunk is None else "inference_delay"
                raise ObservationError(f"expected prev_chunk and inference_delay together, got no {missing}")
            if isinstance(delay, (bool, np.bool_)) or not isinstance(delay, (int, np.integer)) or delay < 0:
                raise ObservationError(f"inference_delay: expected a number of actions, 0 or more, got {delay!r:.60}")
            previous = self.processor.begin(chunk, one)
            if len(previous) > horizon:
                raise ObservationError(f"prev_chunk: expected at most {horizon} actions, got {len(previous)}")
            if target is None or weights is None:
                target = np.zeros((len(inputs), horizon, self.model.config.action_dim), np.float32)
                weights = np.zeros((len(inputs), horizon), np.float32)
            target[row, : len(previous)] = previous
            weights[row] = chunk_weights(self.config.rtc, int(delay), len(previous), horizon)
        return target, weights

    def _feed(
        self, inputs: list[Inputs], noise: np.ndarray | None, target: np.ndarray | None, weights: np.ndarray | None
    ) -> tuple[Pipeline, Feed]:
        """The pipeline for these inputs, and the inputs as its arrays."""
        batch, views = len(inputs), len(inputs[0].images)
        if noise is not None:
            noise = self._given_noise(noise, batch)
        counts = [len(i.tokens) for i in inputs]
        longest = max(counts)
        width = -(-longest // TOKEN_BUCKET) * TOKEN_BUCKET if self._padded else longest
        padded = self._padded or min(counts) != longest
        if any(len(i.images) != views for i in inputs):
            raise ObservationError(f"batch: expected as many views of each, got {[len(i.images) for i in inputs]}")
        images = views * self.model.config.vision.tokens
        feed = Feed(
            images=[i.images for i in inputs],
            tokens=[i.tokens for i in inputs],
            lengths=np.array([images + n for n in counts], np.int32),
            state=[i.state for i in inputs],
            noise=noise,
            target=target,
            weights=weights,
        )
        return self.pipelines.get(Shape(batch, views, width, self.config.num_steps, padded)), feed


def resolve_device(name: str) -> torch.device:
    """The device of a configuration; "auto" is the GPU if there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} was asked for, but torch {torch.__version__} sees no CUDA GPU")
    return device


def resolve_precision(config: PolicyConfig, device: torch.device) -> torch.dtype:
    """The dtype of the large products: "auto" is BF16 on a GPU, FP32 on a CPU."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision]
