"""`OptimizedPolicy`: a drop-in for openpi's `Policy` that says what each component cost and which path really ran.

    preprocess → vision → kv_cache → denoise → postprocess

Owns no mathematics: models compute, engines run, `processing` converts. Calls from several threads are taken in turn.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel import latency
from vla_accel.components import denoise_component, kv_cache_component, vision_component
from vla_accel.config import PolicyConfig, load_config
from vla_accel.engines import Engine, build
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError
from vla_accel.ledger import Ledger
from vla_accel.models.checkpoint import describe, load_checkpoint
from vla_accel.models.pi0 import Pi0
from vla_accel.processing import IMAGE_KEYS, STATE_KEY, Inputs, Normaliser, Processor, load_statistics
from vla_accel.tokenizer import SmallTokenizer, load_tokenizer

ASSETS = Path(__file__).parent / "assets"
NAMED = {"demo": ASSETS / "pi05_demo"}
_KEPT_PIPELINES = 16


@dataclass(frozen=True)
class _Key:
    """What decides a pipeline's static shapes."""

    batch: int
    views: int
    tokens: int
    steps: int
    masked: bool


@dataclass
class _Pipeline:
    """The three engines for one key, wired output to input."""

    vision: Engine
    kv_cache: Engine
    denoise: Engine


class OptimizedPolicy:
    """A policy ready to act. Make one with `from_pretrained`.

    `infer` may be called from several threads; calls are serialised. `metadata` says what was loaded and what runs.
    """

    def __init__(self, model: Pi0, processor: Processor, config: PolicyConfig, *, name: str) -> None:
        self.config, self.name = config, name
        self.device = _device(config.device)
        self.model = model.to(self.device).to_compute_dtype(_precision(config, self.device))
        self.processor = processor
        self.ledger = Ledger(strict=config.strict)
        self.latency = latency.LatencyLog()
        self._pipelines: OrderedDict[_Key, _Pipeline] = OrderedDict()
        self._lock = threading.RLock()
        self._noise = torch.Generator().manual_seed(config.seed)

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
        """Load a checkpoint folder, or a bundled checkpoint by name ("demo").

        Args: `config`: a `PolicyConfig`, a mapping, or a YAML/JSON file; `device`, `num_steps` and `seed` override
        it. Raises CheckpointError for anything incomplete, ConfigError for settings that cannot be.
        """
        settings = load_config(config)
        overrides = {"device": device, "num_steps": num_steps, "seed": seed}
        settings = replace(settings, **{k: v for k, v in overrides.items() if v is not None})
        folder = NAMED.get(str(path_or_name), Path(path_or_name))
        if not folder.is_dir():
            names = ", ".join(NAMED)
            raise CheckpointError(f"checkpoint: expected a folder or one of {names}, got {str(path_or_name)!r}")
        model = load_checkpoint(folder)
        processor = load_processor(folder, model, settings)
        policy = cls(model, processor, settings, name=str(path_or_name))
        policy.warm_up()
        return policy

    # -- acting ---------------------------------------------------------------------------------------------------

    def infer(self, observation: Mapping[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        """One observation to one chunk of actions.

        Args: `observation`: openpi's LIBERO keys: `observation/image`, `observation/wrist_image` uint8
        (224, 224, 3), `observation/state` (8,), `prompt` str. `noise`: (horizon, action_dim), else drawn from the
        policy's seeded generator.
        Returns: `actions` float64 (horizon, 7); `state` float64 (8,) as given; `policy_timing` in milliseconds:
        `infer_ms`, and per component; `engines`: the ledger.
        Raises ObservationError for a bad observation or noise, EngineError for non-finite actions.
        """
        return self.infer_batch([observation], noise=None if noise is None else np.asarray(noise)[None])[0]

    @torch.inference_mode()
    def infer_batch(
        self, observations: Sequence[Mapping[str, Any]], *, noise: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Several independent observations in one pass; noise (batch, horizon, action_dim). Returns as `infer`."""
        if not observations:
            raise ObservationError("observations: expected at least one, got none")
        with self._lock:
            watch = latency.Stopwatch(self.device)
            with watch.section("preprocess", host=True):
                inputs = [self.processor.prepare(o) for o in observations]
                start = self._start_noise(noise, len(inputs))
                pipeline = self._feed(inputs, start)
            with watch.section("vision"):
                pipeline.vision.run()
            with watch.section("kv_cache"):
                pipeline.kv_cache.run()
            with watch.section("denoise"):
                pipeline.denoise.run()
            # The call's one synchronisation.
            actions = pipeline.denoise.outputs["actions"].to("cpu", copy=True).numpy()
            with watch.section("postprocess", host=True):
                if not np.isfinite(actions).all():
                    raise EngineError("denoise.actions: non-finite values; compare engines with the eager one")
                robot = [self.processor.finish(a) for a in actions]
            sample = watch.finish()
            self.latency.add(sample)
            timing = {"infer_ms": sample.total_ms, "total_ms": sample.total_ms}
            timing |= {f"{name}_ms": value for name, value in sample.sections.items()}
            engines = self.ledger.as_list()
        return [
            {"actions": a, "state": i.raw_state, "policy_timing": dict(timing), "engines": engines}
            for a, i in zip(robot, inputs, strict=True)
        ]

    def reset(self) -> None:
        """Start an episode: the noise begins anew from the configured seed."""
        with self._lock:
            self._noise.manual_seed(self.config.seed)

    def warm_up(self) -> None:
        """Build the engines of an ordinary observation and run them once, so that the ledger is complete, a strict
        fallback raises now, and the first call is not the slow one. Leaves noise and latency log untouched."""
        size = self.processor.image_size
        image = np.zeros((size, size, 3), np.uint8)
        observation = {key: image for key in IMAGE_KEYS}
        config = self.model.config
        noise = np.zeros((config.action_horizon, config.action_dim), np.float32)
        prompt = self.config.default_prompt or "pick up the black bowl on the stove and place it on the plate"
        state = self.processor.state.low
        with self._lock:
            samples = list(self.latency.samples)
            self.infer({**observation, STATE_KEY: state, "prompt": prompt}, noise=noise)
            self.latency.samples[:] = samples

    def with_steps(self, num_steps: int) -> OptimizedPolicy:
        """The same weights with another number of denoising steps, and a latency log of its own."""
        config = replace(self.config, num_steps=num_steps)
        return OptimizedPolicy(self.model, self.processor, config, name=self.name)

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

    def _start_noise(self, noise: np.ndarray | None, batch: int) -> torch.Tensor:
        config = self.model.config
        shape = (batch, config.action_horizon, config.action_dim)
        if noise is None:
            return torch.randn(shape, generator=self._noise)
        noise = np.asarray(noise, dtype=np.float32)
        if noise.shape != shape:
            raise ObservationError(f"noise: expected shape {shape[1:]}, got {noise.shape[1:]}")
        if not np.isfinite(noise).all():
            raise ObservationError("noise: expected finite numbers, got NaN or Inf")
        return torch.from_numpy(noise)

    def _feed(self, inputs: list[Inputs], noise: torch.Tensor) -> _Pipeline:
        longest = max(len(i.tokens) for i in inputs)
        masked = any(len(i.tokens) != longest for i in inputs)
        key = _Key(len(inputs), len(inputs[0].images), longest, self.config.num_steps, masked)
        pipeline = self._pipeline(key)
        tokens = np.zeros((key.batch, longest), np.int64)
        for row, one in enumerate(inputs):
            tokens[row, : len(one.tokens)] = one.tokens
        pipeline.vision.write("images", torch.from_numpy(np.stack([i.images for i in inputs])))
        pipeline.kv_cache.write("tokens", torch.from_numpy(tokens))
        pipeline.denoise.write("noise", noise)
        if "state" in pipeline.denoise.inputs:
            pipeline.denoise.write("state", torch.from_numpy(np.stack([i.state for i in inputs])))
        if masked:
            images = key.views * self.model.config.vision.tokens
            mask = np.ones((key.batch, images + longest), bool)
            for row, one in enumerate(inputs):
                mask[row, images + len(one.tokens) :] = False
            pipeline.kv_cache.write("mask", torch.from_numpy(mask))
        return pipeline

    def _pipeline(self, key: _Key) -> _Pipeline:
        if key in self._pipelines:
            self._pipelines.move_to_end(key)
            return self._pipelines[key]
        model, config = self.model, self.config
        prefix_tokens = key.views * model.config.vision.tokens + key.tokens

        def engine(component: Any, spec: Any) -> Engine:
            return build(component, spec, device=self.device, ledger=self.ledger)

        vision = engine(vision_component(model, key.batch, key.views), config.vision)
        kv_cache = engine(kv_cache_component(model, key.batch, key.views, key.tokens, key.masked), config.kv_cache)
        denoise = engine(denoise_component(model, key.batch, prefix_tokens, key.steps, key.masked), config.denoise)
        kv_cache.bind("image_tokens", vision.outputs["image_tokens"])
        for name in ("keys", "values"):
            denoise.bind(name, kv_cache.outputs[name])
        if key.masked:
            denoise.bind("mask", kv_cache.inputs["mask"])
        self._pipelines[key] = _Pipeline(vision, kv_cache, denoise)
        if len(self._pipelines) > _KEPT_PIPELINES:
            self._pipelines.popitem(last=False)
        return self._pipelines[key]


def load_processor(folder: Path, model: Pi0, settings: PolicyConfig) -> Processor:
    """The transforms of a checkpoint folder: its statistics and its tokenizer."""
    config = model.config
    statistics = load_statistics(folder / "norm_stats.json")
    kind = "quantile" if config.kind == "pi05" else "mean_std"
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, SmallTokenizer) and tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"tokenizer {folder}: expected at most {config.vocab_size} tokens, got {tokenizer.vocab_size}"
        )
    return Processor(
        tokenizer=tokenizer,
        state=Normaliser.of(statistics["state"], kind, "state"),
        actions=Normaliser.of(statistics["actions"], kind, "actions"),
        image_size=config.vision.image_size,
        action_dim=config.action_dim,
        max_token_len=config.max_token_len,
        discrete_state=config.discrete_state_input,
        default_prompt=settings.default_prompt,
    )


def _device(name: str) -> torch.device:
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


def _precision(config: PolicyConfig, device: torch.device) -> torch.dtype:
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision]
