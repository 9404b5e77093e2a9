"""The tensor of openpi's PyTorch model for each of openpi's JAX parameters.

JAX has the layers of a stack in one array with the layer as the first axis, and projections as einsum operands with
an axis for the heads; PyTorch has one (out, in) matrix a layer. The rules below describe the difference.
Source of the layouts: openpi's Flax modules (Physical Intelligence, openpi, Apache-2.0).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vla_accel.checkpoints.weights import some
from vla_accel.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """One PyTorch tensor: the part of its source at `index` (leading axes), with the axes rearranged by `layout`."""

    name: str
    source: str
    index: tuple[int, ...]
    layout: str
    shape: Shape

    def cut(self, array: np.ndarray) -> np.ndarray:
        """Return the tensor's values from the whole source array, a view if possible."""
        before, order, _ = _parsed(self.layout)
        part = array[self.index]
        assert part.ndim == len(before)
        return part.transpose(order).reshape(self.shape)


@dataclass(frozen=True)
class _Rule:
    """A JAX parameter and its PyTorch tensors.

    Attributes:
        source: The JAX name.
        targets: PyTorch names, with the index after the layer's.
        layout: Axes before and after; those in parentheses become one.
        layered: Whether the first axis is the layer.
    """

    source: str
    targets: Mapping[str, tuple[int, ...]]
    layout: str
    layered: bool = True


_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
_LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert.model."
_IMG, _LLM = "PaliGemma/img/", "PaliGemma/llm/"
_BLOCK = _IMG + "Transformer/encoderblock/"
_HEADS = _BLOCK + "MultiHeadDotProductAttention_0/"
_LAYER = "encoder.layers.{layer}."


def _linear(source: str, target: str, *, layered: bool) -> tuple[_Rule, _Rule]:
    return (
        _Rule(source + "/kernel", {target + ".weight": ()}, "in out -> out in", layered),
        _Rule(source + "/bias", {target + ".bias": ()}, "out -> out", layered),
    )


def _layer_norm(source: str, target: str, *, layered: bool) -> tuple[_Rule, _Rule]:
    return (
        _Rule(source + "/scale", {target + ".weight": ()}, "d -> d", layered),
        _Rule(source + "/bias", {target + ".bias": ()}, "d -> d", layered),
    )


def _siglip() -> list[_Rule]:
    layer = _VISION + _LAYER
    rules = [
        _Rule(
            _IMG + "embedding/kernel",
            {_VISION + "embeddings.patch_embedding.weight": ()},
            "h w c d -> d c h w",
            layered=False,
        ),
        _Rule(_IMG + "embedding/bias", {_VISION + "embeddings.patch_embedding.bias": ()}, "d -> d", layered=False),
        _Rule(
            _IMG + "pos_embedding",
            {_VISION + "embeddings.position_embedding.weight": ()},
            "one tokens d -> (one tokens) d",
            layered=False,
        ),
        _Rule(_HEADS + "out/kernel", {layer + "self_attn.out_proj.weight": ()}, "n h d -> d (n h)"),
        _Rule(_HEADS + "out/bias", {layer + "self_attn.out_proj.bias": ()}, "d -> d"),
        *_layer_norm(_BLOCK + "LayerNorm_0", layer + "layer_norm1", layered=True),
        *_layer_norm(_BLOCK + "LayerNorm_1", layer + "layer_norm2", layered=True),
        *_linear(_BLOCK + "MlpBlock_0/Dense_0", layer + "mlp.fc1", layered=True),
        *_linear(_BLOCK + "MlpBlock_0/Dense_1", layer + "mlp.fc2", layered=True),
        *_layer_norm(_IMG + "Transformer/encoder_norm", _VISION + "post_layernorm", layered=False),
        *_linear(_IMG + "head", "paligemma_with_expert.paligemma.model.multi_modal_projector.linear", layered=False),
    ]
    for theirs, ours in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        target = f"{layer}self_attn.{ours}"
        rules.append(_Rule(f"{_HEADS}{theirs}/kernel", {target + ".weight": ()}, "d n h -> (n h) d"))
        rules.append(_Rule(f"{_HEADS}{theirs}/bias", {target + ".bias": ()}, "n h -> (n h)"))
    return rules


def _gemma(suffix: str, root: str) -> list[_Rule]:
    """Return the rules of a stack. The expert's names have the suffix `_1`. A norm has a scale, in π0.5's
    expert a projection."""
    layer = root + "layers.{layer}."
    attention, mlp = f"{_LLM}layers/attn/", f"{_LLM}layers/mlp{suffix}/"
    rules = [
        _Rule(f"{attention}q_einsum{suffix}/w", {layer + "self_attn.q_proj.weight": ()}, "n d h -> (n h) d"),
        _Rule(
            f"{attention}kv_einsum{suffix}/w",
            {layer + "self_attn.k_proj.weight": (0,), layer + "self_attn.v_proj.weight": (1,)},
            "k d h -> (k h) d",
        ),
        _Rule(f"{attention}attn_vec_einsum{suffix}/w", {layer + "self_attn.o_proj.weight": ()}, "n h d -> d (n h)"),
        _Rule(
            f"{mlp}gating_einsum",
            {layer + "mlp.gate_proj.weight": (0,), layer + "mlp.up_proj.weight": (1,)},
            "d m -> m d",
        ),
        _Rule(f"{mlp}linear", {layer + "mlp.down_proj.weight": ()}, "m d -> d m"),
    ]
    norms = (
        (f"layers/pre_attention_norm{suffix}", layer + "input_layernorm", True),
        (f"layers/pre_ffw_norm{suffix}", layer + "post_attention_layernorm", True),
        (f"final_norm{suffix}", root + "norm", False),
    )
    for theirs, ours, layered in norms:
        rules.append(_Rule(f"{_LLM}{theirs}/scale", {ours + ".weight": ()}, "d -> d", layered))
        rules.extend(_linear(f"{_LLM}{theirs}/Dense_0", ours + ".dense", layered=layered))
    return rules


_PROJECTIONS = ("action_in_proj", "action_out_proj", "state_proj", "action_time_mlp_in", "action_time_mlp_out")
_TIME = ("time_mlp_in", "time_mlp_out")
_RULES: dict[str, _Rule] = {
    rule.source: rule
    for rule in (
        *_siglip(),
        *_gemma("", _LANGUAGE),
        *_gemma("_1", _EXPERT),
        # The name of the tied table in openpi's own files.
        _Rule(
            _LLM + "embedder/input_embedding",
            {"paligemma_with_expert.paligemma.lm_head.weight": ()},
            "tokens d -> tokens d",
            layered=False,
        ),
        *(rule for name in (*_PROJECTIONS, *_TIME) for rule in _linear(name, name, layered=False)),
    )
}


def targets(shapes: Mapping[str, Shape], where: str) -> list[Target]:
    """Return the PyTorch tensors of every JAX parameter.

    Args:
        shapes: Shapes by name, joined by slashes, without openpi's outer `params` and nnx's inner `value`.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: A parameter is unknown or has the wrong rank. Missing ones show when the PyTorch names are
            checked.
    """
    unknown = sorted(shapes.keys() - _RULES.keys())
    if unknown:
        raise CheckpointError(f"checkpoint {where}: {len(unknown)} parameters have no place in π0: {some(unknown)}")
    result: list[Target] = []
    for source in sorted(shapes):
        result.extend(_of_one(source, shapes[source], _RULES[source], where))
    return result


def _of_one(source: str, shape: Shape, rule: _Rule, where: str) -> list[Target]:
    before, _, groups = _parsed(rule.layout)
    picks = len(next(iter(rule.targets.values())))
    leading = int(rule.layered) + picks
    if len(shape) != leading + len(before):
        raise CheckpointError(
            f"checkpoint {where}: {source}: expected {leading + len(before)} axes ({rule.layout}), got shape {shape}"
        )
    if picks and shape[leading - 1] != len(rule.targets):
        raise CheckpointError(f"checkpoint {where}: {source}: expected {len(rule.targets)} parts, got shape {shape}")
    sizes = dict(zip(before, shape[leading:], strict=True))
    whole = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    layers = range(shape[0]) if rule.layered else (None,)
    return [
        Target(
            name=name.format(layer=layer),
            source=source,
            index=pick if layer is None else (layer, *pick),
            layout=rule.layout,
            shape=whole,
        )
        for layer in layers
        for name, pick in rule.targets.items()
    ]


def _parsed(layout: str) -> tuple[list[str], tuple[int, ...], list[list[str]]]:
    """Return the axes before, their order after, and the groups that become one axis each."""
    left, right = layout.split("->")
    before = left.split()
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
    return before, tuple(before.index(axis) for group in groups for axis in group), groups
