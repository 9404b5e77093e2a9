"""Diffusion Policy's denoising steps as one persistent kernel, for one chunk of up to 16 actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vla_accel.families.diffusion_policy.conditions import Conditions
from vla_accel.families.diffusion_policy.network import (
    EPS,
    LAST_GROUPS,
    DiffusionPolicy,
    DiffusionPolicyConfig,
    doubling,
)
from vla_accel.families.diffusion_policy.scheduler import Step
from vla_accel.kernels.conv1d import unet
from vla_accel.kernels.conv1d.unet import PackedConvolution, PersistentUnet, Phase, Product, Source, pack, weight_bytes
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.runtime import current


def why_not(config: DiffusionPolicyConfig, batch: int, precision: str, device: torch.device) -> str | None:
    """Explain why the kernel does not run these steps; None if it does."""
    runtime = current(device)
    if runtime.why_not_cuda is not None:
        return runtime.why_not_cuda
    if precision != "bf16":
        return f"it needs BF16 weights, got {precision.upper()}"
    if batch > 1:
        return f"it runs a batch of 1, got {batch}"
    if any(
        name.startswith("up.") and name.endswith(".0") and channels == width for name, channels, width in config.blocks
    ):
        return "its upward blocks need a convolution of the residual"
    groups = (config.groups, LAST_GROUPS)
    return unet.why_not(runtime.gpu, config.widths, groups, config.action_horizon, config.action_dim)


@dataclass(frozen=True)
class PackedUnet:
    """The convolutions and the norms by their names in the model, and `films` as of `Conditions`."""

    convolutions: Mapping[str, PackedConvolution]
    norms: Mapping[str, GroupNorm]
    films: Tensor

    @classmethod
    def of(cls, model: DiffusionPolicy) -> PackedUnet:
        """Pack the weights of a model."""
        config, convolutions, norms = model.config, {}, {}

        def read(name: str) -> Tensor:
            return model.weight(f"unet.{name}")

        def add(name: str) -> None:
            convolutions[name] = pack(read(f"{name}.weight").transpose(1, 2), read(f"{name}.bias"))

        def add_norm(name: str, groups: int) -> None:
            norms[name] = GroupNorm(groups, read(f"{name}.weight").float(), read(f"{name}.bias").float(), EPS)

        for name, channels, width in config.blocks:
            for part in ("conv1", "conv2", *(("residual",) if channels != width else ())):
                add(f"{name}.{part}")
            for part in ("norm1", "norm2"):
                add_norm(f"{name}.{part}", config.groups)
        for level in range(len(config.widths) - 1):
            add(f"down.{level}.2")
            weight, bias = doubling(read(f"up.{level}.2.weight")), read(f"up.{level}.2.bias")
            convolutions[f"up.{level}.2"] = pack(weight.unflatten(1, (3, -1)), bias.repeat(2))
        for name in ("last", "out"):
            add(name)
        add_norm("last_norm", LAST_GROUPS)
        return cls(convolutions, norms, Conditions.weights(model, torch.bfloat16))


def phases_of(weights: PackedUnet, config: DiffusionPolicyConfig) -> list[Phase]:
    """Return the phases of a step, with buffers of their own."""
    builder = _Phases(weights, config)
    builder.lay_out()
    return builder.found


class _Phases:
    """The phases of a step so far, `found`."""

    def __init__(self, weights: PackedUnet, config: DiffusionPolicyConfig) -> None:
        self.weights, self.config, self.device = weights, config, weights.films.device
        self.found: list[Phase] = []

    def lay_out(self) -> None:
        """List the phases in their order."""
        config, condition = self.config, 0
        length, films = config.action_horizon, 1 + config.scaled
        skips: list[Source] = []
        sources: tuple[Source, ...] = (Source(None, config.action_dim),)
        for name, _, width in config.blocks:
            level, _, number = name.rpartition(".")
            if level.startswith("up") and number == "0":
                sources = (*sources, skips.pop())
            sums, residual = self._begin_block(name, length, sources)
            between = Source(sums, width, self.weights.norms[f"{name}.norm1"], condition, films)
            condition += films * width
            sums = self._phase(length, (between,), f"{name}.conv2")
            after = Source(sums, width, self.weights.norms[f"{name}.norm2"], residual=residual)
            sources = (after,)
            if number == "0":
                continue
            if level.startswith("down") and level != "down.0":
                # The way up reads this map again.
                kept = self._buffer(length, width)
                sources = (replace(after, kept=kept),)
                skips.append(Source(kept, width))
            if f"{level}.2" in self.weights.convolutions:
                halves = level.startswith("down")
                outputs = length // 2 if halves else length
                sums = self._phase(length, sources, f"{level}.2", outputs=outputs, stride=2 if halves else 1)
                length = outputs if halves else 2 * length
                sources = (Source(sums.view(2, length, width), width),)
        sums = self._phase(length, sources, "last")
        last = Source(sums, config.widths[0], self.weights.norms["last_norm"])
        product = Product(self.weights.convolutions["out"], None, length)
        self.found.append(Phase(length, (last,), (product,)))

    def _begin_block(self, name: str, length: int, sources: tuple[Source, ...]) -> tuple[Tensor, Tensor]:
        """Add the first convolution of a block, and that of its residual; return the sums of both, or the input as the
        residual."""
        if f"{name}.residual" in self.weights.convolutions:
            sums = [self._product(length, f"{name}.{part}") for part in ("conv1", "residual")]
            self.found.append(Phase(length, sources, tuple(sums)))
            first, residual = (product.sums for product in sums)
        else:
            (source,) = sources
            residual = source.rows
            if source.norm is not None:
                residual = source.kept if source.kept is not None else self._buffer(length, source.channels)
                sources = (replace(source, kept=residual),)
            first = self._phase(length, sources, f"{name}.conv1")
        assert first is not None and residual is not None
        return first, residual

    def _phase(
        self, length: int, sources: tuple[Source, ...], name: str, *, outputs: int | None = None, stride: int = 1
    ) -> Tensor:
        """Add a phase of one product; return its sums."""
        product = self._product(length if outputs is None else outputs, name, stride)
        self.found.append(Phase(length, sources, (product,)))
        assert product.sums is not None
        return product.sums

    def _product(self, outputs: int, name: str, stride: int = 1) -> Product:
        packed = self.weights.convolutions[name]
        return Product(packed, self._buffer(outputs, packed.channels), outputs, stride)

    def _buffer(self, length: int, channels: int) -> Tensor:
        return torch.zeros(2, length, channels, device=self.device)


class PersistentProgram:
    """As `NativeUnet`, in one launch.

    Raises:
        NotResident: the device does not run all blocks at once.
    """

    def __init__(
        self, weights: PackedUnet, tables: Tensor, steps: Sequence[Step], config: DiffusionPolicyConfig
    ) -> None:
        self.weights, self.tables, gpu = weights, tables, current(tables).gpu
        assert gpu is not None
        self.conditions, self.phases = Conditions(weights.films, config, 1), phases_of(weights, config)
        chunk = (config.action_horizon, config.action_dim)
        sizes = [step.sizes(config.scheduler.clip) for step in steps]
        self.unet = PersistentUnet(gpu, self.phases, sizes, torch.empty_like(tables), chunk)
        megabytes = weight_bytes(self.phases) / 2**20
        self.detail = f"one persistent CUDA kernel, {len(self.phases)} phases and {megabytes:.0f} MiB of weights a step"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.conditions.update(inputs)
        torch.add(self.tables, self.conditions.own, out=self.unet.conditions)
        noise = inputs["noise"]
        self.unet.run(noise if noise.dim() == 3 else noise[0], outputs["actions"][0])
