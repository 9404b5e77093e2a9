"""What families have in common: prompts of several lengths, in buckets; those of vision → image_tokens → kv_cache →
keys, values → …, views of one size and a state; and those that then denoise, guidance by a previous chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families import stand_in
from vla_accel.families.family import IMAGES, Family, Rows, Shape, Store, Work, products_of
from vla_accel.fp8 import Scales
from vla_accel.nn.calibration import calibration
from vla_accel.nn.denoise import denoise_component
from vla_accel.nn.kv_cache import kv_cache_component
from vla_accel.nn.network import Network
from vla_accel.nn.padding import PROMPT_BUCKET, padded_prompt
from vla_accel.nn.quantize import calibrate, load_modelopt
from vla_accel.nn.random_weights import Drawn, drawn_model
from vla_accel.nn.rtc import chunk_weights
from vla_accel.nn.variants import needs_scales
from vla_accel.nn.vision import vision_component
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Inputs, Processor


@dataclass(frozen=True)
class PromptShape(Shape):
    """`views`: images of each observation; `tokens`: prompt tokens; `padded`: rows may have fewer, and `lengths` say
    how many; `mapped`: vision reads pixel maps (`vla_accel.pictures`)."""

    views: int
    tokens: int
    padded: bool
    mapped: bool = False

    @property
    def title(self) -> str:
        sizes = "" if self.cameras is None else " of " + ", ".join(f"{h} x {w}" for h, w in self.cameras.sizes)
        return f"{self.views} views{sizes} and {self.tokens} prompt tokens"


class TextFamily(Family):
    """A family with a text prompt, whose config has `action_horizon`, `action_dim` and `max_token_len`."""

    network_class: type[Network]
    store_class: Callable[[Any, Scales | None], Store]
    drawn: type[Drawn] = Drawn
    """What draws its random weights."""

    def network(self, config: Any) -> Network:
        return self.network_class.empty(config)

    def store(self, model: Network, scales: Scales | None) -> Store:
        return self.store_class(model, scales)

    def random(self, config: Any, *, seed: int, device: str, dtype: torch.dtype) -> Network:
        return drawn_model(self.network_class, config, seed=seed, device=device, dtype=dtype, drawn=self.drawn)

    def action_shape(self, config: Any) -> tuple[int, int]:
        return config.action_horizon, config.action_dim

    def prompt_place(
        self, inputs: Sequence[Any], specs: Mapping[str, EngineSpec], readers: Sequence[str]
    ) -> tuple[int, bool]:  # fmt: skip
        """Tokens that these prompts get, and whether rows may have fewer. `readers`: parts that read the prompt."""
        counts = [len(i.tokens) for i in inputs]
        # The native engine takes lengths: where it runs a part that reads the prompt, or may have to step in for
        # another, all parts must agree, and so must engines built ahead of time.
        bucketed = any("native" in (specs[n].engine, *specs[n].fallback) for n in readers)
        tokens = padded_prompt(max(counts)) if bucketed else max(counts)
        return tokens, bucketed or min(counts) != tokens

    def shapes(self, config: Any, shape: Any) -> Sequence[Any]:
        if not shape.padded:
            return (shape,)
        longest = padded_prompt(config.max_token_len)
        return [replace(shape, tokens=tokens) for tokens in range(PROMPT_BUCKET, longest + 1, PROMPT_BUCKET)]

    def shapes_of(self, transforms: Any, observation: Mapping[str, Any], shape: Any) -> Sequence[Any]:
        if not shape.padded or not hasattr(transforms, "token_counts"):
            return (shape,)
        counts = transforms.token_counts(observation[transforms.preset.prompt])
        first, last = (padded_prompt(min(count, transforms.max_token_len)) for count in counts)
        tokens = sorted(range(first, last + 1, PROMPT_BUCKET), key=lambda n: abs(n - shape.tokens))
        return [replace(shape, tokens=n) for n in tokens]


class PromptedFamily(TextFamily):
    """A family whose config is one of a `models.prefixed.PrefixNetwork`, whose transforms are a `Processor`, and whose
    components are vision, kv_cache and another, `last`."""

    host_embeddings = ("kv_cache",)

    # -- running it -----------------------------------------------------------------------------------------------

    def components(
        self, model: Any, shape: PromptShape, *, store: Any = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        vision = vision_component(model, shape.batch, shape.views, store, mapped=shape.mapped)
        return vision, self.kv_cache(model, shape, store, scales), self.last(model, shape, store, rtc)

    def kv_cache(self, model: Any, shape: PromptShape, store: Any, scales: Scales | None) -> Component:
        return kv_cache_component(model, shape.batch, shape.views, shape.tokens, shape.padded, store, scales)

    @abstractmethod
    def last(self, model: Any, shape: PromptShape, store: Any, rtc: RtcConfig | None) -> Component:
        """What makes the result from keys and values."""

    def shape(
        self, config: Any, inputs: Sequence[Inputs], steps: int, specs: Mapping[str, EngineSpec]
    ) -> PromptShape:  # fmt: skip
        views = len(inputs[0].images)
        if any(len(i.images) != views for i in inputs):
            raise ObservationError(f"batch: expected as many views of each, got {[len(i.images) for i in inputs]}")
        tokens, padded = self.prompt_place(inputs, specs, self.parts[1:])
        mapped, cameras = inputs[0].pixel_maps is not None, inputs[0].cameras
        return PromptShape(len(inputs), steps, views, tokens, padded, mapped, cameras=cameras)

    def image_feed(self, config: Any, seen: Sequence[Observed | Inputs]) -> Mapping[str, Rows]:
        maps = [one.pixel_maps for one in seen if one.pixel_maps is not None]
        return {IMAGES: [image for one in seen for image in one.images]} | ({"pixel_maps": maps} if maps else {})

    def feed(self, config: Any, inputs: Sequence[Inputs]) -> Mapping[str, Rows]:
        return {
            **self.image_feed(config, inputs),
            "tokens": [i.tokens for i in inputs],
            "lengths": np.array([config.prefix_tokens(len(i.images), len(i.tokens)) for i in inputs], np.int32),
            "state": [i.state for i in inputs],
        }

    def rehearse(self, config: Any, shape: PromptShape, host: Mapping[str, np.ndarray]) -> None:
        # A length of zero would leave rows without a key.
        if "lengths" in host:
            host["lengths"][:] = config.prefix_tokens(shape.views, shape.tokens)

    # -- measuring it ---------------------------------------------------------------------------------------------

    def internals(self, config: Any, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), and `keys` and `values` (depth, S, kv_heads, d) of the real tokens."""
        real = config.prefix_tokens(len(inputs.images), len(inputs.tokens))
        return {
            "image_tokens": outputs["image_tokens"][0],
            "keys": outputs["keys"][:, 0, :real],
            "values": outputs["values"][:, 0, :real],
        }

    def stand_in(self, config: Any, views: int) -> Processor:
        return stand_in.processor(config, views)

    def random_observation(self, transforms: Processor, rng: np.random.Generator) -> dict[str, Any]:
        side = transforms.image_size
        prompt = transforms.ordinary_prompt(stand_in.PROMPT)
        return stand_in.observation(transforms, (side, side), rng, prompt)

    # -- FP8 ------------------------------------------------------------------------------------------------------

    def needs_scales(self, specs: Mapping[str, EngineSpec]) -> bool:
        return needs_scales(specs)

    def calibrate(self, model: Any, inputs: Sequence[Inputs], source: str) -> Scales:
        load_modelopt()  # where it is missing that is said before the weights are read
        with model.present():
            rows = [(i.images, i.tokens, i.state) for i in inputs]
            maps = [() if i.pixel_maps is None else (i.pixel_maps,) for i in inputs]
            arguments = [(*row, *its) for row, its in zip(rows, maps, strict=True)]
            return calibrate(model, calibration(model), arguments, source)


class DenoisingFamily(PromptedFamily):
    """One whose network is a `models.flow.FlowNetwork`."""

    parts = ("vision", "kv_cache", "denoise")
    guidance = ("target", "weights")
    rtc_settings = tuple(field.name for field in fields(RtcConfig))
    systems: ClassVar = {
        "native-fp8": {"kv_cache": "fp8"},
        "native-fp8-vision": {"vision": "fp8", "kv_cache": "fp8"},
        "native-fp8-int8-denoise": {"kv_cache": "fp8", "denoise": "int8"},
        "native-fp8-vision-int8-denoise": {"vision": "fp8", "kv_cache": "fp8", "denoise": "int8"},
        "native-int8-denoise": {"denoise": "int8"},
        "native-int8": {"kv_cache": "int8"},
        "native-int8-vision": {"vision": "int8", "kv_cache": "int8"},
    }

    def steps(self, config: Any) -> int:
        return config.num_steps

    def shallow(self, config: Any, depth: int) -> Any:
        """Prefix and expert; vision stays whole."""
        return replace(
            config, prefix=replace(config.prefix, depth=depth), expert=replace(config.expert, depth=depth)
        )  # fmt: skip

    def last(self, model: Any, shape: PromptShape, store: Any, rtc: RtcConfig | None) -> Component:
        prefix = model.config.prefix_tokens(shape.views, shape.tokens)
        return denoise_component(model, shape.batch, prefix, shape.steps, shape.padded, store, rtc)

    def guide(self, config: Any, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        most = rtc.longest_delay(config.action_horizon)
        if most is not None and delay > min(most, len(previous)):
            raise ObservationError(
                f"inference_delay: expected at most {min(most, len(previous))} actions, of {len(previous)} that are "
                f"left and {most} that the checkpoint was trained for, got {delay}"
            )
        target = np.zeros(self.action_shape(config), np.float32)
        target[: len(previous)] = previous
        weights = chunk_weights(rtc, delay, len(previous), config.action_horizon)
        return {"target": target, "weights": weights.numpy()}


def prefix_work(config: Any, inputs: Inputs, specs: Mapping[str, EngineSpec]) -> dict[str, Work]:
    """Of vision and kv_cache on one prepared observation: the last prefix layer stops after its keys and values.
    `config`: of a `models.paligemma.PaliGemma`."""
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
        "vision": Work(float(vision), precision=products_of(specs["vision"])),
        "kv_cache": Work(float(prefix), precision=products_of(specs["kv_cache"])),
    }
