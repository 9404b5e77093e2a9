"""What the tests of the evaluation share: stand-ins for a policy and a simulator."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval.harness.benchmark import Task

OBSERVATION = {
    "observation/image": np.zeros((224, 224, 3), np.uint8),
    "observation/wrist_image": np.zeros((224, 224, 3), np.uint8),
    "observation/state": np.zeros(8),
}
OBS = {**OBSERVATION, "prompt": "do it"}
TASK = Task(0, "task_0", "do it", [np.zeros(3)] * 2)
PARTS = {"preprocess": 1.0, "vision": 4.0, "kv_cache": 10.0, "postprocess": 0.5}


class FakePolicy:
    """A policy that answers with a constant chunk and records what it was asked.

    Its denoising takes 2 ms + 3 ms a step, by its own account.
    """

    device = torch.device("cpu")

    def __init__(self, steps: int = 10, *, fail: Callable[[int], None] | None = None) -> None:
        self.steps = steps
        self.metadata = {
            "model": {"kind": "fake"},
            "engines": [],
            "device": "cpu",
            "num_steps": steps,
            "action_horizon": 10,
            "action_dim": 8,
        }
        self.noises: list[np.ndarray | None] = []
        self.prompts: list[str] = []
        self.calls = 0
        self._fail = fail

    def with_steps(self, steps: int) -> FakePolicy:
        return FakePolicy(steps, fail=self._fail)

    def reset(self) -> None:
        pass

    def infer(self, obs: dict[str, Any], *, noise: np.ndarray | None = None) -> dict[str, Any]:
        self.calls += 1
        if self._fail is not None:
            self._fail(self.calls)
        self.noises.append(noise)
        self.prompts.append(obs["prompt"])
        parts = {**PARTS, "denoise": 2.0 + 3.0 * self.steps}
        total = sum(parts.values())
        timing = {f"{k}_ms": v for k, v in {**parts, "total": total, "infer": total}.items()}
        return {"actions": np.full((10, 7), 0.1), "policy_timing": timing}


class FakeEnv:
    """A simulator without physics: success after a given number of actions.

    Like the real one it refuses to show what a step that did not look would have shown.
    """

    absolute = False

    def __init__(self, succeed_after: int | None = None, crash_at: int | None = None) -> None:
        self.succeed_after, self.crash_at = succeed_after, crash_at
        self.steps: list[tuple[np.ndarray, bool]] = []
        self.shown = 0
        self._looked = False

    def reset_to(self, start_state: np.ndarray, *, seed: Sequence[int]) -> None:
        self.steps, self._looked = [], True

    def step(self, action: np.ndarray, *, look: bool) -> bool:
        if self.crash_at == len(self.steps):
            raise RuntimeError("the simulation\nis unstable")
        self.steps.append((action, look))
        self._looked = look
        return len(self.steps) == self.succeed_after

    def observation(self) -> dict[str, Any]:
        assert self._looked, "asked to see a step that did not look"
        self.shown += 1
        return OBSERVATION

    def close(self) -> None:
        pass


def write_checkpoint(folder: Path) -> Path:
    """A random checkpoint of the demo's architecture: it loads and acts, and knows nothing."""
    from vla_accel.checkpoints.bundled import NAMED
    from vla_accel.checkpoints.checkpoint import save_checkpoint
    from vla_accel.families.pi0.network import Pi0, pi05_demo

    torch.manual_seed(0)
    config = pi05_demo()
    state = {k: torch.randn_like(v) * 0.02 for k, v in Pi0(config).state_dict().items()}
    save_checkpoint(state, config, folder)
    for name in ("norm_stats.json", "tokenizer.json"):
        shutil.copy(NAMED["demo"] / name, folder / name)
    return folder
