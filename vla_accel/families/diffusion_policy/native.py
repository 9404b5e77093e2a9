"""Diffusion Policy in fused operations: frames to features, and all denoising steps in one program.

Exact savings: what depends on the step alone is a table; the observation's part of all conditions is one product of a
call; the maps that the way up needs again are written where it reads them. A convolution is a product of gathered rows,
which the pass before it writes, so that a step streams the weights and does little else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.families.diffusion_policy.conditions import Conditions
from vla_accel.families.diffusion_policy.network import (
    ALIGNED,
    EPS,
    LAST_GROUPS,
    DiffusionPolicy,
    DiffusionPolicyConfig,
    centre,
    doubling,
    filled,
)
from vla_accel.families.diffusion_policy.persistent import PackedUnet, PersistentProgram, why_not
from vla_accel.families.diffusion_policy.scheduler import Step
from vla_accel.fp8 import Products
from vla_accel.kernels.chain import Chain
from vla_accel.kernels.conv1d.ops import Film, Target, normed, scheduler_step
from vla_accel.kernels.gemm.config import default, gemm_sizes
from vla_accel.kernels.gemm.epilogue import Epilogue
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.image.ops import GroupNorm
from vla_accel.kernels.persistent import NotResident
from vla_accel.nn.kernel_choices import Choice, KernelChoices
from vla_accel.nn.resnet import NativeResNet, ResNetWeights, convolutions_by
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import compute_dtype, plain_input, weights_in
from vla_accel.numeric import round_up
from vla_accel.runtime import current

QUANTISED = {"denoise": {"native": Products(("conv1", "conv2", "residual"), activations=False)}}
"""By component, then engine. All other products are computed in the policy's precision."""
_MEASURED = 1 << 20
"""Weights of a product from which it is measured: each tile config is a kernel to compile at the first start."""
Operation = Callable[[int], None]
"""An operation of a step, by the step's index."""


class DiffusionPolicyStore(NativeStore[DiffusionPolicy]):
    """Prepared weights of one Diffusion Policy."""

    def vision(self, batch: int, spec: EngineSpec) -> Program:
        """The program of the frames."""
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: EncoderWeights.of(self.model, compute_dtype(precision)))
        return NativeEncoder(weights, self.model.config, batch)

    def denoise(self, batch: int, num_steps: int, spec: EngineSpec) -> Program:
        """The program of all steps. Its FP8 and INT8 are of weights alone and need no scales."""
        precision, config = self.precision("denoise", spec, QUANTISED["denoise"]["native"]), self.model.config
        steps = config.scheduler.steps(num_steps)

        def tables() -> Tensor:
            names = [f"{name}.film" for name in self.model.unet.names]
            with self.model.present(*(f"unet.{name}" for name in ("time_in", "time_out", *names))):
                return torch.cat(self.model.time_tables([step.time for step in steps]), 1).float()

        # They depend on the step alone, whatever the precision.
        times = self.weights(("denoise", "times", num_steps), tables)
        reason = why_not(config, batch, precision, times.device)
        if reason is None:
            packed = self.weights(("denoise", "packed"), lambda: PackedUnet.of(self.model))
            try:
                return PersistentProgram(packed, times, steps, config)
            except NotResident as error:
                reason = str(error)
        weights = self.weights(("denoise", precision), lambda: UnetWeights.of(self.model, precision))
        return NativeUnet(weights, times, steps, config, batch, reason)


# -- frames -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderWeights:
    """A ResNet and the weights of its two products for each encoder; `scales` (V, 2, 3) float32: factor and shift of
    each frame's levels; `places` as of `DiffusionPolicy.see`."""

    resnets: tuple[ResNetWeights, ...]
    heads: tuple[tuple[Tensor, ...], ...]
    scales: Tensor
    places: Tensor

    @classmethod
    def of(cls, model: DiffusionPolicy, dtype: torch.dtype) -> EncoderWeights:
        """Prepare the weights of a model."""
        config, names = model.config, [f"encoders.{index}" for index in range(len(model.encoders))]
        heads = tuple(
            tuple(model.weight(f"{name}.{part}").float() for part in
                  ("keypoints.weight", "keypoints.bias", "out.weight", "out.bias"))
            for name in names
        )  # fmt: skip
        with model.present("encoders.0.out"):
            mean, deviation, places = (part.double() for part in model.pixel_constants())
        scales = torch.stack((1.0 / (255.0 * deviation), -mean / deviation), 1).flatten(2).float()
        resnets = tuple(ResNetWeights.of(model, f"{name}.backbone", config.backbone, dtype) for name in names)
        return cls(resnets, heads, scales, places.float())


class NativeEncoder:
    """`images` (B, V, H, W, 3) uint8 to `features` (B, V, n) float32."""

    def __init__(self, weights: EncoderWeights, config: DiffusionPolicyConfig, batch: int) -> None:
        self.weights, self.config = weights, config
        cameras, count = len(config.cameras), len(weights.resnets)
        views = [slice(None)] if count == 1 else [slice(index, None, cameras) for index in range(cameras)]
        images = (batch, config.history * cameras // count)
        self.resnets = [NativeResNet(one, images, config.seen) for one in weights.resnets]
        scales = weights.scales
        if config.resize is not None:  # frames are scaled before they are resized
            scales = torch.tensor([1.0, 0.0], device=scales.device)[:, None].expand_as(scales)
        own = [scales[view].contiguous() for view in views]
        self.encoders = list(zip(views, own, self.resnets, weights.heads, strict=True))
        self.chain = Chain(current(weights.places.device).gpu)
        self.detail = f"fused ops, {self.resnets[0].value.dtype}, {convolutions_by(self.resnets)}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        config, images = self.config, inputs["images"].permute(0, 1, 4, 2, 3)
        if config.resize is not None:
            factor, shift = self.weights.scales[..., None, None].unbind(1)
            frames = torch.addcmul(shift, images.float(), factor).flatten(0, 1)
            frames = F.interpolate(frames, config.resize, mode="bilinear", antialias=True, align_corners=False)
            images = frames.view(*images.shape[:3], *config.resize)
        images = centre(images, config.seen).permute(0, 1, 3, 4, 2)
        if config.resize is not None:
            images = images.contiguous()
        features = outputs["features"]
        for view, scales, resnet, head in self.encoders:
            with self.chain:
                resnet.see(images[:, view], scales)
                maps = resnet()
            features[:, view] = self._keypoints(maps, head).view(features[:, view].shape)

    def _keypoints(self, maps: Tensor, head: tuple[Tensor, ...]) -> Tensor:
        """Return the features (N, n) float32 of feature maps."""
        keypoints, bias, out, shift = head
        logits = F.linear(maps.flatten(1, 2).float(), keypoints.flatten(1), bias)
        found = logits.softmax(1).transpose(1, 2) @ self.weights.places
        return F.relu(F.linear(found.flatten(1), out, shift))


# -- denoising ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convolution:
    """A convolution as a product of gathered rows; `bias` (N,) float32."""

    product: Linear
    bias: Tensor


@dataclass(frozen=True)
class FilmBlockWeights:
    """The products and the norms of a block."""

    conv1: Convolution
    norm1: GroupNorm
    conv2: Convolution
    norm2: GroupNorm
    residual: Convolution | None


@dataclass(frozen=True)
class UnetWeights:
    """Prepared weights.

    Attributes:
        blocks: By name.
        changes: What halves ("down.0") or doubles ("up.0") the length, by level.
        last: The last convolution.
        last_norm: The norm after it.
        out: The product of the output.
        films: As of `Conditions`. Like the rows of all products, filled up with zeros.
        precision: Of the blocks' products.
    """

    blocks: Mapping[str, FilmBlockWeights]
    changes: Mapping[str, Convolution]
    last: Convolution
    last_norm: GroupNorm
    out: Convolution
    films: Tensor
    precision: str

    @classmethod
    def of(cls, model: DiffusionPolicy, precision: str) -> UnetWeights:
        """Prepare the weights of a model. `precision`: fp32, bf16, or for the blocks fp8 or int8."""
        config, dtype = model.config, compute_dtype(precision)

        def read(name: str) -> Tensor:
            return model.weight(f"unet.{name}")

        def convolution(name: str, *, low: bool = False) -> Convolution:
            weight = read(f"{name}.weight").transpose(1, 2)  # each tap's channels next to each other
            product = filled(weight).flatten(1)
            linear = plain_input(precision, product) if low else make_linear(product, None, dtype)
            return Convolution(linear, read(f"{name}.bias").float())

        def norm(name: str, groups: int) -> GroupNorm:
            return GroupNorm(groups, read(f"{name}.weight").float(), read(f"{name}.bias").float(), EPS)

        blocks = {
            name: FilmBlockWeights(
                convolution(f"{name}.conv1", low=True), norm(f"{name}.norm1", config.groups),
                convolution(f"{name}.conv2", low=True), norm(f"{name}.norm2", config.groups),
                convolution(f"{name}.residual", low=True) if channels != width else None,
            )
            for name, channels, width in config.blocks
        }  # fmt: skip
        changes = {}
        for level in range(len(config.widths) - 1):
            changes[f"down.{level}"] = convolution(f"down.{level}.2")
            product = make_linear(doubling(read(f"up.{level}.2.weight")), None, dtype)
            changes[f"up.{level}"] = Convolution(product, read(f"up.{level}.2.bias").float().repeat(2))
        return cls(
            blocks, changes, convolution("last"), norm("last_norm", LAST_GROUPS), convolution("out"),
            Conditions.weights(model, dtype), precision,
        )  # fmt: skip


def _aligned(columns: int) -> int:
    return round_up(columns, ALIGNED)


@dataclass(frozen=True)
class _Product:
    """A convolution and its buffers: gathered rows, and sums (R, N) float32."""

    weights: Convolution
    rows: Tensor
    sums: Tensor

    @property
    def kind(self) -> str:
        """A name for products of the same sizes."""
        weight = self.weights.product.weight
        low = "" if weight.dtype == self.rows.dtype else " of 8-bit weights"
        return f"{len(self.rows)}x{weight.shape[0]}x{weight.shape[1]}{low}"


@dataclass(frozen=True)
class _BlockInput:
    """Where the input of a block goes: gathered for its first convolution, and plain for its residual."""

    gathered: Target
    plain: Target

    def at(self, offset: int) -> list[Target]:
        """The places of channels from `offset` on."""
        return [replace(target, offset=offset) for target in (self.gathered, self.plain)]


class NativeUnet:
    """`noise`, `features` (B, V, n) and `state` (B, history, state_dim) to `actions` (B, T, A) float32.

    The constructor lays out the operations of a step once, each over static buffers.
    """

    def __init__(
        self, weights: UnetWeights, tables: Tensor, steps: Sequence[Step], config: DiffusionPolicyConfig, batch: int,
        why_not_persistent: str,
    ) -> None:  # fmt: skip
        """`tables` (steps, n) float32: the time's part of the conditions of all blocks."""
        self.weights, self.tables, self.config, self.batch = weights, tables, config, batch
        self.dtype, self.device = weights.films.dtype, weights.films.device
        self.sizes = [step.sizes(config.scheduler.clip) for step in steps]
        self.conditions = Conditions(weights.films, config, batch)
        self.products: list[_Product] = []
        self.operations: list[Operation] = []
        self.chain = Chain(current(self.device).gpu)
        self.choices = KernelChoices(self.device, self.chain)
        self.first, self.output = self._lay_out()
        alike: dict[str, list[_Product]] = {}
        for product in self.products:
            alike.setdefault(product.kind, []).append(product)
        for kind, products in alike.items():
            sizes = gemm_sizes(products[0].rows, products[0].weights.product)
            if sizes.n * sizes.k < _MEASURED:
                self.choices.chosen[kind] = Choice(default(current(self.device).gpu, sizes))
            else:
                self.choices.product(kind, sizes, partial(self._multiply_all, products))
        launches = len(self.operations) + 1
        self.detail = f"fused ops, {weights_in(weights.precision)}, {launches} launches a step{self.choices.detail}"
        self.detail += f", no persistent kernel: {why_not_persistent}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        noise, actions = inputs["noise"], outputs["actions"]
        draws = noise[:, None] if noise.dim() == 3 else noise
        self.conditions.update(inputs)
        with self.chain:
            scheduler_step(draws[:, 0], None, None, actions, self.sizes[0], self.first)
            for index, sizes in enumerate(self.sizes):
                for operation in self.operations:
                    operation(index)
                more, ends = index + 1 < draws.shape[1], index + 1 == len(self.sizes)
                z = draws[:, index + 1] if more else None
                scheduler_step(actions, self.output, z, actions, sizes, [] if ends else self.first)

    # -- the operations of a step, laid out in their order --------------------------------------------------------

    def _lay_out(self) -> tuple[list[Target], Tensor]:
        """Return the places of the noisy chunk, and the buffer of the network's output."""
        config, weights = self.config, self.weights
        levels, length = len(config.widths), config.action_horizon
        lengths = {f"down.{i}": length >> i for i in range(levels)} | {"mid": length >> (levels - 1)}
        lengths |= {f"up.{i}": length >> (levels - 1 - i) for i in range(levels - 1)}
        inputs: dict[str, _BlockInput] = {}
        for name, channels, _ in config.blocks:
            plain = channels if weights.blocks[name].residual is None else _aligned(channels)
            its = lengths[name.rpartition(".")[0]]
            gathered = self._gathered(its, channels, config.kernel)
            inputs[name] = _BlockInput(gathered, Target(self._rows(its, plain), plain))
        last = self._gathered(length, config.widths[0], config.kernel)
        at = 0
        for index, (name, _, width) in enumerate(config.blocks):
            level, _, number = name.rpartition(".")
            its, after = lengths[level], config.blocks[index + 1][0] if index + 1 < len(config.blocks) else ""
            following = inputs[after].at(0) if after else [last]
            change, targets = weights.changes.get(level) if number == "1" else None, following
            if change is not None:
                targets = [self._gathered(its, width, 3, stride=2 if level.startswith("down") else 1)]
            if number == "1" and level.startswith("down") and level != "down.0":
                # The way up reads this map again, behind the one that it doubles.
                targets = [*targets, *inputs[f"up.{levels - 1 - int(level[5:])}.0"].at(width)]
            at = self._block(name, its, inputs[name], targets, at)
            if change is not None:
                sums = self._multiplied(change, targets[0].rows)
                halves = its // 2 if level.startswith("down") else 2 * its
                self._then(sums.view(-1, width), halves, following)
        sums, plain = self._multiplied(weights.last, last.rows), self._rows(length, _aligned(config.widths[0]))
        self._then(sums, length, [Target(plain, plain.shape[1])], weights.last_norm)
        return inputs["down.0.0"].at(0), self._multiplied(weights.out, plain)

    def _block(self, name: str, length: int, into: _BlockInput, targets: list[Target], at: int) -> int:
        """A residual block, whose conditions begin in column `at`; returns the column after them."""
        weights, width = self.weights.blocks[name], self.weights.blocks[name].norm1.weight.numel()
        end = at + (1 + self.config.scaled) * width
        between = self._gathered(length, width, self.config.kernel)
        sums = self._multiplied(weights.conv1, into.gathered.rows)
        self._then(sums, length, [between], weights.norm1, slice(at, end))
        residual = into.plain.rows
        if weights.residual is not None:
            residual = self._multiplied(weights.residual, residual)
        self._then(self._multiplied(weights.conv2, between.rows), length, targets, weights.norm2, None, residual)
        return end

    def _multiplied(self, weights: Convolution, rows: Tensor) -> Tensor:
        """Add a product; return its sums."""
        sums = torch.zeros(len(rows), len(weights.product.weight), device=self.device)
        product = _Product(weights, rows, sums)
        self.products.append(product)
        self.operations.append(lambda step: self._multiply(product))
        return sums

    def _then(
        self, sums: Tensor, length: int, targets: Sequence[Target], norm: GroupNorm | None = None,
        films: slice | None = None, residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add the pass after a product. `films`: columns of the conditions."""

        def run(step: int) -> None:
            film = None if films is None else Film(self.tables[step, films], self.conditions.own[:, films])
            normed(sums, length, targets, norm, film, residual)

        self.operations.append(run)

    def _multiply(self, product: _Product) -> None:
        epilogue = Epilogue(shift=product.weights.bias)
        gemm(product.rows, product.weights.product, product.sums, epilogue, **self.choices[product.kind].options)

    def _multiply_all(self, products: Sequence[_Product]) -> None:
        for product in products:
            self._multiply(product)

    def _rows(self, length: int, columns: int) -> Tensor:
        return torch.zeros(self.batch * length, columns, dtype=self.dtype, device=self.device)

    def _gathered(self, length: int, channels: int, taps: int, stride: int = 1) -> Target:
        """The rows of a convolution over a map of `length` rows."""
        wide = _aligned(channels)
        return Target(self._rows(length // stride, taps * wide), wide, taps, stride, taps // 2)
