"""A Stable Diffusion pipeline's parts: loading and checking them, and making schedulers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.config import EngineSpec
from vla_accel.errors import CheckpointError, ConfigError, nearest
from vla_accel.files import user_path
from vla_accel.images.models import diffusers_module, from_folder, random_stable_diffusion
from vla_accel.images.native_unet import TRAIN_TIMESTEPS

RANDOM = {"random": False, "tiny-random": True}
"""Names instead of a folder, to whether tiny: version 1.4's configuration with random weights."""
_log = logging.getLogger("vla_accel")
_SCHEDULER_PARTS = ("init_noise_sigma", "scale_model_input", "order")


def unet_engine_file(folder: str | Path) -> Path:
    """Return the path of the engine that `build-unet` builds for a model."""
    return user_path(folder) / "unet" / "trt" / "unet.trt"


def found_unet_file(folder: str | Path, spec: EngineSpec) -> Path | None:
    """Return the UNet's engine file in a folder, if there is one and `spec` names TensorRT."""
    path = unet_engine_file(folder)
    return path if spec.engine.startswith("tensorrt") and path.is_file() else None


def make_scheduler(own: Any, name: str | None) -> Any:
    """Make a scheduler of the checkpoint's class, or of another diffusers class with the checkpoint's settings.

    Raises ConfigError if diffusers has no such class, or it does not suit Stable Diffusion or these settings.
    """
    kind = type(own) if name is None else scheduler_class(name)
    try:
        made = kind.from_config(own.config)
    except (TypeError, ValueError, KeyError, NotImplementedError, ImportError) as error:
        expected = f"scheduler {kind.__name__}: expected a class that the checkpoint's settings suit"
        raise ConfigError(f"{expected}, got: {' '.join(str(error).split())}") from error
    problem = ", ".join(f"one without {part}" for part in _SCHEDULER_PARTS if not hasattr(made, part))
    try:
        inspect.signature(made.step).bind(None, None, None, return_dict=False)
    except TypeError as error:
        problem = problem or f"one whose step has {error}"
    if problem:
        raise ConfigError(
            f"scheduler {kind.__name__}: expected one of Stable Diffusion's, like DDIMScheduler, got {problem}"
        )
    return made


def set_timesteps(scheduler: Any, steps: int, strength: float | None) -> Tensor:
    """Set a scheduler to `steps` steps and return its timesteps, with an input image the last share `strength`.

    Raises ConfigError if the scheduler does not run so many steps, takes no input image, or has fractional timesteps.
    """
    name = f"scheduler {type(scheduler).__name__}"
    # On the CPU: schedulers look up their tables by timestep, which would wait for the GPU at every step.
    try:
        scheduler.set_timesteps(steps, device="cpu")
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{name}: expected one that runs {steps} steps, got: {error}") from error
    timesteps = scheduler.timesteps
    if strength is not None:
        if not hasattr(scheduler, "add_noise"):
            raise ConfigError(f"{name}: expected one with add_noise for an input image, as DDIMScheduler, got none")
        skipped = (steps - int(steps * strength)) * scheduler.order
        timesteps = timesteps[skipped:]
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(skipped)
        if len(timesteps) == 0:
            raise ConfigError(f"strength {strength}: expected at least one of {steps} steps to run, got none")
    if bool((timesteps != timesteps.round()).any()) or int(timesteps.max()) >= TRAIN_TIMESTEPS:
        raise ConfigError(
            f"{name}: expected whole timesteps below {TRAIN_TIMESTEPS}, got {float(timesteps[0]):g}, "
            f"{float(timesteps[min(1, len(timesteps) - 1)]):g}, …: set its timestep_spacing to leading or trailing, or "
            "take another scheduler"
        )
    return timesteps


def tokenize(tokenizer: Any, prompts: list[str]) -> Tensor:
    """Return the tokens (B, 77) of prompts, with a warning about the part of a prompt that is truncated."""
    most = tokenizer.model_max_length
    for prompt in prompts:
        whole = tokenizer(prompt, verbose=False).input_ids
        if len(whole) > most:
            text = "prompt: expected at most %d tokens, got %d; this part is ignored: %r"
            _log.warning(text, most, len(whole), tokenizer.decode(whole[most - 1 : -1]))
    return tokenizer(prompts, padding="max_length", max_length=most, truncation=True, return_tensors="pt").input_ids


def scheduler_class(name: str) -> Any:
    """Return a diffusers scheduler class, named with or without "Scheduler". Raises ConfigError."""
    package = diffusers_module()
    kind = getattr(package, name if name.endswith("Scheduler") else f"{name}Scheduler", None)
    try:
        usable = hasattr(kind, "set_timesteps")
    except ImportError as error:  # diffusers has dummies for classes that need another package
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error
    if not usable or kind is None:
        like = nearest(name, (n.removesuffix("Scheduler") for n in dir(package) if n.endswith("Scheduler")))
        raise ConfigError(f"scheduler: expected a diffusers class like DDIMScheduler, got {name}{like}")
    return kind


def load_parts(folder: str | Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """Load a diffusers `StableDiffusionPipeline` without its safety checker; `folder` may be a name of `RANDOM`."""
    if folder in RANDOM:
        return random_stable_diffusion(tiny=RANDOM[str(folder)], dtype=dtype, device=device)
    path = user_path(folder)
    if path.is_dir() or str(folder).startswith((".", "/", "~")):
        if not (path / "model_index.json").is_file():
            raise CheckpointError(f"Stable Diffusion folder {path}: expected a model_index.json, found none")
    elif str(folder).count("/") != 1:
        raise CheckpointError(
            f"Stable Diffusion: expected a diffusers folder, or owner/name of one on the hub, got {str(folder)!r}"
        )
    unchecked: dict[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    return from_folder("StableDiffusionPipeline", path, "Stable Diffusion", dtype=dtype, **unchecked).to(device)


def diffusers_call(parts: Any, request: Any, image: Tensor | None, **components: Any) -> Callable[..., np.ndarray]:
    """Return a call of diffusers' own pipeline for a `stable.Request`, which returns pixels (H, W, 3) in 0..1.

    `components` replace those of `parts`.
    """
    package = diffusers_module()
    kind = package.StableDiffusionPipeline if image is None else package.StableDiffusionImg2ImgPipeline
    made = {"scheduler": make_scheduler(parts.scheduler, request.scheduler), **components}
    pipeline = kind(**{**parts.components, **made}, requires_safety_checker=False)
    pipeline.set_progress_bar_config(disable=True)
    size: dict[str, Any] = {"height": request.height, "width": request.width}
    if image is not None:
        size = {"image": image / 2 + 0.5, "strength": request.strength}
    return lambda **options: pipeline(
        request.prompt,
        negative_prompt=request.negative_prompt,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="np",
        **size,
        **options,
    ).images[0]


def check_parts(parts: Any) -> None:
    """Raise CheckpointError for models that need inputs which Stable Diffusion 1 lacks."""
    unet, text = parts.unet.config, parts.text_encoder.config
    keys = "time_cond_proj_dim", "encoder_hid_dim_type", "addition_embed_type", "class_embed_type"
    for part, key, expected, got in (
        *(("unet", key, None, unet.get(key)) for key in keys),
        ("unet", "in_channels", parts.vae.config.latent_channels, unet.in_channels),
        ("text_encoder", "use_attention_mask", False, bool(getattr(text, "use_attention_mask", False))),
    ):
        if got != expected:
            lacking = f"{part}: expected {key} {expected}, as in Stable Diffusion 1, got {got!r}"
            raise CheckpointError(f"{lacking}; use diffusers' own pipeline")
