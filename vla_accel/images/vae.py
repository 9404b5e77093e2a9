"""An autoencoder for images of any size: one engine for each size, made on first use."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vla_accel.component import Program
from vla_accel.config import EngineSpec
from vla_accel.engines.eager import EagerEngine
from vla_accel.engines.tensorrt_session import Scratch
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images.autoencoder import Half, autoencoder_kind, split_autoencoder
from vla_accel.images.cache import Cache
from vla_accel.images.config import VaeConfig, check_spec, engine_file, load_vae_config, why_no_engine
from vla_accel.images.memory import check_fits
from vla_accel.images.native_autoencoder import CompiledHalf, NativeHalf, QuickestHalf
from vla_accel.images.stage import Stage, require_finite
from vla_accel.images.switches import refuse_modes, refuse_switches
from vla_accel.images.vae_component import Side, Size, size_key, vae_component
from vla_accel.ledger import Ledger, LedgerEntry
from vla_accel.numeric import DTYPES


class AcceleratedVae:
    """Encoder and decoder of a diffusers autoencoder on engines, for any number of threads. Results are new tensors.

    After the weights have changed, or moved to another dtype or device, the next call makes new engines. A deep copy
    has its own engines.
    """

    def __init__(
        self,
        vae: Any,
        config: VaeConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        specs: Mapping[Side, EngineSpec] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Read an autoencoder of `AUTOENCODERS`; `specs` replace the configuration's engines."""
        self.vae, self.config = vae, load_vae_config(config or VaeConfig())
        own = EngineSpec(engine=self.config.vae_type, precision=self.config.precision)
        self.specs: dict[Side, EngineSpec] = {"encoder": own, "decoder": own, **(specs or {})}
        for side, spec in self.specs.items():
            check_spec(f"vae_{side}", spec, DTYPES)
        self.ledger = ledger or Ledger()
        budget = self.config.memory_budget_gib * 2**30
        self.cache: Cache[tuple[Side, int, str], Stage] = Cache(lambda stages: sum(s.bytes for s in stages) > budget)
        # `decode` clamps, as diffusers does after it has blended tiles. Engine files contain the clamp.
        self._clamp = autoencoder_kind(vae) == "qwen"
        self._follow(hooks=False)
        self._half("encoder")

    @property
    def device(self) -> torch.device:
        return next(self.vae.parameters()).device

    def encode(self, image: Tensor) -> Tensor:
        """Image (B, 3[, 1], H, W) in -1..1 to moments (B, 2 z[, 1], H // 8, W // 8): mean, then log variance. Wan
        2.2 has 16 instead of 8."""
        return self.run("encoder", image)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents (B, z[, 1], h, w) to an image (B, 3[, 1], 8 h, 8 w) in -1..1; Wan 2.2: 16 h, 16 w."""
        image = self.run("decoder", latents)
        return image.clamp_(-1.0, 1.0) if self._clamp else image

    def run(self, side: Side, value: Tensor) -> Tensor:
        """Run one side. Unlike `decode`, this does not clamp Qwen-Image's and Wan's picture to -1..1.

        Raises EngineError for an input of another shape, dtype or device, a result that is not finite, and whatever
        the engines would ignore: gradients, torch.autocast, switches of the autoencoder.
        """
        if not isinstance(value, Tensor):
            raise EngineError(f"vae_{side}: expected a tensor, got {type(value).__name__}")
        refuse_modes(f"vae_{side}", (value,), value.device)
        with self.cache.on(value.device), torch.no_grad():
            self._follow()
            self._check(side, value)
            unit = 1 if side == "encoder" else self._half(side).scale
            with torch.inference_mode():
                stage = self._stage(side, (value.shape[-2] * unit, value.shape[-1] * unit), value.shape[0])
                (source,) = stage.component.inputs
                (result,) = stage(**{source.name: value}).values()
                require_finite(result, stage.component, (value,))
            # A copy made outside of inference mode is an ordinary tensor: diffusers blends tiles in place.
            return result.clone()

    @torch.inference_mode()
    def prepare(self, side: Side, size: Size, batch: int = 1) -> None:
        """Make the engine of a size now, so that its errors come before other work. Raises as `run` does."""
        with self.cache.on(self.device):
            self._follow()
            self._stage(side, size, batch)

    def _follow(self, hooks: bool = True) -> None:
        refuse_switches("vae", self.vae, hooks=hooks)
        self.cache.follow(self.vae)

    def _half(self, side: Side) -> Half:
        if side not in self.cache.shared:
            encoder, decoder = split_autoencoder(self.vae)
            decoder.clamp = decoder.clamp and self.config.from_files
            self.cache.shared |= {"encoder": encoder, "decoder": decoder}
        return self.cache.shared[side]

    def _check(self, side: Side, value: Tensor) -> None:
        half, shape = self._half(side), tuple(value.shape)
        if len(shape) != (5 if half.frames else 4) or shape[1:-2] != (half.channels[0], *((1,) if half.frames else ())):
            layout = f"(B, C, {'1, ' * half.frames}H, W) with C = {half.channels[0]}"
            raise EngineError(f"vae_{side}: expected {layout}, got {shape}")
        if value.dtype != half.dtype:
            raise EngineError(f"vae_{side}: expected dtype {half.dtype}, got {value.dtype}")
        if value.device != self.device:
            raise EngineError(f"vae_{side}: expected device {self.device}, got {value.device}")

    def _stage(self, side: Side, size: Size, batch: int) -> Stage:
        return self.cache.get((side, batch, size_key(size)), lambda: self._make(side, size, batch))

    def _make(self, side: Side, size: Size, batch: int) -> Stage:
        half, spec, engine = self._half(side), self.specs[side], None
        reason = why_no_engine(self.config, side, size) if self.config.from_files else None
        if self.config.from_files and reason is None:
            from vla_accel.images.engine_files import open_file

            component = vae_component(half, side, size, batch=batch, dynamic=self.config.trt_vae_config.multi_profile)
            # One for all sizes: the cache's lock lets one of them run at a time.
            scratch = self.cache.share("scratch", lambda: Scratch(self.device))
            path = engine_file(self.config.trt_vae_config, side, size)
            return open_file(component, EngineSpec(engine=self.config.vae_type), path, scratch, self.ledger)
        if reason is not None and self.config.pad == "error":
            raise ConfigError(f"{reason}; or set pad: auto, which runs such a size without an engine")
        native = spec.engine == "native"
        program = self.cache.share(f"{side} program", lambda: self._program(half, spec)) if native else None
        component = vae_component(half, side, size, batch=batch, program=program)
        if spec.engine in ("eager", "native") or reason is not None:
            check_fits(component, self.device, self.cache.drop_oldest)
        if reason is not None:
            engine = EagerEngine(component, self.device, EngineSpec("eager"))
            self.ledger.record(LedgerEntry(component.name, self.config.vae_type, "eager", reason, engine.detail))
        return Stage(component, spec, self.device, self.ledger, engine=engine)

    def _program(self, half: Half, spec: EngineSpec) -> Program:
        dtype = DTYPES.get(spec.precision)
        fused = NativeHalf(half, dtype)
        if self.config.inductor == "never":
            return fused
        # A copy, since compiling changes the layout of the weights.
        return QuickestHalf({"fused": fused, "inductor": CompiledHalf(copy.deepcopy(half).to(dtype or half.dtype))})
