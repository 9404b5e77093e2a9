"""`OptimizedPolicy`: a drop-in for openpi's `Policy` that reports each component's time and the engines that ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vla_accel import latency
from vla_accel.config import NamedSchedule, PolicyConfig, load_config
from vla_accel.engines import ENGINES
from vla_accel.engines.auto import choose
from vla_accel.errors import ConfigError, ObservationError, of_one
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Shape, Store
from vla_accel.families.loading import Checkpoint, load
from vla_accel.kernels.image import resize
from vla_accel.kernels.nvrtc import synchronize
from vla_accel.kernels.phases import recorded
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.nn.flow import Schedule
from vla_accel.nn.memory import free_memory
from vla_accel.numeric import resolve_dtype, without_autocast
from vla_accel.policy import agreement
from vla_accel.policy.checks import (
    StateCheck,
    check_engines,
    checked_noise,
    guidance,
    is_warm,
    refuse_unused_rtc,
)
from vla_accel.policy.footprint import explained_if_too_large, memory_of
from vla_accel.policy.pipeline import Feed, Pipeline, Pipelines, Plan
from vla_accel.remote.ensemble import TEMPORAL_ENSEMBLE
from vla_accel.runtime import Runtime
from vla_accel.transforms.history import HISTORY, History
from vla_accel.transforms.observations import real_numbers

if TYPE_CHECKING:
    from vla_accel.remote.async_runner import AsyncRunner

MOST_BUILT = 4
"""Warm-up builds all shapes of an observation (prompt buckets) up to this number."""


class OptimizedPolicy:
    """A policy ready to act. Make one with `from_pretrained`.

    Several threads may call `infer`; calls run one after the other.
    """

    @without_autocast()
    def __init__(self, checkpoint: Checkpoint, config: PolicyConfig, *, store: Store | None = None) -> None:
        """Place a loaded checkpoint on the configured device.

        The model is moved and cast in place, unless it can be read again. `store`: prepared weights of another policy
        of the same model, to share them. Raises ConfigError if the model lacks a component, or if the checkpoint was
        loaded with another preset, prompt or setting.
        """
        for name in ("preset", "checkpoint", "default_prompt"):
            value, read = getattr(config, name), getattr(checkpoint.settings, name)
            if value not in (getattr(PolicyConfig(), name), read):
                raise ConfigError(f"{name}: expected what {checkpoint.name} was loaded with, {read}, got {value}")
        self.name, self.family = checkpoint.name, checkpoint.family
        sizes = checkpoint.model.config
        self.action_shape: tuple[int, int] = (sizes.action_horizon, sizes.action_dim)
        """Horizon and action dimensions of the normalized actions."""
        self.schedule = self.family.schedule(sizes, config)
        self.warm_schedule = None if config.warm_start is None else self.schedule.from_start(config.warm_start)
        """The schedule of calls with a previous chunk, if it is another one (`PolicyConfig.warm_start`)."""
        self.num_steps = self.schedule.steps
        self.noise_shape = self.family.noise_shape(sizes, self.num_steps)
        """Shape of one row of the noise: usually that of the normalized actions."""
        rtc = self.family.chunking.resolve(sizes, config.rtc)
        refuse_unused_rtc(self.family, rtc)
        self.config = config = replace(config, num_steps=self.num_steps, rtc=rtc)
        self.device = resolve_device(config.device)
        dtype = resolve_dtype(config.precision, self.device)
        self.model: Any = checkpoint.model.placed(self.device, dtype)
        if self.model is not checkpoint.model:
            checkpoint = replace(checkpoint, model=self.model)
        self.checkpoint = checkpoint
        self.processor = checkpoint.processor
        moments = getattr(self.processor, HISTORY, 1)
        keys = (*self.processor.preset.images, *self.processor.preset.state) if moments > 1 else ()
        self._history = History(moments, keys) if moments > 1 else None
        self.ledger = Ledger(strict=config.strict)
        self.latency = latency.LatencyLog()
        check_engines(self.family, config)
        specs = config.specs(self.family.parts)
        shown = None if self.device.type == "cpu" else agreement.for_auto(checkpoint, specs, self.schedule)
        self.choices = choose(specs, self.device, dtype, shown)
        self.specs = {name: choice.spec for name, choice in self.choices.items()}
        """The engine of each component, with "auto" resolved."""
        self.scales = checkpoint.scales if self.family.capabilities.needs_scales(self.specs) else None
        self.store = store or self.family.store_class(self.model, self.scales)
        runtime = Runtime.of(self.device, deterministic=config.deterministic)
        plan = Plan(self.family, self.model, config, self.choices, self.store, runtime, self.ledger, self.scales)
        self.pipelines = Pipelines(plan)
        self._free = free_memory(self.device) if self.device.type == "cuda" else (0, 0)
        if any(ENGINES[name].needs == "all" for spec in self.specs.values() for name in (spec.engine, *spec.fallback)):
            with self._explained_if_too_large():
                self.model.fetch()
        self._states = StateCheck(self.processor, self.ledger)
        self.start: dict[str, float] | None = None
        """Seconds of `from_pretrained` by phase (`kernels.phases`)."""
        self._lock = threading.RLock()
        self._noise = torch.Generator(self.device).manual_seed(config.seed)

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        config: PolicyConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        device: str | None = None,
        num_steps: int | None = None,
        seed: int | None = None,
        lora: str | Path | None = None,
    ) -> OptimizedPolicy:
        """Load a checkpoint and build its engines.

        Args:
            path_or_name: A checkpoint folder, "demo", or `owner/name[@revision][/folder]` on the hub.
            config: A `PolicyConfig`, a mapping, a YAML or JSON file, or the name of a shipped configuration
                ("native_fp8"). By default the fastest path without loss (`engines.auto`).
            device, num_steps, seed: Override the configuration's.
            lora: Folder or hub name of an adapter to fold into the weights.

        Raises CheckpointError for an incomplete checkpoint, ConfigError for a setting that is impossible or changes
        nothing.
        """
        with recorded() as spent, without_autocast():
            overrides = {"device": None if device is None else str(device), "num_steps": num_steps, "seed": seed}
            settings = replace(load_config(config), **{k: v for k, v in overrides.items() if v is not None})
            if lora is not None:
                settings = settings.with_lora(str(lora))
            where = resolve_device(settings.device)
            checkpoint = load(
                path_or_name, settings, device=where, dtype=resolve_dtype(settings.precision, where), whole=False
            )
            with checkpoint.progress():
                policy = cls(checkpoint, settings)
                policy.warm_up()
        policy.start = spent.described
        agreement.log_choices(policy.name, policy.ledger, policy.specs, policy.device)
        return policy

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        noise: np.ndarray | None = None,
        prev_chunk: np.ndarray | None = None,
        inference_delay: int | None = None,
    ) -> dict[str, Any]:
        """Compute one chunk of actions.

        A policy that reads several observations (`history` in `metadata`) keeps those of `infer` and `observe` since
        `reset`, unless an observation brings its own: images (k, H, W, 3) and a state (k, n), oldest first.

        With `prev_chunk` and `inference_delay` (real-time chunking) the new chunk begins with the previous chunk's next
        actions and leaves them gradually (`PolicyConfig.rtc`). With a delay of k or more it keeps all of them. With
        `PolicyConfig.warm_start`, every call with `prev_chunk` also starts from it; `inference_delay` may be absent.

        Args:
            observation: The keys of the robot's preset. For LIBERO: `observation/image` and `observation/wrist_image`
                uint8 (224, 224, 3), `observation/state` (8,), `prompt` str.
            noise: `noise_shape`; by default drawn from the policy's seeded generator. π0-FAST and ACT
                check the shape and ignore the values.
            prev_chunk: (k, 7), the actions of an earlier `infer` from the one due at this observation on; k at most
                the horizon.
            inference_delay: How many of those actions will be executed before the new chunk is used.

        Returns:
            `actions` float64 (horizon, 7); `state`, the robot's own as a list; `policy_timing`, milliseconds of the
            call (`infer_ms`) and of each component; `engines`, the ledger.

        Raises ObservationError for bad input, EngineError for a result that is not finite, ActionError if the model's
        output is no chunk of actions.
        """
        with self._lock:
            try:
                return self.infer_batch(
                    [observation if self._history is None else self._history.add(observation)],
                    noise=None if noise is None else real_numbers(noise, "noise")[None],
                    prev_chunks=[prev_chunk],
                    inference_delays=[inference_delay],
                )[0]
            except ObservationError:
                if self._history is not None:
                    self._history.undo()
                raise

    def observe(self, observation: Mapping[str, Any]) -> None:
        """Keep the observation of a control step without a call, for a policy that reads several of them. Raises
        ObservationError for bad input."""
        with self._lock:
            if self._history is not None:
                self.processor.prepare(observation)  # refuses what a call would refuse
                self._history.add(observation)

    @without_autocast()
    @torch.inference_mode()
    def infer_batch(
        self,
        observations: Sequence[Mapping[str, Any]],
        *,
        noise: np.ndarray | None = None,
        prev_chunks: Sequence[np.ndarray | None] | None = None,
        inference_delays: Sequence[int | None] | None = None,
    ) -> list[dict[str, Any]]:
        """Compute a chunk of actions for each of several independent observations in one pass.

        A policy that reads several observations requires the history of each one (`infer`). `noise` is
        (batch, *noise_shape); `prev_chunks` and `inference_delays` have one entry, or None, for each observation.
        Returns what `infer` returns, for each. Errors name the observation, as "observations[1]: …".
        """
        if isinstance(observations, (Mapping, str)):
            raise ObservationError(f"observations: expected a list of them, got one {type(observations).__name__}")
        if not observations:
            raise ObservationError("observations: expected at least one, got none")
        with self._lock:
            began = time.perf_counter()
            processor, seen = self.processor, self._observe(observations)
            # The GPU encodes the images while the host tokenizes prompts.
            schedule = (self.warm_schedule if is_warm(self.config, prev_chunks) else None) or self.schedule
            early = self.pipelines.started(self.family.image_feed(self.model.config, seen), schedule)
            try:
                inputs = []
                for index, one in enumerate(seen):
                    with of_one(index, len(seen)):
                        inputs.append(processor.encode(one))
                        self._states.check(inputs[-1])
                guide = guidance(
                    self.family, self.config, self.model, processor, inputs, prev_chunks, inference_delays
                )  # fmt: skip
                pipeline, feed = self._feed(inputs, noise, guide, schedule)
                if pipeline is not early:
                    pipeline.start(feed.inputs)
            except BaseException:
                if early is not None:
                    synchronize(self.device)  # the upload still reads the staging buffer
                raise
            # One ledger for each result: nothing is shared between them, so that one may be changed.
            ledgers = [self.ledger.as_list() for _ in inputs]
            result, times = pipeline.finish(feed, self._noise)
            returned = time.perf_counter()
            chunks = zip(self.family.normalised(processor, result), inputs, strict=True)
            robot = [processor.unnormalize_actions(chunk, one) for chunk, one in chunks]
            ended = time.perf_counter()
            # The sections add up to the total: transfer is launches, copies and waiting.
            sections = {
                "preprocess": (pipeline.launched - began) * 1e3,
                **times,
                "transfer": (returned - pipeline.launched) * 1e3 - sum(times.values()),
                "postprocess": (ended - returned) * 1e3,
            }
            sample = latency.Sample(sections, (ended - began) * 1e3)
            self.latency.add(sample)
            timing = {"infer_ms": sample.total_ms, "total_ms": sample.total_ms}
            timing |= {f"{name}_ms": value for name, value in sections.items()}
            return [
                # `state` is a list: openpi's ActionChunkBroker takes the row of its step of every array.
                {"actions": a, "state": i.raw_state.tolist(), "policy_timing": timing.copy(), "engines": engines}
                for a, i, engines in zip(robot, inputs, ledgers, strict=True)
            ]

    def infer_with_internals(
        self, observation: Mapping[str, Any], *, noise: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the result of `infer`, and float32 arrays to compare engines by: the normalised `actions` (H, A) and
        the outputs in `BenchCard.internals`. Begins an episode. Copies a lot, so do not time it."""
        with self._lock:
            if self._history is not None:
                self._history.clear()
            result = self.infer(observation, noise=noise)
            pipeline, inputs = self.pipelines.newest, self.processor.prepare(observation)
            raw = pipeline.result[:1].cpu().numpy()
            kept = {
                "actions": torch.from_numpy(self.family.normalised(self.processor, raw)[0]),
                **bench_card(self.family).internals(self.model.config, pipeline.outputs, inputs),
            }
            # Copies: the next call overwrites the buffers.
            return result, {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in kept.items()}

    def reset(self) -> None:
        """Start an episode: reset the noise to the configured seed, and forget earlier observations."""
        with self._lock:
            if self._history is not None:
                self._history.clear()
            self._noise.manual_seed(self.config.seed)

    @without_autocast()
    @torch.inference_mode()
    def warm_up(self, observation: Mapping[str, Any] | None = None) -> None:
        """Build the engines that calls will need and run them once, so that the ledger is complete and no call is slow.

        Builds the shapes of `observation`, with its image sizes, and of its prompt with other states, at most
        `MOST_BUILT`. Without one, builds those of an ordinary observation, with images of the model's size, and of the
        prompts in `PolicyConfig.warm_up`: at most `MOST_BUILT` for all states of each, and with the native engine all
        prompt lengths if they are no more than `MOST_BUILT`. A warning lists the shapes that are not built.
        """
        if resize.fits_on(self.device):
            resize.rehearse(self.device)
        if observation is not None:
            with self._lock:
                inputs = [self.processor.encode(seen) for seen in self._observe([observation])]
                for shape in self._shape(inputs).reachable(self.processor, observation)[:MOST_BUILT]:
                    self._pipeline(shape).rehearse()
            return
        example = self.processor.example()
        prompts = [self.processor.example(prompt) for prompt in self.config.warm_up]
        with self._lock:
            reach = [self._shape([self.processor.prepare(o)]).reachable(self.processor, o) for o in (example, *prompts)]
            ordinary = reach[0][0]
            # Dictionaries as sets that keep their order.
            wanted = dict.fromkeys(chain.from_iterable(shapes[:MOST_BUILT] for shapes in reach))
            native = any(spec.engine == "native" for spec in self.specs.values())
            buckets = ordinary.buckets(self.model.config) if native else ()
            possible = dict.fromkeys((*buckets, *wanted, *chain.from_iterable(reach)))
            if len(possible) <= MOST_BUILT:
                wanted = possible
            for shape in wanted:
                if self.warm_schedule is not None:
                    self._pipeline(replace(shape, schedule=self.warm_schedule)).rehearse()
                if shape != ordinary:
                    self._pipeline(shape).rehearse()
            # Not `infer`: π0-FAST's answer to black images need not be a chunk of actions.
            pipeline, feed = self._feed([self.processor.prepare(example)], np.zeros((1, *self.noise_shape)), None)
            pipeline.start(feed.inputs)
            pipeline.finish(feed, self._noise)
        if left_out := [shape for shape in possible if shape not in wanted]:
            shapes = ", ".join(shape.title for shape in left_out)
            self.ledger.warn(
                f"{self.name}: engines are not built in advance for {shapes}: the first such call builds them; to "
                "build them at loading, list its prompt under `warm_up` in the configuration"
            )

    def with_steps(
        self, num_steps: int | None = None, schedule: NamedSchedule | Sequence[float] | None = None
    ) -> OptimizedPolicy:
        """Return a policy with the same weights, other denoising steps and its own latency log. Arguments: see
        `PolicyConfig.with_steps`."""
        made = OptimizedPolicy(self.checkpoint, self.config.with_steps(num_steps, schedule), store=self.store)
        made.ledger.warned = self.ledger.warned
        return made

    def async_runner(self, hz: float, **options: Any) -> AsyncRunner:
        """Return a control loop at `hz` (`vla_accel.remote.async_runner.AsyncRunner`, with its `options`) that computes
        the next chunk while the robot executes this one. Only the runner may use the policy."""
        from vla_accel.remote.async_runner import AsyncRunner

        return AsyncRunner(self, hz, **options)

    @property
    def supports_prev_chunk(self) -> bool:
        """Whether `infer` takes `prev_chunk` and `inference_delay` (real-time chunking, `PolicyConfig.warm_start`)."""
        return bool(self.family.chunking.inputs)

    batches_prev_chunks = supports_prev_chunk
    """Whether `infer_batch` takes `prev_chunks` and `inference_delays`."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What was loaded and which engines run, as plain data; the server sends it to clients on connect.

        `action_horizon` and `action_dim` are the model's: a robot may get fewer actions (`returned_actions`, if so) of
        fewer numbers. `max_delay`: the largest `inference_delay`, None if any is accepted. `warm_start`: as in
        `PolicyConfig`, if set. `temporal_ensemble`: c of the temporal ensembling with which the checkpoint's episodes
        run, if they do.
        """
        preset = getattr(self.processor, "preset", None)
        ensemble = getattr(self.processor, TEMPORAL_ENSEMBLE, None)
        return {
            "policy": self.name,
            "model": self._described(),
            "action_horizon": self.action_shape[0],
            "action_dim": self.action_shape[1],
            "noise_shape": list(self.noise_shape),
            **({} if self._history is None else {HISTORY: self._history.count}),
            **({} if ensemble is None else {TEMPORAL_ENSEMBLE: ensemble}),
            **self._returned(),
            "image_size": getattr(self.processor, "image_size", None),
            "robot": None if preset is None else preset.described(),
            "max_delay": self.config.rtc.longest_delay(self.action_shape[0]),
            "num_steps": self.num_steps,
            **self.schedule.described,
            **({} if self.config.warm_start is None else {"warm_start": self.config.warm_start}),
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engines": self.ledger.as_list(),
            "memory": self.memory(),
        }

    def memory(self) -> dict[str, Any]:
        """Bytes on the policy's device: `weights` by component, and of a loaded `text_encoder`, each storage counted
        once; `unused`, weights that no engine reads; `buffers`, inputs, activations and graphs of all shapes (0 on a
        CPU); `total`, their sum; and `host`, weights that a GPU reads from host memory."""
        return memory_of(self.pipelines, getattr(self.processor, "encoder_weights", ()))

    def latency_report(self) -> dict[str, Any]:
        """The breakdown JSON of the calls so far (schema `vla_accel.breakdown/1`)."""
        content = latency.breakdown(
            model={"name": self.name, **self._described()},
            engines=self.ledger.as_list(),
            steps=self.num_steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
            memory=self.memory(),
        )
        return {**content, **self.schedule.described}

    def _described(self) -> dict[str, Any]:
        parameters = sum(p.numel() for p in self.model.parameters())
        sizes = dict(zip(("action_horizon", "action_dim"), self.action_shape, strict=True))
        return {"kind": self.family.name, "parameters": parameters, **sizes}

    def _returned(self) -> dict[str, int]:
        """The actions of a chunk that the robot gets, if they are fewer than the model's."""
        horizon = self.action_shape[0]
        rows = self.processor.returned(horizon) if hasattr(self.processor, "returned") else horizon
        return {} if rows == horizon else {"returned_actions": rows}

    def _observe(self, observations: Sequence[Mapping[str, Any]]) -> list[Any]:
        seen = []
        for index, one in enumerate(observations):
            with of_one(index, len(observations)):
                seen.append(self.processor.observe(one))
                if self._history is not None and not self._history.has(one):
                    most = self._history.count
                    raise ObservationError(
                        f"observation: expected 1 to {most} images of each camera, (k, H, W, 3), oldest first, because "
                        "a batch keeps no history, got one image"
                    )
        cameras = {one.cameras for one in seen}
        if len(cameras) == 1 and self.pipelines.resizes(*cameras):
            return seen
        return [one if one.cameras is None else self.processor.resized(one) for one in seen]

    def _pipeline(self, shape: Shape) -> Pipeline:
        with self._explained_if_too_large():
            return self.pipelines.get(shape)

    def _explained_if_too_large(self) -> AbstractContextManager[None]:
        def ordinary() -> Shape:
            return self._shape([self.processor.prepare(self.processor.example())])

        return explained_if_too_large(self.pipelines.plan, self.checkpoint, self._free, ordinary)

    def _shape(self, inputs: Sequence[Any], schedule: Schedule | None = None) -> Shape:
        return self.family.shape(self.model.config, inputs, schedule or self.schedule, self.specs)

    def _feed(
        self, inputs: list[Any], noise: np.ndarray | None, guidance: Mapping[str, np.ndarray] | None,
        schedule: Schedule | None = None,
    ) -> tuple[Pipeline, Feed]:  # fmt: skip
        if noise is not None:
            noise = checked_noise(noise, (len(inputs), *self.noise_shape))
        elif (fixed := self.family.noise(self.model.config)) is not None:
            noise = np.repeat(fixed[None], len(inputs), 0)
        pipeline = self._pipeline(self._shape(inputs, schedule))
        return pipeline, Feed(self.family.feed(self.model.config, inputs), noise, guidance)
