"""Diffusers models from a folder, or of a published or tiny configuration with random weights.

Random weights keep activations of order one through the depth, as trained ones do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_accel.config.mapping import read_mapping
from vla_accel.errors import CheckpointError, ConfigError, DependencyError, nearest, unknown
from vla_accel.files import user_path

_SD_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
}
_SD_UNET = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
_SD_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
_LATENTS = ("latents_mean", "latents_std")
_TINY_QWEN = {"base_dim": 8, "z_dim": 4, "latents_mean": [0.1] * 4, "latents_std": [0.9] * 4}
_WAN22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
_TINY_WAN22 = {**_WAN22_VAE, "base_dim": 8, "decoder_base_dim": 8, "z_dim": 4, **dict.fromkeys(_LATENTS, [0.5] * 4)}
_TINY_UNET = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (16, 32),
    "sample_size": 64,
    "norm_num_groups": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-vae": ("AutoencoderKLQwenImage", {}),
    "sd-vae": ("AutoencoderKL", _SD_VAE),
    "sd-unet": ("UNet2DConditionModel", {**_SD_UNET, "block_out_channels": (320, 640, 1280, 1280)}),
    "wan-vae": ("AutoencoderKLWan", {}),
    "wan22-vae": ("AutoencoderKLWan", _WAN22_VAE),
    "tiny-qwen-vae": ("AutoencoderKLQwenImage", _TINY_QWEN),
    "tiny-sd-vae": ("AutoencoderKL", {**_SD_VAE, "block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4}),
    "tiny-wan-vae": ("AutoencoderKLWan", _TINY_QWEN),
    "tiny-wan22-vae": ("AutoencoderKLWan", _TINY_WAN22),
    "tiny-sd-unet": ("UNet2DConditionModel", _TINY_UNET),
}
"""Name to (diffusers class, configuration). Names without "tiny" are the published ones."""


def diffusers_module() -> Any:
    """Import diffusers. Raises DependencyError."""
    try:
        import diffusers
    except ImportError as error:
        raise DependencyError(f"images need diffusers ({error}): pip install 'vla_accel[diffusion]'") from error
    return diffusers


def load_model(
    source: str | Path, *, kinds: Collection[str], dtype: torch.dtype, device: torch.device, also: Iterable[str] = ()
) -> Any:
    """Load a diffusers model in eval mode. Only safetensors are read: a pickle can run code.

    Args:
        source: a name of `CONFIGS`, which has random weights, or a folder.
        kinds: the accepted classes.
        also: other names that the user may type, for the error.
    """
    diffusers_module()
    names = [name for name, (kind, _) in CONFIGS.items() if kind in kinds]
    if str(source) in names:
        return random_model(str(source), dtype=dtype, device=device)
    folder, kind = user_path(source), CONFIGS.get(str(source), (None,))[0]
    if folder.exists() or str(source).startswith((".", "/", "~")):
        found = folder / "config.json"
        if not found.is_file():
            raise CheckpointError(f"model folder {folder}: expected a config.json, found none")
        kind = read_mapping(found).get("_class_name")
    if kind not in kinds:
        expected = f"one of {', '.join((*names, *also))}, or the folder of a diffusers model"
        got = f"neither{nearest(source, (*names, *also))}" if kind is None else f"the class {kind}"
        raise CheckpointError(f"model {source}: expected {expected}, got {got}")
    model = from_folder(str(kind), folder, "model", dtype=dtype)
    return model.to(device, non_blocking=True).eval().requires_grad_(False)


def from_folder(kind: str, source: str | Path, title: str, **options: Any) -> Any:
    """Load a diffusers class from a folder or the hub. Raises CheckpointError, which begins with `title`."""
    package = diffusers_module()
    # Without accelerate, diffusers falls back to False with a warning.
    options["low_cpu_mem_usage"] = package.utils.is_accelerate_available()
    try:
        return getattr(package, kind).from_pretrained(str(source), use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{title} {source}: {str(error).splitlines()[0]}") from error


def random_model(name: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """Make a model of `CONFIGS` with seeded random weights on the device."""
    package = diffusers_module()
    if name not in CONFIGS:
        raise ConfigError(unknown("model", name, CONFIGS))
    kind, config = CONFIGS[name]
    return filled(lambda: getattr(package, kind)(**config), dtype=dtype, device=device, seed=seed)


def filled(make: Callable[[], nn.Module], *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """Make a module and fill its parameters: matrices scaled by their fan-in, norms near one. Buffers stay."""
    with _parameters_on_meta():
        model = make()
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.float32)
            if parameter.dim() > 1 and parameter.shape[1:].numel() > 1:
                parameter.copy_(noise / parameter.shape[1:].numel() ** 0.5)
            elif name.endswith(("weight", "gamma")):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made in this block have their parameters on the meta device, uninitialised."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def random_stable_diffusion(*, tiny: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a diffusers `StableDiffusionPipeline` of version 1.4's configuration (or a tiny one) with random weights.

    Its tokenizer, made without a download, knows single characters only.
    """
    package = diffusers_module()
    import transformers

    prefix = "tiny-" if tiny else ""
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"
    config: dict[str, Any] = dict(zip(names, (32, 48, 4, 2) if tiny else (768, 3072, 12, 12), strict=True))
    characters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    tokenizer = transformers.CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=77)
    config |= {"vocab_size": len(words) if tiny else 49408, "max_position_embeddings": 77}
    text_config = transformers.CLIPTextConfig(bos_token_id=0, eos_token_id=1, **config)
    return package.StableDiffusionPipeline(
        vae=random_model(f"{prefix}sd-vae", dtype=dtype, device=device),
        text_encoder=filled(lambda: transformers.CLIPTextModel(text_config), dtype=dtype, device=device),
        tokenizer=tokenizer,
        unet=random_model(f"{prefix}sd-unet", dtype=dtype, device=device),
        scheduler=package.PNDMScheduler.from_config(_SD_SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
