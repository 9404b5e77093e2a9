"""ResNets against their formulas with torch's own norms, in torch and in fused operations."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.agreement import rms
from tests.support.runtimes import pinned, steered
from vla_accel.errors import ConfigError
from vla_accel.kernels.image import convolution
from vla_accel.kernels.image.convolution import LIBRARY, ConvPlan, ConvTile
from vla_accel.nn import resnet
from vla_accel.nn.network import Network
from vla_accel.nn.resnet import NativeResNet, ResNet, ResNetConfig, ResNetWeights, convolutions_by, feature_size

PARTS = ("running_mean", "running_var", "weight", "bias")


class Backbone(Network):
    """A ResNet as the part `vision` of a network."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config, self.vision = config, ResNet(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.vision.conv1.weight.dtype

    @staticmethod
    def kept_wide(name: str) -> bool:
        return ResNet.kept_wide(name)


def backbone(config: ResNetConfig) -> Backbone:
    """Random weights; norms far from the identity."""
    model, generator = Backbone(config).requires_grad_(False).eval(), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "running_var" in name or (ResNet.kept_wide(name) and name.endswith("weight")):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif ResNet.kept_wide(name):
            parameter.normal_(0, 0.1, generator=generator)
        else:
            parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
    return model


def expected(weights: dict[str, Tensor], config: ResNetConfig, x: Tensor) -> Tensor:
    def normed(name: str, norm: str, x: Tensor, stride: int, padding: int) -> Tensor:
        y = F.conv2d(x, weights[f"{name}.weight"], None, stride, padding)
        if config.norm == "group":
            return F.group_norm(y, y.shape[1] // 16, weights[f"{norm}.weight"], weights[f"{norm}.bias"])
        mean, variance, weight, bias = (weights[f"{norm}.{part}"] for part in PARTS)
        return F.batch_norm(y, mean, variance, weight, bias)

    x = F.max_pool2d(normed("conv1", "bn1", x, 2, 3).relu(), 3, 2, 1)
    kernels = (1, 3, 1) if config.name == "resnet50" else (3, 3)
    widest = 1 if config.name == "resnet50" else 0
    for stage, count in enumerate({"resnet18": (2, 2, 2, 2)}.get(config.name, (3, 4, 6, 3)), 1):
        for block in range(count):
            start, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = x
            for i, kernel in enumerate(kernels):
                step = stride if i == widest else 1
                y = normed(f"{start}.conv{i + 1}", f"{start}.bn{i + 1}", y, step, kernel // 2)
                y = y.relu() if i + 1 < len(kernels) else y
            down = f"{start}.downsample"
            x = (y + (normed(f"{down}.0", f"{down}.1", x, stride, 0) if f"{down}.0.weight" in weights else x)).relu()
    return x


def in_fused_operations(model: Backbone, images: Tensor) -> Tensor:
    """The feature map of normalised images (B, 3, H, W)."""
    native = NativeResNet(
        ResNetWeights.of(model, "vision", model.config, model.dtype),
        (len(images), 1),
        (images.shape[2], images.shape[3]),
    )
    native.see(images.permute(0, 2, 3, 1)[:, None], torch.tensor([[[1.0] * 3, [0.0] * 3]]))
    return native().permute(0, 3, 1, 2)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_a_resnet_is_its_formula_in_torch_and_in_fused_operations(name: str, norm: Literal["batch", "group"]) -> None:
    config = ResNetConfig(name, norm)
    model, images = backbone(config), torch.randn(2, 3, 33, 70, generator=torch.Generator().manual_seed(1))
    want = expected({k: v.double() for k, v in model.vision.state_dict().items()}, config, images.double()).float()
    assert want.shape[1:] == (config.channels, *feature_size(33, 70))
    size = want.abs().max().item()
    torch.testing.assert_close(model.vision(images), want, rtol=0, atol=1e-5 * size)
    torch.testing.assert_close(in_fused_operations(model, images), want, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_bf16_rounds_products_and_keeps_the_norms(norm: Literal["batch", "group"]) -> None:
    config = ResNetConfig("resnet18", norm)
    images = torch.randn(1, 3, 32, 64, generator=torch.Generator().manual_seed(1))
    want = backbone(config).vision(images)
    low = backbone(config).to_compute_dtype(torch.bfloat16)
    for got in (low.vision(images.bfloat16()), in_fused_operations(low, images)):
        assert got.dtype == torch.bfloat16
        assert 1e-4 < rms(got.float() - want) / rms(want) < 0.03


@pytest.mark.parametrize("fixed", [False, True])
def test_every_convolution_of_the_library_repeats_in_a_deterministic_runtime(
    fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen, conv = backbone(ResNetConfig()), list[tuple[bool, bool]](), convolution.conv

    def recorded(*arguments: Any) -> Tensor:
        seen.append((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        return conv(*arguments)

    monkeypatch.setattr(convolution, "conv", recorded)
    with pinned() if fixed else contextlib.nullcontext():
        in_fused_operations(model, torch.zeros(1, 3, 32, 32))
    assert seen == [(not fixed, fixed)] * 20


@pytest.mark.parametrize(("kind", "stem"), [(torch.float32, "the library"), (torch.float16, "Triton")])
def test_the_ledger_counts_the_convolutions_of_all_resnets(
    kind: torch.dtype, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = iter([ConvPlan(ConvTile(64, 64, 2)), *[LIBRARY] * 37])
    monkeypatch.setattr(resnet, "plan_convolution", lambda *_, **__: next(plans))
    weights = ResNetWeights.of(backbone(ResNetConfig()), "vision", ResNetConfig(), kind)
    made = [NativeResNet(weights, (1, 1), (32, 32)) for _ in range(2)]
    assert convolutions_by(made).startswith("stem by the library; 1 of 38 ")
    with steered("triton"):
        assert convolutions_by(made).startswith(f"stem by {stem}; ")


def test_an_unknown_backbone_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"vision_backbone: expected one of resnet18, resnet34, resnet50, got 'vgg'"):
        ResNetConfig("vgg")
