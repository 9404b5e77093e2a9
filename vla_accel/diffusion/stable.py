"""Stable Diffusion 1 over the shared engines: text to image and image to image.

    text_encoder → [vae_encode] → steps of (unet → scheduler) → vae_decode

Same seed, scheduler and options give the image of diffusers' own pipeline. Owns no mathematics: models compute,
engines run, diffusers' schedulers step.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel import latency
from vla_accel.components.unet import text_component, unet_component
from vla_accel.components.vae import vae_component
from vla_accel.config import EngineSpec
from vla_accel.diffusion.models import diffusers_module, from_folder, random_stable_diffusion
from vla_accel.diffusion.picture import to_uint8
from vla_accel.diffusion.stage import Stage, require_finite
from vla_accel.errors import CheckpointError, ConfigError, nearest
from vla_accel.ledger import Ledger
from vla_accel.models.autoencoder import SCALE, split_autoencoder
from vla_accel.models.unet import Unet
from vla_accel.native.autoencoder import NativeHalf
from vla_accel.native.unet import TRAIN_TIMESTEPS, NativeUnet

RANDOM = {"random": False, "tiny-random": True}
"""Instead of a folder: version 1.4's configuration, or a tiny one, with random weights."""
_KEPT_SIZES = 4


@dataclass(frozen=True)
class Request:
    """What to generate. Sizes in pixels, None for the model's own (or the input image's).

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
        if not 1 <= self.steps <= TRAIN_TIMESTEPS:
            raise ConfigError(f"steps: expected 1 to {TRAIN_TIMESTEPS}, got {self.steps}")
        if not 0 <= self.strength <= 1:
            raise ConfigError(f"strength: expected 0 to 1, got {self.strength}")

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
    vae_decoder: Stage
    vae_encoder: Stage | None = None


class StableDiffusion:
    """A pipeline ready to generate. Make one with `from_pretrained`, or from a diffusers pipeline's parts."""

    def __init__(
        self, parts: Any, engines: Engines | None = None, *, strict: bool = False, unet_file: Path | None = None
    ) -> None:
        """`parts`: a diffusers `StableDiffusionPipeline` on its device and in its dtype. `unet_file`: an engine file
        of `build-unet` to run the UNet from, of the library that `engines.unet` names."""
        engines = engines or Engines()
        self.unet_file = unet_file
        self.parts, self.engines = parts, engines
        self.device: torch.device = next(parts.unet.parameters()).device
        self.dtype: torch.dtype = next(parts.unet.parameters()).dtype
        self.ledger = Ledger(strict=strict)
        self.latency = latency.LatencyLog()
        self.encoder, self.decoder = split_autoencoder(parts.vae)
        self._unets = {paired: Unet(parts.unet, paired=paired) for paired in (False, True)}
        self._programs: dict[str, Any] = {}
        self._stages: OrderedDict[tuple[int, int, bool], _Stages] = OrderedDict()

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

    @torch.inference_mode()
    def generate(
        self, request: Request, image: Tensor | None = None, *, on_step: Callable[[int, int], None] | None = None
    ) -> Generated:
        """One picture. `image`: (1, 3, H, W) in -1..1 to start from; without it, noise.

        `on_step(done, total)` is called after every step is enqueued. Raises ConfigError for a size that does not fit,
        EngineError for an output that is not finite, naming component and module.
        """
        height, width = self._size(request, image)
        guided = request.guidance > 1
        stages = self._prepare(height, width, guided, image is not None)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        watch = latency.Stopwatch(self.device)
        ids = self._tokenize(request, guided)
        with watch.section("text_encoder"):
            states = stages.text_encoder(ids=ids.to(self.device, non_blocking=True))["states"]
        scheduler, timesteps = self._schedule(request, image is not None)
        if image is None:
            latents = self._noise((1, self.parts.unet.config.in_channels, height // SCALE, width // SCALE), generator)
            latents = latents * scheduler.init_noise_sigma
        else:
            with watch.section("vae_encode"):
                latents = self._encode(stages, image, scheduler, timesteps, generator)
        latents = self._denoise(stages.unet, states, latents, request, scheduler, timesteps, generator, watch, on_step)
        with watch.section("vae_decode"):
            scaled = (latents / self.parts.vae.config.scaling_factor).to(self.dtype)
            decoded = stages.vae_decoder(latents=scaled)["image"]
            pixels_f = decoded[0].float().cpu()
        if not bool(torch.isfinite(pixels_f).all()):
            self._blame(stages, latents, scaled, decoded)
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
        own = self.parts.unet.config.sample_size * SCALE
        given = (own, own) if image is None else tuple(image.shape[2:])
        height, width = request.height or given[0], request.width or given[1]
        if image is not None and (height, width) != tuple(image.shape[2:]):
            raise ConfigError(f"image: expected {width}x{height} pixels, got {image.shape[3]}x{image.shape[2]}")
        return height, width

    def _prepare(self, height: int, width: int, guided: bool, encode: bool) -> _Stages:
        key = (height, width, guided)
        stages = self._stages.get(key)
        if stages is None:
            batch = 2 if guided else 1
            stages = _Stages(
                self._stage(text_component(self.parts.text_encoder, batch), self.engines.text_encoder),
                self.unet_stage((height, width), guided=guided),
                self._vae("decoder", (height, width)),
            )
            self._stages[key] = stages
        self._stages.move_to_end(key)
        if encode and stages.vae_encoder is None:
            stages.vae_encoder = self._vae("encoder", (height, width))
        while len(self._stages) > _KEPT_SIZES:
            self._stages.popitem(last=False)
        return stages

    def unet_stage(self, size: tuple[int, int], *, guided: bool) -> Stage:
        """The UNet for one size, on its engine or from its engine file."""
        unet, program = self._unets[guided], self._unet_program(guided)
        component = unet_component(unet, size, batch=2 if guided else 1, program=program)
        if self.unet_file is None:
            return self._stage(component, self.engines.unet)
        from vla_accel.diffusion.engine_files import open_file

        return open_file(component, self.engines.unet, self.unet_file, self.device, self.ledger)

    def _stage(self, component: Any, spec: EngineSpec) -> Stage:
        return Stage(component, spec, self.device, self.ledger)

    def _unet_program(self, paired: bool) -> NativeUnet | None:
        if self.engines.unet.engine != "native":
            return None
        # One copy of the weights serves both forms and every size.
        if "unet" not in self._programs:
            self._programs["unet"] = NativeUnet(self._unets[True])
        return self._programs["unet"].form(paired)

    def _vae(self, side: Any, size: tuple[int, int]) -> Stage:
        spec = self.engines.vae_encoder if side == "encoder" else self.engines.vae_decoder
        half = self.encoder if side == "encoder" else self.decoder
        if spec.engine == "native" and side not in self._programs:
            self._programs[side] = NativeHalf(half)
        return self._stage(vae_component(half, side, size, program=self._programs.get(side)), spec)

    def _tokenize(self, request: Request, guided: bool) -> Tensor:
        tokenizer = self.parts.tokenizer
        prompts = [request.negative_prompt, request.prompt] if guided else [request.prompt]
        return tokenizer(
            prompts, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        ).input_ids

    def _schedule(self, request: Request, from_image: bool) -> tuple[Any, Tensor]:
        scheduler = make_scheduler(self.parts.scheduler, request.scheduler)
        # On the CPU: schedulers look their tables up by timestep, which would wait for the GPU at every step.
        scheduler.set_timesteps(request.steps, device="cpu")
        timesteps = scheduler.timesteps
        if from_image:
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

    def _encode(
        self, stages: _Stages, image: Tensor, scheduler: Any, timesteps: Tensor, generator: torch.Generator
    ) -> Tensor:
        assert stages.vae_encoder is not None
        moments = stages.vae_encoder(image=image.to(self.dtype).to(self.device, non_blocking=True))["moments"]
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
        extra = {"generator": generator} if "generator" in accepted else {}
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

    def _blame(self, stages: _Stages, latents: Tensor, scaled: Tensor, decoded: Tensor) -> None:
        # Only after a failure: each check waits for the GPU. In order, so that the first culprit is named.
        for stage in (stages.text_encoder, stages.unet):
            require_finite(stage.output(), stage.component, tuple(stage.engine.inputs.values()))
        require_finite(latents, stages.unet.component, tuple(stages.unet.engine.inputs.values()))
        require_finite(decoded, stages.vae_decoder.component, (scaled,))


def unet_engine_file(folder: str | Path) -> Path:
    """Where `build-unet` puts a model's engine."""
    return Path(folder) / "unet" / "trt" / "unet.trt"


def make_scheduler(own: Any, name: str | None) -> Any:
    """A fresh scheduler: of the checkpoint's class, or of another diffusers class with the checkpoint's settings.

    Raises ConfigError for a name that diffusers does not have.
    """
    return (type(own) if name is None else scheduler_class(name)).from_config(own.config)


def scheduler_class(name: str) -> Any:
    """A diffusers class, its name with or without "Scheduler". Raises ConfigError for one that is not there."""
    package = diffusers_module()
    kind = getattr(package, name if name.endswith("Scheduler") else f"{name}Scheduler", None)
    if kind is None or not hasattr(kind, "set_timesteps"):
        like = nearest(name, (n.removesuffix("Scheduler") for n in dir(package) if n.endswith("Scheduler")))
        raise ConfigError(f"scheduler: expected a diffusers class like DDIMScheduler, got {name}{like}")
    return kind


def load_parts(folder: str | Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """A diffusers `StableDiffusionPipeline` without its safety checker; a name of `RANDOM` has random weights. Raises
    CheckpointError."""
    if folder in RANDOM:
        return random_stable_diffusion(tiny=RANDOM[str(folder)], dtype=dtype, device=device)
    path = Path(folder)
    if path.is_dir() or str(folder).startswith((".", "/")):
        if not (path / "model_index.json").is_file():
            raise CheckpointError(f"Stable Diffusion folder {path}: expected a model_index.json, found none")
    elif str(folder).count("/") != 1:
        raise CheckpointError(
            f"Stable Diffusion: expected a diffusers folder, or owner/name of one on the hub, got {str(folder)!r}"
        )
    unchecked: dict[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    return from_folder("StableDiffusionPipeline", folder, "Stable Diffusion", dtype=dtype, **unchecked).to(device)
