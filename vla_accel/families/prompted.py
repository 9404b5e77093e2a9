"""What families with a text prompt share: prompt lengths in buckets, components vision → kv_cache → a last one, and
real-time chunking of flow networks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from vla_accel.component import Component
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ObservationError
from vla_accel.families.family import IMAGES, C, Capabilities, Chunking, Family, Rows, S, Shape, X
from vla_accel.fp8 import Scales
from vla_accel.nn.denoise import denoise_component
from vla_accel.nn.flow import Schedule
from vla_accel.nn.padding import PROMPT_BUCKET, padded_prompt
from vla_accel.nn.prefix_components import kv_cache_component, vision_component
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.rtc import chunk_weights
from vla_accel.transforms.observations import Observed
from vla_accel.transforms.processing import Inputs

T = TypeVar("T", bound="TextShape")


@dataclass(frozen=True)
class TextShape(Shape):
    """A shape with a text prompt.

    Attributes:
        views: Images of each observation.
        tokens: Prompt tokens.
        padded: Whether rows may have fewer tokens; `lengths` then holds their number.
    """

    views: int
    tokens: int
    padded: bool

    def buckets(self: T, config: Any) -> Sequence[T]:
        if not self.padded:
            return (self,)
        longest = padded_prompt(config.max_token_len)
        return [replace(self, tokens=tokens) for tokens in range(PROMPT_BUCKET, longest + 1, PROMPT_BUCKET)]

    def reachable(self: T, transforms: Any, observation: Mapping[str, Any]) -> Sequence[T]:
        if not self.padded or not hasattr(transforms, "token_counts"):
            return (self,)
        counts = transforms.token_counts(observation[transforms.preset.prompt])
        first, last = (padded_prompt(min(count, transforms.max_token_len)) for count in counts)
        tokens = sorted(range(first, last + 1, PROMPT_BUCKET), key=lambda n: abs(n - self.tokens))
        return [replace(self, tokens=n) for n in tokens]

    def row_length(self, config: Any) -> int:
        """Return the value of `lengths` for a row with all tokens."""
        return self.tokens

    def make_valid(self, config: Any, host: Mapping[str, np.ndarray]) -> None:
        # With a length of zero, attention would have no keys.
        if "lengths" in host:
            host["lengths"][:] = self.row_length(config)


@dataclass(frozen=True)
class PromptShape(TextShape):
    """`mapped`: vision reads pixel maps (`vla_accel.pictures`)."""

    mapped: bool = False

    @property
    def title(self) -> str:
        sizes = "" if self.cameras is None else " of " + ", ".join(f"{h} x {w}" for h, w in self.cameras.sizes)
        return f"{self.views} views{sizes} and {self.tokens} prompt tokens"

    def row_length(self, config: Any) -> int:
        return config.prefix_tokens(self.views, self.tokens)


class TextFamily(Family[C, X, S]):
    """A family with a text prompt, whose config has `max_token_len`."""

    def length(self, config: C, inputs: Any) -> int:
        """Return the value of `lengths` for an observation: its real tokens."""
        return len(inputs.tokens)

    def image_feed(self, config: C, seen: Sequence[Any]) -> Mapping[str, Rows]:
        return {IMAGES: [image for one in seen for image in one.images]}

    def feed(self, config: C, inputs: Sequence[Any]) -> Mapping[str, Rows]:
        return {
            **self.image_feed(config, inputs),
            "tokens": [i.tokens for i in inputs],
            "lengths": np.array([self.length(config, i) for i in inputs], np.int32),
            "state": [i.state for i in inputs],
        }

    def prompt_bucket(
        self, inputs: Sequence[Any], specs: Mapping[str, EngineSpec], readers: Sequence[str]
    ) -> tuple[int, bool]:
        """Return the prompt tokens of a shape, and whether rows may have fewer.

        The native engine takes lengths. If it runs (or may run, as a fallback) one of the components that read the
        prompt, `readers`, all of them must agree, and so must engines that are built ahead of time.
        """
        counts = [len(i.tokens) for i in inputs]
        bucketed = any("native" in (specs[n].engine, *specs[n].fallback) for n in readers)
        tokens = padded_prompt(max(counts)) if bucketed else max(counts)
        return tokens, bucketed or min(counts) != tokens


def prompt_capabilities(parts: Sequence[str], *settings: str) -> Capabilities:
    """Return the capabilities of a `PromptedFamily`."""
    return Capabilities(True, ("kv_cache",), {name: QUANTISED[name] for name in parts}, settings)


class PromptedFamily(TextFamily[C, Inputs, PromptShape]):
    """A family of a `nn.prefixed.PrefixNetwork` with a `Processor`, whose components are vision, kv_cache and another,
    `last`."""

    def components(
        self, model: Any, shape: PromptShape, *, store: Any = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        vision = vision_component(model, shape.batch, shape.views, store, mapped=shape.mapped)
        cache = kv_cache_component(model, shape.batch, shape.views, shape.tokens, shape.padded, store, scales)
        return vision, cache, self.last(model, shape, store, rtc)

    @abstractmethod
    def last(self, model: Any, shape: PromptShape, store: Any, rtc: RtcConfig | None) -> Component:
        """Return the component that computes the result from keys and values."""

    def shape(
        self, config: C, inputs: Sequence[Inputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> PromptShape:  # fmt: skip
        views = len(inputs[0].images)
        if any(len(i.images) != views for i in inputs):
            raise ObservationError(f"batch: expected equally many views, got {[len(i.images) for i in inputs]}")
        tokens, padded = self.prompt_bucket(inputs, specs, self.parts[1:])
        mapped, cameras = inputs[0].pixel_maps is not None, inputs[0].cameras
        return PromptShape(len(inputs), schedule, views, tokens, padded, mapped, cameras=cameras)

    def length(self, config: Any, inputs: Inputs) -> int:
        return config.prefix_tokens(len(inputs.images), len(inputs.tokens))

    def image_feed(self, config: C, seen: Sequence[Observed | Inputs]) -> Mapping[str, Rows]:
        maps = [one.pixel_maps for one in seen if one.pixel_maps is not None]
        return {**super().image_feed(config, seen), **({"pixel_maps": maps} if maps else {})}


class FlowChunking(Chunking[C]):
    """Real-time chunking of flow networks: guidance by the previous chunk, or pinned actions if trained for it."""

    inputs = ("target", "weights")
    settings = tuple(field.name for field in fields(RtcConfig))

    def guide(self, config: C, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        most = rtc.longest_delay(config.action_horizon)
        if most is not None and delay > min(most, len(previous)):
            raise ObservationError(
                f"inference_delay: expected at most {min(most, len(previous))} actions, of {len(previous)} that are "
                f"left and {most} that the checkpoint was trained for, got {delay}"
            )
        target = np.zeros((config.action_horizon, config.action_dim), np.float32)
        target[: len(previous)] = previous
        weights = chunk_weights(rtc, delay, len(previous), config.action_horizon)
        return {"target": target, "weights": weights.numpy()}


class DenoisingFamily(PromptedFamily[C]):
    """A family of a `nn.flow.FlowNetwork`."""

    parts = ("vision", "kv_cache", "denoise")
    capabilities = prompt_capabilities(parts)
    chunking = FlowChunking()
    flow = True

    def last(self, model: Any, shape: PromptShape, store: Any, rtc: RtcConfig | None) -> Component:
        prefix = model.config.prefix_tokens(shape.views, shape.tokens)
        return denoise_component(model, shape.batch, prefix, shape.schedule, shape.padded, store, rtc)
