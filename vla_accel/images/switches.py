"""Errors for switches of a diffusers pipeline that engines would ignore; docs/images.md has the table of all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel.errors import EngineError

_NEUTRAL_PROCESSORS = {
    *("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0", "SlicedAttnProcessor", "XFormersAttnProcessor"),
    *("AttnProcessorNPU", "XLAFlashAttnProcessor2_0"),
}


def refuse_switches(part: str, module: nn.Module, *, hooks: bool = True, adapters: bool = True) -> None:
    """Raise EngineError for offloaded weights; with `hooks` also for forward hooks inside the module; with `adapters`
    also for LoRA layers and attention processors that change the mathematics."""
    stack = [(part, module)]
    while stack:
        name, child = stack.pop()
        if problem := _problem(child, hooks and child is not module, adapters):
            raise EngineError(f"{name}: expected {problem}")
        stack += [(f"{name}.{key}", inner) for key, inner in child._modules.items() if inner is not None]


def _problem(module: nn.Module, hooks: bool, adapters: bool) -> str | None:
    own = vars(module)
    if "_hf_hook" in own:
        return (
            f"weights that stay on their device, got accelerate's {type(own['_hf_hook']).__name__} "
            "(enable_model_cpu_offload, enable_sequential_cpu_offload or device_map); call "
            "pipeline.remove_all_hooks() and pipeline.to(device), or undo the acceleration"
        )
    # Pipelines leave an empty registry behind.
    if registered := getattr(own.get("_diffusers_hook"), "hooks", None):
        return (
            f"a module without hooks of diffusers, got {', '.join(registered)} (enable_group_offload, "
            "enable_layerwise_casting or enable_cache); switch it off, or undo the acceleration"
        )
    if hooks and (module._forward_hooks or module._forward_pre_hooks):
        return (
            "a module without forward hooks, which engines do not call, got one (register_forward_hook); remove it, "
            "or undo the acceleration"
        )
    if not adapters:
        return None
    if "merged_adapters" in own:
        return (
            "a plain layer, got a LoRA layer; call pipeline.fuse_lora() and pipeline.unload_lora_weights(), or undo "
            "the acceleration"
        )
    processor = own.get("processor") or module._modules.get("processor")
    kind = type(processor).__name__
    if processor is not None and hasattr(module, "to_q") and kind not in _NEUTRAL_PROCESSORS:
        return (
            f"an attention processor of the same mathematics (AttnProcessor2_0), got {kind} "
            "(set_attn_processor, load_ip_adapter); use engine eager for it"
        )
    return None


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
