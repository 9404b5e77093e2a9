"""What a model family is: one object that says all that the rest of the package has to know of a model.

The pipeline, the policy, measurements, ahead-of-time builds and checkpoints are written against `Family` and name no
model. Families live in `vla_accel.families`; `FAMILIES` is the one list of them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.config import EnginePrecision, EngineSpec, PolicyConfig, RtcConfig
from vla_accel.errors import ConfigError, unknown
from vla_accel.fp8 import Scales
from vla_accel.nn.network import Network
from vla_accel.pictures import Cameras

FAMILIES: dict[str, str] = {
    "pi0": "vla_accel.families.pi0.family:PI0",
    "pi05": "vla_accel.families.pi0.family:PI05",
    "pi0_fast": "vla_accel.families.pi0_fast.family:PI0_FAST",
    "smolvla": "vla_accel.families.smolvla.family:SMOLVLA",
    "groot": "vla_accel.families.groot.family:GROOT",
}
"""Every family by name, as "module:object", imported when it is asked for: none needs another's packages."""

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


class Prepared(Protocol):
    """One observation as a family's transforms leave it: what its `feed` reads, and the robot's own state float64."""

    @property
    def raw_state(self) -> np.ndarray: ...


class Transforms(Protocol):
    """Converts a robot's observations and actions to a model's and back. Raises ObservationError for bad input."""

    def observe(self, observation: Mapping[str, Any]) -> Seen:
        """Read and check an observation's images and state; images keep their sizes if the device may resize them."""
        ...

    def resized(self, seen: Any) -> Any:
        """Resize the images on the host. Called only where `Seen.cameras` is not None."""
        ...

    def encode(self, seen: Any) -> Prepared:
        """Normalise the state and tokenize the prompt."""
        ...

    def prepare(self, observation: Mapping[str, Any]) -> Prepared:
        """Check and convert an observation: `observe`, `resized` and `encode`."""
        ...

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
        steps: Denoising steps.
        cameras: The sizes of images that the device resizes as the first step of the first component; None where
            images arrive in the model's size.
    """

    batch: int
    steps: int
    cameras: Cameras | None = field(default=None, kw_only=True)

    @property
    def title(self) -> str:
        """What distinguishes the shape for a user."""
        return str(self)


@dataclass(frozen=True)
class Work:
    """What a component must do in one call: operations of its products (multiply and add count as two) in `precision`,
    and bytes that it must read. A component is bound by the one or the other."""

    flop: float
    bytes: float = 0.0
    precision: Literal["bf16", "fp8", "int8"] = "bf16"


def products_of(spec: EngineSpec) -> Literal["bf16", "fp8", "int8"]:
    """What the products of a component are computed in, for its `Work`."""
    return spec.precision if spec.precision in ("fp8", "int8") else "bf16"


def weight_bytes(spec: EngineSpec) -> int:
    """Of one weight of a component's products."""
    return 2 if products_of(spec) == "bf16" else 1


class Family(ABC):
    """A kind of policy. Everything that a method gets named `config` is the family's own dataclass of sizes."""

    name: str
    parts: tuple[str, ...]
    """Names of the components, in order: keys of configurations, of the ledger and of timings."""
    sizes: Mapping[str, Callable[..., Any]]
    """Published sizes by name; a function takes the fields to change. The first is what `bench` times."""
    settings: tuple[str, ...] = ()
    """Fields of `config.CheckpointSpec` that count for its checkpoints, besides those that count for every family's."""
    host_embeddings: tuple[str, ...] = ()
    """Components whose native program can read token embeddings from host memory (`config.NativeOptions`)."""
    guidance: tuple[str, ...] = ()
    """Host inputs of real-time chunking, zero in a plain call. Without any the family has no real-time chunking."""
    rtc_settings: tuple[str, ...] = ()
    """Fields of `RtcConfig` that change its real-time chunking; it refuses the others."""
    result: str = "actions"
    """The last component's output that a call brings to the host."""

    # -- the network ----------------------------------------------------------------------------------------------

    @abstractmethod
    def network(self, config: Any) -> Network:
        """A network of these sizes, in eval mode, without weights (`Network.empty`)."""

    @abstractmethod
    def random(self, config: Any, *, seed: int, device: str, dtype: torch.dtype) -> Network:
        """A network whose weights are drawn so that activations stay of order one, in eval mode; now or, with an
        `origin`, when they are asked for."""

    @abstractmethod
    def action_shape(self, config: Any) -> tuple[int, int]:
        """(horizon, action dimensions) of one row of the noise, if it draws any, and of the normalised actions."""

    def steps(self, config: Any) -> int:
        """Denoising steps where nobody says how many."""
        return 10

    def chunking(self, config: Any, rtc: RtcConfig) -> RtcConfig:
        """Real-time chunking as the checkpoint was trained for it, where `rtc` of the configuration does not say.
        Raises ConfigError where the two contradict each other."""
        return rtc

    def shallow(self, config: Any, depth: int) -> Any:
        """The same sizes with so many layers in the large stacks, to measure builds with."""
        raise ConfigError(f"depth: {self.name} cannot be made shallower, got {depth}")

    # -- running it -----------------------------------------------------------------------------------------------

    @abstractmethod
    def store(self, model: Network, scales: Scales | None) -> Store:
        """Where its native programs keep their weights. Costs nothing until a program is made."""

    @abstractmethod
    def components(
        self, model: Network, shape: Any, *, store: Store | None = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        """The components of a shape, in the order of `parts`. They join by name.

        An input that has the name of an earlier output is that output. Inputs of one name are one host input. `noise`
        (B, H, A) float32 is drawn on the device or given; a family may do without. Every other input comes from `feed`.
        The last component's output `result` is the result: `actions` (B, H, A) float32, or what `normalised` reads.
        """

    @abstractmethod
    def shape(self, config: Any, inputs: Sequence[Any], steps: int, specs: Mapping[str, EngineSpec]) -> Any:
        """The shape that these prepared observations need with these engines. Raises ObservationError where they do
        not fit into one batch."""

    def shapes(self, config: Any, shape: Any) -> Sequence[Any]:
        """All shapes that observations like those of `shape` may need, with other prompts."""
        return (shape,)

    def shapes_of(self, transforms: Any, observation: Mapping[str, Any], shape: Any) -> Sequence[Any]:
        """All shapes that an observation of `shape` may need with the same prompt and other states, `shape` first."""
        return (shape,)

    def image_feed(self, config: Any, seen: Sequence[Any]) -> Mapping[str, Rows]:
        """The host inputs of the first component, as in `feed`, if images are all that it reads; empty otherwise.

        The pipeline then starts that component before the rest of the observations is encoded."""
        return {}

    @abstractmethod
    def feed(self, config: Any, inputs: Sequence[Any]) -> Mapping[str, Rows]:
        """The host inputs of a call from its prepared observations, but for `guidance` and noise."""

    def normalised(self, transforms: Any, result: np.ndarray) -> np.ndarray:
        """The normalised actions float32 (B, H, A) of a call's `result`. Raises ActionError where it is no chunk."""
        return result

    def rehearse(self, config: Any, shape: Any, host: Mapping[str, np.ndarray]) -> None:
        """Make zeroed host inputs of a shape valid: any values will do, but none that no call would have."""
        del config, shape, host

    def guide(self, config: Any, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        """One row of the inputs in `guidance`, from the previous chunk float32 (k, A), k at most the horizon."""
        raise ConfigError(f"{self.name}: this family has no real-time chunking")

    # -- measuring it ---------------------------------------------------------------------------------------------

    @abstractmethod
    def internals(self, config: Any, outputs: Mapping[str, Tensor], inputs: Any) -> dict[str, Tensor]:
        """What `parity` compares besides the actions to find a culprit: from all components' outputs of a call on one
        observation, `inputs`, without what stands for nothing (padding)."""

    @abstractmethod
    def work(self, config: Any, inputs: Any, steps: int, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
        """Work of each component on one prepared observation."""

    @abstractmethod
    def published(self, horizon: int | None = None) -> Any:
        """The sizes that `bench` times, with another horizon if one is given."""

    sweep: tuple[int, ...] = (10, 3, 1)
    """Denoising steps that `bench` times, unless others are asked for."""

    def sweep_of(self, config: Any) -> tuple[int, ...]:
        """Denoising steps that `bench` times of a checkpoint: `sweep`, and before it the checkpoint's own."""
        own = self.steps(config)
        return self.sweep if own in self.sweep else (own, *self.sweep)

    views: int = 2
    """Images a call in `bench`, unless another number is asked for."""

    @abstractmethod
    def stand_in(self, config: Any, views: int) -> Any:
        """Transforms for a network with random weights: some robot's, with statistics that change nothing."""

    @abstractmethod
    def random_observation(self, transforms: Any, rng: np.random.Generator) -> dict[str, Any]:
        """An observation that suits transforms of this family, of random numbers."""

    systems: Mapping[str, Mapping[str, EnginePrecision]] = {}
    """What `bench` can time besides eager and native BF16: names, each with its components in FP8 or INT8."""
    baselines: tuple[str, ...] = ()
    """Other projects' code for the same model that `bench` can time: first as it is, then through torch.compile."""

    def systems_in(self, precision: EnginePrecision) -> dict[str, tuple[str, ...]]:
        """Of `systems` those that have nothing but this beside BF16, each with its components."""
        return {name: tuple(parts) for name, parts in self.systems.items() if {*parts.values()} == {precision}}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Callable[[Mapping[str, Any]], Any]:
        """`infer(observation)` of a baseline with random weights. Raises DependencyError where it is not installed."""
        raise ConfigError(f"systems: {self.name} has no baseline {name!r}")

    realtime_vla: tuple[str, ...] = ()
    """Systems that `bench` makes from a checkout of realtime-vla."""

    def from_checkout(self, name: str, checkout: Path, *, views: int, horizon: int, tokens: int) -> Callable[..., Any]:
        """`infer(observation)` of one of `realtime_vla` with random weights, ten denoising steps and a prompt of
        `tokens`. Raises ConfigError for a folder that is no checkout, DependencyError for what it needs."""
        raise ConfigError(f"realtime-vla: it has no code for {self.name}, got {checkout}")

    # -- FP8 ------------------------------------------------------------------------------------------------------

    def needs_scales(self, specs: Mapping[str, EngineSpec]) -> bool:
        """Whether some engine is to quantise its inputs."""
        return False

    def calibrate(self, model: Network, inputs: Sequence[Any], source: str) -> Scales:
        """FP8 scales from prepared observations. Raises ConfigError for a family without FP8."""
        raise ConfigError(f"{self.name}: this family has no products in FP8")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @abstractmethod
    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a checkpoint's folder is this family's, from its config.json (empty where there is none) and the
        names and shapes of its tensors (empty where there are none). Refuses by answering no, never by raising."""

    def hint(self, folder: Path) -> str | None:
        """What to do about a folder that no family recognises, but that looks like one of this family's."""
        return None

    @staticmethod
    @abstractmethod
    def load(
        folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
    ) -> tuple[Network, Transforms]:
        """The network with a folder's weights, and the transforms around it. Raises CheckpointError, ConfigError.

        A network may come with an `origin` instead of weights, if the family's components fetch what they compute with
        (`Component.fetch`) and its native programs prepare from parts that are `present`.
        """


def family_named(name: str) -> Family:
    """A family by name. Raises ConfigError that lists those there are."""
    if name not in FAMILIES:
        raise ConfigError(unknown("model", name, FAMILIES))
    module, _, attribute = FAMILIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def sized(name: str) -> tuple[Family, Callable[..., Any]]:
    """The family that has a published size of this name, and the size's function. Raises ConfigError."""
    families = [family_named(n) for n in FAMILIES]
    for family in families:
        if name in family.sizes:
            return family, family.sizes[name]
    raise ConfigError(unknown("model", name, sorted(size for family in families for size in family.sizes)))
