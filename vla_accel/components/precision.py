"""The components at another precision than the policy's: vision in FP16, the prefix with its MLPs in FP8.

Each is a module with the inputs and outputs of the component that it stands for; its parts that an engine may build
alone are `Island`s. Knows nothing about engines. ModelOpt is imported only where FP8 is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel import ops
from vla_accel.component import Island
from vla_accel.components.padding import real_tokens
from vla_accel.errors import DependencyError, EngineError
from vla_accel.models.gemma import GemmaLayer, RmsNorm
from vla_accel.models.pi0 import Pi0, prefix_positions
from vla_accel.native.fold import fold_norm

E4M3_MAX = 448.0
"""The largest number in FP8 E4M3."""
Scales = Mapping[str, float]
"""Largest absolute input of a product, by its name in the model ("prefix.layers.0.down_proj"): see `quantize`."""


class Bridge(nn.Module):
    """The cast between two parts that compute in different dtypes, as an operation with a name."""

    def forward(self, x: Tensor, following: Tensor) -> Tensor:
        """`x` in the dtype of `following`, a weight of the part that comes next."""
        return x.to(following.dtype)


class NarrowVision(nn.Module):
    """`Vision` with the tower in FP16, a cast bridge, and the projector as it is.

    The embeddings stay in float32 as in the model; of the tower's large products only the dtype changes.
    """

    def __init__(self, model: Pi0, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        tower = copy.deepcopy(model.vision)
        for part in (*tower.layers, tower.post_layernorm):
            part.to(dtype)
        self.tower = Island("siglip", tower)
        self.projector = model.projector
        self.bridge = Bridge()
        self.tokens, self.width = model.config.vision.tokens, model.config.prefix.width

    def forward(self, images: Tensor) -> Tensor:
        batch, views = images.shape[:2]
        pixels = images.float().permute(0, 1, 4, 2, 3) / 255.0 * 2.0 - 1.0
        features = self.bridge(self.tower(pixels.flatten(0, 1)), self.projector.weight)
        tokens = F.linear(features, self.projector.weight, self.projector.bias)
        return tokens.view(batch, views * self.tokens, self.width)


class Mlp(nn.Module):
    """Gemma's gated MLP of one layer, with the weight of the norm before it folded in: x (B, T, width), normalised
    without weights, to the same shape."""

    def __init__(self, layer: GemmaLayer) -> None:
        super().__init__()
        norm = layer.post_attention_layernorm
        assert isinstance(norm, RmsNorm)
        folded, _ = fold_norm(layer.gate_up_proj, norm)
        self.gate_up_proj = _linear(folded.to(layer.gate_up_proj.weight.dtype))
        self.down_proj = _linear(layer.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.geglu(self.gate_up_proj(x)))


class QuantisedKvCache(nn.Module):
    """`KvCache` with every MLP in FP8: weights and activations in E4M3, one scale a tensor. The rest is unchanged.

    The last layer has no MLP here: it stops after its keys and values.
    """

    def __init__(self, model: Pi0, scales: Scales) -> None:
        super().__init__()
        config = model.config.prefix
        self.embed, self.layers = model.embed, model.prefix.layers
        self.head_dim, self.width, self.eps = config.head_dim, config.width, config.eps
        self.plain: Tensor
        self.register_buffer("plain", torch.zeros(config.width, device=model.embed.weight.device), persistent=False)
        self.mlps = nn.ModuleList()
        for index, layer in enumerate(self.layers[:-1]):  # type: ignore[arg-type]
            assert isinstance(layer, GemmaLayer)
            mlp = Mlp(layer)
            quantise(mlp, {n: _scale(scales, f"prefix.layers.{index}.{n}") for n in ("gate_up_proj", "down_proj")})
            self.mlps.append(Island(f"mlp{index}", mlp))

    def forward(self, image_tokens: Tensor, tokens: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        embedded = (self.embed(tokens) * self.width**0.5).to(image_tokens.dtype)
        x = torch.cat((image_tokens, embedded), dim=1)
        mask = None if lengths is None else real_tokens(lengths, x.shape[1])
        positions, allowed = prefix_positions(x, mask)
        rope = ops.rope_tables(positions, self.head_dim, x.dtype)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, GemmaLayer)
            q, k, v, _ = layer.qkv(x, rope)
            keys.append(k)
            values.append(v)
            if index < len(self.mlps):
                x = x + layer.o_proj(ops.attention(q, k, v, allowed).flatten(2))
                x = x + self.mlps[index](ops.rms_norm(x, self.plain, self.eps))
        return torch.stack(keys), torch.stack(values)


def variants(model: Pi0, kind: str, scales: Scales | None = None) -> dict[str, Callable[[], nn.Module]]:
    """The versions that a component ("vision" or "kv_cache") of `model` comes in, for `Component.variants`."""
    if kind == "vision":
        return {"fp16": lambda: NarrowVision(model).requires_grad_(False)}

    def fp8() -> nn.Module:
        if not scales:
            raise EngineError(
                "kv_cache: FP8 needs calibrated scales beside the checkpoint (fp8_scales.json); "
                "make them with `vla-accel calibrate`"
            )
        return QuantisedKvCache(model, scales).requires_grad_(False)

    return {"fp8": fp8}


# -- ModelOpt -----------------------------------------------------------------------------------------------------


def quantise(module: nn.Module, activations: Mapping[str, float]) -> None:
    """Give every linear layer of `module` FP8 quantisers, in place. The weights stay as they are.

    `activations`: largest absolute input by layer name; weights bring their own. Scales become powers of two.
    """
    mtq = _modelopt()
    with _quiet():
        mtq.quantize(module, mtq.FP8_DEFAULT_CFG, forward_loop=None)
    for name, largest in activations.items():
        layer = module.get_submodule(name)
        layer.input_quantizer.amax = torch.tensor(_rounded(largest))  # type: ignore[union-attr]
        weight: Any = layer.weight_quantizer
        weight.amax = torch.tensor(_rounded(float(layer.weight.detach().abs().max())))  # type: ignore[union-attr]
        for quantizer in (layer.input_quantizer, weight):
            quantizer.to(layer.weight.device)  # type: ignore[union-attr]


def _modelopt() -> Any:
    try:
        with _quiet():
            import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise DependencyError(
            f"FP8 needs nvidia-modelopt ({error}); install it: pip install 'vla_accel[tensorrt]'"
        ) from error
    return mtq


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # ModelOpt prints what it inserted and warns about optional parts of itself.
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        yield


def _rounded(largest: float) -> float:
    """The least amax not below `largest` whose scale, amax / 448, is a power of two.

    Dividing by the scale is then exact, so that every library rounds alike; E4M3 is a floating-point format, which
    loses no precision by it.
    """
    return E4M3_MAX * 2.0 ** math.ceil(math.log2(max(largest, 1e-6) / E4M3_MAX))


def _scale(scales: Scales, name: str) -> float:
    if name not in scales:
        raise EngineError(f"kv_cache: no FP8 scale for {name}; calibrate again")
    return scales[name]


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer of its own around a weight: quantising it leaves the model's layer alone."""
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made
