"""lerobot's own policies as baselines of `bench`: how they are made and called. Nothing of lerobot is imported here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import DependencyError


@contextlib.contextmanager
def importing(model: str, packages: str = "lerobot==0.6.1") -> Iterator[None]:
    """Within this context, an import that fails is a DependencyError that says what to install for lerobot's model."""
    try:
        yield
    except ImportError as error:
        raise DependencyError(f"lerobot's {model} is not installed: pip install {packages} ({error})") from error


@functools.lru_cache(maxsize=1)
def cached_model(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return `make(*arguments)`, and keep the last result: such a model fills the memory of a GPU."""
    return make(*arguments)


def features(sizes: Sequence[tuple[int, int]], state: int | None, action: int) -> dict[str, Any]:
    """Return the features of a config of lerobot: cameras 0, 1, … with images of these sizes, state (None: no such
    feature) and action."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    images = {f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, *size)) for i, size in enumerate(sizes)}
    states = {} if state is None else {"observation.state": PolicyFeature(FeatureType.STATE, (state,))}
    return {
        "input_features": {**images, **states},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (action,))},
    }


def batch_of(
    observation: Mapping[str, Any], device: str | torch.device, scales: Sequence[Tensor] = ()
) -> dict[str, Any]:  # fmt: skip
    """Return an observation of one present moment as a batch, as lerobot's server makes it: bytes are copied, and
    converted to floats on the device.

    `scales`: mean and deviation (2, 3, 1, 1) of each camera's pixels on the device, with which they are normalized.
    """
    state = torch.from_numpy(np.asarray(observation["observation/state"], np.float32))
    batch: dict[str, Any] = {"observation.state": state[None].to(device)}
    images = [value for key, value in observation.items() if "image" in key]
    for index, image in enumerate(images):
        pixels = torch.from_numpy(image)[None].to(device).permute(0, 3, 1, 2).float() / 255
        mean, deviation = scales[index] if scales else (0.0, 1.0)
        batch[f"observation.images.{index}"] = (pixels - mean) / deviation if scales else pixels
    return batch


def moments_of(observation: Mapping[str, Any], scales: Tensor) -> dict[str, Any]:
    """Return an observation with a history as a batch of a policy whose cameras are stacked.

    `scales`: mean and deviation (cameras, 2, 3, 1, 1) of the cameras' pixels, on the device.
    """
    state = torch.from_numpy(np.asarray(observation["observation/state"], np.float32))
    images = [value for key, value in observation.items() if "image" in key]
    pixels = torch.stack([torch.from_numpy(image).to(scales.device) for image in images], 1)
    pixels = (pixels.permute(0, 1, 4, 2, 3).float() / 255 - scales[:, 0]) / scales[:, 1]
    return {"observation.state": state[None].to(scales.device), "observation.images": pixels[None]}


def without_hub(module: Any, parts: Mapping[str, Any]) -> Any:
    """Replace classes of a module, such as AutoTokenizer, within a context: `from_pretrained` returns the part, or what
    the part, a function, returns for the same arguments."""
    made: dict[str, Any] = {
        name: SimpleNamespace(
            from_pretrained=part if callable(part) and not isinstance(part, torch.nn.Module) else _constant(part)
        )
        for name, part in parts.items()
    }
    return patch.multiple(module, **made)


def _constant(part: Any) -> Callable[..., Any]:
    return lambda *_, **__: part
