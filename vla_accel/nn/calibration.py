"""FP8 and INT8 calibration: measure the largest input of every product of vision and prefix, with NVIDIA ModelOpt.

One block of the model is in memory at a time, with its norm weights folded into its products as engines compute it. All
observations go through it before the next block is read.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.errors import CheckpointError, DependencyError
from vla_accel.fp8 import E4M3, Scales, fingerprint
from vla_accel.kernels import reference
from vla_accel.kernels.image.pixels import pixels
from vla_accel.nn.block import Block, Norm
from vla_accel.nn.network import Network, weightless
from vla_accel.nn.prefixed import PrefixNetwork
from vla_accel.nn.quantised import calibrated_products
from vla_accel.nn.reference import TransformerBlock
from vla_accel.nn.weights import product_of, with_norm
from vla_accel.progress import shown

N = TypeVar("N", bound=Network)
P = TypeVar("P", bound=PrefixNetwork)


@torch.no_grad()
def calibrate(model: PrefixNetwork, inputs: Sequence[Sequence[Any]], source: str) -> Scales:
    """Measure scales from observations.

    Args:
        inputs: of each observation the images uint8 (V, S, S, 3), the tokens int64 (L,), the state float32 and, if the
            checkpoint needs them, the pixel maps float32 (V, `pictures.MAP_WIDTH`).
        source: where the observations come from, for the record.

    Raises:
        DependencyError: ModelOpt is missing.
        CheckpointError: there are no observations, or a product saw nothing finite.
    """
    return measured_scales(PrefixMeasuring(model), inputs, source)


@torch.no_grad()
def measured_scales(measuring: Measuring[Any], inputs: Sequence[Sequence[Any]], source: str) -> Scales:
    """Return the scales that a pass measures; arguments and errors as those of `calibrate`, with each observation as
    the pass takes it."""
    _, version = load_modelopt()
    if not inputs:
        raise CheckpointError("FP8 calibration: expected at least one observation, got none")
    model, names, blocks = measuring.model, measuring.products(), measuring.blocks()
    given = [[torch.from_numpy(np.array(value)).to(model.device) for value in one] for one in inputs]
    with shown("calibrating") as advance:
        for _ in measuring.run(given):
            advance(1, blocks)
    missing = [name for name in names if not 0 < measuring.amax.get(name, math.nan) < math.inf]
    if missing:
        raise CheckpointError(f"FP8 calibration: no finite input was seen at {', '.join(missing[:8])}")
    amax = {name: measuring.amax[name] for name in names}
    return Scales(amax, len(inputs), source, version, fingerprint(model, names))


class Measuring(ABC, Generic[N]):
    """Runs a network block by block and collects the largest inputs of the products in `amax`."""

    def __init__(self, model: N) -> None:
        self.model = model
        self.amax: dict[str, float] = {}

    @abstractmethod
    def products(self) -> list[str]:
        """The products that are measured, by their names in the model."""

    @abstractmethod
    def blocks(self) -> int:
        """The number of blocks that `run` measures."""

    @abstractmethod
    def run(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Measure; yields after each block."""

    def through(
        self, name: str, block: Block, inputs: Sequence[tuple[Any, ...]], *, keys_values_only: bool = False
    ) -> list[Tensor]:
        """Run the block `name` on rows, rotation and mask of each observation, and measure its products."""
        module = folded_block(self.model, name, block, keys_values_only=keys_values_only)
        results: list[Tensor] = []
        # The dtype of the weights as read: unread ones need not have the dtype that they are stored in.
        dtype = module.get_parameter(f"{block.names.qkv}.weight").dtype

        def forward(quantised: Any) -> None:
            for rows, rope, mask in inputs:
                rows = rows.to(dtype)
                results.append(quantised.qkv(rows, rope)[0] if keys_values_only else quantised(rows, rope, mask))

        mtq, _ = load_modelopt()
        with _quiet():
            mtq.quantize(module, mtq.FP8_DEFAULT_CFG, forward)
        for part, layer in module.named_modules():
            quantizer = getattr(layer, "input_quantizer", None)
            if quantizer is not None and getattr(quantizer, "amax", None) is not None:
                self.amax[f"{name}.{part}"] = float(quantizer.amax)
        return results


class PrefixMeasuring(Measuring[P]):
    """Vision and prefix."""

    def products(self) -> list[str]:
        return calibrated_products(self.model.config)

    def blocks(self) -> int:
        return self.model.config.vision.depth + self.model.config.prefix.depth

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        model, prefix = self.model, self.model.config.prefix
        tokens = yield from self.image_tokens(inputs)
        with model.present(*(name for name in ("embed", "state_proj") if hasattr(model, name))):
            stacks = [model.prefix_rows(x, t[None], s[None]) for x, (_, t, s, *_) in zip(tokens, inputs, strict=True)]
        rows, ropes = [x for x, _, _ in stacks], [model.prefix.rope(x, positions) for x, positions, _ in stacks]
        masks = [mask for _, _, mask in stacks]
        for index in range(prefix.depth):
            last = index + 1 == prefix.depth
            given = list(zip(rows, ropes, masks, strict=True))
            rows = self.through(f"prefix.layers.{index}", prefix.block(), given, keys_values_only=last)
            yield

    def image_tokens(self, inputs: Sequence[Sequence[Tensor]]) -> Generator[None, None, list[Tensor]]:
        """Measure vision; yields after each block. Returns the image tokens (1, I, W) of each observation."""
        model, rows = self.model, list[Tensor]()
        for rows in self.vision(inputs):  # noqa: B007 - the last block's
            yield
        with model.present("vision.post_layernorm", *(["projector"] if hasattr(model, "projector") else [])):
            features = (reference.layer_norm(x, model.vision.post_layernorm) for x in rows)
            return [model.project(x).flatten(0, 1)[None] for x in features]

    def vision(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Measure the blocks of vision; yields the rows (V, T, W) of each observation after each block."""
        model, vision = self.model, self.model.config.vision
        with model.present("vision.patch_embedding", "vision.position_embedding"):
            embed, wide = model.vision.embed, model.vision.patch_embedding.weight.dtype
            made = (pixels(images, maps[0] if maps else None, wide) for images, _, _, *maps in inputs)
            rows = [embed(one) for one in made]
        for index in range(vision.depth):
            rows = self.through(f"vision.layers.{index}", vision.block, [(x, None, None) for x in rows])
            yield rows


def folded_block(model: Network, name: str, block: Block, *, keys_values_only: bool = False) -> TransformerBlock:
    """The block `name` of a model, with its norm weights folded into its products. The model stays as it is.

    `keys_values_only`: the block stops after its keys and values.
    """
    with weightless():
        made = TransformerBlock(block).requires_grad_(False).eval()
    names, norm_of = block.names, {block.names.qkv: block.names.norm, block.names.up: block.names.mlp_norm}
    for part, module in list(made.named_children()):
        if part in ("q_norm", "k_norm"):  # of heads, and folded into nothing
            module.weight = _parameter(model.weight(f"{name}.{part}.weight"))
        elif keys_values_only and part not in (names.qkv, names.norm):
            delattr(made, part)
        elif isinstance(module, nn.Linear):
            weight, bias = product_of(model, f"{name}.{part}", block)
            dtype = weight.dtype
            if part in norm_of:
                weight, bias = with_norm(model, f"{name}.{norm_of[part]}", block, weight, bias)
            module.weight = _parameter(weight.to(dtype))
            module.bias = None if bias is None else _parameter(bias.to(dtype))  # type: ignore[assignment]
        else:
            factor = torch.ones_like(model.weight(f"{name}.{part}.weight"))
            module.weight = _parameter(factor - 1.0 if block.norm is Norm.GEMMA else factor)
            if block.layer_norm:
                module.bias = _parameter(torch.zeros_like(factor))
    return made


def _parameter(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def quantise(module: nn.Module, activations: Mapping[str, float]) -> None:
    """Give every linear layer of `module` FP8 quantisers, in place. The weights stay as they are.

    `activations`: largest absolute input by layer name; weights bring their own. Scales become powers of two.
    """
    mtq, _ = load_modelopt()
    with _quiet():
        mtq.quantize(module, mtq.FP8_DEFAULT_CFG, forward_loop=None)
    for name, largest in activations.items():
        layer: Any = module.get_submodule(name)
        weight = float(layer.weight.detach().abs().max())
        for quantizer, amax in ((layer.input_quantizer, largest), (layer.weight_quantizer, weight)):
            quantizer.amax = torch.tensor(E4M3.largest * E4M3.scale(amax, power_of_two=True))
            quantizer.to(layer.weight.device)


def load_modelopt() -> tuple[Any, str]:
    """ModelOpt's quantisation for torch, and its version. Raises DependencyError without it."""
    try:
        with _quiet():
            import modelopt
            import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise DependencyError(f"FP8 needs nvidia-modelopt ({error}); pip install 'vla_accel[onnx]'") from error
    return mtq, modelopt.__version__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # ModelOpt prints what it inserted and warns about optional parts of itself.
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield
