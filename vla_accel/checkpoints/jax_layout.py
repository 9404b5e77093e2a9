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
    """The PyTorch tensors of a JAX parameter; several are stacked along its first axis, after the layer's.

    Attributes:
        targets: PyTorch names.
        layout: Axes before and after; those in parentheses become one.
        layered: Whether the first axis is the layer.
    """

    targets: tuple[str, ...]
    layout: str
    layered: bool


_PALIGEMMA = "paligemma_with_expert.paligemma."
_TOWER = _PALIGEMMA + "model.vision_tower.vision_model."
_IMG, _LLM = "PaliGemma/img/", "PaliGemma/llm/"
_BLOCK = _IMG + "Transformer/encoderblock/"
_HEADS = _BLOCK + "MultiHeadDotProductAttention_0/"
_LAYER = "layers.{layer}."
# Layouts of a module's parameters.
_LINEAR = {"kernel": "in out -> out in", "bias": "out -> out"}
_NORM = {"scale": "d -> d", "bias": "d -> d"}
_PATCHES = {"kernel": "h w c d -> d c h w", "bias": "d -> d"}
_TO_HEADS = {"kernel": "d n h -> (n h) d", "bias": "n h -> (n h)"}
_FROM_HEADS = {"kernel": "n h d -> d (n h)", "bias": "d -> d"}


def _rules() -> dict[str, _Rule]:
    layer = _TOWER + "encoder." + _LAYER
    modules: list[tuple[str, str, Mapping[str, str]]] = [
        (_IMG + "embedding", _TOWER + "embeddings.patch_embedding", _PATCHES),
        (_IMG + "Transformer/encoder_norm", _TOWER + "post_layernorm", _NORM),
        (_IMG + "head", _PALIGEMMA + "model.multi_modal_projector.linear", _LINEAR),
        (_HEADS + "query", layer + "self_attn.q_proj", _TO_HEADS),
        (_HEADS + "key", layer + "self_attn.k_proj", _TO_HEADS),
        (_HEADS + "value", layer + "self_attn.v_proj", _TO_HEADS),
        (_HEADS + "out", layer + "self_attn.out_proj", _FROM_HEADS),
        (_BLOCK + "LayerNorm_0", layer + "layer_norm1", _NORM),
        (_BLOCK + "LayerNorm_1", layer + "layer_norm2", _NORM),
        (_BLOCK + "MlpBlock_0/Dense_0", layer + "mlp.fc1", _LINEAR),
        (_BLOCK + "MlpBlock_0/Dense_1", layer + "mlp.fc2", _LINEAR),
    ]
    names = ("action_in_proj", "action_out_proj", "state_proj", "action_time_mlp_in", "action_time_mlp_out",
             "time_mlp_in", "time_mlp_out")  # fmt: skip
    modules += [(name, name, _LINEAR) for name in names]
    arrays: list[tuple[str, tuple[str, ...], str]] = [
        (_IMG + "pos_embedding", (_TOWER + "embeddings.position_embedding.weight",), "one tokens d -> (one tokens) d"),
        # The name of the tied table in openpi's own files.
        (_LLM + "embedder/input_embedding", (_PALIGEMMA + "lm_head.weight",), "tokens d -> tokens d"),
    ]
    # The expert's JAX names have the suffix `_1`.
    for suffix, root in ("", _PALIGEMMA + "model.language_model."), ("_1", "paligemma_with_expert.gemma_expert.model."):
        attention, mlp, layer = f"{_LLM}layers/attn/", f"{_LLM}layers/mlp{suffix}/", root + _LAYER
        for source, targets, layout in (
            (f"{attention}q_einsum{suffix}/w", ("self_attn.q_proj",), "n d h -> (n h) d"),
            (f"{attention}kv_einsum{suffix}/w", ("self_attn.k_proj", "self_attn.v_proj"), "k d h -> (k h) d"),
            (f"{attention}attn_vec_einsum{suffix}/w", ("self_attn.o_proj",), "n h d -> d (n h)"),
            (f"{mlp}gating_einsum", ("mlp.gate_proj", "mlp.up_proj"), "d m -> m d"),
            (f"{mlp}linear", ("mlp.down_proj",), "m d -> d m"),
        ):
            arrays.append((source, tuple(f"{layer}{target}.weight" for target in targets), layout))
        for source, target in (
            (f"{_LLM}layers/pre_attention_norm{suffix}", layer + "input_layernorm"),
            (f"{_LLM}layers/pre_ffw_norm{suffix}", layer + "post_attention_layernorm"),
            (f"{_LLM}final_norm{suffix}", root + "norm"),
        ):
            # A norm has a scale, in π0.5's expert a projection.
            arrays.append((source + "/scale", (target + ".weight",), "d -> d"))
            modules.append((source + "/Dense_0", target + ".dense", _LINEAR))
    for source, target, layouts in modules:
        for leaf, layout in layouts.items():
            arrays.append((f"{source}/{leaf}", (f"{target}.{'bias' if leaf == 'bias' else 'weight'}",), layout))
    return {source: _Rule(targets, layout, _LAYER in targets[0]) for source, targets, layout in arrays}


_RULES = _rules()


def targets(shapes: Mapping[str, Shape], where: str) -> list[Target]:
    """Return the PyTorch tensors of every JAX parameter.

    Args:
        shapes: Shapes by name, joined by slashes, without openpi's outer `params` and nnx's inner `value`.
        where: The checkpoint, for errors.

    Raises:
        CheckpointError: A parameter is unknown or has the wrong rank. Missing ones show when the PyTorch names are
            checked.
    """
    if unknown := sorted(shapes.keys() - _RULES.keys()):
        raise CheckpointError(f"checkpoint {where}: {len(unknown)} parameters do not belong to π0: {some(unknown)}")
    return [target for source in sorted(shapes) for target in _of_one(source, shapes[source], where)]


def _of_one(source: str, shape: Shape, where: str) -> list[Target]:
    rule = _RULES[source]
    before, _, groups = _parsed(rule.layout)
    stacked = len(rule.targets) > 1
    leading = int(rule.layered) + stacked
    axes = leading + len(before)
    if len(shape) != axes or (stacked and shape[leading - 1] != len(rule.targets)):
        expected = f"{axes} axes ({rule.layout})" if len(shape) != axes else f"{len(rule.targets)} parts"
        raise CheckpointError(f"checkpoint {where}: {source}: expected {expected}, got shape {shape}")
    sizes = dict(zip(before, shape[leading:], strict=True))
    whole = tuple(math.prod(sizes[axis] for axis in group) for group in groups)
    return [
        Target(name.format(layer=layer), source, (layer,) * rule.layered + (part,) * stacked, rule.layout, whole)
        for layer in (range(shape[0]) if rule.layered else (0,))
        for part, name in enumerate(rule.targets)
    ]


def _parsed(layout: str) -> tuple[list[str], tuple[int, ...], list[list[str]]]:
    """Return the axes before, their order after, and the groups that become one axis each."""
    left, right = layout.split("->")
    before = left.split()
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", right)]
    return before, tuple(before.index(axis) for group in groups for axis in group), groups
