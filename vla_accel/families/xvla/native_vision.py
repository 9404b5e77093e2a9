"""X-VLA's vision in fused operations: uint8 images to image tokens.

Exact savings besides those of DaViT's stages: positions are folded into a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.families.xvla.network import EPS, Xvla, XvlaConfig, pixels_of
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.kernels.image import ops
from vla_accel.nn.davit import Size
from vla_accel.nn.native_davit import LANES, StageProgram, StageWeights
from vla_accel.nn.weights import Affine, compute_dtype
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN
from vla_accel.runtime import current


@dataclass(frozen=True)
class VisionWeights:
    """All stages, the projector and its norm. `scale` (2, 3) float32: factor and shift of the images' levels."""

    stages: tuple[StageWeights, ...]
    projector: Linear
    norm: Affine
    scale: Tensor

    @classmethod
    def of(cls, model: Xvla, precision: str) -> VisionWeights:
        """Prepare the weights of a model."""
        dtype, read = compute_dtype(precision), model.weight
        mean, deviation = (torch.tensor(x, dtype=torch.float64) for x in (IMAGENET_MEAN, IMAGENET_DEVIATION))
        scale = torch.stack((1.0 / (255.0 * deviation), -mean / deviation)).float().to(model.device)
        norm = read("projector_norm.weight").float().clone(), read("projector_norm.bias").float().clone()
        stages = tuple(
            StageWeights.of(model, f"vision.stages.{index}", stage, dtype)
            for index, stage in enumerate(model.config.vision.stages)
        )
        return cls(stages, make_linear(read("projector.weight"), None, dtype), norm, scale)


class NativeVision:
    """The program. Inputs `image0`, … uint8 (B, height, width, 3); output `image_tokens` (B, V, rows, W)."""

    def __init__(
        self, weights: VisionWeights, positions: Tensor, config: XvlaConfig, sizes: Sequence[Size], batch: int,
        attention: str,
    ) -> None:  # fmt: skip
        """`positions` (pixels, W) of the last map."""
        self.weights, self.config, self.positions = weights, config, positions
        self.fitted = config.fitted(sizes[0])
        dtype, device = weights.projector.weight.dtype, weights.scale.device
        images = batch * len(sizes)
        self.pixels = torch.zeros(batch, len(sizes), *self.fitted, LANES, dtype=dtype, device=device)
        self.stages = [
            StageProgram(stage, config.vision, size, images, attention)
            for stage, size in zip(weights.stages, config.vision.sizes(self.fitted), strict=True)
        ]
        self.attention = self.stages[0].attention
        self.rows = torch.empty(images, 1 + len(positions), config.vision.width, dtype=dtype, device=device)
        products = "".join(f"; stage {i}{stage.products}" for i, stage in enumerate(self.stages, 1) if stage.products)
        self.detail = f"fused ops, {dtype}, library convolutions, {self.attention.detail}{products}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        for view in range(self.pixels.shape[1]):
            self._read(inputs[f"image{view}"], self.pixels[:, view])
        fixed = current(self.pixels).deterministic
        x = self.pixels.flatten(0, 1)
        # The library measures its convolutions on a shape's first call, unless calls are to repeat bit for bit.
        with torch.backends.cudnn.flags(enabled=True, benchmark=not fixed, deterministic=fixed, allow_tf32=True):
            for stage in self.stages:
                x = stage(x)
        torch.add(x.flatten(1, 2), self.positions, out=self.rows[:, 1:])
        torch.mean(self.rows[:, 1:], 1, out=self.rows[:, 0])
        tokens = outputs["image_tokens"]
        made = tokens.new_empty(self.rows.shape[0] * self.rows.shape[1], tokens.shape[-1])
        gemm(self.rows.flatten(0, 1), self.weights.projector, made)
        _, normed = ops.add_layer_norm(made, None, None, *self.weights.norm, EPS)
        tokens.view(made.shape).copy_(normed)

    def _read(self, image: Tensor, out: Tensor) -> None:
        """Enqueue the normalised pixels of a view, to (B, h, w, lanes)."""
        if tuple(image.shape[1:3]) == self.fitted:
            ops.normalise_pixels(image, self.weights.scale, out)
        else:
            out[..., :3] = pixels_of(image, self.config.image_size).permute(0, 2, 3, 1)
