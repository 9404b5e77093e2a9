"""openpi's own PyTorch model as a baseline: used where it is installed (`rlinf-openpi` from the package index)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vla_accel.errors import DependencyError
from vla_accel.numeric import matmul_precision

MODES: dict[str, str | None] = {
    "openpi-eager": None,
    "openpi-compile": "default",
    "openpi-max-autotune": "max-autotune",
}
"""Names that `bench` knows, with torch.compile's mode."""


def sampler(kind: str, horizon: int, device: str, name: str, steps: int) -> Callable[[Mapping[str, Any]], Any]:
    """`infer(observation)` of one of `MODES`. Raises DependencyError without openpi."""
    return _model(kind, horizon, device).sampler(MODES[name], steps)


@functools.lru_cache(maxsize=1)
def _model(kind: str, horizon: int, device: str) -> _Openpi:
    return _Openpi(kind, horizon, device)


class _Openpi:
    """openpi's `PI0Pytorch` with random BF16 weights, fed as its own server feeds it: three views (what is missing is
    masked), prompts padded to the full length."""

    def __init__(self, kind: str, horizon: int, device: str) -> None:
        try:
            from openpi.models import model as observations
            from openpi.models import pi0_config
            from openpi.models_pytorch.pi0_pytorch import PI0Pytorch
        except ImportError as error:
            raise DependencyError(f"openpi is not installed: pip install rlinf-openpi ({error})") from error
        self.kind, self.device, self.horizon = kind, device, horizon
        self.tokens = 200 if kind == "pi05" else 48
        config: Any = pi0_config.Pi0Config(
            pi05=kind == "pi05", action_horizon=horizon, max_token_len=self.tokens, dtype="bfloat16"
        )
        with matmul_precision(), torch.device(device):
            model = PI0Pytorch(config)
            # What the constructor asks for holds for openpi's own calls, as in openpi's server, and for them alone.
            self.precision = torch.get_float32_matmul_precision()
        # It compiles itself when made; the plain method is what eager means.
        self.model = model.to(device).eval()
        self.method = type(model).sample_actions
        self.observation = observations.Observation

    def sampler(self, mode: str | None, steps: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """`infer(observation)` through eager code, or torch.compile in `mode`."""
        method = self.method.__get__(self.model)
        call = method if mode is None else torch.compile(method, mode=mode)
        keys = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            views = [v for k, v in observation.items() if "image" in k]
            blank = np.zeros_like(views[0])
            images = [*views, *[blank] * (3 - len(views))]
            prompt = np.zeros((1, self.tokens), np.int64)
            prompt[0, :20] = np.arange(2, 22)
            state = np.zeros((1, 32), np.float32)
            state[0, :8] = observation["observation/state"]
            on = {
                "image": {k: torch.from_numpy(i)[None].to(self.device) for k, i in zip(keys, images, strict=True)},
                "image_mask": {
                    k: torch.tensor([i < len(views)], device=self.device) for i, k in enumerate(keys)
                },
                "state": torch.from_numpy(state).to(self.device),
                "tokenized_prompt": torch.from_numpy(prompt).to(self.device),
                "tokenized_prompt_mask": torch.from_numpy(prompt > 0).to(self.device),
            }  # fmt: skip
            with matmul_precision(self.precision), torch.inference_mode():
                actions = call(self.device, self.observation.from_dict(on), num_steps=steps)
            return {"actions": actions.float().cpu().numpy()}

        return infer
