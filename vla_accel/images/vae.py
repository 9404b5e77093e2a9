"""An autoencoder for images of any size: one engine a size, made on first use, the least recently used given up.

Knows engines and sizes; nothing of prompts or schedulers. `plugged.plug_in` puts it into a diffusers pipeline.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vla_accel.component import Component, Program
from vla_accel.config import EngineSpec
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.tensorrt_session import Scratch
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images.autoencoder import SCALE, Half, split_autoencoder
from vla_accel.images.config import VaeConfig, check_spec, load_vae_config, why_no_engine
from vla_accel.images.exclusive import Exclusive
from vla_accel.images.memory import check_fits
from vla_accel.images.native_autoencoder import CompiledHalf, NativeHalf, QuickestHalf
from vla_accel.images.stage import Stage, require_finite
from vla_accel.images.switches import refuse_adapters, refuse_hooks, refuse_modes, refuse_offloading
from vla_accel.images.vae_component import Side, Size, size_key, vae_component
from vla_accel.images.weights import WeightState
from vla_accel.ledger import Ledger, LedgerEntry
from vla_accel.numeric import DTYPES


class Runnable(Protocol):
    """What runs one side at one size."""

    bytes: int

    def __call__(self, **inputs: Tensor) -> dict[str, Tensor]: ...


class AcceleratedVae:
    """Encoder and decoder on engines.

    `encode` and `decode` take and return what diffusers' autoencoder does at its own ends, without distributions:
    image (B, 3[, 1], H, W) to moments, latents to image. Results are new tensors. Any number of threads may call.

    The engines follow the autoencoder: after its weights have changed, or moved to another dtype or device, the next
    call makes new engines.
    """

    def __init__(
        self,
        vae: Any,
        config: VaeConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        specs: Mapping[Side, EngineSpec] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Read a diffusers autoencoder.

        Args:
            vae: an `AutoencoderKL` or `AutoencoderKLQwenImage`.
            config: the configuration, or its file.
            specs: an engine for each side instead of the configuration's.
            ledger: where the engines that run are recorded.

        Raises:
            CheckpointError: the autoencoder has parts that are not known here.
            EngineError: hooks or adapters on the autoencoder would be ignored.
        """
        self.vae, self.config = vae, load_vae_config(config or VaeConfig())
        own = EngineSpec(engine=self.config.vae_type, precision=self.config.precision)
        self.specs: dict[Side, EngineSpec] = {"encoder": own, "decoder": own, **(specs or {})}
        for side, spec in self.specs.items():
            check_spec(f"vae_{side}", spec, DTYPES)
        self.ledger = ledger or Ledger()
        self._exclusive = Exclusive()
        self._weights: WeightState | None = None
        self._halves: dict[Side, Half] = {}
        self._clamp = False
        self._scratch: Scratch | None = None
        self._programs: dict[Side, Program] = {}
        self._stages: OrderedDict[tuple[Side, int, str], tuple[Component, Runnable]] = OrderedDict()
        self._read()

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedVae:
        made = copy.copy(self)
        memo[id(self)] = made
        made.vae, made.ledger = copy.deepcopy(self.vae, memo), copy.deepcopy(self.ledger, memo)
        # The copied autoencoder may not be complete yet: the first call reads it.
        made._exclusive, made._weights = Exclusive(), None
        made._halves, made._programs, made._stages, made._scratch = {}, {}, OrderedDict(), None
        return made

    @property
    def device(self) -> torch.device:
        """Where the autoencoder is now."""
        return next(self.vae.parameters()).device

    def encode(self, image: Tensor) -> Tensor:
        """Image (B, 3[, 1], H, W) in -1..1 to moments (B, 2 z[, 1], H // 8, W // 8): mean, then log variance."""
        return self.run("encoder", image)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, z[, 1], h, w) to an image (B, 3[, 1], 8 h, 8 w) in -1..1."""
        image = self.run("decoder", latents)
        return image.clamp_(-1.0, 1.0) if self._clamp else image

    @property
    def sizes(self) -> list[str]:
        """Keys of the engines in memory, oldest use first."""
        with self._exclusive.on(torch.device("cpu")):
            return [f"{side} {key}" for side, _, key in self._stages]

    @property
    def bytes(self) -> int:
        """Memory that the engines of all sizes hold."""
        with self._exclusive.on(torch.device("cpu")):
            return sum(stage.bytes for _, stage in self._stages.values())

    def run(self, side: Side, value: Tensor) -> Tensor:
        """One side, as its network gives it: `decode` holds the image of Qwen-Image to -1..1, this need not.

        Raises:
            ConfigError: the engine files do not have this size.
            EngineError: an input of another shape, dtype or device, or that needs a gradient; a result that is not
                finite; a switch of the autoencoder, or torch.autocast, that engines would ignore.
            DeviceMemoryError: an engine of this size does not fit.
        """
        if not isinstance(value, Tensor):
            raise EngineError(f"vae_{side}: expected a tensor, got {type(value).__name__}")
        refuse_modes(f"vae_{side}", (value,), value.device)
        with self._exclusive.on(value.device), torch.no_grad():
            self._follow()
            half = self._halves[side]
            self._check(side, half, value)
            unit = 1 if side == "encoder" else SCALE
            with torch.inference_mode():
                component, stage = self._stage(side, (value.shape[-2] * unit, value.shape[-1] * unit), value.shape[0])
                (source,) = component.inputs
                (result,) = stage(**{source.name: value}).values()
                require_finite(result, component, (value,))
            # Outside of inference mode the copy is an ordinary tensor, which diffusers blends tiles of in place.
            return result.clone()

    @torch.inference_mode()
    def stage(self, side: Side, size: Size, batch: int = 1) -> None:
        """Make the engine for a size now, so that its errors come before other work. Raises as `run` does."""
        with self._exclusive.on(self.device):
            self._follow()
            self._stage(side, size, batch)

    def _follow(self) -> None:
        refuse_offloading("vae", self.vae)
        if self._weights is None or self._weights.changed():
            self._read()
        refuse_hooks("vae", self.vae)
        refuse_adapters("vae", self.vae)

    def _read(self) -> None:
        refuse_offloading("vae", self.vae)
        refuse_adapters("vae", self.vae)
        self._stages.clear()
        self._programs.clear()
        self._scratch = None
        encoder, decoder = split_autoencoder(self.vae)
        # `decode` clamps, as diffusers does after it has blended tiles. Engine files have the clamp inside.
        self._clamp = decoder.clamp
        decoder.clamp = decoder.clamp and self.config.from_files
        self._halves = {"encoder": encoder, "decoder": decoder}
        self._weights = WeightState(self.vae)

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
            self._give_up()
        return made

    def _give_up(self) -> bool:
        if not self._stages:
            return False
        self._stages.popitem(last=False)
        return True

    def _make(self, side: Side, size: Size, batch: int) -> tuple[Component, Runnable]:
        half, spec = self._halves[side], self.specs[side]
        if self.config.from_files:
            from vla_accel.images.engine_files import open_engine

            if (reason := why_no_engine(self.config, side, size)) is not None:
                return self._eager(vae_component(half, side, size, batch=batch), reason)
            component = vae_component(half, side, size, batch=batch, dynamic=self.config.trt_vae_config.multi_profile)
            # One for all sizes of this object, whose lock lets one of them run at a time.
            self._scratch = self._scratch or Scratch(self.device)
            return component, open_engine(self.config, side, size, component, self._scratch, self.ledger)
        if spec.engine == "native" and side not in self._programs:
            dtype, fused = DTYPES.get(spec.precision), NativeHalf(half, DTYPES.get(spec.precision))
            measured = self.config.inductor == "measure"
            # Of its own weights: compiling lays them out anew.
            self._programs[side] = (
                QuickestHalf({"fused": fused, "inductor": CompiledHalf(copy.deepcopy(half).to(dtype or half.dtype))})
                if measured
                else fused
            )
        component = vae_component(half, side, size, batch=batch, program=self._programs.get(side))
        if spec.engine in ("eager", "native"):
            check_fits(component, self.device, self._give_up)
        return component, Stage(component, spec, self.device, self.ledger)

    def _eager(self, component: Component, reason: str) -> tuple[Component, Runnable]:
        """The module itself, at a size that no engine file has. Raises ConfigError if `pad` does not allow it."""
        if self.config.pad == "error":
            raise ConfigError(f"{reason}; or set pad: auto, which runs such a size without an engine")
        check_fits(component, self.device, self._give_up)
        engine = EagerEngine(component, self.device, EngineSpec("eager"))
        self.ledger.record(LedgerEntry(component.name, self.config.vae_type, "eager", reason, engine.detail))
        return component, Stage(component, engine.spec, self.device, self.ledger, engine=engine)
