"""An autoencoder for images of any size: one engine a size, made on first use, the least recently used given up.

Knows engines, sizes and padding; nothing of prompts or schedulers. `plug_in` puts it into a diffusers pipeline.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel.component import Component, Program
from vla_accel.components.vae import Side, Size, check_size, padded_size, size_key, vae_component
from vla_accel.config import EngineSpec
from vla_accel.diffusion.config import VaeConfig, load_vae_config
from vla_accel.diffusion.stage import Stage, require_finite
from vla_accel.errors import EngineError
from vla_accel.ledger import Ledger
from vla_accel.models.autoencoder import SCALE, Half, split_autoencoder
from vla_accel.native.autoencoder import CompiledHalf, NativeHalf, QuickestHalf
from vla_accel.numeric import DTYPES


class Runnable(Protocol):
    """What runs one side at one size."""

    bytes: int

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]: ...


class AcceleratedVae:
    """Encoder and decoder behind engines.

    `encode` and `decode` take and give what diffusers' autoencoder does at its own ends, without distributions:
    image (B, 3[, 1], H, W) to moments, latents to image. Results are new tensors. Sizes that engines do not take
    raise ConfigError with the size to pad to, or with `pad="auto"` are padded (edges repeated) and cropped back.
    """

    def __init__(
        self,
        vae: Any,
        config: VaeConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        spec: EngineSpec | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.config = load_vae_config(config or VaeConfig())
        encoder, decoder = split_autoencoder(vae)
        self.halves: dict[Side, Half] = {"encoder": encoder, "decoder": decoder}
        self.device = next(encoder.parameters()).device
        self.dtype = encoder.dtype
        self.spec = spec or EngineSpec(engine=self.config.vae_type, precision=self.config.precision)
        self.ledger = ledger or Ledger()
        self._programs: dict[Side, Program] = {}
        self._stages: OrderedDict[tuple[Side, int, str], tuple[Component, Runnable]] = OrderedDict()

    @torch.inference_mode()
    def encode(self, image: Tensor) -> Tensor:
        """Image in -1..1 to moments: mean and log variance. With padding, of the padded image."""
        return self._run("encoder", image, 1)

    @torch.inference_mode()
    def decode(self, latents: Tensor, size: Size | None = None) -> Tensor:
        """Latents to an image; `size` crops it to the (height, width) that `encode` was given."""
        image = self._run("decoder", latents, SCALE)
        if size is not None:
            image = image[..., : size[0], : size[1]]
        return image

    @property
    def sizes(self) -> list[str]:
        """Keys of the engines in memory, oldest use first."""
        return [f"{side} {key}" for side, _, key in self._stages]

    @property
    def bytes(self) -> int:
        """Memory that the engines of all sizes hold."""
        return sum(stage.bytes for _, stage in self._stages.values())

    def _run(self, side: Side, value: Tensor, unit: int) -> Tensor:
        half = self.halves[side]
        self._check(side, half, value)
        asked = (value.shape[-2] * unit, value.shape[-1] * unit)
        size = padded_size(asked) if self.config.pad == "auto" else check_size(asked)
        padded = _pad(value, (size[0] // unit, size[1] // unit))
        component, stage = self._stage(side, size, value.shape[0])
        (source,) = component.inputs
        outputs = stage(**{source.name: padded})
        (result,) = outputs.values()
        require_finite(result, component, (padded,))
        if side == "decoder" and size != asked:
            result = result[..., : asked[0], : asked[1]]
        return result.clone()

    def _check(self, side: Side, half: Half, value: Tensor) -> None:
        axes, name = (5 if half.frames else 4), f"vae_{side}"
        layout = "(B, C, 1, H, W)" if half.frames else "(B, C, H, W)"
        if value.dim() != axes or value.shape[1] != half.channels[0] or (half.frames and value.shape[2] != 1):
            raise EngineError(f"{name}: expected {layout} with C = {half.channels[0]}, got {tuple(value.shape)}")
        if value.dtype != half.dtype:
            raise EngineError(f"{name}: expected dtype {half.dtype}, got {value.dtype}")
        if value.device != self.device:
            raise EngineError(f"{name}: expected device {self.device}, got {value.device}")

    def _stage(self, side: Side, size: Size, batch: int) -> tuple[Component, Runnable]:
        key = (side, batch, size_key(size))
        if key in self._stages:
            self._stages.move_to_end(key)
            return self._stages[key]
        made = self._make(side, size, batch)
        self._stages[key] = made
        budget = self.config.memory_budget_gib * 2**30
        # The newest stays, even alone above the budget: the call that wants it would fail otherwise.
        while len(self._stages) > 1 and self.bytes > budget:
            self._stages.popitem(last=False)
        return made

    def _make(self, side: Side, size: Size, batch: int) -> tuple[Component, Runnable]:
        half = self.halves[side]
        if self.config.from_files:
            from vla_accel.diffusion.engine_files import open_engine

            component = vae_component(half, side, size, batch=batch, dynamic=self.config.trt_vae_config.multi_profile)
            return component, open_engine(self.config, side, size, component, self.device, self.ledger)
        if self.spec.engine == "native" and side not in self._programs:
            fused = NativeHalf(half, DTYPES.get(self.spec.precision))
            measured = self.config.inductor == "measure"
            # Of its own weights: compiling lays them out anew.
            self._programs[side] = (
                QuickestHalf({"fused": fused, "inductor": CompiledHalf(copy.deepcopy(half))}) if measured else fused
            )
        component = vae_component(half, side, size, batch=batch, program=self._programs.get(side))
        return component, Stage(component, self.spec, self.device, self.ledger)


def plug_in(vae: Any, accelerated: AcceleratedVae) -> Callable[[], None]:
    """Make a diffusers autoencoder's `encode` and `decode` run the engines; returns what undoes it.

    The object stays the pipeline's own, so configuration, dtype and scaling are found where pipelines look for them.
    """
    from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode(x: Tensor, return_dict: bool = True) -> Any:
        posterior = DiagonalGaussianDistribution(accelerated.encode(x))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)

    def decode(z: Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        sample = accelerated.decode(z)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    return exchanged(vae, encode=encode, decode=decode)


def exchanged(module: nn.Module, **functions: Callable[..., Any]) -> Callable[[], None]:
    """Put functions in the place of a module's own; returns what puts back what was there, as often as it is called."""
    there = vars(module)
    before = {name: there[name] for name in functions if name in there}
    there.update(functions)

    def undo() -> None:
        for name in functions:
            there.pop(name, None)
        there.update(before)

    return undo


def _pad(value: Tensor, size: Size) -> Tensor:
    height, width = value.shape[-2:]
    if (height, width) == size:
        return value
    flat = value.flatten(0, 1) if value.dim() == 5 else value
    # Edges repeated: a border of zeros would be a grey edge that the network sees.
    flat = F.pad(flat, (0, size[1] - width, 0, size[0] - height), mode="replicate")
    return flat.view(*value.shape[:-2], *size)
