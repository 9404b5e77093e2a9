"""`BenchCard`: the part of a family for benchmarks, `parity`, `calibrate` and ahead-of-time builds, in its `bench.py`.
Also dummy transforms for networks with random weights."""

from __future__ import annotations

import functools
import importlib
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from vla_accel.checkpoints.lerobot import Processors
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError, unknown
from vla_accel.families.family import FAMILIES, Family, ModelConfig, family_named
from vla_accel.families.overrides import processor_of, transforms_of
from vla_accel.fp8 import FORMATS, Scales
from vla_accel.nn.calibration import calibrate
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.random_weights import Drawn, drawn_model
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Inputs, Processor
from vla_accel.transforms.robots import LIBERO, Preset

C = TypeVar("C", bound=ModelConfig)
X = TypeVar("X")
P = TypeVar("P", bound=Processor)
T = TypeVar("T")
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


class BenchCard(ABC, Generic[C, X]):
    """How a family is measured without a checkpoint, and against what."""

    family: Family[Any, Any, Any]
    sizes: Mapping[str, Callable[..., C]]
    """Published sizes by name; a function takes the fields to change."""
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
    bound_by_reading: tuple[str, ...] = ()
    """Components that take less arithmetic than reading, in addition to the last."""

    def random(self, config: C, *, seed: int, device: str, dtype: torch.dtype) -> Network:
        """Return a network in eval mode whose random weights keep activations of order one; they are drawn when they
        are read."""
        return drawn_model(self.family.network_class, config, seed=seed, device=device, dtype=dtype, drawn=self.drawn)

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

    def work(self, config: C, inputs: X, steps: int, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
        """Return the work of each component on one prepared observation, with the bytes of weights and inputs for a
        component that is bound by reading. The last component reads its inputs at every step."""
        *_, last = self.family.parts
        eager = dict.fromkeys(self.family.parts, EngineSpec("eager"))
        shapes = (self.family.shape(config, [inputs], Schedule.uniform(count), eager) for count in (1, 2))
        first, second = (_counted(self.family, config, shape) for shape in shapes)
        found = {}
        for name, one in first.items():
            precision, times = specs[name].precision, steps - 1 if name == last else 0
            flop = one.flop + times * (second[name].flop - one.flop)
            read = one.bytes(precision) + times * (second[name].bytes(precision) - one.bytes(precision))
            reads = name == last or name in self.bound_by_reading
            products = self.family.capabilities.quantised.get(name, {}).get(specs[name].engine)
            quantised = precision in FORMATS and products is not None and products.activations
            found[name] = Work(
                float(flop),
                float(read + times * one.input_bytes) if reads else 0.0,
                precision if quantised else "bf16",  # type: ignore[arg-type]
            )
        return found

    def calibrate(self, model: Any, inputs: Sequence[X], source: str) -> Scales:
        """Return scales measured on prepared observations. Raises ConfigError for a family that needs none."""
        raise ConfigError(f"{self.family.name}: this family quantizes no inputs and needs no calibration")

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


def sized(name: str) -> tuple[BenchCard[Any, Any], Callable[..., Any]]:
    """Return the card of the family with a published size of this name, and the function of the size."""
    cards = [bench_card(family_named(n)) for n in FAMILIES]
    for card in cards:
        if name in card.sizes:
            return card, card.sizes[name]
    raise ConfigError(unknown("model", name, sorted(size for card in cards for size in card.sizes)))


@dataclass(frozen=True)
class _Counted:
    """A call of a component: FLOP, bytes of its inputs, the number of weights that it reads of each product, and the
    products whose weights FP8 and INT8 quantize."""

    flop: int
    input_bytes: int
    weights: Mapping[str, int]
    quantised: Sequence[str]

    def bytes(self, precision: str) -> int:
        low = self.quantised if precision in FORMATS else ()
        return self.input_bytes + sum(count * (1 if name in low else 2) for name, count in self.weights.items())


class _WeightReads(TorchFunctionMode):
    """Counts the weights that linear layers and convolutions read, by product."""

    PRODUCTS = nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d

    def __init__(self, model: Network) -> None:
        super().__init__()
        # Products outside of layers are never quantized. A crossing layer has only the first part of qkv_proj.
        names = {id(p): name.split(".") for name, p in model.named_parameters()}
        inside = {key: parts[-2] for key, parts in names.items() if any(part.isdigit() for part in parts)}
        self._products = {key: "qkv_proj" if name == "q_proj" else name for key, name in inside.items()}
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS:
            self.counts[self._products.get(id(args[1]), "")] += args[1].numel()
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=32)
def _counted(family: Family[Any, Any, Any], config: Any, shape: Any) -> Mapping[str, _Counted]:
    """Run every component on the meta device, in eager mode."""
    meta, found = torch.device("meta"), {}
    with meta:
        model = family.network_class(config).to_compute_dtype(torch.bfloat16).requires_grad_(False).eval()
    for component in family.components(model, shape):
        inputs = [spec.empty(meta) for spec in component.inputs]
        with torch.inference_mode(), FlopCounterMode(display=False) as flop, _WeightReads(model) as reads:
            component.module(*inputs)
        quantised = component.quantised["native"].names if "native" in component.quantised else ()
        size = sum(tensor.nbytes for tensor in inputs)
        found[component.name] = _Counted(flop.get_total_flops(), size, reads.counts, quantised)
    return found


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


def dummy_processor(
    config: Any, views: int, kind: type[P] = Processor, tokenizer: DummyTokenizer | None = None, **fields: Any
) -> P:
    """Return LIBERO's transforms with statistics that change nothing; `fields` of the class `kind`."""
    tokenizer = tokenizer or DummyTokenizer(config.vocab_size)
    fields = {"discrete_state": False, **fields}
    return processor_of(kind, config, _unscaled(views), tokenizer, PolicyConfig(), **fields)


def dummy_transforms(
    kind: Callable[..., T], config: Any, views: int, tokenizer: DummyTokenizer, /, **fields: Any
) -> T:  # fmt: skip
    """As `dummy_processor`, for a class that is no `Processor`."""
    return transforms_of(kind, config, _unscaled(views), tokenizer, PolicyConfig(), **fields)


def _unscaled(views: int) -> Processors:
    preset = libero(views)
    return Processors(preset, Normaliser.identity(preset.state_dim), Normaliser.identity(preset.action_dim))


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

    def calibrate(self, model: Any, inputs: Sequence[Inputs], source: str) -> Scales:
        maps = [() if i.pixel_maps is None else (i.pixel_maps,) for i in inputs]
        rows = [(i.images, i.tokens, i.state, *its) for i, its in zip(inputs, maps, strict=True)]
        return calibrate(model, rows, source)

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
