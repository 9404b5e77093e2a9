"""`Family`, the interface between a model and policy, pipeline and checkpoint loading; and `FAMILIES`, the registry.

Benchmarks and `parity` need a `BenchCard` in addition (`vla_accel.families.bench`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.lerobot import is_lerobot_config
from vla_accel.checkpoints.weights import Weights
from vla_accel.component import Component
from vla_accel.config import EngineSpec, PolicyConfig, RtcConfig, load_config, shipped_configs
from vla_accel.errors import ConfigError, unknown
from vla_accel.fp8 import FORMATS, Products, Scales, can_quantise
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.pictures import Cameras

FAMILIES: dict[str, str] = {
    "pi0": "vla_accel.families.pi0.family:PI0",
    "pi05": "vla_accel.families.pi0.family:PI05",
    "pi0_fast": "vla_accel.families.pi0_fast.family:PI0_FAST",
    "smolvla": "vla_accel.families.smolvla.family:SMOLVLA",
    "groot": "vla_accel.families.groot.family:GROOT",
    "groot_n16": "vla_accel.families.groot.family:GROOT_N16",
    "groot_n15": "vla_accel.families.groot.family:GROOT_N15",
    "vla_jepa": "vla_accel.families.vla_jepa.family:VLA_JEPA",
    "fastwam": "vla_accel.families.fastwam.family:FASTWAM",
    "molmoact2": "vla_accel.families.molmoact2.family:MOLMOACT2",
    "starvla_groot": "vla_accel.families.starvla.family:STARVLA_GROOT",
    "starvla_pi": "vla_accel.families.starvla.family:STARVLA_PI",
    "starvla_oft": "vla_accel.families.starvla.family:STARVLA_OFT",
    "openvla_oft": "vla_accel.families.openvla_oft.family:OPENVLA_OFT",
    "diffusion_policy": "vla_accel.families.diffusion_policy.family:DIFFUSION_POLICY",
    "multi_task_dit": "vla_accel.families.multi_task_dit.family:MULTI_TASK_DIT",
    "act": "vla_accel.families.act.family:ACT",
    "evo1": "vla_accel.families.evo1.family:EVO1",
    "xvla": "vla_accel.families.xvla.family:XVLA",
}
"""Every family by name, as "module:object", imported when it is requested: none needs another's packages."""

Rows: TypeAlias = "np.ndarray | Sequence[np.ndarray]"
"""A host input of a call: an array for each row of the batch; of `IMAGES`, one for each view of each row. An array may
be shorter than its buffer along the first axis; the rest is zero."""
IMAGES = "images"
"""The input of the first component whose images the device may resize (`Shape.cameras`)."""


class Seen(Protocol):
    """One observation with its images read and checked, and its prompt not yet tokenized."""

    @property
    def cameras(self) -> Cameras | None:
        """The sizes of images that are still to be resized to the model's; None where there are none."""
        ...


class Transforms(Protocol):
    """Converts a robot's observations and actions to a model's and back. Raises ObservationError for bad input.

    `observe` reads and checks images and state; images keep their sizes if the device may resize them. `resized`
    resizes them on the host. `encode` normalises the state and tokenizes the prompt; its result has the robot's own
    `raw_state` float64. `prepare` is all three.
    """

    def observe(self, observation: Mapping[str, Any]) -> Seen: ...
    def resized(self, seen: Any) -> Any: ...
    def encode(self, seen: Any) -> Any: ...
    def prepare(self, observation: Mapping[str, Any]) -> Any: ...

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        """Convert the model's actions (H, A) to the robot's, float64 (H, robot's)."""
        ...

    def normalize_actions(self, actions: Any, inputs: Any, name: str = "prev_chunk") -> np.ndarray:
        """Convert k robot actions to the model's, float32 (k, A): the inverse of `unnormalize_actions`."""
        ...

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        """A valid observation, to build and warm engines with. `prompt`: instead of an ordinary one."""
        ...


class Store(Protocol):
    """A model's weights as the native engine reads them, prepared once for all shapes."""

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """What was prepared so far, by component."""
        ...


@dataclass(frozen=True)
class Shape:
    """Everything that changes a captured graph; a family adds its own fields (views, prompt tokens, …) in a subclass.

    Attributes:
        batch: Observations of a call.
        schedule: Denoising steps.
        cameras: The sizes of images that the device resizes as the first step of the first component; None where
            images arrive in the model's size.
    """

    batch: int
    schedule: Schedule
    cameras: Cameras | None = field(default=None, kw_only=True)

    @property
    def steps(self) -> int:
        """The number of denoising steps (or decoded tokens)."""
        return self.schedule.steps

    @property
    def title(self) -> str:
        """A description for messages."""
        return str(self)

    def buckets(self, config: Any) -> Sequence[Shape]:
        """All shapes of the same observations with prompts of other lengths."""
        return (self,)

    def reachable(self, transforms: Any, observation: Mapping[str, Any]) -> Sequence[Shape]:
        """All shapes of an observation with the same prompt and other states, this one first."""
        return (self,)

    def make_valid(self, config: Any, host: Mapping[str, np.ndarray]) -> None:
        """Change zeroed host inputs into values that a call could have."""


class ModelConfig(Protocol):
    """The sizes that every family's config has: the shape of a chunk of normalized actions, and the denoising steps (or
    decoded tokens) by default."""

    @property
    def action_horizon(self) -> int: ...
    @property
    def action_dim(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


C = TypeVar("C", bound=ModelConfig)
X = TypeVar("X")
S = TypeVar("S", bound=Shape)


class Chunking(Generic[C]):
    """A family's real-time chunking; this base class is that of a family without it.

    Attributes:
        inputs: Host inputs of the guidance, which are zero in a plain call.
        settings: Fields of `RtcConfig` that it honours. Others are refused.
    """

    inputs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def resolve(self, config: C, rtc: RtcConfig) -> RtcConfig:
        """Return the settings for a checkpoint. Raises ConfigError if they contradict its training or its sizes."""
        horizon = config.action_horizon
        for name, most in (("execution_horizon", horizon), ("max_delay", horizon - 1)):
            if (value := getattr(rtc, name)) is not None and value > most:
                raise ConfigError(f"rtc.{name}: expected at most {most}, for chunks of {horizon} actions, got {value}")
        return rtc

    def guide(self, config: C, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        """Return one row of `inputs` from the rest of the previous chunk.

        Args:
            config: The model's sizes.
            rtc: Settings, as `resolve` returns them.
            previous: Normalized actions float32 (k, A), k at most the horizon.
            delay: Actions that are executed before the new chunk arrives.
        """
        raise ConfigError("prev_chunk: this family has no real-time chunking")


@dataclass(frozen=True)
class Capabilities:
    """What a family can do beyond a plain call in the policy's precision.

    Attributes:
        lora: Whether `load` folds a LoRA adapter into the weights.
        host_embeddings: Components whose native program can read token embeddings from host memory
            (`config.NativeOptions`).
        quantised: By component, then engine: the products that can be computed in FP8 or INT8.
        settings: Fields of `config.CheckpointSpec` that apply to its checkpoints, in addition to those of every family.
        prompt: Whether the model reads an instruction. If not, settings of prompts are refused.
    """

    lora: bool = False
    host_embeddings: tuple[str, ...] = ()
    quantised: Mapping[str, Mapping[str, Products]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    prompt: bool = True

    def needs_scales(self, specs: Mapping[str, EngineSpec]) -> bool:
        """Return whether an engine quantizes its inputs, for which calibrated scales are required."""
        for part, spec in specs.items():
            quantised = self.quantised.get(part, {})
            for engine in (spec.engine, *spec.fallback):
                engine = "native" if engine == "auto" else engine
                if can_quantise(quantised, engine, spec.precision) and quantised[engine].activations:
                    return True
        return False


class Family(ABC, Generic[C, X, S]):
    """A kind of policy. `C` is its dataclass of sizes, `X` a prepared observation, `S` its shape."""

    name: str
    parts: tuple[str, ...]
    """Names of the components, in order: keys of configurations, of the ledger and of timings."""
    network_class: type[Network]
    store_class: Callable[[Any, Scales | None], Store]
    """Makes the store of the native programs' weights, which are prepared when a program is made."""
    capabilities: Capabilities = Capabilities()
    chunking: Chunking[C] = Chunking()
    flow: bool = False
    """Whether the steps integrate a flow, so that they have times (`PolicyConfig.schedule`); see `has_flow`."""
    uniform_noise: bool = False
    """Whether noise is uniform in [-1, 1) instead of normal."""
    signs: tuple[str, ...] = ()
    """Tensors that no other model's checkpoints have."""

    @abstractmethod
    def components(
        self, model: Any, shape: S, *, store: Any = None, scales: Scales | None = None, rtc: RtcConfig | None = None
    ) -> Sequence[Component]:
        """Return the components of a shape, in the order of `parts`. They join by name.

        An input with the name of an earlier output is that output. Inputs of the same name are one host input. `noise`
        (B, *noise_shape) float32 is drawn on the device or passed by the caller; a family may do without. All other
        inputs come from `feed`. The last component's only output is the result: actions (B, H, A) float32, or the input
        of `normalised`.
        """

    @abstractmethod
    def shape(self, config: C, inputs: Sequence[X], schedule: Schedule, specs: Mapping[str, EngineSpec]) -> S:
        """Return the shape that these observations need with these engines. Raises ObservationError if they do not fit
        into one batch."""

    def has_flow(self, config: C) -> bool:
        """Return whether the steps of a model of these sizes integrate a flow."""
        return self.flow

    def schedule(self, config: C, settings: PolicyConfig) -> Schedule:
        """Return the steps of a policy. Raises ConfigError for times of steps that have none."""
        for name in ("schedule", "warm_start"):
            value = getattr(settings, name)
            if value is not None and not self.has_flow(config):
                raise ConfigError(f"{name}: expected none for {self.name}, which has no flow, got {value}")
        return Schedule.of(settings.schedule, settings.num_steps or config.num_steps)

    def noise_shape(self, config: C, num_steps: int) -> tuple[int, ...]:
        """Return the shape of a row of the input `noise`."""
        return config.action_horizon, config.action_dim

    def draw(self, noise: Tensor, generator: torch.Generator) -> None:
        """Draw noise on its device, in place."""
        if self.uniform_noise:
            noise.uniform_(-1.0, 1.0, generator=generator)
        else:
            noise.normal_(generator=generator)

    def drawn(self, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
        """Return noise float32 of this shape, drawn on the host."""
        noise = rng.uniform(-1.0, 1.0, shape) if self.uniform_noise else rng.standard_normal(shape)
        return noise.astype(np.float32)

    def noise(self, config: C) -> np.ndarray | None:
        """Return the noise float32 (H, A) that every call starts from; None: it is drawn anew."""
        return None

    def image_feed(self, config: C, seen: Sequence[Any]) -> Mapping[str, Rows]:
        """Return the host inputs of the first component, as in `feed`, if images are all that it reads; else nothing.

        The pipeline then starts that component before the rest of the observations is encoded.
        """
        return {}

    @abstractmethod
    def feed(self, config: C, inputs: Sequence[X]) -> Mapping[str, Rows]:
        """Return the host inputs of a call without noise and without those of `chunking`."""

    def normalised(self, transforms: Any, result: np.ndarray) -> np.ndarray:
        """Return a call's result as normalized actions float32 (B, H, A). Raises ActionError if it is no chunk."""
        return result

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether a checkpoint's folder belongs to this family: by lerobot's name of the policy, or else by the
        tensors in `signs`.

        Args:
            content: config.json, empty if there is none.
            shapes: Names and shapes of the tensors, empty if there are none.
        """
        if is_lerobot_config(content):
            return content["type"] == self.name
        return bool(self.signs) and all(name in shapes for name in self.signs)

    def hint(self, folder: Path) -> str | None:
        """Return what to do about a folder that no family recognises but that resembles one of this family's."""
        return None

    def prompts(self, folder: Path, settings: PolicyConfig) -> Any:
        """Return the encoded prompts of a checkpoint, with the encoder (`families.fastwam.text.Prompts`). Raises
        ConfigError for a family that reads prompts in each call."""
        raise ConfigError(f"prompts: expected a family that encodes instructions in advance (fastwam), got {self.name}")

    @staticmethod
    @abstractmethod
    def load(folder: Path, settings: PolicyConfig, weights: Weights | None = None) -> tuple[Network, Transforms]:
        """Return the network, whose weights have an `origin`, and the transforms. Raises CheckpointError, ConfigError.

        `weights`: the tensors, if they are not in the folder.

        The family's components fetch what they compute with (`Component.fetch`), and its native programs read
        their weights by name.
        """


def quantised_configs(family: Family[Any, Any, Any]) -> dict[str, PolicyConfig]:
    """Return the shipped configurations of the native engine in FP8 and INT8 that a family can run, by name. Their
    engines have no fallback."""
    found = {}
    for name in shipped_configs():
        config = load_config(name)
        try:
            specs = config.specs(family.parts)
        except ConfigError:  # it names components of other models
            continue
        low = {part: spec for part, spec in specs.items() if spec.precision in FORMATS and spec.engine == "native"}
        able = family.capabilities.quantised
        if low and all(can_quantise(able.get(part, {}), "native", spec.precision) for part, spec in low.items()):
            found[name] = config.with_specs({part: replace(spec, fallback=()) for part, spec in specs.items()})
    return found


def family_named(name: str) -> Family[Any, Any, Any]:
    """Return a family by name. Raises ConfigError that lists the names."""
    if name not in FAMILIES:
        raise ConfigError(unknown("model", name, FAMILIES))
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
