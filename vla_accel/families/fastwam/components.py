"""FastWAM's components: images → image_tokens → keys and values of video and text → actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.component import Component, TensorSpec
from vla_accel.families.family import IMAGES, Shape
from vla_accel.families.fastwam.network import Cache, FastWam, FastWamConfig, StepConstants, VideoConstants
from vla_accel.families.fastwam.transforms import FastWamProcessor
from vla_accel.fp8 import Products
from vla_accel.nn.fixed import Fixed
from vla_accel.nn.flow import Schedule
from vla_accel.pictures import bilinear_weights

_PRODUCTS = Products(("qkv_proj", "out_proj", "text_q", "text_kv", "text_out", "fc1", "fc2"), activations=False)
QUANTISED = {"kv_cache": {"native": _PRODUCTS}, "denoise": {"native": _PRODUCTS}}
"""By component, then engine. All other products are computed in the policy's precision."""


@dataclass(frozen=True)
class FastWamShape(Shape):
    """`views`: cameras; `size`: height and width of each camera's image; `rows`: of the prompts, as
    `FastWamConfig.context_rows` returns them."""

    views: int
    size: tuple[int, int]
    rows: int

    @property
    def title(self) -> str:
        return f"{self.views} views of {self.size[0]} x {self.size[1]} and {self.rows} rows of text"

    def reachable(self, transforms: FastWamProcessor, observation: Mapping[str, Any]) -> Sequence[FastWamShape]:
        """All shapes of an observation with the known prompts, this one first."""
        rows = {transforms.config.context_rows(len(known)) for known in transforms.prompts.rows.values()}
        return [replace(self, rows=n) for n in (self.rows, *sorted(rows - {self.rows}))]


@dataclass(frozen=True)
class Resized:
    """Weights float32 of rows (h, H) and columns (w, V W): rows · images side by side · columnsᵀ is the canvas. Empty
    if it needs no resizing."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, config: FastWamConfig, shape: FastWamShape, device: torch.device) -> Resized:
        (height, width), views = config.image_size, shape.views
        if (shape.size[0], shape.size[1] * views) == (height, width):
            return cls(*(torch.empty(0, device=device) for _ in range(2)))
        part = width // views
        each = np.kron(np.eye(views), bilinear_weights(shape.size[1], part))
        # Cameras that do not divide the width leave columns, over which lerobot stretches the whole canvas.
        weights = bilinear_weights(shape.size[0], height), bilinear_weights(part * views, width) @ each
        return cls(*(torch.from_numpy(side).float().to(device) for side in weights))


def canvas(images: Tensor, resized: Resized) -> Tensor:
    """Camera images uint8 (B, V, H, W, 3), each resized, in a row: (B, 3, h, w) float32 in 0..1."""
    x = images.permute(0, 4, 2, 1, 3).flatten(3).float() / 255.0
    return resized.rows @ x @ resized.columns.T if resized.rows.numel() else x


class Vision(Fixed[FastWam]):
    """`images` uint8 (B, V, H, W, 3) to `image_tokens` (B, I, W)."""

    def __init__(self, model: FastWam, shape: FastWamShape) -> None:
        parts = model.names("vae", "latent_mean", "latent_std", "patch")
        super().__init__(model, lambda: Resized.of(model.config, shape, model.device), parts)

    def forward(self, images: Tensor) -> Tensor:
        return self.model.image_tokens(canvas(images, Resized(*self.kept())))


class KvCache(Fixed[FastWam]):
    """`image_tokens`, `text` (B, L, text_dim), `text_bias` (B, L + 2) and `state` (B, state_dim) to the other fields of
    `Cache`."""

    def __init__(self, model: FastWam) -> None:
        blocks = model.names("video.layers")
        texts = [n for n in model.names("action.layers") if ".text_k" in n]
        embeddings = [f"{stack}.{part}" for stack in ("video", "action") for part in ("text_in", "text_mix")]
        read = [n for n in (*blocks, *texts) if not n.endswith("modulation")]
        super().__init__(model, model.video_constants, [*read, *model.names("state", *embeddings)])

    def forward(self, image_tokens: Tensor, text: Tensor, text_bias: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        cache = self.model.read(image_tokens, text, text_bias, state, VideoConstants(*self.kept()))
        return cache.keys, cache.values, cache.text_keys, cache.text_values


class Denoise(Fixed[FastWam]):
    """`noise` (B, H, A) float32 and the fields of `Cache` to normalised `actions` (B, H, A) float32."""

    def __init__(self, model: FastWam, schedule: Schedule) -> None:
        blocks = [n for n in model.names("action.layers") if ".text_k" not in n and not n.endswith("modulation")]
        parts = [*blocks, *model.names("action_in", "action_out")]
        super().__init__(model, lambda: model.step_constants(schedule), parts)
        self.schedule = schedule

    def extra_repr(self) -> str:
        """What a graph of `forward` has as constants; keys of built engines contain it."""
        return f"times={self.schedule.times}"

    def forward(self, noise: Tensor, *cache: Tensor) -> Tensor:
        return self.model.integrate(noise, StepConstants(*self.kept()), Cache(*cache), schedule=self.schedule)


def components(model: FastWam, shape: FastWamShape, store: Any) -> tuple[Component, ...]:
    """The components of a shape, with native programs if there is a `store`."""
    config, batch, dtype = model.config, shape.batch, model.dtype
    video, tokens = config.video, config.grid[0] * config.grid[1]

    def made(name: str, module: Fixed[FastWam], inputs: tuple[TensorSpec, ...], outputs: Any, *sizes: Any) -> Component:
        native: Callable[..., Any] | None = None if store is None else partial(getattr(store, name), batch, *sizes)
        return Component(
            name, module, inputs, outputs, native, quantised=QUANTISED.get(name, {}), fetch=module.fetch, products=dtype
        )  # fmt: skip

    images = TensorSpec(IMAGES, (batch, shape.views, *shape.size, 3), torch.uint8)
    seen = TensorSpec("image_tokens", (batch, tokens, video.width), dtype)
    text = TensorSpec("text", (batch, shape.rows - 2, video.text_dim), torch.float32)
    bias = TensorSpec("text_bias", (batch, shape.rows), torch.float32)
    state = TensorSpec("state", (batch, config.state_dim), torch.float32)
    sizes = {"keys": tokens, "values": tokens, "text_keys": shape.rows, "text_values": shape.rows}
    cache = tuple(
        TensorSpec(name, (video.depth, batch, rows, video.heads, video.head_dim), dtype) for name, rows in sizes.items()
    )
    noise, actions = (
        TensorSpec(name, (batch, config.action_horizon, config.action_dim), torch.float32)
        for name in ("noise", "actions")
    )
    return (
        made("vision", Vision(model, shape), (images,), (seen,), shape),
        made("kv_cache", KvCache(model), (seen, text, bias, state), cache, shape.rows),
        made("denoise", Denoise(model, shape.schedule), (noise, *cache, bias), (actions,), shape.schedule, shape.rows),
    )
