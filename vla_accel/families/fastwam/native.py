"""The native programs of FastWAM: the components written in fused ops over static buffers, for a CUDA graph.

Exact savings besides those of the parts: the scaling of latents is in the weights of their patches.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vla_accel.component import OVERLAP, Program
from vla_accel.config import EngineSpec
from vla_accel.families.family import IMAGES
from vla_accel.families.fastwam.components import QUANTISED, FastWamShape, Resized, canvas
from vla_accel.families.fastwam.network import FastWam, FastWamConfig
from vla_accel.images.native_autoencoder import NativeHalf
from vla_accel.kernels.gemm.ops import gemm
from vla_accel.kernels.gemm.weights import Linear, make_linear
from vla_accel.nn.flow import Schedule
from vla_accel.nn.native_wan import (
    ActionLoop,
    StepTables,
    TextProgram,
    TextWeights,
    VideoLoop,
    WanWeights,
    step_tables,
)
from vla_accel.nn.store import NativeStore
from vla_accel.nn.weights import compute_dtype, weights_in


@dataclass(frozen=True)
class EncoderWeights:
    """The image encoder, its tensors, and the product from patches of latents to rows."""

    half: NativeHalf
    tensors: tuple[Tensor, ...]
    patch: Linear

    @classmethod
    def of(cls, model: FastWam) -> EncoderWeights:
        """Prepare the weights of a model."""
        with model.present("vae", "latent_mean", "latent_std", "patch"):
            half = copy.deepcopy(model.vae)
            std, mean = model.latent_std.double(), model.latent_mean.double()
            weight = model.patch.weight.double() / std[:, None, None]
            assert model.patch.bias is not None
            bias = model.patch.bias.double() - (weight * mean[:, None, None]).sum((1, 2, 3))
        patch = make_linear(weight.flatten(1), bias, model.dtype)
        return cls(NativeHalf(half), tuple(half.parameters()), patch)


class NativeEncoder:
    """The program of images. Input `images` uint8 (B, V, H, W, 3); output `image_tokens` (B, I, W)."""

    def __init__(self, weights: EncoderWeights, config: FastWamConfig, shape: FastWamShape) -> None:
        self.weights, self.config = weights, config
        self.detail, device = weights.half.detail, weights.patch.weight.device
        self.resized = Resized.of(config, shape, device)
        (height, width), scale = config.image_size, config.vae.scale
        dtype = weights.patch.weight.dtype
        self.image = torch.empty(shape.batch, 3, height, width, dtype=dtype, device=device)
        sides = height // scale, width // scale
        self.moments = torch.empty(shape.batch, 2 * config.vae.latent, *sides, dtype=dtype, device=device)
        self.rows = self.image.new_empty(shape.batch * sides[0] * sides[1] // 4, 4 * config.vae.latent)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.image.copy_(2.0 * canvas(inputs[IMAGES], self.resized) - 1.0)
        self.weights.half({"image": self.image}, {"moments": self.moments})
        self.detail = self.weights.half.detail
        # Squares of four latents, in the order of the convolution's weight: channel, row, column.
        latents = self.moments[:, : self.config.vae.latent].unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        latents = latents.permute(0, 2, 4, 1, 3, 5)
        self.rows.view(latents.shape).copy_(latents)
        gemm(self.rows, self.weights.patch, outputs["image_tokens"].view(len(self.rows), -1))


@dataclass(frozen=True)
class ReaderWeights:
    """The video's stack, the text of both, and the projection of the state, float32."""

    video: WanWeights
    video_text: TextWeights
    action_text: TextWeights
    state: tuple[Tensor, Tensor]
    rope: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, model: FastWam, precision: str) -> ReaderWeights:
        """Prepare the weights of a model."""
        constants, depth = model.video_constants(), model.config.video.depth
        weight, bias = (model.weight(f"state.{part}").float().clone() for part in ("weight", "bias"))
        return cls(
            WanWeights.of(model, "video", model.config.video, precision, constants.modulations),
            TextWeights.of(model, "video", depth - 1, precision), TextWeights.of(model, "action", depth, precision),
            (weight, bias), (constants.cos, constants.sin),
        )  # fmt: skip


class NativeReader:
    """The program of video and text. Inputs `image_tokens`, `text`, `text_bias` and `state`; outputs the other fields
    of `Cache`. `rows`: of the context."""

    attention = None

    def __init__(self, weights: ReaderWeights, config: FastWamConfig, batch: int, rows: int) -> None:
        self.weights, video = weights, config.video
        self.video = VideoLoop(weights.video, video, batch, config.grid[0] * config.grid[1], rows, weights.rope)
        x = self.video.x
        # State, padding, text: padding stays zero.
        self.context = x.new_zeros(batch, rows, video.text_dim)
        self.texts = (
            TextProgram(weights.video_text, video, video.depth - 1, batch * rows, self.video.chain),
            TextProgram(weights.action_text, config.action, video.depth, batch * rows, self.video.chain),
        )
        self.keys = x.new_empty(video.depth - 1, batch, rows, video.heads, video.head_dim)
        self.values = torch.empty_like(self.keys)
        self.detail = f"fused ops, {weights_in(weights.video.precision)}{self.video.choices.detail}"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        weight, bias = self.weights.state
        self.context[:, 2:] = inputs["text"].to(self.context.dtype)
        self.context[:, 0] = torch.addmm(bias, inputs["state"], weight.T).to(self.context.dtype)
        context = self.context.flatten(0, 1)
        with self.video.chain:
            self.texts[0](context, self.keys, self.values)
            self.texts[1](context, outputs["text_keys"], outputs["text_values"])
        own = {"text_keys": self.keys, "text_values": self.values, "text_bias": inputs["text_bias"]}
        self.video(inputs["image_tokens"], {**outputs, **own})


class NativeActions(ActionLoop):
    """The denoise program of FastWAM. Its first step overlaps the native program of the video."""

    def follow(self, earlier: Program, outputs: Mapping[str, Tensor]) -> str:
        del outputs
        if not isinstance(earlier, NativeReader):
            return ""
        self.overlap = earlier.video.overlapped()
        return OVERLAP


class FastWamStore(NativeStore[FastWam]):
    """Prepared weights of one FastWAM."""

    def vision(self, batch: int, shape: FastWamShape, spec: EngineSpec) -> Program:
        """The program of images."""
        del batch
        precision = self.precision("vision", spec)
        weights = self.weights(("vision", precision), lambda: EncoderWeights.of(self.model))
        return NativeEncoder(weights, self.model.config, shape)

    def kv_cache(self, batch: int, rows: int, spec: EngineSpec) -> Program:
        """The program of video and text. Its FP8 and INT8 are of weights alone and need no scales."""
        precision = self.precision("kv_cache", spec, QUANTISED["kv_cache"]["native"])
        weights = self.weights(("kv_cache", precision), lambda: ReaderWeights.of(self.model, precision))
        return NativeReader(weights, self.model.config, batch, rows)

    def denoise(self, batch: int, schedule: Schedule, rows: int, spec: EngineSpec) -> Program:
        """The whole Euler loop. Its FP8 and INT8 are of weights alone and need no scales."""
        model, config = self.model, self.model.config
        precision = self.precision("denoise", spec, QUANTISED["denoise"]["native"])
        form = ("denoise", precision)
        weights = self.weights(form, lambda: WanWeights.of(model, "action", config.action, precision))
        ends = self.weights(("denoise", "ends"), lambda: self._ends(compute_dtype(precision)))
        tables = self.weights((*form, schedule), lambda: self._tables(weights, schedule))
        noise = batch, config.action_horizon, config.action_dim
        return NativeActions(weights, tables, ends, config.action, noise, (config.grid[0] * config.grid[1], rows))

    def _ends(self, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], Linear]:
        (w_in, b_in), (w_out, b_out) = (
            [self.model.weight(f"{name}.{part}") for part in ("weight", "bias")] for name in ("action_in", "action_out")
        )
        return (w_in.float().T.contiguous(), b_in.float().clone()), make_linear(w_out, b_out, dtype)

    def _tables(self, weights: WanWeights, schedule: Schedule) -> StepTables:
        constants, config = self.model.step_constants(schedule), self.model.config.action
        biases = {
            name: [self.model.weight(f"action.layers.{i}.{product}.bias") for i in range(config.depth)]
            for name, product in {"qkv": "qkv_proj", "up": "fc1"}.items()
        }
        rope = constants.cos, constants.sin
        return step_tables(weights, biases, config, constants.modulations, schedule.dts, rope)
