"""Stable Diffusion 1 over the shared engines: text to image and image to image.

    text_encoder → [vae_encode] → steps of (unet → scheduler) → vae_decode

The same seed, scheduler and options give the image of diffusers' own pipeline.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel import latency
from vla_accel.config import EngineSpec
from vla_accel.config.mapping import Checked
from vla_accel.engines.tensorrt_session import Scratch
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.cache import Cache
from vla_accel.images.config import VaeConfig, check_spec
from vla_accel.images.native_unet import TRAIN_TIMESTEPS, NativeUnet
from vla_accel.images.parts import check_parts, found_unet_file, load_parts, make_scheduler, set_timesteps, tokenize
from vla_accel.images.picture import to_uint8
from vla_accel.images.plugged import Plugged
from vla_accel.images.stage import Stage, require_finite
from vla_accel.images.switches import refuse_freeu, refuse_modes, refuse_switches
from vla_accel.images.unet import Unet, check_file_size, check_size, text_component, unet_component
from vla_accel.images.vae import AcceleratedVae
from vla_accel.ledger import Ledger

_KEPT_SIZES = 4


@dataclass(frozen=True)
class Request(Checked):
    """What to generate.

    Attributes:
        height: pixels, a multiple of 8, with `width`; None for the model's size, or the input image's.
        guidance: scale of classifier-free guidance; 1 or less runs the prompt without the negative one.
        strength: share of the steps that run on an input image, 0 to 1.
        scheduler: a diffusers class instead of the checkpoint's.
    """

    prompt: str
    negative_prompt: str = ""
    height: int | None = None
    width: int | None = None
    steps: int = 50
    guidance: float = 7.5
    strength: float = 0.8
    seed: int = 0
    scheduler: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.guidance):
            raise ConfigError(f"guidance: expected a finite number, got {self.guidance}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: expected 0 to 2**63 - 1, got {self.seed}")
        if not 1 <= self.steps <= TRAIN_TIMESTEPS:
            raise ConfigError(f"steps: expected 1 to {TRAIN_TIMESTEPS}, got {self.steps}")
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"strength: expected 0 to 1, got {self.strength}")
        if (self.height is None) != (self.width is None):
            raise ConfigError("size: expected both height and width, or neither")
        if self.height is not None and self.width is not None:
            check_size((self.height, self.width))

    def run(self, from_image: bool) -> int:
        """The number of steps that run."""
        return int(self.steps * self.strength) if from_image else self.steps


EAGER = EngineSpec("eager")


@dataclass(frozen=True)
class Engines:
    """The engine of each component."""

    text_encoder: EngineSpec = EAGER
    unet: EngineSpec = EAGER
    vae_encoder: EngineSpec = EAGER
    vae_decoder: EngineSpec = EAGER

    @classmethod
    def all(cls, spec: EngineSpec) -> Engines:
        return cls(spec, spec, spec, spec)


@dataclass(frozen=True)
class Generated:
    """A picture, uint8 (H, W, 3), and its latents before decoding."""

    pixels: np.ndarray
    latents: Tensor


class _Stages(NamedTuple):
    text_encoder: Stage
    unet: Stage


@dataclass
class _Call:
    request: Request
    image: Tensor | None
    stages: _Stages
    scheduler: Any
    timesteps: Tensor
    generator: torch.Generator
    watch: latency.Stopwatch


class StableDiffusion:
    """A pipeline, for any number of threads: make one with `from_pretrained`, or from a diffusers pipeline.

    After weights have changed, or moved to another dtype or device, the next call makes new engines.
    """

    def __init__(
        self, parts: Any, engines: Engines | None = None, *, strict: bool = False, unet_file: Path | None = None
    ) -> None:
        """Read a diffusers `StableDiffusionPipeline`.

        `strict`: a fallback to another engine is an error; `unet_file`: the UNet's engine file from `build-unet`.
        """
        engines = engines or Engines()
        check_spec("text_encoder", engines.text_encoder)
        check_spec("unet", engines.unet)
        check_parts(parts)
        self.unet_file = unet_file
        self.parts, self.engines = parts, engines
        self.ledger = Ledger(strict=strict)
        self.latency = latency.LatencyLog()
        specs = {"encoder": engines.vae_encoder, "decoder": engines.vae_decoder}
        self.vae = AcceleratedVae(parts.vae, VaeConfig(), specs=specs, ledger=self.ledger)  # type: ignore[arg-type]
        self._vae = Plugged(parts.vae, self.vae)
        self._unets = {paired: Unet(parts.unet, paired=paired) for paired in (False, True)}
        self.cache: Cache[tuple[int, int, bool], _Stages] = Cache(lambda made: len(list(made)) > _KEPT_SIZES)
        self._generating = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StableDiffusion:
        parts = copy.deepcopy(self.parts, memo)
        return StableDiffusion(parts, self.engines, strict=self.ledger.strict, unet_file=self.unet_file)

    @property
    def device(self) -> torch.device:
        return next(self.parts.unet.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parts.unet.parameters()).dtype

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        engines: Engines | None = None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        strict: bool = False,
    ) -> StableDiffusion:
        """Load a diffusers folder or hub name, and the engine file of `build-unet` in it. Raises CheckpointError."""
        file = found_unet_file(folder, (engines or Engines()).unet)
        return cls(load_parts(folder, device=device, dtype=dtype), engines, strict=strict, unet_file=file)

    def generate(
        self, request: Request, image: Tensor | None = None, *, on_step: Callable[[int, int], None] | None = None
    ) -> Generated:
        """Make one picture.

        Args:
            image: (1, 3, H, W) in -1..1 to start from instead of noise. A size that is no multiple of 8 is reduced to
                one, as diffusers does with tensors.
            on_step: called as `on_step(done, total)` after each step is enqueued.

        Raises:
            ConfigError: a size or an option does not fit; raised before the first step.
            EngineError: an output is not finite, or the engines would ignore a switch of the parts.
        """
        refuse_modes("generate", (), self.device)
        with self.cache.on(self.device), torch.no_grad():
            if self._generating:
                raise EngineError("generate: expected a call after the one in progress, got one from its on_step")
            self._generating = True
            try:
                with torch.inference_mode():
                    made = self._generate(request, image, on_step)
                # Outside of inference mode the copy is an ordinary tensor.
                return dataclasses.replace(made, latents=made.latents.clone())
            finally:
                self._generating = False

    def _generate(
        self, request: Request, image: Tensor | None, on_step: Callable[[int, int], None] | None
    ) -> Generated:
        height, width = self._size(request, image)
        if image is not None and image.shape[2:] != (height, width):
            image = F.interpolate(image, size=(height, width))
        guided = request.guidance > 1
        scheduler = make_scheduler(self.parts.scheduler, request.scheduler)
        timesteps = set_timesteps(scheduler, request.steps, None if image is None else request.strength)
        stages = self._prepare((height, width), guided, image is not None)
        watch, generator = latency.Stopwatch(self.device), torch.Generator("cpu").manual_seed(request.seed)
        call = _Call(request, image, stages, scheduler, timesteps, generator, watch)
        prompts = [request.negative_prompt, request.prompt] if guided else [request.prompt]
        ids = tokenize(self.parts.tokenizer, prompts)
        with watch.section("text_encoder"):
            states = stages.text_encoder(ids=ids.to(self.device, non_blocking=True))["states"]
        latents = self._denoise(call, states, self._start(call, height, width), on_step)
        with watch.section("vae_decode"):
            picture = self._decode(stages, latents)
        with watch.section("postprocess", host=True):
            pixels = to_uint8(picture)
        self.latency.add(watch.finish())
        return Generated(pixels, latents)

    def latency_report(self, steps: int) -> dict[str, Any]:
        """Return the breakdown JSON of all calls so far."""
        unet = self.parts.unet.config
        return latency.breakdown(
            model={"kind": "stable_diffusion", "channels": list(unet.block_out_channels), "dtype": str(self.dtype)},
            engines=self.ledger.as_list(),
            steps=steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
        )

    def _size(self, request: Request, image: Tensor | None) -> tuple[int, int]:
        if image is None:
            own = self.parts.unet.config.sample_size
            rows, columns = (own, own) if isinstance(own, int) else own
            given = rows * SCALE, columns * SCALE
        else:
            if not isinstance(image, Tensor) or not image.is_floating_point():
                got = str(image.dtype) if isinstance(image, Tensor) else type(image).__name__
                raise ConfigError(f"image: expected a floating-point tensor (1, 3, H, W) in -1 to 1, got {got}")
            if image.dim() != 4 or image.shape[:2] != (1, 3) or min(image.shape[2:]) < SCALE:
                raise ConfigError(
                    f"image: expected (1, 3, H, W) of at least {SCALE} pixels a side, got {tuple(image.shape)}"
                )
            if not bool((image.abs() <= 1 + 1e-3).all()):
                raise ConfigError(f"image: expected values of -1 to 1, got {image.min():g} to {image.max():g}")
            given = (image.shape[2] // SCALE * SCALE, image.shape[3] // SCALE * SCALE)
        if request.height is None or request.width is None:
            return given
        if image is not None and (request.height, request.width) != given:
            raise ConfigError(
                f"image: expected {request.width}x{request.height} pixels, got {image.shape[3]}x{image.shape[2]}"
            )
        return request.height, request.width

    def _prepare(self, size: tuple[int, int], guided: bool, encode: bool) -> _Stages:
        self._follow()

        def make() -> _Stages:
            text = text_component(self.parts.text_encoder, 2 if guided else 1)
            stage = Stage(text, self.engines.text_encoder, self.device, self.ledger)
            return _Stages(stage, self.unet_stage(size, guided=guided))

        stages = self.cache.get((*size, guided), make)
        if not self.parts.vae.use_tiling:
            # A size that does not fit is an error before the first step.
            self.vae.prepare("decoder", size)
            if encode:
                self.vae.prepare("encoder", size)
        return stages

    def _follow(self) -> None:
        """Refuse switches that the engines would ignore, and drop the engines if the weights have changed."""
        unet, text = self.engines.unet.engine != "eager", self.engines.text_encoder.engine != "eager"
        refuse_switches("unet", self.parts.unet, hooks=unet, adapters=unet)
        refuse_switches("text_encoder", self.parts.text_encoder, hooks=text, adapters=False)
        if unet:
            refuse_freeu(self.parts.unet)
        check_parts(self.parts)
        self.cache.follow(self.parts.unet, self.parts.text_encoder, values=unet or text)

    def unet_stage(self, size: tuple[int, int], *, guided: bool) -> Stage:
        """Make the UNet for one size, on its engine or from its engine file. One thread at a time may use it."""
        unet, spec, program = self._unets[guided], self.engines.unet, None
        if spec.engine == "native":
            # One copy of the weights serves both forms and every size.
            program = self.cache.share("unet", lambda: NativeUnet(self._unets[True])).form(guided)
        component = unet_component(unet, size, batch=2 if guided else 1, program=program)
        if self.unet_file is None:
            return Stage(component, spec, self.device, self.ledger)
        check_file_size(unet, size)
        from vla_accel.images.engine_files import open_file

        return open_file(component, spec, self.unet_file, Scratch(self.device), self.ledger)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # As diffusers draws it: on the generator's device, in the model's dtype.
        return torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device, non_blocking=True)

    def _start(self, call: _Call, height: int, width: int) -> Tensor:
        """The latents before the first step: noise, or an encoded image with noise."""
        if call.image is None:
            shape = 1, self.parts.unet.config.in_channels, height // SCALE, width // SCALE
            return self._noise(shape, call.generator) * call.scheduler.init_noise_sigma
        with call.watch.section("vae_encode"):
            image = call.image.to(self.dtype).to(self.device, non_blocking=True)
            mean, log_variance = self._vae.encode(image).latent_dist.parameters.chunk(2, dim=1)
            deviation = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
            latents = mean + deviation * self._noise(tuple(mean.shape), call.generator)
            latents = self.parts.vae.config.scaling_factor * latents
            noise = self._noise(tuple(latents.shape), call.generator)
            return call.scheduler.add_noise(latents, noise, call.timesteps[:1])

    def _denoise(
        self, call: _Call, states: Tensor, latents: Tensor, on_step: Callable[[int, int], None] | None
    ) -> Tensor:
        unet, scheduler, timesteps = call.stages.unet, call.scheduler, call.timesteps
        unet.engine.write("encoder_hidden_states", states)
        buffers, noise = unet.engine.inputs, unet.output()
        halves = buffers["sample"].shape[0]
        on_device = timesteps.to(torch.int64).to(self.device, non_blocking=True)
        # As in diffusers' pipelines: TCD's own default of eta is another.
        options: dict[str, Any] = {"generator": call.generator, "eta": 0.0}
        accepted = inspect.signature(scheduler.step).parameters
        extra = {name: value for name, value in options.items() if name in accepted}
        for i, timestep in enumerate(timesteps):
            with call.watch.section("scheduler"):
                scaled = scheduler.scale_model_input(latents, timestep)
                buffers["sample"].unflatten(0, (halves, 1)).copy_(scaled)
                buffers["timestep"].copy_(on_device[i])
            with call.watch.section("unet"):
                unet.run()
            with call.watch.section("scheduler"):
                if halves == 2:
                    without, with_prompt = noise.chunk(2)
                    guided = without + call.request.guidance * (with_prompt - without)
                else:
                    guided = noise.clone()
                latents = scheduler.step(guided, timestep, latents, **extra, return_dict=False)[0]
            if on_step is not None:
                on_step(i + 1, len(timesteps))
        return latents

    def _decode(self, stages: _Stages, latents: Tensor) -> Tensor:
        scaled = (latents / self.parts.vae.config.scaling_factor).to(self.dtype)
        try:
            return self._vae.decode(scaled, return_dict=False)[0][0].float().cpu()
        except EngineError:
            # Only after a failure, since each check waits for the GPU. In order, to name the first culprit.
            for stage in stages:
                require_finite(stage.output(), stage.component, tuple(stage.engine.inputs.values()))
            require_finite(latents, stages.unet.component, tuple(stages.unet.engine.inputs.values()))
            raise
