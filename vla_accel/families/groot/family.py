"""GR00T N1.7 as a model family: vision → image_tokens, deepstack → kv_cache → keys and values → denoise → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vla_accel.checkpoints.weights import read_json
from vla_accel.component import Component
from vla_accel.config import EngineSpec, RtcConfig
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families import stand_in
from vla_accel.families.family import IMAGES, Rows, Shape, Work, weight_bytes
from vla_accel.families.groot import lerobot as groot_lerobot
from vla_accel.families.groot import stand_in as groot_stand_in
from vla_accel.families.groot.checkpoint import OTHERS, prefix_of
from vla_accel.families.groot.components import CACHE, groot_components
from vla_accel.families.groot.folder import load_folder
from vla_accel.families.groot.language import Layout
from vla_accel.families.groot.native import GrootStore
from vla_accel.families.groot.network import Groot, GrootConfig, groot_n17, overlap_weights
from vla_accel.families.groot.transforms import GrootInputs, GrootProcessor
from vla_accel.families.groot.vision import Grid
from vla_accel.families.prompted import TextFamily
from vla_accel.fp8 import Scales
from vla_accel.nn.random_weights import DrawnGroot
from vla_accel.transforms.observations import Observed

MODEL_TYPES = {"gr00tn1d7", "gr00t_n1d7", "gr00t_n1_7"}


@dataclass(frozen=True)
class GrootShape(Shape):
    """`views`: images of each observation, of `grid` tokens each; `tokens`: text tokens; `padded`: rows may have fewer,
    and `lengths` say how many."""

    views: int
    grid: Grid
    tokens: int
    padded: bool

    @property
    def layout(self) -> Layout:
        return Layout(self.views, self.grid, self.tokens)

    @property
    def title(self) -> str:
        rows, columns = self.grid
        return f"{self.views} views of {rows} x {columns} tokens and {self.tokens} text tokens"


class GrootFamily(TextFamily):
    """One embodiment of a checkpoint. Real-time chunking is GR00T's own: the first actions start at the previous
    chunk's and move by less of the velocity; of `RtcConfig` only `execution_horizon` counts."""

    name = "groot"
    network_class, store_class, drawn = Groot, GrootStore, DrawnGroot
    parts = ("vision", "kv_cache", "denoise")
    settings = ("embodiment",)
    sizes: ClassVar = {"groot_n17": groot_n17}
    guidance = ("target", "weights")
    rtc_settings = ("execution_horizon",)
    systems: ClassVar = {"native-fp8": {"denoise": "fp8"}, "native-int8-denoise": {"denoise": "int8"}}
    sweep = (4, 2, 1)
    baselines = tuple(groot_lerobot.MODES)

    # -- the network ----------------------------------------------------------------------------------------------

    def steps(self, config: GrootConfig) -> int:
        return config.num_steps

    def shallow(self, config: GrootConfig, depth: int) -> GrootConfig:
        """Language and transformer; vision stays whole. The transformer keeps blocks of every source."""
        language = replace(config.language, depth=max(depth, len(config.vision.deepstack)))
        return replace(config, language=language, head=replace(config.head, depth=4 * depth))

    # -- running it -----------------------------------------------------------------------------------------------

    def components(  # type: ignore[override]
        self, model: Groot, shape: GrootShape, *, store: Any = None, scales: Scales | None = None,
        rtc: RtcConfig | None = None,
    ) -> Sequence[Component]:  # fmt: skip
        return groot_components(model, shape.layout, shape.batch, shape.steps, shape.padded, store)

    def shape(
        self, config: GrootConfig, inputs: Sequence[GrootInputs], steps: int, specs: Mapping[str, EngineSpec]
    ) -> GrootShape:
        sizes = {(len(i.images), *i.images[0].shape[:2]) for i in inputs}
        if len(sizes) > 1:
            raise ObservationError(f"batch: expected as many views of each, of one size, got {sorted(sizes)}")
        ((views, height, width),) = sizes
        place = self.prompt_place(inputs, specs, self.parts)
        return GrootShape(len(inputs), steps, views, config.vision.grid(height, width), *place)

    def image_feed(self, config: GrootConfig, seen: Sequence[Observed | GrootInputs]) -> Mapping[str, Rows]:
        return {IMAGES: [image for one in seen for image in one.images]}

    def feed(self, config: GrootConfig, inputs: Sequence[GrootInputs]) -> Mapping[str, Rows]:
        return {
            **self.image_feed(config, inputs),
            "tokens": [i.tokens for i in inputs],
            "lengths": np.array([len(i.tokens) for i in inputs], np.int32),
            "state": [i.state for i in inputs],
        }

    def rehearse(self, config: GrootConfig, shape: GrootShape, host: Mapping[str, np.ndarray]) -> None:
        # A length of zero would leave rows without a key.
        if "lengths" in host:
            host["lengths"][:] = shape.tokens

    def guide(self, config: GrootConfig, rtc: RtcConfig, previous: np.ndarray, delay: int) -> dict[str, np.ndarray]:
        target = np.zeros(self.action_shape(config), np.float32)
        target[: len(previous)] = previous
        weights = overlap_weights(len(previous), delay, config.action_horizon, config.ramp, rtc.execution_horizon)
        return {"target": target, "weights": weights.numpy()}

    # -- measuring it ---------------------------------------------------------------------------------------------

    def internals(
        self, config: GrootConfig, outputs: Mapping[str, Tensor], inputs: GrootInputs
    ) -> dict[str, Tensor]:  # fmt: skip
        """`image_tokens` (I, W), `deepstack` (n, I, W), and keys and values of real tokens (n, tokens, heads, d)."""
        real = len(inputs.tokens)
        cache = {name: outputs[name][:, 0] for name in CACHE}
        text = {name: value[:, :real] for name, value in cache.items() if name.startswith("text")}
        return {"image_tokens": outputs["image_tokens"][0], "deepstack": outputs["deepstack"][:, 0], **cache, **text}

    def work(
        self, config: GrootConfig, inputs: GrootInputs, steps: int, specs: Mapping[str, EngineSpec]
    ) -> dict[str, Work]:
        """Vision and the prefix are bound by their products, denoising by reading the transformer's weights at every
        step; norms' modulations, and keys and values of blocks that look outside, are computed before."""
        v, lm, h = config.vision, config.language, config.head
        rows, columns = v.grid(*inputs.images[0].shape[:2])
        tokens = len(inputs.images) * rows * columns
        patches, joined = tokens * v.merge**2, v.width * v.merge**2
        per_patch = 3 * v.patch_size**2 * v.width + v.depth * (4 * v.width * v.width + 2 * v.width * v.mlp_dim)
        attended = rows * columns * v.merge**2
        mergers = (1 + len(v.deepstack)) * tokens * joined * (joined + v.out_width)
        vision = 2 * (patches * per_patch + mergers) + v.depth * 4 * patches * attended * v.width
        text = len(inputs.tokens)
        total = tokens + text
        layer = lm.width * (lm.qkv_dim + lm.heads * lm.head_dim + 3 * lm.mlp_dim)
        block = 4 * h.vl_width * h.vl_width + 2 * h.vl_width * h.vl_mlp_dim
        outside = 2 * h.vl_width * h.width
        cached = outside * (len(h.blocks("text")) * text + len(h.blocks("image")) * tokens)
        # Under a causal mask half of the pairs of tokens are computed.
        prefix = 2 * (total * (lm.depth * layer + h.vl_depth * block) + cached)
        prefix += 4 * total * total * (lm.depth * lm.heads * lm.head_dim / 2 + h.vl_depth * h.vl_width)
        looking = len(h.blocks("self"))
        weights = h.depth * (2 * h.width * h.width + 2 * h.width * h.mlp_dim) + looking * 2 * h.width * h.width
        ends = h.width * (config.action_dim + 2 * h.width) + h.hidden * (h.width + h.hidden + config.action_dim)
        suffix = config.action_horizon + 1
        keys = 2 * h.width * (len(h.blocks("text")) * text + len(h.blocks("image")) * tokens)
        attention = 4 * suffix * h.width * (keys / (2 * h.width) + looking * suffix)
        return {
            "vision": Work(float(vision)),
            "kv_cache": Work(float(prefix)),
            "denoise": Work(
                float(steps * (2 * suffix * (weights + ends) + attention)),
                float(steps * (weights * weight_bytes(specs["denoise"]) + 2 * ends + 2 * keys)),
            ),
        }

    def published(self, horizon: int | None = None) -> GrootConfig:
        return groot_n17() if horizon is None else groot_n17(action_horizon=horizon)

    def stand_in(self, config: GrootConfig, views: int) -> GrootProcessor:
        return groot_stand_in.processor(config, views)

    def random_observation(self, transforms: GrootProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return stand_in.observation(transforms, transforms.cropping.target, rng)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Callable[[Mapping[str, Any]], Any]:
        return groot_lerobot.sampler(horizon, device, name, steps)

    # -- FP8 ------------------------------------------------------------------------------------------------------

    def calibrate(self, model: Groot, inputs: Sequence[GrootInputs], source: str) -> Scales:  # type: ignore[override]
        raise ConfigError(f"{self.name}: its FP8 is of the transformer's weights alone and needs no calibration")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        if "type" in content and "input_features" in content:  # lerobot's
            return content["type"] == self.name
        return _model_type(content) in MODEL_TYPES or (prefix_of(shapes) is not None and not _model_type(content))

    def hint(self, folder: Path) -> str | None:
        path = folder / "config.json"
        kind = _model_type(read_json(path)) if path.is_file() else ""
        if kind.startswith("gr00t"):
            return f"expected GR00T N1.7 (model_type Gr00tN1d7), found {kind}: {OTHERS}"
        return None

    load = staticmethod(load_folder)


def _model_type(content: Mapping[str, Any]) -> str:
    value = content.get("model_type")
    return value.lower() if isinstance(value, str) else ""


GROOT = GrootFamily()
