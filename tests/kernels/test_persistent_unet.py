"""All steps of Diffusion Policy's U-Net in one kernel, in an emulator on the CPU: as near to float32 as the launches of
fused ops in BF16, the same bits on every GPU; and what it refuses."""

from __future__ import annotations

import functools
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
from vla_accel.families.diffusion_policy.persistent import PackedUnet, PersistentProgram, why_not
from vla_accel.families.diffusion_policy.scheduler import NoiseScheduler
from vla_accel.kernels import nvrtc
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
STEPS = 3


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
    found = [program.unet.table, program.unet.sizes, program.unet.conditions]
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


@functools.cache
def correct(folder: Path) -> Tensor:
    """What the kernel computes on five multiprocessors."""
    unet = Unet(folder)
    return unet.run(unet.persistent(gpu_of(5)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_as_near_as_fused_ops_and_repeats_its_bits(name: str, emulated: Path) -> None:
    unet = Unet(emulated, **CASES[name])
    program = unet.persistent(gpu_of(5))
    got = unet.run(program)
    assert_as_near(got, unet.fused("bf16"), unet.fused("fp32"))
    assert torch.equal(unet.run(program), got)
    assert program.unet.module.launches == ["unet"] * 2  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "shared"), [(1, H200.shared_per_block), (17, 64 * 1024)])
def test_the_result_does_not_depend_on_the_gpu(blocks: int, shared: int, emulated: Path) -> None:
    """A GPU's multiprocessors and its shared memory decide who computes what, and no sum. 64 KB hold two stages."""
    unet = Unet(emulated)
    assert torch.equal(unet.run(unet.persistent(gpu_of(blocks, shared))), correct(emulated))


# What a line of the source becomes, and the error; without one, the actions are wrong.
MISTAKES = {
    "a stage is not awaited": ("mbarrier_wait(full(at), parity ^ wraps);", "", "with no barrier between"),
    "a stage is overwritten": ("mbarrier_wait(empty(slot), parity ^ 1);", "", "with no barrier between|all of 32"),
    "sums are read early": ("  makers_sync();\n  const int tile", "  const int tile", "with no barrier between"),
    "the input is read early": ("  makers_sync();\n}\n\n// -- products", "}\n\n// -- products",
                                "with no barrier between"),
    "a value is not awaited": ("if (!(wrong & 1)) break;", "break;", ""),
    "a stamp is never right": ("| stamp()", "", "wait for ever"),
    "the stamp does not change": ("index / 2 % 2 ^ 1", "1", ""),
    "steps share a half": ("map + index % 2 * size", "map", ""),
    "another row": ("row = output * q.stride - q.pad", "row = output * q.stride - q.pad - 1", ""),
    "the second tile's weights": ("at + tile * UNIT_BYTES", "at", ""),
    "the next group's variance": ("rsqrtf(team_sum(squares, 1)", "rsqrtf(team_sum(sum, 1)", ""),
    "a team does not wait for its sums": ("  bar_sync<TEAM>(2 + team);\n", "", "with no barrier between"),
    "no residual": ("floats_of(added[r][c]))", "zero)", ""),
    "the condition of another step": ("(u64)step.index * c.films", "(u64)0 * c.films", ""),
    "the noise of another step": ("c.noise + (step + 1)", "c.noise + step", ""),
    "a block leaves out what it stores": (" && !p.front.kept", "", "wait for ever"),
    "a kept map is not stored": ("int turn = kept ?", "int turn = false ?", "wait for ever"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name: str, emulated: Path) -> None:
    text, becomes, error = MISTAKES[name]
    unet = Unet(emulated)
    program = unet.persistent(gpu_of(5), (text, becomes))
    if error:
        with pytest.raises(EmulationError, match=error):
            unet.run(program)
        return
    unet.run(program)
    assert not torch.equal(unet.run(program), correct(emulated))


REFUSED: dict[str, tuple[Gpu | None, dict[str, Any], int, str, str]] = {
    "no GPU": (None, {}, 1, "bf16", "there is no GPU"),
    "an old GPU": (replace(H200, capability=(7, 5)), {}, 1, "bf16", "compute capability 8.0"),
    "8-bit weights": (H200, {}, 1, "int8", "BF16 weights, got INT8"),
    "a batch": (H200, {}, 2, "bf16", "a batch of 1, got 2"),
    "a long chunk": (H200, {"action_horizon": 24}, 1, "bf16", "24 rows are more than 16"),
    "odd widths": (H200, {"widths": (32, 40)}, 1, "bf16", "do not fit widths of 32, 40"),
    "no residual convolution": (H200, {"widths": (64, 32)}, 1, "bf16", "upward blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses_what_it_does_not_run(name: str) -> None:
    gpu, changes, batch, precision, reason = REFUSED[name]
    with Runtime(CPU, gpu, "cuda").open():
        found = why_not(config_of(**(WIDTHS | changes)), batch, precision, CPU)
    assert found is not None and reason in found
    with Runtime(CPU, H200, "cuda").open():
        assert why_not(config_of(**WIDTHS), 1, "bf16", CPU) is None
