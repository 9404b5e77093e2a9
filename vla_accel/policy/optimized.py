"""`OptimizedPolicy`: a drop-in for openpi's `Policy` that reports each component's time and the engines that ran.

preprocess → the components of the model → transfer → postprocess
"""

from __future__ import annotations

import logging
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
from vla_accel.config import EngineSpec, PolicyConfig, load_config
from vla_accel.engines import ENGINES
from vla_accel.engines.auto import Shown, choose
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError, of_one
from vla_accel.families.bench import bench_card
from vla_accel.families.family import Shape, Store
from vla_accel.families.loading import Checkpoint, load
from vla_accel.kernels.image import resize
from vla_accel.kernels.nvrtc import synchronize
from vla_accel.kernels.phases import recorded
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.nn.memory import Counted, free_memory
from vla_accel.numeric import DTYPES, without_autocast
from vla_accel.policy import agreement
from vla_accel.policy.checks import (
    StateCheck,
    check_engines,
    checked_noise,
    guidance,
    previous_chunks,
    refuse_unused_rtc,
)
from vla_accel.policy.footprint import explained_if_too_large
from vla_accel.policy.pipeline import Feed, Pipeline, Pipelines, Plan
from vla_accel.runtime import Runtime
from vla_accel.transforms.observations import real_numbers

if TYPE_CHECKING:
    from vla_accel.remote.async_runner import AsyncRunner

MOST_BUILT = 4
"""Warm-up builds all shapes of an observation (prompt buckets) up to this number."""
_log = logging.getLogger("vla_accel")


class OptimizedPolicy:
    """A policy ready to act. Make one with `from_pretrained`.

    Several threads may call `infer`; calls run one after the other. `metadata` describes what was loaded and which
    engines run; `checkpoint.folder` is where the weights came from.
    """

    @without_autocast()
    def __init__(self, checkpoint: Checkpoint, config: PolicyConfig, *, store: Store | None = None) -> None:
        """Place a loaded checkpoint on the configured device.

        Args:
            checkpoint: Its model is moved and cast in place, unless it can be read again.
            config: Engines and settings.
            store: Prepared weights of another policy of the same model, to share them.

        Raises:
            ConfigError: The model lacks a component, or the checkpoint was loaded with another preset, prompt or
                setting.
        """
        for name in ("preset", "checkpoint", "default_prompt"):
            value, read = getattr(config, name), getattr(checkpoint.settings, name)
            if value not in (getattr(PolicyConfig(), name), read):
                raise ConfigError(f"{name}: expected what {checkpoint.name} was loaded with, {read}, got {value}")
        self.name, self.family = checkpoint.name, checkpoint.family
        sizes = checkpoint.model.config
        self.num_steps = config.num_steps or sizes.num_steps
        rtc = self.family.chunking.resolve(sizes, config.rtc)
        refuse_unused_rtc(self.family, rtc)
        self.config = config = replace(config, num_steps=self.num_steps, rtc=rtc)
        self.device = resolve_device(config.device)
        dtype = resolve_dtype(config, self.device)
        self.model: Any = checkpoint.model.placed(self.device, dtype)
        if self.model is not checkpoint.model:
            checkpoint = replace(checkpoint, model=self.model)
        self.checkpoint = checkpoint
        self.processor = checkpoint.processor
        self.ledger = Ledger(strict=config.strict)
        self.latency = latency.LatencyLog()
        check_engines(self.family, config)
        specs = config.specs(self.family.parts)
        self.choices = choose(specs, self.device, dtype, self._shown(specs))
        self.specs = {name: choice.spec for name, choice in self.choices.items()}
        """The engine of each component, with "auto" resolved."""
        self.scales = checkpoint.scales if self.family.needs_scales(self.specs) else None
        self.store = store or self.family.store(self.model, self.scales)
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
            path_or_name: A checkpoint folder, a bundled checkpoint ("demo") or `owner/name[@revision][/folder]` on the
                hub.
            config: A `PolicyConfig`, a mapping, a YAML or JSON file, or the name of a shipped configuration
                ("native_fp8"). By default the fastest path without loss (`engines.auto`).
            device: Overrides the configuration's device.
            num_steps: Overrides the number of denoising steps.
            seed: Overrides the seed of the noise.
            lora: Folder or hub name of an adapter to fold into the weights.

        Raises:
            CheckpointError: The checkpoint is incomplete.
            ConfigError: A setting is impossible, or would change nothing.
        """
        with recorded() as spent, without_autocast():
            settings = load_config(config)
            overrides = {"device": None if device is None else str(device), "num_steps": num_steps, "seed": seed}
            settings = replace(settings, **{k: v for k, v in overrides.items() if v is not None})
            if lora is not None:
                settings = settings.with_lora(str(lora))
            where = resolve_device(settings.device)
            checkpoint = load(path_or_name, settings, device=where, dtype=resolve_dtype(settings, where), whole=False)
            with checkpoint.progress():
                policy = cls(checkpoint, settings)
                policy.warm_up()
        policy.start = spent.described
        policy._log_auto_choices()
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
        """Compute one chunk of actions.

        With `prev_chunk` and `inference_delay` (real-time chunking) the new chunk begins with the previous chunk's next
        actions and leaves them gradually (`PolicyConfig.rtc`). With a delay of k or more it keeps all of them, as in
        lerobot.

        Args:
            observation: The keys of the robot's preset. For LIBERO: `observation/image` and `observation/wrist_image`
                uint8 (224, 224, 3), `observation/state` (8,), `prompt` str.
            noise: (horizon, action_dim); by default drawn from the policy's seeded generator. π0-FAST decodes
                greedily: it checks the shape and ignores the values.
            prev_chunk: (k, 7), the actions of an earlier `infer` from the one due at this observation on; k at most
                the horizon.
            inference_delay: How many of those actions will be executed before the new chunk is used.

        Returns:
            `actions` float64 (horizon, 7); `state`, the robot's own as a list; `policy_timing`, milliseconds of the
            call (`infer_ms`) and of each component; `engines`, the ledger.

        Raises:
            ObservationError: The observation, noise or previous chunk is invalid.
            EngineError: The result is not finite.
            ActionError: The model's output is no chunk of actions.
        """
        return self.infer_batch(
            [observation],
            noise=None if noise is None else real_numbers(noise, "noise")[None],
            prev_chunks=[prev_chunk],
            inference_delays=[inference_delay],
        )[0]

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

        Args:
            observations: At least one.
            noise: (batch, horizon, action_dim).
            prev_chunks: One for each observation, or None.
            inference_delays: One for each observation, or None.

        Returns:
            What `infer` returns, for each observation. Errors name the observation, as "observations[1]: …".
        """
        if isinstance(observations, (Mapping, str)):
            raise ObservationError(f"observations: expected a list of them, got one {type(observations).__name__}")
        if not observations:
            raise ObservationError("observations: expected at least one, got none")
        with self._lock:
            began = time.perf_counter()
            family, processor, sizes = self.family, self.processor, self.model.config
            seen = self._observe(observations)
            # The GPU encodes the images while the host tokenizes prompts.
            early = self.pipelines.started(family.image_feed(sizes, seen))
            try:
                inputs = []
                for index, one in enumerate(seen):
                    with of_one(index, len(seen)):
                        inputs.append(processor.encode(one))
                        self._states.check(inputs[-1])
                previous = previous_chunks(processor, inputs, prev_chunks, inference_delays)
                pipeline, feed = self._feed(inputs, noise, guidance(family, sizes, self.config.rtc, previous))
                if pipeline is not early:
                    pipeline.start(feed.inputs)
            except BaseException:
                if early is not None:
                    synchronize(self.device)  # the upload still reads the staging buffer
                raise
            # One ledger for each result: nothing is shared between them, so that one may be changed.
            ledgers = [self.ledger.as_list() for _ in inputs]
            result, times = self._finish(pipeline, feed)
            returned = time.perf_counter()
            actions = family.normalised(processor, result)
            robot = [processor.unnormalize_actions(a, i) for a, i in zip(actions, inputs, strict=True)]
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
        the components' outputs in `Family.internals`. Copies a lot, so do not time it."""
        with self._lock:
            result = self.infer(observation, noise=noise)
            outputs, inputs = self.pipelines.newest.outputs, self.processor.prepare(observation)
            raw = outputs[self.family.result][:1].cpu().numpy()
            kept = {
                "actions": torch.from_numpy(self.family.normalised(self.processor, raw)[0]),
                **bench_card(self.family).internals(self.model.config, outputs, inputs),
            }
            # Copies: the next call overwrites the buffers.
            return result, {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in kept.items()}

    def reset(self) -> None:
        """Start an episode: reset the noise to the configured seed."""
        with self._lock:
            self._noise.manual_seed(self.config.seed)

    @without_autocast()
    @torch.inference_mode()
    def warm_up(self) -> None:
        """Build the engines that calls will need and run them once.

        Afterwards the ledger is complete, a strict fallback has raised, and no call of an episode is slow. Noise and
        latency log stay untouched.

        Builds the shapes of an ordinary observation, with images of the model's size, and of the prompts in
        `PolicyConfig.warm_up`. If the state is part of the prompt, each prompt gets the shapes from the shortest to the
        longest state, at most `MOST_BUILT`. With the native engine, all prompt lengths of the checkpoint are built if
        they are no more than `MOST_BUILT`. A warning lists the shapes that are not built.
        """
        noise = np.zeros(self.family.action_shape(self.model.config), np.float32)
        if resize.fits_on(self.device):
            resize.rehearse(self.device)
        example = self.processor.example()
        prompts = [self.processor.example(prompt) for prompt in self.config.warm_up]
        with self._lock:
            own = [(o, self._shape([self.processor.prepare(o)])) for o in (example, *prompts)]
            ordinary = own[0][1]
            ranges = [shape.reachable(self.processor, o) for o, shape in own]
            # Dictionaries as sets that keep their order.
            wanted = dict.fromkeys(shape for shapes in ranges for shape in shapes[:MOST_BUILT])
            possible = dict.fromkeys((*wanted, *chain.from_iterable(ranges)))
            if any(spec.engine == "native" for spec in self.specs.values()):
                possible = dict.fromkeys((*ordinary.buckets(self.model.config), *possible))
            if len(possible) <= MOST_BUILT:
                wanted = possible
            for shape in wanted:
                if shape != ordinary:
                    self._pipeline(shape).rehearse()
            # Not `infer`: π0-FAST's answer to black images need not be a chunk of actions.
            pipeline, feed = self._feed([self.processor.prepare(example)], noise[None], None)
            pipeline.start(feed.inputs)
            self._finish(pipeline, feed)
        if left_out := [shape for shape in possible if shape not in wanted]:
            shapes = ", ".join(shape.title for shape in left_out)
            self.ledger.warn(
                f"{self.name}: engines are not built in advance for {shapes}: the first such call builds them; name "
                "its prompt in `warm_up` of the configuration"
            )

    def with_steps(self, num_steps: int) -> OptimizedPolicy:
        """Return a policy with the same weights, another number of denoising steps and its own latency log."""
        made = OptimizedPolicy(self.checkpoint, replace(self.config, num_steps=num_steps), store=self.store)
        made.ledger.warned = self.ledger.warned
        return made

    def async_runner(self, hz: float, **options: Any) -> AsyncRunner:
        """Return a control loop at `hz` that computes the next chunk while the robot executes this one.

        `options` are those of `vla_accel.remote.async_runner.AsyncRunner`. Only the runner may use the policy.
        """
        from vla_accel.remote.async_runner import AsyncRunner

        return AsyncRunner(self, hz, **options)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def supports_prev_chunk(self) -> bool:
        """Whether `infer` takes `prev_chunk` and `inference_delay` (real-time chunking)."""
        return bool(self.family.chunking.inputs)

    @property
    def batches_prev_chunks(self) -> bool:
        """Whether `infer_batch` takes `prev_chunks` and `inference_delays`."""
        return self.supports_prev_chunk

    @property
    def metadata(self) -> dict[str, Any]:
        """What was loaded and which engines run, as plain data; the server sends it to clients on connect.

        `action_horizon` and `action_dim` are the model's, as in `noise`: a robot may get fewer actions (GR00T) of fewer
        numbers. `robot` is `Preset.described`; `max_delay` the largest `inference_delay`, None if any is accepted.
        """
        horizon, action_dim = self.family.action_shape(self.model.config)
        preset = getattr(self.processor, "preset", None)
        return {
            "policy": self.name,
            "model": self._described(),
            "action_horizon": horizon,
            "action_dim": action_dim,
            "image_size": getattr(self.processor, "image_size", None),
            "robot": None if preset is None else preset.described(),
            "max_delay": self.config.rtc.longest_delay(horizon),
            "num_steps": self.num_steps,
            "device": str(self.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "engines": self.ledger.as_list(),
            "memory": self.memory(),
        }

    def memory(self) -> dict[str, Any]:
        """Bytes on the policy's device.

        Returns:
            `weights` by component, as its engines read them, each storage counted once; `unused`, weights that no
            engine reads; `buffers`, inputs, activations and graphs of all shapes (0 on a CPU); `total`, their sum;
            `host`, weights that a GPU reads from host memory.
        """
        counted, on_host = Counted(self.device.type), Counted("cpu")
        prepared, own = self.store.tensors(), self.pipelines.eager_weights()
        by_part = {part: [*prepared.get(part, ()), *own.get(part, ())] for part in self.family.parts}
        weights = {part: counted.add(tensors) for part, tensors in by_part.items()}
        unused = counted.add(self.model.parameters())
        host = on_host.add(chain(*by_part.values())) if self.device.type == "cuda" else 0
        total = sum(weights.values()) + unused + self.pipelines.bytes
        return {"weights": weights, "unused": unused, "buffers": self.pipelines.bytes, "total": total, "host": host}

    def latency_report(self) -> dict[str, Any]:
        """The breakdown JSON of the calls so far (schema `vla_accel.breakdown/1`)."""
        return latency.breakdown(
            model={"name": self.name, **self._described()},
            engines=self.ledger.as_list(),
            steps=self.num_steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
            memory=self.memory(),
        )

    # -- internal -------------------------------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        """The model's entry in breakdown and metadata."""
        horizon, action_dim = self.family.action_shape(self.model.config)
        return {
            "kind": self.family.name,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "action_horizon": horizon,
            "action_dim": action_dim,
        }

    def _shown(self, specs: Mapping[str, EngineSpec]) -> Shown | None:
        """A lower precision that `auto` may take: the checkpoint's folder has FP8 scales and a passed parity report for
        exactly these weights."""
        folder = self.checkpoint.kept
        if folder is None or self.device.type != "cuda" or any(spec.engine != "auto" for spec in specs.values()):
            return None
        found = agreement.shown(folder, self.model, self.num_steps)
        if found is None:
            return None
        try:
            has_scales = self.checkpoint.scales is not None
        except CheckpointError as error:
            _log.warning("auto: %s is ignored: %s", found.source, error)
            return None
        return found if has_scales else None

    def _log_auto_choices(self) -> None:
        """Log the engines that `auto` built; a warning if one differs from its choice, or a GPU runs eager."""
        groups: dict[tuple[str, str], list[str]] = {}
        level = logging.INFO
        for entry in self.ledger.entries.values():
            if entry.requested == "auto":
                spec = self.specs[entry.component]
                plain = entry.used == "eager" or spec.precision == "auto"
                used = entry.used if plain else f"{entry.used} {spec.precision}"
                groups.setdefault((used, entry.reason), []).append(entry.component)
                slow = entry.used != spec.engine or (entry.used == "eager" and self.device.type != "cpu")
                level = logging.WARNING if slow else level
        if groups:
            text = "; ".join(f"{', '.join(names)}: {used} ({why})" for (used, why), names in groups.items())
            _log.log(level, "%s: auto chose %s", self.name, text)

    def _observe(self, observations: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Read observations; images are resized here unless the device does it."""
        seen = []
        for index, one in enumerate(observations):
            with of_one(index, len(observations)):
                seen.append(self.processor.observe(one))
        cameras = {one.cameras for one in seen}
        if len(cameras) == 1 and self.pipelines.resizes(*cameras):
            return seen
        return [one if one.cameras is None else self.processor.resized(one) for one in seen]

    def _finish(self, pipeline: Pipeline, feed: Feed) -> tuple[np.ndarray, dict[str, float]]:
        """As `Pipeline.finish`. Raises EngineError for values that are not finite."""
        result, times = pipeline.finish(feed, self._noise)
        if not np.isfinite(result).all():
            name = f"{self.family.parts[-1]}.{self.family.result}"
            raise EngineError(f"{name}: non-finite values; compare engines with the eager one")
        return result, times

    def _pipeline(self, shape: Shape) -> Pipeline:
        with self._explained_if_too_large():
            return self.pipelines.get(shape)

    def _explained_if_too_large(self) -> AbstractContextManager[None]:
        def ordinary() -> Shape:
            return self._shape([self.processor.prepare(self.processor.example())])

        return explained_if_too_large(self.pipelines.plan, self.checkpoint, self._free, ordinary)

    def _shape(self, inputs: Sequence[Any]) -> Shape:
        return self.family.shape(self.model.config, inputs, self.num_steps, self.specs)

    def _feed(
        self, inputs: list[Any], noise: np.ndarray | None, guidance: Mapping[str, np.ndarray] | None
    ) -> tuple[Pipeline, Feed]:
        """The pipeline for these inputs, and the inputs as its arrays."""
        if noise is not None:
            noise = checked_noise(noise, (len(inputs), *self.family.action_shape(self.model.config)))
        shape = self._shape(inputs)
        return self._pipeline(shape), Feed(self.family.feed(self.model.config, inputs), noise, guidance)


def resolve_dtype(config: PolicyConfig, device: torch.device) -> torch.dtype:
    """The dtype of the large products: "auto" is BF16 on a GPU, FP32 on a CPU."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[config.precision]
