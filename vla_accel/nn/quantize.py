"""NVIDIA ModelOpt, in one place: it measures the scales of a checkpoint, and puts quantisers into modules that TensorRT
is built from. Imported only where it is used. Knows no model: a family says what is measured."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_accel.errors import CheckpointError, DependencyError
from vla_accel.fp8 import E4M3, Scales, fingerprint
from vla_accel.progress import shown


@torch.no_grad()
def calibrate(
    model: nn.Module,
    calibration: tuple[nn.Module, Sequence[str]],
    inputs: Iterable[Sequence[np.ndarray | Sequence[np.ndarray]]],
    source: str,
) -> Scales:
    """Scales from observations.

    Args: `model`: whose weights the scales will belong to; `calibration`: the module that runs what is measured, as
    engines compute it, and the names of its products, which are those of `model`; `inputs`: that module's arguments
    for each observation; `source`: where they come from, for the record.
    Raises DependencyError without ModelOpt, CheckpointError where some product saw nothing finite.
    """
    mtq, version = load_modelopt()
    module, names = calibration
    device = next(model.parameters()).device
    observations = [[torch.from_numpy(np.array(value)).to(device) for value in one] for one in inputs]
    if not observations:
        raise CheckpointError("FP8 calibration: expected at least one observation, got none")

    def forward(quantised: Any) -> None:
        with shown("calibrating") as advance:
            for one in observations:
                quantised(*one)
                advance(1, len(observations))

    with _quiet():
        mtq.quantize(module, mtq.FP8_DEFAULT_CFG, forward)
    amax: dict[str, float] = {}
    for name, part in module.named_modules():
        quantizer = getattr(part, "input_quantizer", None)
        if quantizer is not None and getattr(quantizer, "amax", None) is not None:
            amax[name] = float(quantizer.amax)
    missing = [name for name in names if not 0 < amax.get(name, math.nan) < math.inf]
    if missing:
        raise CheckpointError(f"FP8 calibration: no finite input was seen at {', '.join(missing[:8])}")
    return Scales({n: amax[n] for n in names}, len(observations), source, version, fingerprint(model, names))


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
