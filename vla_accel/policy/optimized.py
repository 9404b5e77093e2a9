"""`OptimizedPolicy`: a drop-in for openpi's `Policy` that says what each component cost and which path really ran.

    preprocess → the components of the model → transfer → postprocess

Owns no mathematics: models compute, engines run, `processing` converts. Calls from several threads are taken in turn.
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
from typing import Any

import numpy as np
import torch

from vla_accel import latency
from vla_accel.checkpoints.loading import Checkpoint, load
from vla_accel.config import EngineSpec, PolicyConfig, load_config
from vla_accel.engines import ENGINES
from vla_accel.engines.auto import Shown, choose
from vla_accel.errors import CheckpointError, ConfigError, EngineError, ObservationError, of_one, unknown
from vla_accel.families.family import Shape, Store
from vla_accel.kernels.image import resize
from vla_accel.kernels.phases import recorded
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.nn.memory import Counted, free_memory
from vla_accel.numeric import DTYPES, without_autocast
from vla_accel.policy import agreement
from vla_accel.policy.footprint import told_if_too_large
from vla_accel.policy.given import given_noise, guidance, refuse_unused_rtc
from vla_accel.policy.pipeline import Feed, Pipeline, Pipelines, Plan
from vla_accel.policy.states import StateCheck
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.runtime import Runtime
from vla_accel.transforms.observations import real_numbers

MOST_BUILT = 4
"""Shapes of one observation (prompt buckets) up to which warm-up builds all of them."""
_log = logging.getLogger("vla_accel")


class OptimizedPolicy:
    """A policy ready to act. Make one with `from_pretrained`.

    `infer` may be called from several threads; calls are serialised. `metadata` says what was loaded and what runs,
    `checkpoint` where it came from (`checkpoint.folder`).
    """

    @without_autocast()
    def __init__(self, checkpoint: Checkpoint, config: PolicyConfig, *, store: Store | None = None) -> None:
        """`checkpoint`: its model is moved and cast in place, unless it can be read again; `store`: of another policy
        of the same model, to share its prepared weights. Raises ConfigError for a component that the model lacks, and
        for a preset, a prompt or a setting of the checkpoint that it was not loaded with."""
        for name in ("preset", "checkpoint", "default_prompt"):
            value, read = getattr(config, name), getattr(checkpoint.settings, name)
            if value not in (getattr(PolicyConfig(), name), read):
                raise ConfigError(f"{name}: expected what {checkpoint.name} was loaded with, {read}, got {value}")
        self.name, self.family = checkpoint.name, checkpoint.family
        sizes = checkpoint.model.config
        self.num_steps = config.num_steps or self.family.steps(sizes)
        rtc = self.family.chunking(sizes, config.rtc)
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
        specs = config.specs(self.family.parts)
        for part, spec in specs.items():
            for engine in (spec.engine, *spec.fallback):
                if engine not in (*ENGINES, "auto"):
                    raise ConfigError(unknown(f"{part}.engine", engine, ("auto", *ENGINES)))
                if config.deterministic and engine != "auto" and ENGINES[engine].by_time:
                    raise ConfigError(
                        f"deterministic: {part}: {engine} takes the kernels that it measures as the fastest"
                    )
        on_host = [part for part, spec in specs.items() if spec.native.embeddings == "host"]
        unread = [part for part in on_host if part not in self.family.host_embeddings]
        if unread and (config.native.embeddings == "gpu" or unread == on_host):
            have = ", ".join(self.family.host_embeddings) or "no component"
            raise ConfigError(
                f"{unread[0]}.native.embeddings: host is for {have} of {self.family.name}, got it for {unread[0]}"
            )
        self.choices = choose(specs, self.device, dtype, self._shown(specs))
        self.specs = {name: choice.spec for name, choice in self.choices.items()}
        """The engine that each component is built with; "auto" is resolved."""
        self.scales = checkpoint.scales if self.family.needs_scales(self.specs) else None
        self.store = store or self.family.store(self.model, self.scales)
        runtime = Runtime.of(self.device, deterministic=config.deterministic)
        plan = Plan(self.family, self.model, config, self.choices, self.store, runtime, self.ledger, self.scales)
        self.pipelines = Pipelines(plan)
        self._free = free_memory(self.device) if self.device.type == "cuda" else (0, 0)
        if any(ENGINES[name].needs == "all" for spec in self.specs.values() for name in (spec.engine, *spec.fallback)):
            with self._told_if_too_large():
                self.model.fetch()
        self._states = StateCheck(self.processor, self.ledger)
        self.start: dict[str, float] | None = None
        """Seconds of `from_pretrained` by phase (`ops.phases`)."""
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
        """Load a checkpoint folder, a bundled checkpoint ("demo") or `owner/name[@revision][/folder]` on the hub.

        Args: `config`: a `PolicyConfig`, a mapping, a YAML/JSON file or the name of a shipped one ("native_fp8"), by
        default the fast path (`engines.auto`); `device`, `num_steps`, `seed` and `lora` override it; `lora`: folder or
        hub name of an adapter that is folded into the weights. Raises CheckpointError for anything incomplete,
        ConfigError for settings that cannot be, and for those that would change nothing.
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
        policy._say_what_auto_chose()
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

        Args: `observation`: what the robot's transforms expect, in LIBERO's case openpi's keys: `observation/image`,
        `observation/wrist_image` uint8 (224, 224, 3), `observation/state` (8,), `prompt` str. `noise`: (horizon,
        action_dim), else drawn from the policy's seeded generator. π0-FAST decodes greedily: it checks the noise's
        shape and does not use it. Real-time chunking: `prev_chunk` (k, 7), what an earlier `infer` returned, from the
        action on that is due at this observation, k at most the horizon; `inference_delay`: how many of them will be
        executed before the answer is used. The new chunk is guided to begin with those, and to leave them gradually
        (`PolicyConfig.rtc`); with a delay of k or more, all of them are kept, as in lerobot.
        Returns: `actions` float64 (horizon, 7); `state`, a list of 8 as given; `policy_timing` in milliseconds:
        `infer_ms`, and per component; `engines`: the ledger.
        Raises ObservationError for a bad observation or noise, EngineError for non-finite actions, ActionError where a
        family's answer is no chunk of actions.
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
        """Several independent observations in one pass; noise (batch, horizon, action_dim); `prev_chunks`,
        `inference_delays`: one for each observation, or None. Returns and raises as `infer`; what is wrong with one of
        several names it, as "observations[1]: …"."""
        if isinstance(observations, (Mapping, str)):
            raise ObservationError(f"observations: expected a list of them, got one {type(observations).__name__}")
        if not observations:
            raise ObservationError("observations: expected at least one, got none")
        with self._lock:
            began = time.perf_counter()
            with self.pipelines.ahead(self.processor, observations) as ahead:
                family, sizes, rtc, inputs = self.family, self.model.config, self.config.rtc, []
                for index, one in enumerate(observations):
                    with of_one(index, len(observations)):
                        inputs.append(family.prepare(self.processor, one, self.device))
                        self._states.look(inputs[-1])
                guided = guidance(family, sizes, rtc, self.processor, inputs, prev_chunks, inference_delays)
                pipeline, feed = self._feed(inputs, noise, guided)
                if ahead is not None and ahead is not pipeline:
                    ahead.abandon()
                pipeline.feed(feed, self._noise)
            # One for each: nothing is shared between results, so that one may be changed.
            ledgers = [self.ledger.as_list() for _ in inputs]
            result, times = self._run(pipeline)
            returned = time.perf_counter()
            actions = family.normalised(self.processor, result)
            robot = [self.processor.finish(a, i) for a, i in zip(actions, inputs, strict=True)]
            ended = time.perf_counter()
            # Launch, copies and waiting: what of the run is in no component. So the sections add up to the total.
            transfer = (returned - pipeline.launched) * 1e3 - sum(times.values())
            sections = {
                "preprocess": (pipeline.launched - began) * 1e3,
                **times,
                "transfer": transfer,
                "postprocess": (ended - returned) * 1e3,
            }
            sample = latency.Sample(sections, (ended - began) * 1e3)
            self.latency.add(sample)
            timing = {"infer_ms": sample.total_ms, "total_ms": sample.total_ms}
            timing |= {f"{name}_ms": value for name, value in sections.items()}
            return [
                # A list: of each array in an answer openpi's ActionChunkBroker takes the row of its step.
                {"actions": a, "state": i.raw_state.tolist(), "policy_timing": timing.copy(), "engines": engines}
                for a, i, engines in zip(robot, inputs, ledgers, strict=True)
            ]

    def infer_with_internals(
        self, observation: Mapping[str, Any], *, noise: np.ndarray
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """`infer`, and besides it, float32: the normalised `actions` (H, A) and what the family compares of its
        components (`Family.internals`). For comparing paths; copies much, so do not time it."""
        with self._lock:
            result = self.infer(observation, noise=noise)
            outputs, inputs = self.pipelines.newest.outputs, self.processor.prepare(observation)
            raw = outputs[self.family.result][:1].cpu().numpy()
            kept = {
                "actions": torch.from_numpy(self.family.normalised(self.processor, raw)[0]),
                **self.family.internals(self.model.config, outputs, inputs),
            }
            # Copies: the next call overwrites the buffers.
            return result, {name: tensor.to("cpu", torch.float32, copy=True).numpy() for name, tensor in kept.items()}

    def reset(self) -> None:
        """Start an episode: the noise begins anew from the configured seed."""
        with self._lock:
            self._noise.manual_seed(self.config.seed)

    @without_autocast()
    @torch.inference_mode()
    def warm_up(self) -> None:
        """Build the engines that calls will need, and run them once, so that the ledger is complete, a strict fallback
        raises now, and no call of an episode is a slow one. Leaves noise and latency log untouched.

        This builds the shapes of an ordinary observation and of the prompts in `PolicyConfig.warm_up`. Where the state
        is part of the prompt, each prompt gets the shapes from the shortest to the longest state, `MOST_BUILT` at most.
        Where the native engine runs a component, the shapes of all prompts that the checkpoint allows are built if
        these are no more than `MOST_BUILT`. A warning lists the shapes that are not built.
        """
        noise = np.zeros(self.family.action_shape(self.model.config), np.float32)
        if resize.fits_on(self.device):
            resize.rehearse(self.device)
        example = self.processor.example()
        prompts = [self.processor.example(prompt) for prompt in self.config.warm_up]
        with self._lock:
            own = [(o, self._shape([self.processor.prepare(o)])) for o in (example, *prompts)]
            ordinary = own[0][1]
            ranges = [self.family.shapes_of(self.processor, o, shape) for o, shape in own]
            # Dictionaries as sets that keep their order.
            wanted = dict.fromkeys(shape for shapes in ranges for shape in shapes[:MOST_BUILT])
            possible = dict.fromkeys((*wanted, *chain.from_iterable(ranges)))
            if any(spec.engine == "native" for spec in self.specs.values()):
                possible = dict.fromkeys((*self.family.shapes(self.model.config, ordinary), *possible))
            if len(possible) <= MOST_BUILT:
                wanted = possible
            for shape in wanted:
                if shape != ordinary:
                    self._pipeline(shape).rehearse()
            # Not `infer`: an answer to black images need not be a chunk of actions.
            pipeline, feed = self._feed([self.processor.prepare(example)], noise[None], None)
            pipeline.feed(feed, self._noise)
            self._run(pipeline)
        if left_out := [shape for shape in possible if shape not in wanted]:
            shapes = ", ".join(shape.title for shape in left_out)
            self.ledger.warn(
                f"{self.name}: engines are not built in advance for {shapes}: the first such call builds them; name "
                "its prompt in `warm_up` of the configuration"
            )

    def with_steps(self, num_steps: int) -> OptimizedPolicy:
        """The same weights with another number of denoising steps, and a latency log of its own."""
        made = OptimizedPolicy(self.checkpoint, replace(self.config, num_steps=num_steps), store=self.store)
        made.ledger.told = self.ledger.told
        return made

    def async_runner(self, hz: float, **options: Any) -> AsyncRunner:
        """A control loop at `hz` that is kept fed: the next chunk is computed while this one is executed.

        `options` as `vla_accel.remote.async_runner.AsyncRunner` takes them; nobody else may use the policy meanwhile.
        """
        return AsyncRunner(self, hz, **options)

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def supports_prev_chunk(self) -> bool:
        """Whether `infer` takes `prev_chunk` and `inference_delay`: whether the family has real-time chunking."""
        return bool(self.family.guidance)

    @property
    def batches_prev_chunks(self) -> bool:
        """Whether `infer_batch` takes `prev_chunks` and `inference_delays`."""
        return self.supports_prev_chunk

    @property
    def metadata(self) -> dict[str, Any]:
        """What was loaded and which path runs, as plain data; sent to clients on connect. `action_horizon` and
        `action_dim` are the model's, as of `noise`: a robot may get fewer actions (GR00T's) of fewer numbers.
        `robot`: `Preset.described`; `max_delay`: the largest `inference_delay`, None if any is accepted."""
        horizon, action_dim = self.family.action_shape(self.model.config)
        preset = getattr(self.processor, "preset", None)
        return {
            "policy": self.name,
            "model": self._described(),
            "action_horizon": horizon,
            "action_dim": action_dim,
            # Of the images that it makes of the cameras'; a family may have no such size.
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
        """Bytes on the policy's device. `weights`: by component, as its engines read them, each storage counted once;
        `unused`: weights of the model that are there, but that no engine reads; `buffers`: inputs, activations and
        graphs of all shapes, as the device's allocator counts them (0 on a CPU); `total`: their sum. `host`: of weights
        that a GPU reads from host memory."""
        counted, on_host = Counted(self.device.type), Counted("cpu")
        prepared, own = self.store.tensors(), self.pipelines.eager_weights()
        by_part = {part: [*prepared.get(part, ()), *own.get(part, ())] for part in self.family.parts}
        weights = {part: counted.add(tensors) for part, tensors in by_part.items()}
        unused = counted.add(self.model.parameters())
        host = on_host.add(chain(*by_part.values())) if self.device.type == "cuda" else 0
        total = sum(weights.values()) + unused + self.pipelines.bytes
        return {"weights": weights, "unused": unused, "buffers": self.pipelines.bytes, "total": total, "host": host}

    def latency_report(self) -> dict[str, Any]:
        """The breakdown JSON over the calls so far (schema `vla_accel.breakdown/1`)."""
        return latency.breakdown(
            model={"name": self.name, **self._described()},
            engines=self.ledger.as_list(),
            steps=self.num_steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
            memory=self.memory(),
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        """What a breakdown or metadata says of the model."""
        horizon, action_dim = self.family.action_shape(self.model.config)
        return {
            "kind": self.family.name,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "action_horizon": horizon,
            "action_dim": action_dim,
        }

    def _shown(self, specs: Mapping[str, EngineSpec]) -> Shown | None:
        """A lower precision that `auto` may take: scales of these very weights and a parity report that passed lie
        beside the checkpoint."""
        folder = self.checkpoint.kept
        if folder is None or self.device.type != "cuda" or any(spec.engine != "auto" for spec in specs.values()):
            return None
        found = agreement.shown(folder, self.model, self.num_steps)
        if found is None:
            return None
        try:
            has_scales = self.checkpoint.scales is not None
        except CheckpointError as error:
            _log.warning("auto: %s is of no use: %s", found.source, error)
            return None
        return found if has_scales else None

    def _say_what_auto_chose(self) -> None:
        """One line, from what really was built: a warning where what it chose could not be, or a GPU runs eager."""
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
            said = "; ".join(f"{', '.join(names)}: {used} ({why})" for (used, why), names in groups.items())
            _log.log(level, "%s: auto chose %s", self.name, said)

    def _run(self, pipeline: Pipeline) -> tuple[np.ndarray, dict[str, float]]:
        """What `Pipeline.run` says of a call that was fed. Raises EngineError for values that are not finite."""
        result, times = pipeline.run()
        if not np.isfinite(result).all():
            name = f"{self.family.parts[-1]}.{self.family.result}"
            raise EngineError(f"{name}: non-finite values; compare engines with the eager one")
        return result, times

    def _pipeline(self, shape: Shape) -> Pipeline:
        with self._told_if_too_large():
            return self.pipelines.get(shape)

    def _told_if_too_large(self) -> AbstractContextManager[None]:
        def ordinary() -> Shape:
            return self._shape([self.processor.prepare(self.processor.example())])

        return told_if_too_large(self.pipelines.plan, self.checkpoint, self._free, ordinary)

    def _shape(self, inputs: Sequence[Any]) -> Shape:
        return self.family.shape(self.model.config, inputs, self.num_steps, self.specs)

    def _feed(
        self, inputs: list[Any], noise: np.ndarray | None, guidance: Mapping[str, np.ndarray] | None
    ) -> tuple[Pipeline, Feed]:
        """The pipeline for these inputs, and the inputs as its arrays."""
        if noise is not None:
            noise = given_noise(noise, (len(inputs), *self.family.action_shape(self.model.config)))
        shape = self._shape(inputs)
        return self._pipeline(shape), Feed(self.family.feed(self.model.config, inputs), noise, guidance)


def resolve_dtype(config: PolicyConfig, device: torch.device) -> torch.dtype:
    """The dtype of the large products: "auto" is BF16 on a GPU, FP32 on a CPU."""
    if config.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[config.precision]
