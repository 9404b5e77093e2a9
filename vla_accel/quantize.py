"""FP8 calibration through NVIDIA ModelOpt: the largest input of each product of vision and prefix, on observations.

The scales are stored beside the checkpoint as JSON; the native engine makes its FP8 weights from them at load. What is
calibrated is the model as the engine runs it, with norm weights folded into the products.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.errors import CheckpointError, DependencyError
from vla_accel.files import replacing
from vla_accel.models.gemma import GemmaLayer, RmsNorm
from vla_accel.models.pi0 import Pi0
from vla_accel.models.siglip import SiglipLayer
from vla_accel.native.fold import fold_norm

FORMAT = "vla_accel.fp8_scales/1"
FILE = "fp8_scales.json"


@dataclass(frozen=True)
class Scales:
    """`amax`: largest absolute input by a product's canonical name, e.g. "prefix.layers.3.down_proj"."""

    amax: dict[str, float]
    observations: int
    source: str
    modelopt: str

    def save(self, folder: Path) -> Path:
        """Write `fp8_scales.json` into a checkpoint folder."""
        content = {
            "format": FORMAT,
            "algorithm": "max",
            "modelopt": self.modelopt,
            "observations": self.observations,
            "source": self.source,
            "amax": {name: float(f"{value:.6g}") for name, value in self.amax.items()},
        }
        with replacing(folder / FILE) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
        return folder / FILE


def load_scales(folder: Path) -> Scales | None:
    """The scales of a checkpoint folder, or None where it has none. Raises CheckpointError for a damaged file."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"FP8 scales {path}: expected JSON, got: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("amax"), dict):
        raise CheckpointError(f"FP8 scales {path}: expected format {FORMAT!r} with a table of amax")
    bad = [k for k, v in content["amax"].items() if not isinstance(v, (int, float)) or not 0 < v < math.inf]
    if bad:
        raise CheckpointError(f"FP8 scales {path}: expected positive numbers, got others at {', '.join(bad[:8])}")
    amax = {name: float(value) for name, value in content["amax"].items()}
    return Scales(amax, int(content.get("observations", 0)), content.get("source", ""), content.get("modelopt", ""))


class _Calibrated(nn.Module):
    """Vision and prefix of a model with norm weights folded into the products that follow them."""

    def __init__(self, model: Pi0) -> None:
        super().__init__()
        self.vision = copy.deepcopy(model.vision)
        self.prefix = copy.deepcopy(model.prefix)
        with torch.no_grad():
            for layer in self.vision.layers:
                assert isinstance(layer, SiglipLayer)
                _fold(layer.layer_norm1, layer.qkv_proj)
                _fold(layer.layer_norm2, layer.fc1)
            for layer in self.prefix.layers:
                assert isinstance(layer, GemmaLayer)
                _fold(layer.input_layernorm, layer.qkv_proj)
                _fold(layer.post_attention_layernorm, layer.gate_up_proj)

    def forward(self, model: Pi0, images: Tensor, tokens: Tensor) -> None:
        wide = self.vision.patch_embedding.weight.dtype
        pixels = images.to(wide).permute(0, 3, 1, 2) / 255.0 * 2.0 - 1.0
        features = self.vision(pixels)
        image_tokens = nn.functional.linear(features, model.projector.weight, model.projector.bias)
        image_tokens = image_tokens.reshape(1, -1, image_tokens.shape[-1])
        x = torch.cat((image_tokens, model.embed_tokens(tokens).to(image_tokens.dtype)), dim=1)
        positions = torch.arange(x.shape[1], device=x.device).expand(1, -1)
        self.prefix(x, positions, None)


def _fold(norm: nn.Module, linear: nn.Linear) -> None:
    """Move a norm's weights into the product that follows, in place."""
    assert isinstance(norm, (nn.LayerNorm, RmsNorm))
    weight, bias = fold_norm(linear, norm)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    # Gemma stores an offset from one.
    norm.weight.fill_(0.0 if isinstance(norm, RmsNorm) else 1.0)
    if isinstance(norm, nn.LayerNorm):
        norm.bias.zero_()


@torch.no_grad()
def calibrate(
    model: Pi0, inputs: Iterable[tuple[Sequence[np.ndarray] | np.ndarray, np.ndarray]], source: str
) -> Scales:
    """Scales from observations.

    Args: `inputs`: (images uint8 (S, S, 3) of each view, tokens int64 (L,)) of each observation, as a `Processor` makes
    them; `source`: where they come from, for the record.
    Raises DependencyError without ModelOpt, CheckpointError where some product saw nothing finite.
    """
    try:
        import modelopt
        import modelopt.torch.quantization as mtq
    except ImportError as error:
        raise DependencyError(
            f"FP8 calibration needs NVIDIA ModelOpt: pip install 'vla_accel[tensorrt]' ({error})"
        ) from error
    device = next(model.parameters()).device
    folded = _Calibrated(model)
    observations = list(inputs)
    if not observations:
        raise CheckpointError("FP8 calibration: expected at least one observation, got none")

    def forward(quantised: Any) -> None:
        for images, tokens in observations:
            quantised(model, torch.from_numpy(np.array(images)).to(device), torch.tensor(tokens)[None].to(device))

    mtq.quantize(folded, mtq.FP8_DEFAULT_CFG, forward)
    amax: dict[str, float] = {}
    for name, module in folded.named_modules():
        quantizer = getattr(module, "input_quantizer", None)
        if quantizer is not None and getattr(quantizer, "amax", None) is not None:
            amax[name] = float(quantizer.amax)
    wanted = product_names(model)
    missing = [name for name in wanted if not 0 < amax.get(name, math.nan) < math.inf]
    if missing:
        raise CheckpointError(f"FP8 calibration: no finite input was seen at {', '.join(missing[:8])}")
    return Scales({n: amax[n] for n in wanted}, len(observations), source, modelopt.__version__)


def product_names(model: Pi0) -> Sequence[str]:
    """Every product that FP8 may take, by canonical name. The last prefix layer stops after its keys and values."""
    vision = [f"vision.layers.{i}.{n}" for i in range(model.config.vision.depth) for n in _VISION]
    depth = model.config.prefix.depth
    prefix = [f"prefix.layers.{i}.{n}" for i in range(depth) for n in (_PREFIX if i + 1 < depth else _PREFIX[:1])]
    return [*vision, *prefix]


_VISION = ("qkv_proj", "out_proj", "fc1", "fc2")
_PREFIX = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
