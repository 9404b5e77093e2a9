"""`BenchCard`: what only benchmarks, `parity` and ahead-of-time builds need of a family, from the `bench` module of its
folder. Also dummy transforms for networks with random weights."""

from __future__ import annotations

import importlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.checkpoints.lerobot import Processors
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import Family, ModelConfig
from vla_accel.families.overrides import processor_of
from vla_accel.fp8 import FORMATS
from vla_accel.nn.network import Network
from vla_accel.nn.random_weights import Drawn, drawn_model
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Inputs, Processor
from vla_accel.transforms.robots import LIBERO, Preset

C = TypeVar("C", bound=ModelConfig)
X = TypeVar("X")
P = TypeVar("P", bound=Processor)
Infer: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""`infer(observation)` of another project's model with random weights."""
PROMPT = "pick up the black bowl between the plate and the ramekin and place it on the plate"
_VIEWS = ("observation/image", "observation/wrist_image", "observation/right_wrist_image", "observation/back_image")


@dataclass(frozen=True)
class Work:
    """The work of a component in one call: the time of either bounds it from below.

    Attributes:
        flop: Operations of its products in `precision`; a multiplication and an addition count as two.
        bytes: Bytes that it must read.
        precision: Of the products.
    """

    flop: float
    bytes: float = 0.0
    precision: Literal["bf16", "fp8", "int8"] = "bf16"


def product_precision(spec: EngineSpec) -> Literal["bf16", "fp8", "int8"]:
    """Return the precision of a component's products, for its `Work`."""
    return spec.precision if spec.precision in ("fp8", "int8") else "bf16"


def weight_bytes(spec: EngineSpec) -> int:
    """Return the bytes of one weight of a component's products."""
    return 1 if spec.precision in FORMATS else 2


class BenchCard(ABC, Generic[C, X]):
    """How a family is measured without a checkpoint, and against what."""

    family: Family[Any, Any, Any]
    drawn: type[Drawn] = Drawn
    """Draws the random weights."""
    sweep: tuple[int, ...] = (10, 3, 1)
    """Denoising steps that `bench` times by default."""
    own_steps: bool = True
    """Whether `bench` also times a checkpoint's own number of steps by default."""
    views: int = 2
    """Images of a call in `bench` by default."""
    quantised: tuple[str, ...] = ()
    """Shipped configurations in FP8 that `bench` times by default."""
    aliases: Mapping[str, str] = {}
    """Other names of shipped configurations."""
    baselines: tuple[str, ...] = ()
    """Other projects' code for the same model: first eager, then through torch.compile."""
    realtime_vla: tuple[str, ...] = ()
    """Systems of a checkout of realtime-vla."""

    def random(self, config: C, *, seed: int, device: str, dtype: torch.dtype) -> Network:
        """Return a network in eval mode whose random weights keep activations of order one; they are drawn when they
        are read."""
        kind: type[Network] = type(self.family.network(config))
        return drawn_model(kind, config, seed=seed, device=device, dtype=dtype, drawn=self.drawn)

    def shallow(self, config: C, depth: int) -> C:
        """Return the sizes with `depth` layers in the large stacks, for measurements of builds."""
        raise ConfigError(f"depth: {self.family.name} cannot be made shallower, got {depth}")

    def sweep_of(self, config: C) -> tuple[int, ...]:
        """Return the denoising steps that `bench` times of a checkpoint by default."""
        own = config.num_steps
        return self.sweep if not self.own_steps or own in self.sweep else (own, *self.sweep)

    @abstractmethod
    def published(self, horizon: int | None = None) -> C:
        """Return the sizes that `bench` times. `horizon` replaces the usual one."""

    @abstractmethod
    def dummy(self, config: C, views: int) -> Any:
        """Return transforms of LIBERO's robot with statistics that change nothing."""

    @abstractmethod
    def random_observation(self, transforms: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return an observation of random numbers for these transforms."""

    @abstractmethod
    def internals(self, config: C, outputs: Mapping[str, Tensor], inputs: X) -> dict[str, Tensor]:
        """Return the intermediate results that `parity` compares in addition to the actions, without padding.

        Args:
            config: The model's sizes.
            outputs: Outputs of all components of a call on one observation.
            inputs: The prepared observation.
        """

    @abstractmethod
    def work(self, config: C, inputs: X, steps: int, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
        """Return the work of each component on one prepared observation."""

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        """Return one of `baselines` with random weights. Raises DependencyError if it is not installed."""
        raise ConfigError(f"systems: {self.family.name} has no baseline {name!r}")

    def from_checkout(self, name: str, checkout: Path, *, views: int, horizon: int, tokens: int) -> Infer:
        """Return one of `realtime_vla` with random weights, ten denoising steps and a prompt of `tokens`. Raises
        ConfigError for a folder that is no checkout, DependencyError for a missing package."""
        raise ConfigError(f"realtime-vla: it has no code for {self.family.name}, got {checkout}")


def bench_card(family: Family[Any, Any, Any]) -> BenchCard[Any, Any]:
    """Return the card of a family, from `CARDS` in the `bench` module of its folder."""
    folder = type(family).__module__.rpartition(".")[0]
    return importlib.import_module(f"{folder}.bench").CARDS[family.name]


# -- dummy transforms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DummyTokenizer:
    """A tokenizer of one token a word, for models whose tokenizer cannot be bundled."""

    vocab_size: int

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        words = text.replace("\n", " \n").split(" ")
        ids = [3 + zlib.crc32(word.encode()) % (self.vocab_size - 3) for word in words if word]
        return [2, *ids] if add_bos else ids

    def finish(self, ids: list[int]) -> list[int]:
        return ids


def libero(views: int) -> Preset:
    """Return LIBERO's robot with any number of views."""
    if not 1 <= views <= len(_VIEWS):
        raise ConfigError(f"views: expected 1 to {len(_VIEWS)}, got {views}")
    return replace(LIBERO, images=_VIEWS[:views], ignored_images=())


def dummy_processor(config: Any, views: int, kind: type[P] = Processor, **fields: Any) -> P:
    """Return LIBERO's transforms with statistics that change nothing; `fields` of the class `kind`."""
    robot = Processors(libero(views), Normaliser.identity(8), Normaliser.identity(7))
    fields = {"discrete_state": False, **fields}
    return processor_of(kind, config, robot, DummyTokenizer(config.vocab_size), PolicyConfig(), **fields)


def libero_observation(
    transforms: Any, size: tuple[int, int], rng: np.random.Generator, prompt: str = PROMPT
) -> dict[str, Any]:
    """Return noise as images of `size` (height, width), a state of normal numbers before unnormalization, and a LIBERO
    prompt of about 20 tokens."""
    preset = transforms.preset
    images = {k: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for k in preset.images}
    state = transforms.state_at(rng.standard_normal(preset.state_dim))
    return {**images, **preset.split(state), preset.prompt: prompt}


# -- cards of families with a prompt ------------------------------------------------------------------------------


class PromptedBench(BenchCard[C, Inputs]):
    """The card of a `PromptedFamily`."""

    def dummy(self, config: C, views: int) -> Processor:
        return dummy_processor(config, views)

    def random_observation(self, transforms: Processor, rng: np.random.Generator) -> dict[str, Any]:
        side = transforms.image_size
        return libero_observation(transforms, (side, side), rng, transforms.ordinary_prompt(PROMPT))

    def internals(self, config: Any, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), and `keys` and `values` (depth, S, kv_heads, d) of the real tokens."""
        real = config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        return {
            "image_tokens": outputs["image_tokens"][0],
            "keys": outputs["keys"][:, 0, :real],
            "values": outputs["values"][:, 0, :real],
        }


class DenoisingBench(PromptedBench[C]):
    """The card of a `DenoisingFamily`."""

    quantised = ("native_fp8", "native_fp8_vision")

    def shallow(self, config: Any, depth: int) -> Any:
        """Change prefix and expert; vision keeps its depth."""
        return replace(
            config, prefix=replace(config.prefix, depth=depth), expert=replace(config.expert, depth=depth)
        )  # fmt: skip


def prefix_work(config: Any, inputs: Inputs, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
    """Return the work of vision and kv_cache on one observation for a `nn.paligemma.PaliGemma`. The last prefix layer
    stops after its keys and values."""
    v, p = config.vision, config.prefix
    image_tokens = len(inputs.images) * v.tokens
    per_token = 4 * v.width * v.width + 2 * v.width * v.mlp_dim
    vision = v.depth * (2 * image_tokens * per_token + 4 * image_tokens * v.tokens * v.width)
    vision += 2 * image_tokens * (3 * v.patch_size**2 * v.width + v.width * p.width)
    tokens = image_tokens + len(inputs.tokens)
    attended = p.heads * p.head_dim
    layer = p.width * (p.qkv_dim + attended + 3 * p.mlp_dim)
    last = p.width * 2 * p.kv_heads * p.head_dim
    prefix = 2 * tokens * ((p.depth - 1) * layer + last) + (p.depth - 1) * 4 * tokens * tokens * attended
    return {
        "vision": Work(float(vision), precision=product_precision(specs["vision"])),
        "kv_cache": Work(float(prefix), precision=product_precision(specs["kv_cache"])),
    }
