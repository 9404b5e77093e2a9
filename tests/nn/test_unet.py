"""Stable Diffusion's UNet: the native program against diffusers, for every block that it knows, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers", reason="NOT RUN: needs diffusers")

from vla_accel.config import EngineSpec  # noqa: E402
from vla_accel.errors import CheckpointError, ConfigError, EngineError  # noqa: E402
from vla_accel.images.models import filled  # noqa: E402
from vla_accel.images.native_unet import NativeUnet  # noqa: E402
from vla_accel.images.unet import ModuleProgram, Unet, check_file_size, unet_component  # noqa: E402

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "sample_size": 16,
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "block_out_channels": (16, 24, 24),
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
}


def make(**changes: Any) -> Any:
    return filled(
        lambda: diffusers.UNet2DConditionModel(**{**SMALL, **changes}), dtype=torch.float32, device=CPU, seed=5
    )


def example(paired: bool = True, side: tuple[int, int] = (12, 20)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, *side, generator=generator)
    sample = torch.cat((sample, sample)) if paired else torch.cat((sample, 2 * sample))
    states = torch.randn(4, 77, 24, generator=generator)
    return {"sample": sample, "timestep": torch.tensor(371), "encoder_hidden_states": states}


def run(program: NativeUnet, inputs: dict[str, Tensor]) -> Tensor:
    out = torch.full_like(inputs["sample"], torch.nan)
    program(inputs, {"noise": out})
    return out


def want(unet: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        return Unet(unet)(*inputs.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_linear_projection": True},
        {"transformer_layers_per_block": 2},
        {"layers_per_block": 1},
        {"flip_sin_to_cos": False, "freq_shift": 1},
    ],
    ids=str,
)
def test_the_native_program_is_exact(changes: dict[str, Any]) -> None:
    unet, inputs = make(**changes), example()
    expected = want(unet, inputs)
    assert expected.std() > 0.1
    got = run(NativeUnet(Unet(unet)), inputs)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


def test_halves_that_differ_need_the_unpaired_form() -> None:
    unet, inputs = make(), example(paired=False)
    expected = want(unet, inputs)
    program = NativeUnet(Unet(unet, paired=True))
    single = program.form(False)
    assert float((run(single, inputs) - expected).abs().max() / expected.abs().max()) < 1e-5
    # The paired form reads the first half alone: this is what its promise is for.
    assert float((run(program, inputs) - expected).abs().max()) > 1e-2
    assert program.form(True) is program and single.choices is program.choices


def test_every_timestep_has_its_row() -> None:
    unet = make()
    program = NativeUnet(Unet(unet))
    for timestep in (0, 1, 999):
        inputs = {**example(), "timestep": torch.tensor(timestep)}
        expected = want(unet, inputs)
        assert float((run(program, inputs) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"class_embed_type": "timestep"}, "expected class_embed_type None, got 'timestep'"),
        ({"resnet_time_scale_shift": "scale_shift"}, "expected resnet_time_scale_shift 'default'"),
        ({"act_fn": "gelu"}, "expected act_fn 'silu', got 'gelu'"),
        (
            {
                "down_block_types": ("SimpleCrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "SimpleCrossAttnUpBlock2D"),
            },
            "unknown block SimpleCrossAttnDownBlock2D",
        ),
    ],
    ids=lambda c: next(iter(c)) if isinstance(c, dict) else "",
)
def test_parts_that_it_does_not_know_are_named(changes: dict[str, Any], message: str) -> None:
    unet = make(**changes)
    with pytest.raises(EngineError, match=message):
        NativeUnet(Unet(unet))


def test_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected a UNet2DConditionModel, got Linear"):
        Unet(nn.Linear(2, 2))


def test_sizes() -> None:
    unet = Unet(make())
    assert unet.multiple == 4
    with pytest.raises(ConfigError, match="multiples of 8, got 64x100; the smallest that holds it is 64x104"):
        unet_component(unet, (100, 64), batch=2)
    with pytest.raises(ConfigError, match="multiples of 32, got 264x512; the smallest that holds it is 288x512"):
        check_file_size(unet, (512, 264))
    with pytest.raises(ConfigError, match="256 to 1024 pixels a side for an engine file, got 256x1056"):
        check_file_size(unet, (1056, 256))
    component = unet_component(unet, (512, 256), batch=2, dynamic=True)
    assert component.inputs[0].shape == (2, 4, 64, 32)
    assert component.inputs[0].ranges == {0: (1, 8), 2: (32, 128), 3: (32, 128)}
    assert component.inputs[1].shape == () and component.inputs[1].dtype == torch.int64
    assert component.inputs[2].shape == (2, 77, 24) and component.inputs[2].ranges == {0: (1, 8)}
    assert component.native is not None and isinstance(component.native(EngineSpec()), NativeUnet)


def test_a_module_as_a_program() -> None:
    out = torch.empty(3, 2)
    linear = nn.Linear(4, 2)
    x = torch.ones(3, 4)
    ModuleProgram(linear)({"x": x}, {"y": out})
    torch.testing.assert_close(out, linear(x).detach())
