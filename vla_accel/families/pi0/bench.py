"""How π0 and π0.5 are measured, and against what: openpi's own PyTorch model (`rlinf-openpi` on the package index)
and realtime-vla's Triton code from a checkout (github.com/haoyang9804/realtime-vla, a copy)."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from vla_accel.errors import ConfigError, DependencyError
from vla_accel.families.bench import DenoisingBench, Infer
from vla_accel.families.pi0.family import PI0, PI05, Pi0Family
from vla_accel.families.pi0.network import Pi0Config, pi0, pi05, pi05_demo
from vla_accel.numeric import matmul_precision

OPENPI_MODES: dict[str, str | None] = {
    "openpi-eager": None,
    "openpi-compile": "default",
    "openpi-max-autotune": "max-autotune",
}
"""Systems of openpi, with the mode of torch.compile."""


class Pi0Bench(DenoisingBench[Pi0Config]):
    """π0 or π0.5."""

    baselines = tuple(OPENPI_MODES)

    def __init__(self, family: Pi0Family, horizon: int, views: int, **sizes: Callable[..., Pi0Config]) -> None:
        self.family, self.horizon, self.views, self.sizes = family, horizon, views, sizes
        self.realtime_vla = tuple(_REALTIME_VLA[family.name])

    def published(self, horizon: int | None = None) -> Pi0Config:
        """π0.5 has no state in its prompt, as in pi05_libero."""
        return self.sizes[self.family.name](action_horizon=horizon or self.horizon, discrete_state_input=False)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return _openpi(self.family.name, horizon, device).sampler(OPENPI_MODES[name], steps)

    def from_checkout(self, name: str, checkout: Path, *, views: int, horizon: int, tokens: int) -> Infer:
        return _realtime_vla(name, self.family.name, checkout, views=views, horizon=horizon, tokens=tokens)


# -- openpi -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _openpi(kind: str, horizon: int, device: str) -> _Openpi:
    return _Openpi(kind, horizon, device)


class _Openpi:
    """openpi's `PI0Pytorch` with random BF16 weights and the inputs of its own server: three views, of which missing
    ones are masked, and prompts padded to the full length."""

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
            # The constructor's setting applies to openpi's calls, as in openpi's server, and to no others.
            self.precision = torch.get_float32_matmul_precision()
        # The instance's method is compiled; the class's is the eager one.
        self.model = model.to(device).eval()
        self.method = type(model).sample_actions
        self.observation = observations.Observation

    def sampler(self, mode: str | None, steps: int) -> Infer:
        """Return `infer(observation)`, eager or through torch.compile in `mode`."""
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


# -- realtime-vla -------------------------------------------------------------------------------------------------

_REALTIME_VLA = {
    "pi0": {"realtime-vla": ("pi0_infer", "Pi0Inference")},
    "pi05": {
        "realtime-vla": ("pi05_infer", "Pi05Inference"),
        "realtime-vla-autotune": ("pi05_infer_autotune", "Pi05AutotuneInference"),
    },
}
"""By kind and system: the file and its class."""


class _WithMargin(TorchFunctionMode):
    """Allocates 64 more rows with each `torch.empty`: π0's kernels read whole blocks, beyond the end of a buffer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is not torch.empty:
            return func(*args, **options)
        like = func(*args, **options | {"device": "meta"})
        return func(like.numel() + 64 * like.shape[-1], **options)[: like.numel()].view(like.shape)


def _realtime_vla(name: str, kind: str, checkout: Path, *, views: int, horizon: int, tokens: int) -> Infer:
    """Return `infer(observation)`, from images uint8 on the host to actions float32 (H, 32) on the host."""
    if name not in _REALTIME_VLA[kind]:
        raise ConfigError(f"realtime-vla: expected one of {', '.join(_REALTIME_VLA[kind])} for {kind}, got {name!r}")
    file, class_name = _REALTIME_VLA[kind][name]
    if not (checkout / f"{file}.py").is_file():
        raise ConfigError(f"realtime-vla: expected a checkout with {file}.py, got {checkout}")
    sys.path.insert(0, str(checkout))
    try:
        module = importlib.import_module(file)
    except ImportError as error:
        raise DependencyError(f"realtime-vla: {checkout}: {error}") from error
    finally:
        sys.path.remove(str(checkout))
    options: dict[str, Any] = {"num_views": views, "chunk_size": horizon}
    if kind == "pi05":
        options["discrete_state_input"] = False  # otherwise it needs PaliGemma's tokenizer
    prompt = torch.randn(tokens, 2048, dtype=torch.bfloat16)
    with _WithMargin():
        model = getattr(module, class_name)({"language_embeds": prompt}, **options)
    # Weights without a checkpoint are uninitialised and may be NaN.
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


CARDS = {
    "pi0": Pi0Bench(PI0, horizon=50, views=3, pi0=pi0),
    "pi05": Pi0Bench(PI05, horizon=10, views=2, pi05=pi05, pi05_demo=pi05_demo),
}
