"""The streamed denoise loop without a GPU: built as usual on the CPU, with a module that records what is launched. And
what it is given on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.gpus import H200
from tests.support.tiny import random_model
from vla_accel.families.pi0.native_loop import expert_spec, expert_weights
from vla_accel.families.pi0.network import Kind, Pi0Config
from vla_accel.families.pi0.step_tables import step_tables
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import StepTables, StreamedLoop, why_not
from vla_accel.nn.expert import ExpertWeights
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.loop import streamed_loop
from vla_accel.nn.siglip import SiglipConfig


def streamable(kind: Kind, *, width: int, mlp: int, heads: int, kv_heads: int = 1, head_dim: int = 64, depth: int = 2,
               horizon: int = 10, action_dim: int = 8) -> Pi0Config:  # fmt: skip
    """A small model whose expert the streamed kernels can run."""
    return Pi0Config(
        kind=kind,
        vision=SiglipConfig(width=32, depth=1, mlp_dim=64, heads=2, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=64, depth=depth, mlp_dim=128, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        expert=GemmaConfig(width=width, depth=depth, mlp_dim=mlp, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        vocab_size=64,
        action_dim=action_dim,
        action_horizon=horizon,
        max_token_len=48,
        discrete_state_input=kind == "pi05",
    )


@dataclass(frozen=True)
class LoopCase:
    config: Pi0Config
    batch: int = 1
    prefix_tokens: int = 100
    steps: int = 3


# Sizes that take other paths: one to four tiles of rows, one to four units a block, one to four parts of K, products
# of one or two chunks. The expert of the full-size model is among them, two layers deep.
FULL = {"width": 1024, "mlp": 4096, "heads": 8, "head_dim": 256, "action_dim": 32}
LOOPS = {
    "demo": LoopCase(streamable("pi05", width=128, mlp=512, heads=4)),
    "demo x 4": LoopCase(streamable("pi05", width=128, mlp=512, heads=4), batch=4),
    "full": LoopCase(streamable("pi05", **FULL), prefix_tokens=544),
    "full pi0": LoopCase(streamable("pi0", **FULL, horizon=50), prefix_tokens=800),
    "full fifty rows": LoopCase(streamable("pi05", **FULL, horizon=50), prefix_tokens=800),
    "full pi0 three rows of tiles": LoopCase(streamable("pi0", **FULL, horizon=39), prefix_tokens=64),
    "grouped": LoopCase(streamable("pi0", width=256, mlp=1024, heads=4, kv_heads=2, horizon=15), batch=2),
    "wide": LoopCase(streamable("pi05", width=64, mlp=2048, heads=64, horizon=17), prefix_tokens=31),
    "narrow": LoopCase(streamable("pi05", width=32, mlp=96, heads=1, horizon=1, action_dim=7), prefix_tokens=1),
}


ROOM: dict[int, int] = {}
"""Clusters that the recorded device holds at once, by their blocks; any number of those that are not named."""


@dataclass
class RecordedModule:
    """What `runtime.Module` was given, and the launches."""

    source: str
    shared: Mapping[str, int]
    architecture: str
    device: torch.device
    launches: list[tuple[str, int, int, tuple[Any, ...], int, bool]] = field(default_factory=list)

    def launch(self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
               dependent: bool = False) -> None:  # fmt: skip
        self.launches.append((name, blocks, threads, tuple(arguments), cluster, dependent))

    def clusters_at_once(self, name: str, threads: int, cluster: int) -> int:
        """The device's own answer: `ROOM`, by blocks of a cluster."""
        return ROOM.get(cluster, 1000)

    @property
    def defines(self) -> dict[str, int]:
        """The sizes before the source."""
        lines = (line.split() for line in self.source.splitlines())
        return {w[1]: int(w[2]) for w in lines if len(w) == 3 and w[0] == "#define" and w[2].isdigit()}


def recorded_loop(
    case: LoopCase, monkeypatch: pytest.MonkeyPatch, gpu: Gpu = H200
) -> tuple[StreamedLoop, RecordedModule]:
    """The loop of a case with random weights, on the CPU, as it would run on a GPU."""
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    model = random_model(case.config)
    with torch.inference_mode():
        weights = expert_weights(model.to_compute_dtype(torch.bfloat16), "bf16", streamed=True)
        tables = step_tables(model, weights.normed_products(), case.steps)
        loop = streamed_loop(gpu, weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)
    assert isinstance(loop.module, RecordedModule)
    return loop, loop.module


def reason(case: LoopCase) -> str | None:
    """Why a case cannot run on an H200."""
    return why_not(H200, expert_spec(case.config), case.batch, "bf16")


def loops_inputs(case: LoopCase) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """keys, values, lengths and guidance, the state's token and the noise, on the CPU. Beyond a row's length there is
    rubbish."""
    config, generator = case.config, torch.Generator().manual_seed(case.batch)
    expert = config.expert
    cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
    keys, values = (torch.randn(cache, generator=generator).bfloat16() for _ in range(2))
    lengths = torch.tensor([max(1, case.prefix_tokens - 7 * b) for b in range(case.batch)], dtype=torch.int32)
    beyond = (torch.arange(case.prefix_tokens) >= lengths[:, None])[None, :, :, None, None]
    keys, values = keys.masked_fill(beyond, 1e3), values.masked_fill(beyond, -1e3)
    state = torch.randn(case.batch, expert.width, generator=generator) if config.kind == "pi0" else None
    noise = torch.randn(case.batch, config.action_horizon, config.action_dim, generator=generator)
    target, weights = torch.randn(noise.shape, generator=generator), torch.rand(noise.shape[:2], generator=generator)
    weights[:, -1] = 0
    given = {"keys": keys, "values": values, "lengths": lengths, "target": target, "weights": weights}
    return given, state, noise


def loop_of(case: LoopCase, weights: ExpertWeights, tables: StepTables) -> StreamedLoop:
    """On the GPU at hand."""
    gpu = Gpu.of(torch.device("cuda"))
    assert gpu is not None
    return streamed_loop(gpu, weights, expert_spec(case.config), tables, case.batch, case.prefix_tokens)


def run_loop(loop: Any, inputs: dict[str, Tensor], state: Tensor | None, noise: Tensor, device: str) -> np.ndarray:
    placed = {name: value.to(device) for name, value in inputs.items()}
    actions = noise.to(device, copy=True)
    with torch.inference_mode():
        loop.run(placed, None if state is None else state.to(device), actions)
    return actions.cpu().numpy()
