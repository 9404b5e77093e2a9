"""All steps of Diffusion Policy's U-Net in one kernel, in an emulator on the CPU: as near to float32 as the launches of
fused ops in BF16, the same bits on every GPU; and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.agreement import assert_as_near
from tests.support.cuda_emulator import EmulatedModule, EmulationError
from tests.support.gpus import H200
from tests.support.tiny_diffusion_policy import config_of, tiny_model
from vla_accel.families.diffusion_policy.native import NativeUnet, UnetWeights
from vla_accel.families.diffusion_policy.network import DiffusionPolicy
from vla_accel.families.diffusion_policy.persistent import PackedUnet, PersistentProgram
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.kernels import nvrtc
from vla_accel.kernels.conv1d.unet import why_not
from vla_accel.kernels.gpu import Gpu
from vla_accel.runtime import Runtime

CPU = torch.device("cpu")
WIDTHS = {"widths": (32, 64, 96), "action_horizon": 16}
CASES: dict[str, dict[str, Any]] = {
    "DDPM": {},
    "DDIM, shifts alone": {"scaled": False, "scheduler": NoiseScheduler("DDIM", prediction="sample", clip=None)},
    "two levels, three taps, other groups": {"widths": (64, 128), "kernel": 3, "groups": 4, "action_horizon": 12},
    "a level that keeps its width": {"widths": (32, 32, 64), "action_horizon": 8},
}
STEPS = 2


def gpu_of(blocks: int, shared: int = H200.shared_per_block) -> Gpu:
    return replace(H200, multiprocessors=blocks, shared_per_block=shared)


class Unet:
    """A model's denoising steps by the emulated kernel, and by fused ops."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config = config_of(**(WIDTHS | changes))
        self.model, self.folder = tiny_model(self.config), folder
        self.steps = self.config.scheduler.steps(STEPS)
        self.tables = torch.cat(self.model.time_tables([step.time for step in self.steps]), 1).float()
        generator = torch.Generator().manual_seed(1)
        draws, chunk = self.config.scheduler.draws(STEPS), (self.config.action_horizon, self.config.action_dim)
        views = self.config.history * len(self.config.cameras)
        shapes = {
            "noise": (1, *(() if draws == 1 else (draws,)), *chunk), "features": (1, views, 2 * self.config.keypoints),
            "state": (1, self.config.history, self.config.state_dim),
        }  # fmt: skip
        self.inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def fused(self, precision: str) -> Tensor:
        weights = UnetWeights.of(self.model, precision)
        return self.run(NativeUnet(weights, self.tables, self.steps, self.config, 1, ""))

    def run(self, program: Any) -> Tensor:
        actions = torch.full((1, self.config.action_horizon, self.config.action_dim), float("nan"))
        if isinstance(program, PersistentProgram):
            assert isinstance(program.unet.module, EmulatedModule)
            program.unet.module.allow(*tensors_of(program), self.inputs["noise"], actions)
        program(self.inputs, {"actions": actions})
        return actions

    def persistent(self, gpu: Gpu, change: tuple[str, str] = ("", "")) -> PersistentProgram:
        def load(source: str, *rest: Any) -> EmulatedModule:
            assert change[0] in source
            return EmulatedModule(source.replace(*change) if change[0] else source, *rest, folder=self.folder)

        with pytest.MonkeyPatch.context() as patch, Runtime(CPU, gpu, "cuda").open():
            patch.setattr(nvrtc, "load_module", load)
            return PersistentProgram(PackedUnet.of(self.model), self.tables, self.steps, self.config)


def tensors_of(program: PersistentProgram) -> list[Tensor]:
    """What the kernel may touch."""
    found = [program.unet.table, program.unet.sizes, program.unet.arrivals, program.unet.tables, program.unet.own]
    for phase in program.phases:
        for source in phase.sources:
            found += [t for t in (source.rows, source.residual, source.kept) if t is not None]
            found += [] if source.norm is None else [source.norm.weight, source.norm.bias]
        for product in phase.products:
            packed = product.convolution
            found += [packed.weights, packed.bias, *([] if product.sums is None else [product.sums])]
    return found


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_as_near_as_fused_ops_and_repeats_its_bits(name: str, emulated: Path) -> None:
    unet = Unet(emulated, **CASES[name])
    program = unet.persistent(gpu_of(5))
    got = unet.run(program)
    assert_as_near(got, unet.fused("bf16"), unet.fused("fp32"))
    assert torch.equal(unet.run(program), got)
    assert program.unet.module.launches == ["unet"] * 2  # type: ignore[attr-defined]


