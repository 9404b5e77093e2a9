"""The kernels of `kernels/conv1d` in Triton's interpreter, compared with their torch references, and the denoising
programs of a small Diffusion Policy and a small Multi-task DiT (`interpreter`, test_conv1d). `main` prints for each
case the largest difference, relative to the largest value, and its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.support import tiny_multi_task_dit
from tests.support.runtimes import steered
from tests.support.tiny_diffusion_policy import config_of, tiny_model
from vla_accel.config import EngineSpec
from vla_accel.families.diffusion_policy.native import DiffusionPolicyStore
from vla_accel.families.multi_task_dit.native import MultiTaskDitStore
from vla_accel.kernels.conv1d import ops
from vla_accel.kernels.conv1d.ops import Film, StepSizes, Target
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.nn.flow import Schedule

Case = Callable[[], list[Tensor]]
"""Runs an op, and returns what it wrote."""


def cases() -> dict[str, Case]:
    """By name. Sequences and groups that are no powers of two."""
    generator = torch.Generator().manual_seed(0)

    def wide(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch, length, channels = 2, 6, 40
    x, residual = wide(batch * length, channels), wide(batch * length, channels)
    norm = GroupNorm(8, 1 + wide(channels), wide(channels), 1e-5)
    table, own = wide(3, 2 * channels + 9), wide(batch, 2 * channels + 9)
    films = {
        "": None, " shifted": Film(table[1, 4 : 4 + channels], own[:, 4 : 4 + channels]),
        " scaled": Film(table[2, 4 : 4 + 2 * channels], own[:, 4 : 4 + 2 * channels]),
    }  # fmt: skip

    def targets() -> list[Target]:
        """Taps of a convolution behind other channels, of one that halves the length, of one that doubles it, plain."""

        def rows(of: int, columns: int) -> Tensor:
            return torch.zeros(batch * of, columns)

        return [
            Target(rows(length, 5 * 64), 64, 5, pad=2, offset=24), Target(rows(length // 2, 3 * 48), 48, 3, 2, 1),
            Target(rows(length, 3 * channels), channels, 3, pad=1), Target(rows(length, channels), channels),
        ]  # fmt: skip

    def normed(norm: GroupNorm | None, film: Film | None, residual: Tensor | None) -> list[Tensor]:
        written = targets()
        ops.normed(x, length, written, norm, film, residual)
        return [target.rows for target in written]

    chunk, output, z = wide(batch, 3, length, 7), wide(batch * length, 16), wide(batch, 3, length, 7)
    sizes = StepSizes(2.0, -1.5, 0.3, 0.5, 0.25, 0.1, 1.0)

    def stepped(output: Tensor | None, noise: Tensor | None) -> list[Tensor]:
        after, written = torch.zeros(batch, length, 7), [replace(one, offset=0) for one in targets()]
        ops.scheduler_step(chunk[:, 1], output, noise, after, sizes, written)
        return [after, *(target.rows for target in written)]

    def modulated(eps: float | None, repeated: int) -> list[Tensor]:
        out, h = torch.zeros_like(x), torch.zeros_like(x)
        columns = slice(4, 4 + (3 if eps else 1) * channels)
        film = Film(gates[1, columns], of_rows[:, columns])
        ops.modulate(residual[: len(x) // repeated], x, out, h, film, eps=eps)
        return [out, h]

    gates, of_rows = wide(2, 3 * channels + 9), wide(batch, 3 * channels + 9)
    found: dict[str, Case] = {
        f"normed{name}{' residual' * (r is not None)}": lambda f=film, r=r: normed(norm, f, r)
        for name, film in films.items() for r in (None, residual)
    }  # fmt: skip
    found |= {
        "placed": lambda: normed(None, None, None),
        "first step": lambda: stepped(None, None),
        "step": lambda: stepped(output, None),
        "step with noise": lambda: stepped(output, z[:, 2]),
        "modulated": lambda: modulated(1e-6, 1),
        "modulated from repeated rows": lambda: modulated(1e-6, 2),
        "gated": lambda: modulated(None, 1),
        "program": program,
        "transformer": transformer,
    }
    return found


def program(batch: int = 1) -> list[Tensor]:
    """The actions of the denoising program of a small model: a step takes the interpreter seconds."""
    config = config_of(widths=(16, 24), action_horizon=4)
    generator = torch.Generator().manual_seed(1)
    views, chunk = config.history * len(config.cameras), (config.action_horizon, config.action_dim)
    inputs = {
        "noise": torch.randn(batch, *chunk, generator=generator),
        "features": torch.randn(batch, views, 2 * config.keypoints, generator=generator),
        "state": torch.randn(batch, config.history, config.state_dim, generator=generator),
    }
    run = DiffusionPolicyStore(tiny_model(config)).denoise(batch, 1, EngineSpec("native"))
    actions = torch.zeros(batch, *chunk)
    run(inputs, {"actions": actions})
    return [actions]


def transformer(batch: int = 2) -> list[Tensor]:
    """The actions of the denoising program of a small Multi-task DiT, whose heads and rows are no powers of two."""
    config = tiny_multi_task_dit.config_of(scheduler=None, depth=1, action_horizon=5)
    generator = torch.Generator().manual_seed(1)

    def wide(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    chunk = config.action_horizon, config.action_dim
    inputs = {
        "noise": wide(*chunk), "features": wide(config.views, config.vision.width), "text": wide(config.width),
        "state": wide(config.history, config.state_dim),
    }  # fmt: skip
    store = MultiTaskDitStore(tiny_multi_task_dit.tiny_model(config))
    actions = torch.zeros(batch, *chunk)
    store.denoise(batch, Schedule.uniform(1), EngineSpec("native"))(inputs, {"actions": actions})
    return [actions]


def main() -> None:
    for name, run in cases().items():
        want = run()
        with steered("triton"):
            got = run()
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(want, got, strict=True))
        print(f"{worst:.3e} {name}", flush=True)
