"""What the switches of a diffusers pipeline do once engines run inside it: the table, and the refusals.

Engines compute with copies of the weights and without the modules' own `forward`, so they would ignore a hook, an
adapter or an attention processor. Each switch is honoured, makes no difference, or raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vla_accel.errors import EngineError

Effect = Literal["honoured", "neutral", "refused"]


@dataclass(frozen=True)
class Switch:
    """`names`: what the user calls. `where`: the exchanged part that it concerns."""

    names: tuple[str, ...]
    where: str
    effect: Effect
    note: str


SWITCHES: tuple[Switch, ...] = (
    Switch(
        ("enable_tiling", "disable_tiling", "enable_vae_tiling", "tile_sample_min_*", "tile_sample_stride_*"),
        "autoencoder", "honoured", "diffusers' own tiling; the engines run each tile",
    ),
    Switch(
        ("enable_slicing", "disable_slicing", "enable_vae_slicing"),
        "autoencoder", "honoured", "one image at a time on the engines",
    ),
    Switch(
        ("load_state_dict", "to", "half", "weights changed in place"),
        "every part", "honoured", "the next call makes new engines",
    ),
    Switch(
        ("fuse_lora and unload_lora_weights",),
        "every part", "honoured", "as any other change of the weights",
    ),
    Switch(
        ("load_lora_weights", "set_adapters", "attention_kwargs"),
        "transformer, eager UNet", "honoured", "the module itself runs; a graph is recorded again",
    ),
    Switch(
        ("load_lora_weights", "set_adapters"),
        "autoencoder, other UNets", "refused", "call fuse_lora() and unload_lora_weights()",
    ),
    Switch(
        ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload", "device_map"),
        "every part", "refused", "engines keep their weights on the GPU",
    ),
    Switch(
        ("enable_layerwise_casting", "enable_cache", "register_forward_hook"),
        "every part but an eager UNet", "refused", "engines do not call the hooked modules",
    ),
    Switch(
        ("torch.autocast", "requires_grad_"),
        "every part", "refused", "engines compute in their own dtype, without gradients",
    ),
    Switch(
        ("enable_attention_slicing", "enable_xformers_memory_efficient_attention", "fuse_qkv_projections"),
        "every part", "neutral", "the same mathematics",
    ),
    Switch(
        ("enable_freeu", "load_ip_adapter", "set_attn_processor"),
        "native and TensorRT UNet", "refused", "use engine eager for the UNet, or diffusers' own pipeline",
    ),
    Switch(
        ("ControlNet",),
        "transformer", "honoured", "its samples are inputs of the graph",
    ),
    Switch(
        ("enable_freeu", "load_ip_adapter", "ControlNet", "cross_attention_kwargs", "guidance_rescale",
         "callback_on_step_end", "set_progress_bar_config"),
        "pipeline with a plugged-in autoencoder", "neutral", "diffusers' own loop and UNet run",
    ),
)  # fmt: skip
"""The table of docs/images.md."""

_NEUTRAL_PROCESSORS = (
    "AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor",
    "AttnProcessorNPU", "XLAFlashAttnProcessor2_0",
)  # fmt: skip


def refuse_offloading(part: str, module: nn.Module) -> None:
    """Raise EngineError if hooks of accelerate or diffusers move the weights of `module`."""
    for name, child in _named(part, module):
        own = vars(child)
        if "_hf_hook" in own:
            raise EngineError(
                f"{name}: expected weights that stay on their device, got accelerate's {_kind(own['_hf_hook'])} "
                "(enable_model_cpu_offload, enable_sequential_cpu_offload or device_map); call "
                "pipeline.remove_all_hooks() and pipeline.to(device), or undo the acceleration"
            )
        # Pipelines leave an empty registry behind.
        if hooks := getattr(own.get("_diffusers_hook"), "hooks", None):
            raise EngineError(
                f"{name}: expected a module without hooks of diffusers, got {', '.join(hooks)} (enable_group_offload, "
                "enable_layerwise_casting or enable_cache); switch it off, or undo the acceleration"
            )


def refuse_hooks(part: str, module: nn.Module) -> None:
    """Raise EngineError if forward hooks, which no engine would call, are inside `module`."""
    for name, child in _named(part, module):
        if child is not module and (child._forward_hooks or child._forward_pre_hooks):
            raise EngineError(
                f"{name}: expected a module without forward hooks, which engines do not call, got one "
                "(register_forward_hook); remove it, or undo the acceleration"
            )


def refuse_adapters(part: str, module: nn.Module) -> None:
    """Raise EngineError if LoRA layers or attention processors inside `module` change what it computes."""
    for name, child in _named(part, module):
        own = vars(child)
        if "merged_adapters" in own:
            raise EngineError(
                f"{name}: expected a plain layer, got a LoRA layer; call pipeline.fuse_lora() and "
                "pipeline.unload_lora_weights(), or undo the acceleration"
            )
        processor = own.get("processor") or child._modules.get("processor")
        if processor is not None and hasattr(child, "to_q") and _kind(processor) not in _NEUTRAL_PROCESSORS:
            raise EngineError(
                f"{name}: expected an attention processor of the same mathematics ({_NEUTRAL_PROCESSORS[1]}), got "
                f"{_kind(processor)} (set_attn_processor, load_ip_adapter); use engine eager for it"
            )


def refuse_modes(part: str, inputs: Iterable[Any], device: torch.device) -> None:
    """Raise EngineError if torch.autocast is on for `device`, or an input of a call needs a gradient."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        raise EngineError(
            f"{part}: expected a call outside of torch.autocast, which engines do not apply, got one inside; use "
            f'torch.autocast("{device.type}", enabled=False) around it, or undo the acceleration'
        )
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        raise EngineError(
            f"{part}: expected inputs without gradient, which engines do not compute, got requires_grad=True; call it "
            "under torch.no_grad(), or undo the acceleration"
        )


def refuse_freeu(unet: nn.Module) -> None:
    """Raise EngineError if FreeU is on, which only the module itself computes."""
    for index, block in enumerate(getattr(unet, "up_blocks", ())):
        if any(vars(block).get(name) is not None for name in ("s1", "s2", "b1", "b2")):
            raise EngineError(
                f"unet.up_blocks.{index}: expected no FreeU (enable_freeu), which only engine eager computes; call "
                "disable_freeu(), or use engine eager for the UNet"
            )


def _named(part: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    stack = [(part, module)]
    while stack:
        name, child = stack.pop()
        yield name, child
        stack += [(f"{name}.{key}", inner) for key, inner in child._modules.items() if inner is not None]


def _kind(value: Any) -> str:
    return type(value).__name__
