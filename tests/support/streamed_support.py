"""Denoise loops of π0, π0.5 and SmolVLA over random weights: their cases, their inputs, the loop of fused ops, the
persistent loop, and the streamed loop on a GPU, or on the CPU with a module that records its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.gpus import H200
from vla_accel.config import NamedSchedule
from vla_accel.families.pi0 import native_loop as pi0_loop
from vla_accel.families.pi0.network import Kind, Pi0, Pi0Config
from vla_accel.families.smolvla import native_loop as smolvla_loop
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig
from vla_accel.kernels import nvrtc
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop import ExpertSpec, StreamedLoop, why_not
from vla_accel.kernels.persistent import PersistentLoop, Plan
from vla_accel.nn.flow import Schedule
from vla_accel.nn.gemma import GemmaConfig, SmolLmConfig
from vla_accel.nn.loop import SuffixLoop, streamed_loop
from vla_accel.nn.random_weights import random_model
from vla_accel.nn.siglip import SiglipConfig

NAN = float("nan")


def streamable(
    kind: Kind, *, width: int, mlp: int, heads: int, kv_heads: int = 1, head_dim: int = 64, depth: int = 2,
    horizon: int = 10, action_dim: int = 8,
) -> Pi0Config:  # fmt: skip
    """A small π0 or π0.5 whose expert the streamed kernels can run."""
    shared = {"depth": depth, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Pi0Config(
        kind=kind, vision=SiglipConfig(width=32, depth=1, mlp_dim=64, heads=2, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=64, mlp_dim=128, **shared), expert=GemmaConfig(width=width, mlp_dim=mlp, **shared),
        vocab_size=64, action_dim=action_dim, action_horizon=horizon, max_token_len=48,
        discrete_state_input=kind == "pi05",
    )  # fmt: skip


def expert_of(
    *, width: int = 80, mlp: int = 128, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, depth: int = 2,
    horizon: int = 10, action_dim: int = 9, self_every: int = 2,
) -> SmolVlaConfig:  # fmt: skip
    """A SmolVLA with this expert, small otherwise."""
    shared = {"depth": depth, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return SmolVlaConfig(
        vision=SiglipConfig(width=32, depth=1, mlp_dim=64, heads=2, image_size=32, patch_size=8),
        prefix=SmolLmConfig(width=64, mlp_dim=64, **shared), expert=SmolLmConfig(width=width, mlp_dim=mlp, **shared),
        vocab_size=64, shuffle=2, self_every=self_every, state_dim=8, action_dim=action_dim, action_horizon=horizon,
    )  # fmt: skip


@dataclass(frozen=True)
class LoopCase:
    """`config`: of π0, π0.5 or SmolVLA; `ends`: prefix tokens of each sequence that are no padding, by default a few
    less than `prefix_tokens`; `setting`: of the schedule of the `steps`; `trained`: some actions of π0 or π0.5 are
    pinned."""

    config: Any
    batch: int = 1
    prefix_tokens: int = 100
    steps: int = 3
    ends: tuple[int, ...] = ()
    setting: NamedSchedule | None = None
    trained: bool = False

    @property
    def schedule(self) -> Schedule:
        return Schedule.of(self.setting, self.steps)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.ends or tuple(max(1, self.prefix_tokens - 7 * (b + 1)) for b in range(self.batch))


FULL: dict[str, Any] = {"width": 1024, "mlp": 4096, "heads": 8, "head_dim": 256, "action_dim": 32}
SMOLVLA_FULL: dict[str, Any] = {
    "width": 720, "mlp": 2048, "heads": 15, "kv_heads": 5, "horizon": 50, "action_dim": 32,
}  # fmt: skip
# One to four tiles of rows, one to four units a block, one to four parts of K, products of one or two chunks; the
# experts of the full-size models, two layers deep.
LOOPS = {
    "demo": LoopCase(streamable("pi05", width=128, mlp=512, heads=4)),
    "demo x 4": LoopCase(streamable("pi05", width=128, mlp=512, heads=4), batch=4, setting="cubic"),
    "full": LoopCase(streamable("pi05", **FULL), prefix_tokens=544),
    "full pi0": LoopCase(streamable("pi0", **FULL, horizon=50), prefix_tokens=800),
    "full fifty rows": LoopCase(streamable("pi05", **FULL, horizon=50), prefix_tokens=800),
    "full pi0 three rows of tiles": LoopCase(streamable("pi0", **FULL, horizon=39), prefix_tokens=64),
    "grouped": LoopCase(
        streamable("pi0", width=256, mlp=1024, heads=4, kv_heads=2, horizon=15), batch=2, setting="cubic"
    ),
    "wide": LoopCase(streamable("pi05", width=64, mlp=2048, heads=64, horizon=17), prefix_tokens=31),
    "narrow": LoopCase(streamable("pi05", width=32, mlp=96, heads=1, horizon=1, action_dim=7), prefix_tokens=1),
}


def smolvla_case(
    prefix_tokens: int, *ends: int, steps: int = 2, setting: NamedSchedule = "cubic", **expert: Any
) -> LoopCase:
    return LoopCase(expert_of(**expert), len(ends), prefix_tokens, steps, ends, setting)


# One to four tiles of rows, one and two rounds of keys, layers that cross always, sometimes and never, prefixes of one
# token and of more than there are threads, several sequences, the published size.
EXPERTS = {
    **{f"{n} actions": smolvla_case(40, 33, horizon=n) for n in (1, 16, 17, 33, 50, 64)},
    "one token": smolvla_case(1, 1),
    "long": smolvla_case(300, 257),
    "whole prefix": smolvla_case(48, 48, horizon=33),
    "all cross": smolvla_case(40, 33, self_every=0),
    "none crosses": smolvla_case(40, 33, self_every=1),
    "every third": smolvla_case(40, 16, self_every=3, depth=4),
    "heads of 128": smolvla_case(40, 33, head_dim=128),
    "large heads": smolvla_case(40, 33, head_dim=256),
    "three sequences": smolvla_case(40, 33, 40, 7),
    "three long sequences": smolvla_case(70, 33, 40, 70, horizon=20),
    "full": smolvla_case(177, 160, setting="uniform", **SMOLVLA_FULL),
    "full short": smolvla_case(145, 130, **SMOLVLA_FULL),
    "full three views": smolvla_case(241, 241, **SMOLVLA_FULL),
}


class Loops:
    """A case's weights and inputs. `beyond`: the keys and values behind each length."""

    def __init__(self, case: LoopCase, beyond: float = NAN) -> None:
        config, self.case, self._beyond = case.config, case, beyond
        expert, generator = config.expert, torch.Generator().manual_seed(3)
        cache = (expert.depth, case.batch, case.prefix_tokens, expert.kv_heads, expert.head_dim)
        self.noise = torch.randn(case.batch, config.action_horizon, config.action_dim, generator=generator)
        of_state = isinstance(config, Pi0Config) and config.kind == "pi0"
        self.state = torch.randn(case.batch, expert.width, generator=generator) if of_state else None
        self.inputs = {
            "keys": torch.randn(cache, generator=generator).bfloat16(),
            "values": torch.randn(cache, generator=generator).bfloat16(),
            "lengths": torch.tensor(case.lengths, dtype=torch.int32),
            "target": torch.randn(self.noise.shape, generator=generator),
            "weights": torch.rand(self.noise.shape[:2], generator=generator),
        }
        if case.trained:
            self.inputs["weights"] = (self.inputs["weights"] > 0.5).float()
        self._family: Any = pi0_loop if isinstance(config, Pi0Config) else smolvla_loop

    @property
    def spec(self) -> ExpertSpec:
        return self._family.expert_spec(self.case.config)

    def model(self, device: str, dtype: torch.dtype) -> Any:
        kind: Any = Pi0 if isinstance(self.case.config, Pi0Config) else SmolVla
        return random_model(kind, self.case.config).to(device).to_compute_dtype(dtype)

    def weights(self, precision: str, device: str = "cpu", *, streamed: bool = False) -> tuple[Any, Any]:
        """The expert's weights, and the tables of the steps."""
        model = self.model(device, torch.float32 if precision == "fp32" else torch.bfloat16)
        weights = self._family.expert_weights(model, precision, streamed=streamed)
        if isinstance(model, Pi0):
            return weights, pi0_loop.steps_of(model, weights, self.case.schedule, trained=self.case.trained)
        exact = self.model(device, torch.float32)
        return weights, smolvla_loop.steps_of(exact, self.case.schedule, streamed=streamed)

    @torch.inference_mode()
    def fused(self, precision: str, device: str = "cpu") -> SuffixLoop:
        """The loop of fused ops."""
        weights, tables = self.weights(precision, device)
        return SuffixLoop(weights, self.spec, tables, self.case.batch, self.case.prefix_tokens)

    @torch.inference_mode()
    def streamed(self, gpu: Gpu = H200, device: str = "cpu") -> StreamedLoop:
        """The loop of streamed kernels."""
        weights, tables = self.weights("bf16", device, streamed=True)
        return streamed_loop(gpu, weights, self.spec, tables, self.case.batch, self.case.prefix_tokens)

    @torch.inference_mode()
    def persistent(self, gpu: Gpu, device: str = "cpu") -> PersistentLoop:
        """The loop as one persistent kernel."""
        weights, tables = self.weights("bf16", device)
        plan = Plan(self.spec, self.case.batch, self.case.steps, self.case.trained, gpu)
        output = (weights.w_out, weights.b_out)
        return PersistentLoop(plan, list(weights.layers), tables, output, weights.mix, self.case.prefix_tokens)

    def placed(
        self, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, *, beyond: float | None = None
    ) -> dict[str, Tensor]:
        """The inputs on a device, keys and values in `dtype`."""
        behind = torch.arange(self.case.prefix_tokens) >= self.inputs["lengths"][:, None]
        cache = {
            name: self.inputs[name]
            .masked_fill(behind[None, :, :, None, None], self._beyond if beyond is None else beyond)
            .to(dtype)
            for name in ("keys", "values")
        }
        return {name: value.to(device) for name, value in {**self.inputs, **cache}.items()}

    @torch.inference_mode()
    def moved(self, loop: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loop's result minus the noise, on the CPU."""
        device = inputs["keys"].device
        actions = self.noise.to(device, copy=True)
        loop.run(inputs, None if self.state is None else self.state.to(device), actions)
        return actions.cpu() - self.noise


def reason(case: LoopCase) -> str | None:
    """Why a case cannot run on an H200."""
    return why_not(H200, Loops(case).spec, case.batch, "bf16")


# -- without a GPU ----------------------------------------------------------------------------------------------------

ROOM: dict[int, int] = {}
"""Clusters that the recorded device holds at once, by their blocks; 1000 of any other size."""


@dataclass
class RecordedModule:
    """Takes the place of `nvrtc.Module`, and records the launches."""

    source: str
    shared: Mapping[str, int]
    architecture: str
    device: torch.device
    launches: list[tuple[str, int, int, tuple[Any, ...], int, bool]] = field(default_factory=list)

    def launch(
        self, name: str, blocks: int, threads: int, arguments: Sequence[Any], *, cluster: int = 1,
        dependent: bool = False,
    ) -> None:  # fmt: skip
        self.launches.append((name, blocks, threads, tuple(arguments), cluster, dependent))

    def clusters_at_once(self, name: str, threads: int, cluster: int) -> int:
        return ROOM.get(cluster, 1000)

    @property
    def defines(self) -> dict[str, int]:
        """The sizes in front of the source."""
        lines = (line.split() for line in self.source.splitlines())
        return {w[1]: int(w[2]) for w in lines if len(w) == 3 and w[0] == "#define" and w[2].isdigit()}


def recorded_loop(
    case: LoopCase, monkeypatch: pytest.MonkeyPatch, gpu: Gpu = H200
) -> tuple[StreamedLoop, RecordedModule]:
    """The loop of a case on the CPU, as it would run on a GPU."""
    monkeypatch.setattr(nvrtc, "load_module", RecordedModule)
    loop = Loops(case).streamed(gpu)
    assert isinstance(loop.module, RecordedModule)
    return loop, loop.module
