"""realtime-vla's Triton code for π0 and π0.5 as a baseline, from a checkout of it: one CUDA graph, BF16, ten steps.

Built after the code of github.com/haoyang9804/realtime-vla, a copy of realtime-vla (its `benchmark.py` calls it so).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from vla_accel.errors import ConfigError, DependencyError

CLASSES = {
    "pi0": {"realtime-vla": ("pi0_infer", "Pi0Inference")},
    "pi05": {
        "realtime-vla": ("pi05_infer", "Pi05Inference"),
        "realtime-vla-autotune": ("pi05_infer_autotune", "Pi05AutotuneInference"),
    },
}
"""By kind and system: the file and the class in it."""


class _Followed(TorchFunctionMode):
    """`torch.empty` with 64 rows more behind it: π0's kernels read blocks of so many, beyond what they were given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is not torch.empty:
            return func(*args, **options)
        like = func(*args, **options | {"device": "meta"})
        return func(like.numel() + 64 * like.shape[-1], **options)[: like.numel()].view(like.shape)


def sampler(
    name: str, kind: str, checkout: Path, *, views: int, horizon: int, tokens: int
) -> Callable[[Mapping[str, Any]], Any]:
    """`infer(observation)`: images uint8 on the host in, actions float32 (H, 32) on the host out."""
    if name not in CLASSES[kind]:
        raise ConfigError(f"realtime-vla: expected one of {', '.join(CLASSES[kind])} for {kind}, got {name!r}")
    file, kind_of = CLASSES[kind][name]
    if not (checkout / f"{file}.py").is_file():
        raise ConfigError(f"realtime-vla: expected a checkout with {file}.py, got {checkout}")
    sys.path.insert(0, str(checkout))
    try:
        module = importlib.import_module(file)
    except ImportError as error:
        raise DependencyError(f"realtime-vla: {checkout}: {error}") from error
    finally:
        sys.path.remove(str(checkout))
    given: dict[str, Any] = {"num_views": views, "chunk_size": horizon}
    if kind == "pi05":
        given["discrete_state_input"] = False  # else it needs PaliGemma's tokenizer
    prompt = torch.randn(tokens, 2048, dtype=torch.bfloat16)
    with _Followed():
        model = getattr(module, kind_of)({"language_embeds": prompt}, **given)
    # It leaves uninitialised what a checkpoint does not bring; small numbers are no NaN.
    for weight in model.weights.values():
        weight.normal_(0.0, 0.02)
    state = torch.zeros(32, dtype=torch.bfloat16, device="cuda")

    def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
        pixels = [v for v in observation.values() if isinstance(v, np.ndarray) and v.dtype == np.uint8]
        images = torch.from_numpy(np.stack(pixels)).cuda().to(torch.bfloat16) / 127.5 - 1.0
        noise = torch.randn(horizon, 32, dtype=torch.bfloat16, device="cuda")
        actions = model.forward(images, noise) if kind == "pi05" else model.forward(images, state, noise)
        return {"actions": actions.float().cpu().numpy()}

    return infer
