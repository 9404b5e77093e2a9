"""Stable Diffusion 1 over the shared engines: text to image and image to image.

    text_encoder → [vae_encode] → steps of (unet → scheduler) → vae_decode

Same seed, scheduler and options give the image of diffusers' own pipeline. Owns no mathematics: models compute,
engines run, diffusers' schedulers step.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from vla_accel.images.config import VaeConfig, check_spec
from vla_accel.images.exclusive import Exclusive
from vla_accel.images.native_unet import TRAIN_TIMESTEPS, NativeUnet
from vla_accel.images.parts import check_parts, load_parts, make_scheduler, unet_engine_file
from vla_accel.images.picture import to_uint8
from vla_accel.images.plugged import Plugged
from vla_accel.images.stage import Stage, require_finite
from vla_accel.images.switches import refuse_adapters, refuse_freeu, refuse_hooks, refuse_modes, refuse_offloading
from vla_accel.images.unet import Unet
from vla_accel.images.unet_component import check_file_size, check_size, text_component, unet_component
from vla_accel.images.vae import AcceleratedVae
from vla_accel.images.weights import WeightState
from vla_accel.ledger import Ledger

_KEPT_SIZES = 4
_log = logging.getLogger("vla_accel")


@dataclass(frozen=True)
class Request(Checked):
    """What to generate. Sizes in pixels, multiples of 8; None for the model's own, or the input image's.

    `guidance`: of the prompt over the negative prompt; 1 or less runs the prompt alone. `strength`: how much of an
    input image is given up, 0 to 1: that share of the steps is run. `scheduler`: a diffusers class instead of the
    checkpoint's.
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
        """How many of the steps are run."""
        return int(self.steps * self.strength) if from_image else self.steps


EAGER = EngineSpec("eager")


@dataclass(frozen=True)
class Engines:
    """Which engine each component gets."""

    text_encoder: EngineSpec = EAGER
    unet: EngineSpec = EAGER
    vae_encoder: EngineSpec = EAGER
    vae_decoder: EngineSpec = EAGER

    @classmethod
    def all(cls, spec: EngineSpec) -> Engines:
        """The same for every component."""
        return cls(spec, spec, spec, spec)


@dataclass(frozen=True)
class Generated:
    """A picture, uint8 (H, W, 3), its latents before decoding, and what each part of the call took."""

    pixels: np.ndarray
    latents: Tensor
    sample: latency.Sample


@dataclass
class _Stages:
    text_encoder: Stage
    unet: Stage


class StableDiffusion:
    """A pipeline ready to generate. Make one with `from_pretrained`, or from a diffusers pipeline's parts.

    Any number of threads may call `generate`; they take turns. The engines follow the parts: after weights have
    changed, or moved to another dtype or device, the next call makes new engines.
    """

    def __init__(
        self, parts: Any, engines: Engines | None = None, *, strict: bool = False, unet_file: Path | None = None
    ) -> None:
        """Take a diffusers pipeline's parts.

        Args:
            parts: a diffusers `StableDiffusionPipeline` on its device and in its dtype.
            engines: the engine of each component; eager if not given.
            strict: a component that falls back to another engine is an error.
            unet_file: an engine file of `build-unet` to run the UNet from, of the library that `engines.unet` names.

        Raises:
            CheckpointError: the models need inputs that Stable Diffusion 1 does not have.
            ConfigError: an engine would ignore an option.
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
        self._unet: NativeUnet | None = None
        self._stages: OrderedDict[tuple[int, int, bool], _Stages] = OrderedDict()
        self._weights: WeightState | None = None
        self._exclusive, self._generating = Exclusive(), False

    def __deepcopy__(self, memo: dict[int, Any]) -> StableDiffusion:
        parts = copy.deepcopy(self.parts, memo)
        return StableDiffusion(parts, self.engines, strict=self.ledger.strict, unet_file=self.unet_file)

    @property
    def device(self) -> torch.device:
        """Where the UNet is now."""
        return next(self.parts.unet.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The UNet's dtype now."""
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
        """Load a diffusers folder or hub name: safetensors only. Raises CheckpointError.

        An engine file that `build-unet` left in the folder is used where `engines.unet` is its library.
        """
        file = unet_engine_file(folder)
        use = engines is not None and engines.unet.engine.startswith("tensorrt") and file.is_file()
        parts = load_parts(folder, device=device, dtype=dtype)
        return cls(parts, engines, strict=strict, unet_file=file if use else None)

    def generate(
        self, request: Request, image: Tensor | None = None, *, on_step: Callable[[int, int], None] | None = None
    ) -> Generated:
        """Make one picture.

        Args:
            request: what to generate.
            image: (1, 3, H, W) in -1..1 to start from instead of noise. A size that is no multiple of 8 is reduced to
                one, as diffusers does with tensors.
            on_step: called as `on_step(done, total)` after every step is enqueued.

        Raises:
            ConfigError: a size or an option that does not fit, before the first step.
            EngineError: an output that is not finite, naming component and module; or a switch of the parts that the
                engines would ignore.
        """
        refuse_modes("generate", (), self.device)
        with self._exclusive.on(self.device), torch.no_grad():
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
        if image is not None and not bool((image.abs() <= 1 + 1e-3).all()):
            raise ConfigError(
                f"image: expected values of -1 to 1, got {float(image.min()):g} to {float(image.max()):g}"
            )
        if image is not None and image.shape[2:] != (height, width):
            image = F.interpolate(image, size=(height, width))
        guided = request.guidance > 1
        scheduler, timesteps = self._schedule(request, image is not None)
        stages = self._prepare(height, width, guided, image is not None)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        watch = latency.Stopwatch(self.device)
        ids = self._tokenize(request, guided)
        with watch.section("text_encoder"):
            states = stages.text_encoder(ids=ids.to(self.device, non_blocking=True))["states"]
        if image is None:
            latents = self._noise((1, self.parts.unet.config.in_channels, height // SCALE, width // SCALE), generator)
            latents = latents * scheduler.init_noise_sigma
        else:
            with watch.section("vae_encode"):
                latents = self._encode(image, scheduler, timesteps, generator)
        latents = self._denoise(stages.unet, states, latents, request, scheduler, timesteps, generator, watch, on_step)
        with watch.section("vae_decode"):
            scaled = (latents / self.parts.vae.config.scaling_factor).to(self.dtype)
            pixels_f = self._decode(stages, latents, scaled)
        with watch.section("postprocess", host=True):
            pixels = to_uint8(pixels_f)
        sample = watch.finish()
        self.latency.add(sample)
        return Generated(pixels, latents, sample)

    def latency_report(self, steps: int) -> dict[str, Any]:
        """The breakdown JSON over all calls so far."""
        unet = self.parts.unet.config
        return latency.breakdown(
            model={"kind": "stable_diffusion", "channels": list(unet.block_out_channels), "dtype": str(self.dtype)},
            engines=self.ledger.as_list(),
            steps=steps,
            device=self.device,
            components=self.latency.components(),
            samples=len(self.latency.samples),
        )

    # -- pieces of a call ---------------------------------------------------------------------------------------------

    def _size(self, request: Request, image: Tensor | None) -> tuple[int, int]:
        if image is None:
            own = self.parts.unet.config.sample_size
            given = (own * SCALE, own * SCALE) if isinstance(own, int) else (own[0] * SCALE, own[1] * SCALE)
        else:
            if not isinstance(image, Tensor) or not image.is_floating_point():
                got = str(image.dtype) if isinstance(image, Tensor) else type(image).__name__
                raise ConfigError(f"image: expected a floating-point tensor (1, 3, H, W) in -1 to 1, got {got}")
            if image.dim() != 4 or image.shape[:2] != (1, 3) or min(image.shape[2:]) < SCALE:
                raise ConfigError(
                    f"image: expected (1, 3, H, W) of at least {SCALE} pixels a side, got {tuple(image.shape)}"
                )
            given = (image.shape[2] // SCALE * SCALE, image.shape[3] // SCALE * SCALE)
        if request.height is None or request.width is None:
            return given
        if image is not None and (request.height, request.width) != given:
            raise ConfigError(
                f"image: expected {request.width}x{request.height} pixels, got {image.shape[3]}x{image.shape[2]}"
            )
        return request.height, request.width

    def _prepare(self, height: int, width: int, guided: bool, encode: bool) -> _Stages:
        self._follow()
        key = (height, width, guided)
        stages = self._stages.get(key)
        if stages is None:
            batch = 2 if guided else 1
            stages = _Stages(
                self._stage(text_component(self.parts.text_encoder, batch), self.engines.text_encoder),
                self.unet_stage((height, width), guided=guided),
            )
            self._stages[key] = stages
        self._stages.move_to_end(key)
        while len(self._stages) > _KEPT_SIZES:
            self._stages.popitem(last=False)
        if not self.parts.vae.use_tiling:
            # Before the first step, so that a size that does not fit is known then.
            self.vae.stage("decoder", (height, width))
            if encode:
                self.vae.stage("encoder", (height, width))
        return stages

    def _follow(self) -> None:
        """Refuse switches that the engines would ignore, and make new engines if the weights have changed."""
        named = {"unet": (self.parts.unet, self.engines.unet), "text_encoder": (
            self.parts.text_encoder, self.engines.text_encoder)}  # fmt: skip
        for name, (module, spec) in named.items():
            refuse_offloading(name, module)
            if spec.engine != "eager":
                refuse_hooks(name, module)
        if self.engines.unet.engine != "eager":
            refuse_adapters("unet", self.parts.unet)
            refuse_freeu(self.parts.unet)
        check_parts(self.parts)
        if self._weights is None or self._weights.changed():
            self._stages.clear()
            self._unet = None
            copies = any(spec.engine != "eager" for _, spec in named.values())
            self._weights = WeightState(self.parts.unet, self.parts.text_encoder, values=copies)

    def unet_stage(self, size: tuple[int, int], *, guided: bool) -> Stage:
        """The UNet for one size, on its engine or from its engine file. Its buffers are for one thread at a time."""
        unet, program = self._unets[guided], self._unet_program(guided)
        component = unet_component(unet, size, batch=2 if guided else 1, program=program)
        if self.unet_file is None:
            return self._stage(component, self.engines.unet)
        check_file_size(unet, size)
        from vla_accel.images.engine_files import open_file

        return open_file(component, self.engines.unet, self.unet_file, Scratch(self.device), self.ledger)

    def _stage(self, component: Any, spec: EngineSpec) -> Stage:
        return Stage(component, spec, self.device, self.ledger)

    def _unet_program(self, paired: bool) -> NativeUnet | None:
        if self.engines.unet.engine != "native":
            return None
        # One copy of the weights serves both forms and every size.
        if self._unet is None:
            self._unet = NativeUnet(self._unets[True])
        return self._unet.form(paired)

    def _tokenize(self, request: Request, guided: bool) -> Tensor:
        tokenizer = self.parts.tokenizer
        prompts = [request.negative_prompt, request.prompt] if guided else [request.prompt]
        most = tokenizer.model_max_length
        for prompt in prompts:
            whole = tokenizer(prompt, verbose=False).input_ids
            if len(whole) > most:
                _log.warning(
                    "prompt: expected at most %d tokens, got %d; this part is ignored: %r",
                    most, len(whole), tokenizer.decode(whole[most - 1 : -1]),
                )  # fmt: skip
        return tokenizer(prompts, padding="max_length", max_length=most, truncation=True, return_tensors="pt").input_ids

    def _schedule(self, request: Request, from_image: bool) -> tuple[Any, Tensor]:
        scheduler = make_scheduler(self.parts.scheduler, request.scheduler)
        # On the CPU: schedulers look their tables up by timestep, which would wait for the GPU at every step.
        try:
            scheduler.set_timesteps(request.steps, device="cpu")
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"scheduler {type(scheduler).__name__}: expected one that runs {request.steps} steps, got: {error}"
            ) from error
        timesteps = scheduler.timesteps
        if from_image:
            if not hasattr(scheduler, "add_noise"):
                raise ConfigError(
                    f"scheduler {type(scheduler).__name__}: expected one with add_noise for an input image, such as "
                    "DDIMScheduler, got one without"
                )
            skipped = request.steps - request.run(from_image)
            timesteps = timesteps[skipped * scheduler.order :]
            if hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(skipped * scheduler.order)
            if len(timesteps) == 0:
                raise ConfigError(
                    f"strength {request.strength}: expected at least one of {request.steps} steps to run, got none"
                )
        if bool((timesteps != timesteps.round()).any()) or int(timesteps.max()) >= TRAIN_TIMESTEPS:
            raise ConfigError(
                f"scheduler {type(scheduler).__name__}: expected whole timesteps below {TRAIN_TIMESTEPS}, got "
                f"{float(timesteps[0]):g}, {float(timesteps[min(1, len(timesteps) - 1)]):g}, …: set its "
                "timestep_spacing to leading or trailing, or take another scheduler"
            )
        return scheduler, timesteps

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # As diffusers draws it: on the generator's device, in the model's dtype.
        return torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device, non_blocking=True)

    def _encode(self, image: Tensor, scheduler: Any, timesteps: Tensor, generator: torch.Generator) -> Tensor:
        moments = self._vae.encode(image.to(self.dtype).to(self.device, non_blocking=True)).latent_dist.parameters
        mean, log_variance = moments.chunk(2, dim=1)
        deviation = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        latents = mean + deviation * self._noise(tuple(mean.shape), generator)
        latents = self.parts.vae.config.scaling_factor * latents
        return scheduler.add_noise(latents, self._noise(tuple(latents.shape), generator), timesteps[:1])

    def _denoise(
        self,
        unet: Stage,
        states: Tensor,
        latents: Tensor,
        request: Request,
        scheduler: Any,
        timesteps: Tensor,
        generator: torch.Generator,
        watch: latency.Stopwatch,
        on_step: Callable[[int, int], None] | None,
    ) -> Tensor:
        unet.engine.write("encoder_hidden_states", states)
        buffers, noise = unet.engine.inputs, unet.output()
        halves = buffers["sample"].shape[0]
        on_device = timesteps.to(torch.int64).to(self.device, non_blocking=True)
        accepted = inspect.signature(scheduler.step).parameters
        # As diffusers' pipelines: TCD's own default of eta is another.
        options: dict[str, Any] = {"generator": generator, "eta": 0.0}
        extra = {name: value for name, value in options.items() if name in accepted}
        for i, timestep in enumerate(timesteps):
            with watch.section("scheduler"):
                scaled = scheduler.scale_model_input(latents, timestep)
                buffers["sample"].unflatten(0, (halves, 1)).copy_(scaled)
                buffers["timestep"].copy_(on_device[i])
            with watch.section("unet"):
                unet.run()
            with watch.section("scheduler"):
                if halves == 2:
                    without, with_prompt = noise.chunk(2)
                    guided = without + request.guidance * (with_prompt - without)
                else:
                    guided = noise.clone()
                latents = scheduler.step(guided, timestep, latents, **extra, return_dict=False)[0]
            if on_step is not None:
                on_step(i + 1, len(timesteps))
        return latents

    def _decode(self, stages: _Stages, latents: Tensor, scaled: Tensor) -> Tensor:
        try:
            return self._vae.decode(scaled, return_dict=False)[0][0].float().cpu()
        except EngineError:
            # Only after a failure: each check waits for the GPU. In order, so that the first culprit is named.
            for stage in (stages.text_encoder, stages.unet):
                require_finite(stage.output(), stage.component, tuple(stage.engine.inputs.values()))
            require_finite(latents, stages.unet.component, tuple(stages.unet.engine.inputs.values()))
            raise
