"""FP8 and INT8: the formats, the rule for scales, and a checkpoint's calibrated scales with a fingerprint of their
weights. The model family names the products that it computes in FP8 (`Products`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.errors import CheckpointError, EngineError
from vla_accel.files import write_json

FILE = "fp8_scales.json"
FORMAT = "vla_accel.fp8_scales/2"
SAMPLE = 4096
"""Values of each tensor that a fingerprint samples."""


def again(checkpoint: object = "CHECKPOINT") -> str:
    """Return the command that replaces unusable scales."""
    return f"calibrate again: vla-accel calibrate {checkpoint} --observations OBSERVATIONS"


@dataclass(frozen=True)
class Format:
    """Numbers of one byte.

    Attributes:
        largest: the largest magnitude, at which stored values saturate.
        by_channel: a weight has a scale for each output channel, otherwise one. Activations have one scale a tensor.
    """

    name: str
    dtype: torch.dtype
    largest: float
    by_channel: bool = False

    def scale(self, amax: float, power_of_two: bool = False) -> float:
        """Return the scale of a tensor, true value / stored value: `amax` / `largest`.

        `power_of_two`: round up to a power of two, for graphs that hold scales in BF16 (TensorRT's) and would round
        others: a quantised layer then agreed to 0.9995 instead of 0.9999. A floating-point format loses no precision.
        """
        exact = max(amax, 1e-12) / self.largest
        return 2.0 ** math.ceil(math.log2(exact)) if power_of_two else exact

    def saturated(self, x: Tensor) -> Tensor:
        """Return `x`, already divided by its scale, as stored: saturated, where a cast gives NaN. Halves of integers
        are rounded up."""
        if not self.dtype.is_floating_point:
            x = torch.floor(x + 0.5)
        return x.clamp(-self.largest, self.largest).to(self.dtype)


E4M3 = Format("fp8", torch.float8_e4m3fn, 448.0)
INT8 = Format("int8", torch.int8, 127.0, by_channel=True)
FORMATS = {form.name: form for form in (E4M3, INT8)}
"""The formats by precision. Both use the same calibrated ranges."""


def named(dtype: torch.dtype) -> str:
    """Return the ledger's name of a format's dtype."""
    return next(form.name.upper() for form in FORMATS.values() if form.dtype == dtype)


def no_scales(precision: str) -> str:
    """Return the error of a precision of `FORMATS` without calibrated scales."""
    text = f"FP8 needs calibrated scales next to the checkpoint ({FILE}); make them with `vla-accel calibrate`"
    return text.replace("FP8", precision.upper(), 1)


@dataclass(frozen=True)
class Products:
    """The products of a layer that an engine computes in FP8 or INT8.

    With `activations` their inputs are quantized, too, which needs calibrated scales; otherwise only the weights.
    """

    names: tuple[str, ...]
    activations: bool = True
    power_of_two: bool = False
    precisions: tuple[str, ...] = ("fp8", "int8")

    def without(self, keep: Sequence[str]) -> Products:
        """Return the products but `keep`. Raises EngineError for an unknown name, and if no product is left."""
        if unknown := [name for name in keep if name not in self.names]:
            raise EngineError(f"keep: expected some of {', '.join(self.names)}, got {', '.join(unknown)}")
        left = tuple(name for name in self.names if name not in keep)
        if not left:
            raise EngineError(f"keep: expected some of {', '.join(self.names)}, got all of them")
        return replace(self, names=left)

    def described(self, precision: str) -> str:
        """Return the ledger's text for a precision of `FORMATS`."""
        what = precision.upper() + ("" if self.activations else " weights only")
        return f"{what}: {', '.join(self.names)}" + (", scales powers of two" if self.power_of_two else "")


def can_quantise(quantised: Mapping[str, Products], engine: str, precision: str) -> bool:
    """Return whether an engine can compute a component of these products by engine in FP8 or INT8."""
    return precision in FORMATS and engine in quantised and precision in quantised[engine].precisions


@dataclass(frozen=True)
class Scales:
    """Calibrated scales of one checkpoint.

    `amax`: largest absolute input by product name in the model, as "prefix.layers.3.down_proj"; `observations`: how
    many were measured, from `source`; `fingerprint`: of the weights.
    """

    amax: Mapping[str, float]
    observations: int
    source: str
    modelopt: str
    fingerprint: str

    def of(self, product: str) -> float:
        """Return the largest absolute input of a product. Raises EngineError if it was not calibrated."""
        if product not in self.amax:
            raise EngineError(f"FP8 and INT8: there is no calibrated scale of {product}; {again()}")
        return self.amax[product]

    def why_not(self, model: nn.Module) -> str | None:
        """Explain why these scales do not belong to a model's weights; None if they do."""
        modules = {name for name, _ in model.named_modules()}
        if missing := [name for name in self.amax if name not in modules]:
            return f"they name products that the model lacks: {', '.join(missing[:4])}"
        found = fingerprint(model, self.amax)
        if found != self.fingerprint:
            return f"they were measured on other weights (fingerprint {self.fingerprint}, these have {found})"
        return None

    def save(self, folder: Path) -> Path:
        """Write `fp8_scales.json` into a checkpoint folder."""
        content = {
            "format": FORMAT,
            "algorithm": "max",
            "modelopt": self.modelopt,
            "observations": self.observations,
            "source": self.source,
            "fingerprint": self.fingerprint,
            "amax": {name: float(f"{value:.6g}") for name, value in self.amax.items()},
        }
        write_json(folder / FILE, content)
        return folder / FILE


def read_scales(folder: Path) -> Scales | None:
    """Return the scales of a checkpoint folder, or None. Raises CheckpointError for a damaged file or format 1."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"FP8 scales {path}: expected JSON, got: {error}; {again(folder)}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found == "vla_accel.fp8_scales/1":
        raise CheckpointError(f"FP8 scales {path}: format 1 has no fingerprint of the weights; {again(folder)}")
    if found != FORMAT or not isinstance(content.get("amax"), dict) or not content.get("fingerprint"):
        expected = f"format {FORMAT!r} with a fingerprint and a table of amax"
        raise CheckpointError(f"FP8 scales {path}: expected {expected}, got format {found!r}; {again(folder)}")
    if bad := [k for k, v in content["amax"].items() if not isinstance(v, (int, float)) or not 0 < v < math.inf]:
        names = ", ".join(bad[:8])
        raise CheckpointError(f"FP8 scales {path}: expected positive numbers, got others at {names}; {again(folder)}")
    amax = {name: float(value) for name, value in content["amax"].items()}
    source, version = content.get("source", ""), content.get("modelopt", "")
    return Scales(amax, int(content.get("observations", 0)), source, version, str(content["fingerprint"]))


def scales_for(model: nn.Module, folder: Path) -> Scales | None:
    """As `read_scales`. Raises CheckpointError also if they belong to other weights than the model's."""
    scales = read_scales(folder)
    if scales is not None and (reason := scales.why_not(model)):
        raise CheckpointError(f"FP8 scales {folder / FILE}: {reason}; {again(folder)}")
    return scales


def fingerprint(model: nn.Module, products: Iterable[str]) -> str:
    """Return a short hash of the weights that calibrated scales depend on: name, shape and a sample of every parameter
    of the model's parts (the first word of a name) that have one of `products`.

    Values are rounded to BF16 first, so that a checkpoint has one fingerprint in FP32, FP64 and BF16 (not in FP16,
    which rounds differently). At most 4096 values of a tensor are read, at an odd stride, so that they come from all
    columns. Not covered: parts without a calibrated product (in π0: token embedding, projector, expert), the tokenizer,
    and how observations are prepared.
    """
    parts = {name.partition(".")[0] for name in products}
    tensors = sorted((n, t) for n, t in model.named_parameters() if n.partition(".")[0] in parts)
    digest, samples = hashlib.sha256(), []
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        stride = max(1, tensor.numel() // SAMPLE) | 1
        # A weight that is not loaded is sampled from its origin (`nn.network.Network.origin`).
        origin: Any = model.origin if tensor.is_meta else None
        values = tensor.detach().reshape(-1)[::stride] if origin is None else origin.sample(name, stride)
        samples.append(values.to(torch.bfloat16).view(torch.int16).cpu())
    if samples:
        digest.update(torch.cat(samples).numpy().tobytes())
    return digest.hexdigest()[:16]
