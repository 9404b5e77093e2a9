"""Variants of the components, at another precision than the policy's: vision in FP16, the prefix with its MLPs in FP8.

Each is a module with the inputs and outputs of the component that it stands for; its parts that an engine may build
alone are `Island`s. Knows nothing about engines.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.component import Island
from vla_accel.errors import EngineError
from vla_accel.fp8 import Scales, no_scales
from vla_accel.kernels import reference
from vla_accel.kernels.image.pixels import pixels
from vla_accel.nn.calibration import quantise
from vla_accel.nn.network import weightless
from vla_accel.nn.padding import real_tokens
from vla_accel.nn.paligemma import PaliGemma, prefix_positions
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import QUANTISED
from vla_accel.nn.reference import PrefixStack, TransformerBlock
from vla_accel.nn.weights import fold


class Bridge(nn.Module):
    """The cast between two parts that compute in different dtypes, as an operation with a name."""

    def forward(self, x: Tensor, following: Tensor) -> Tensor:
        """`x` in the dtype of `following`, a weight of the part that comes next."""
        return x.to(following.dtype)


class Fp16Vision(nn.Module):
    """`Vision` with the tower in FP16, a cast bridge, and the projector as it is.

    The embeddings stay in float32 as in the model; of the tower's large products only the dtype changes.
    """

    def __init__(self, model: PrefixNetwork) -> None:
        super().__init__()
        tower = copy.deepcopy(model.vision)
        for part in (*tower.layers, tower.post_layernorm):
            part.half()
        self.tower = Island("siglip", tower)
        self.projector, self.project = model.projector, model.project
        self.bridge = Bridge()
        self.tokens, self.width = model.config.image_tokens, model.config.prefix.width

    def forward(self, images: Tensor, pixel_maps: Tensor | None = None) -> Tensor:
        batch, views = images.shape[:2]
        made = pixels(images, pixel_maps, torch.float32)
        features = self.bridge(self.tower(made.flatten(0, 1)), self.projector.weight)
        return self.project(features).view(batch, views * self.tokens, self.width)


class Mlp(nn.Module):
    """The gated MLP of one layer with the weight of its norm folded in: rows (B, T, width), normed without weights, to
    the same shape."""

    def __init__(self, layer: TransformerBlock) -> None:
        super().__init__()
        folded, _ = fold(layer.gate_up_proj.weight, None, layer.post_attention_layernorm.factor)
        self.gate_up_proj = _linear(folded.to(layer.gate_up_proj.weight.dtype))
        self.down_proj = _linear(layer.down_proj.weight)
        self.activation = layer.block.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(reference.activate(self.gate_up_proj(x), self.activation))


class QuantisedKvCache(PrefixStack):
    """`KvCache` with every MLP in FP8: weights and activations in E4M3, one scale a tensor. The rest is unchanged.

    The last layer has no MLP here: it stops after its keys and values.
    """

    def __init__(self, model: PaliGemma, scales: Scales) -> None:
        nn.Module.__init__(self)
        self.block, self.embed, self.layers = model.prefix.block, model.embed, model.prefix.layers
        self.width = model.config.prefix.width
        self.plain: Tensor
        self.register_buffer("plain", torch.zeros(self.width, device=model.embed.weight.device), persistent=False)
        self.mlps = nn.ModuleList()
        names = QUANTISED["kv_cache"]["tensorrt"].names
        for index, layer in enumerate(self.layers[:-1]):  # type: ignore[arg-type]
            assert isinstance(layer, TransformerBlock)
            mlp = Mlp(layer)
            quantise(mlp, {n: scales.of(f"prefix.layers.{index}.{n}") for n in names})
            self.mlps.append(Island(f"mlp{index}", mlp))

    def finish(self, index: int, x: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        layer = self.layers[index]
        assert isinstance(layer, TransformerBlock)
        x = x + layer.o_proj(attended.flatten(2))
        return x + self.mlps[index](reference.rms_norm(x, self.plain, self.block.eps))

    def forward(  # type: ignore[override]
        self, image_tokens: Tensor, tokens: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        embedded = (self.embed(tokens) * self.width**0.5).to(image_tokens.dtype)
        x = torch.cat((image_tokens, embedded), dim=1)
        mask = None if lengths is None else real_tokens(lengths, x.shape[1])
        return super().forward(x, *prefix_positions(x, mask))


def variants(model: Any, kind: str, scales: Scales | None = None) -> dict[str, Callable[[], nn.Module]]:
    """The versions that a component ("vision" or "kv_cache") of `model` comes in, for `Component.variants`."""
    if kind == "vision":
        return {"fp16": lambda: Fp16Vision(model).requires_grad_(False)}

    def fp8() -> nn.Module:
        if scales is None:
            raise EngineError(f"{kind}: {no_scales('fp8')}")
        return QuantisedKvCache(model, scales).requires_grad_(False)

    return {"fp8": fp8}


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer of its own around a weight: quantising it leaves the model's layer alone."""
    with weightless():
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
