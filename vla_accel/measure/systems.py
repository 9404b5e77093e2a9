"""What `vla-accel bench` can time: this package's engines on weights of the published sizes, and openpi's own PyTorch.

openpi is used where it is installed (`rlinf-openpi` from the package index); it is never needed otherwise.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ConfigError, DependencyError
from vla_accel.measure.bench import System
from vla_accel.measure.roofline import Ceilings, floors_ms, work_of
from vla_accel.measure.synthetic import random_policy
from vla_accel.models.pi0 import Pi0, Pi0Config
from vla_accel.policy import OptimizedPolicy
from vla_accel.transforms.processing import Processor

_N = "native"
CONFIGS: dict[str, PolicyConfig] = {
    "eager": PolicyConfig(),
    "native-bf16": PolicyConfig(vision=EngineSpec(_N), kv_cache=EngineSpec(_N), denoise=EngineSpec(_N)),
    "native-fp8": PolicyConfig(vision=EngineSpec(_N), kv_cache=EngineSpec(_N, precision="fp8"), denoise=EngineSpec(_N)),
    "native-fp8-vision": PolicyConfig(
        vision=EngineSpec(_N, precision="fp8"), kv_cache=EngineSpec(_N, precision="fp8"), denoise=EngineSpec(_N)
    ),
}
OPENPI = {"openpi-eager": None, "openpi-compile": "default", "openpi-max-autotune": "max-autotune"}
NAMES = (*CONFIGS, *OPENPI)


class Factory:
    """Makes the systems of one model; all of ours share its weights."""

    def __init__(self, kind: Any, *, views: int, horizon: int, device: str | None, ceilings: Ceilings | None) -> None:
        self.kind, self.views, self.horizon, self.device, self.ceilings = kind, views, horizon, device, ceilings
        self.model: Pi0 | None = None
        self.processor: Processor | None = None
        self._by_name: dict[str, OptimizedPolicy] = {}
        self._openpi: Any = None

    def make(self, name: str, steps: int) -> System:
        """A system by name. Raises ConfigError for an unknown one, DependencyError without openpi."""
        if name in OPENPI:
            return self._theirs(name, steps)
        if name not in CONFIGS:
            raise ConfigError(f"systems: expected some of {', '.join(NAMES)}, got {name!r}")
        started = time.perf_counter()
        if name not in self._by_name:
            policy, _ = random_policy(
                self.kind, CONFIGS[name], horizon=self.horizon, views=self.views, steps=steps, device=self.device,
                model=self.model,
            )  # fmt: skip
            self._by_name[name], self.model, self.processor = policy, policy.model, policy.processor
        policy = self._by_name[name].with_steps(steps)
        policy.warm_up()
        system = System(name, policy.infer, steps, time.perf_counter() - started)
        config = policy.model.config
        length = len(policy.processor.prepare(policy.processor.example()).tokens)
        work = work_of(config, self.views, length, steps)
        if self.ceilings is not None:
            fp8 = {n: getattr(policy.config, n).precision == "fp8" for n in ("vision", "kv_cache")}
            system.floors = floors_ms(work, self.ceilings, fp8_vision=fp8["vision"], fp8_prefix=fp8["kv_cache"])
        system.notes = {"engines": policy.ledger.as_list(), "work": work.__dict__}
        return system

    def _theirs(self, name: str, steps: int) -> System:
        if self._openpi is None:
            self._openpi = _Openpi(self.kind, self.horizon, self.device or "cuda")
        started = time.perf_counter()
        infer = self._openpi.sampler(OPENPI[name], steps)
        return System(name, infer, steps, time.perf_counter() - started)


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
        with torch.device(device):
            model = PI0Pytorch(config)
        # It compiles itself when made; the plain method is what eager means.
        self.model = model.to(device).eval()
        self.method = type(model).sample_actions
        self.observation = observations.Observation

    def sampler(self, mode: str | None, steps: int) -> Any:
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
            with torch.inference_mode():
                actions = call(self.device, self.observation.from_dict(on), num_steps=steps)
            return {"actions": actions.float().cpu().numpy()}

        return infer


def free() -> None:
    """Give back what dropped systems held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_graph(config: PolicyConfig) -> PolicyConfig:
    """The same engines launched one by one, for a profile."""
    return replace(config, cuda_graph=False)


def describe_sizes(config: Pi0Config, views: int) -> dict[str, Any]:
    """What was timed, for the record."""
    return {"kind": config.kind, "views": views, "action_horizon": config.action_horizon,
            "prefix": config.prefix.__dict__, "expert": config.expert.__dict__}  # fmt: skip
