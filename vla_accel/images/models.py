"""Diffusers models by name: from a folder, or of a real or tiny configuration with random weights for benchmarks.

Random weights keep activations of order one through the depth, as trained ones do; what they compute means nothing.
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

_SD_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 512,
}
_SD_UNET: dict[str, Any] = {
    "sample_size": 64,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "block_out_channels": (320, 640, 1280, 1280),
}
_SD_SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
_TINY_BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen-vae": ("AutoencoderKLQwenImage", {}),
    "sd-vae": ("AutoencoderKL", _SD_VAE),
    "sd-unet": ("UNet2DConditionModel", _SD_UNET),
    "tiny-qwen-vae": (
        "AutoencoderKLQwenImage",
        {"base_dim": 8, "z_dim": 4, "latents_mean": [0.1] * 4, "latents_std": [0.9] * 4},
    ),
    "tiny-sd-vae": ("AutoencoderKL", {**_SD_VAE, "block_out_channels": (8, 8, 16, 16), "norm_num_groups": 4}),
    "tiny-sd-unet": (
        "UNet2DConditionModel",
        {
            **_SD_UNET,
            **_TINY_BLOCKS,
            "block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
        },
    ),
}
"""Name to (diffusers class, configuration). The first three are the published ones."""


def diffusers_module() -> Any:
    """The package, imported now. Raises DependencyError, saying what to install."""
    try:
        import diffusers
    except ImportError as error:
        raise DependencyError(f"images need diffusers ({error}): pip install 'vla_accel[diffusion]'") from error
    return diffusers


def load_model(
    source: str | Path, *, kinds: Collection[str], dtype: torch.dtype, device: torch.device, also: Iterable[str] = ()
) -> Any:  # fmt: skip
    """A diffusers model of one of the classes `kinds`, in eval mode: a name of `CONFIGS` with random weights, or a
    folder. `also`: other names that a user may type instead.

    Only safetensors are read: a pickle can run code. Raises CheckpointError for a folder that is missing, incomplete or
    of another class, ConfigError for a config.json that is none.
    """
    diffusers_module()
    names = [name for name, (kind, _) in CONFIGS.items() if kind in kinds]
    if str(source) in names:
        return random_model(str(source), dtype=dtype, device=device)
    folder, kind = Path(source), CONFIGS.get(str(source), (None,))[0]
    if folder.exists() or str(source).startswith((".", "/")):
        found = folder / "config.json"
        if not found.is_file():
            raise CheckpointError(f"model folder {folder}: expected a config.json, found none")
        kind = read_mapping(found).get("_class_name")
    if kind not in kinds:
        expected = f"one of {', '.join((*names, *also))}, or the folder of a diffusers model"
        got = f"neither{nearest(source, (*names, *also))}" if kind is None else f"the class {kind}"
        raise CheckpointError(f"model {source}: expected {expected}, got {got}")
    model = from_folder(str(kind), source, "model", dtype=dtype)
    return model.to(device, non_blocking=True).eval().requires_grad_(False)


def from_folder(kind: str, source: str | Path, title: str, **options: Any) -> Any:
    """A diffusers class by name, of a folder or a hub name. Raises CheckpointError, which begins with `title`."""
    package = diffusers_module()
    # Without accelerate that is what it falls back to, in six lines.
    options["low_cpu_mem_usage"] = package.utils.is_accelerate_available()
    try:
        return getattr(package, kind).from_pretrained(str(source), use_safetensors=True, **options)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{title} {source}: {str(error).splitlines()[0]}") from error


def random_model(name: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model of a known configuration with seeded random weights, made on the device."""
    package = diffusers_module()
    if name not in CONFIGS:
        raise ConfigError(unknown("model", name, CONFIGS))
    kind, config = CONFIGS[name]
    return filled(lambda: getattr(package, kind)(**config), dtype=dtype, device=device, seed=seed)


def filled(make: Callable[[], nn.Module], *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """Build a module without initialising it twice, then fill it: matrices scaled by their fan-in, norms near one.

    Buffers (positions, rotary tables) are what the module makes them.
    """
    with _without_parameters():
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
def _without_parameters() -> Iterator[None]:
    """Modules made inside have their parameters on the meta device: nothing is drawn for them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def random_stable_diffusion(*, tiny: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """A diffusers `StableDiffusionPipeline` of version 1.4's configuration (or a tiny one) with random weights.

    Its tokenizer knows single characters only: enough for a prompt to have an effect, and made without a download.
    """
    package = diffusers_module()
    import transformers

    prefix = "tiny-" if tiny else ""
    sizes = (
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
        if tiny
        else {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    )
    characters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    tokenizer = transformers.CLIPTokenizer(vocab={w: i for i, w in enumerate(words)}, merges=[], model_max_length=77)
    text_config = transformers.CLIPTextConfig(
        vocab_size=len(words) if tiny else 49408,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        **sizes,  # pyright: ignore[reportArgumentType]
    )
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
