"""Qwen-Image in diffusers' own pipelines, with our autoencoder and a graphed or compiled transformer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from vla_accel.errors import ConfigError, unknown
from vla_accel.images.autoencoder import AUTOENCODERS
from vla_accel.images.config import VaeConfig
from vla_accel.images.graphed import CompiledForward, GraphedForward
from vla_accel.images.models import diffusers_module, filled, random_model
from vla_accel.images.plugged import exchanged, plug_in
from vla_accel.images.vae import AcceleratedVae
from vla_accel.ledger import Ledger

Transformer = Literal["eager", "compile", "native"]
TRANSFORMER = "QwenImageTransformer2DModel"
_FORWARDS = {"compile": CompiledForward, "native": GraphedForward}
LAYERS = 60
"""Layers of the published transformer: 20 billion weights, 41 GB in BF16."""


def accelerate(
    pipeline: Any,
    vae: VaeConfig | Mapping[str, Any] | str | Path | None = None,
    transformer: Transformer = "eager",
    *,
    ledger: Ledger | None = None,
) -> Callable[[], None]:
    """Speed up a Qwen-Image pipeline of diffusers in place. Returns a function that undoes it.

    Args:
        vae: the autoencoder's configuration, LightX2V's JSON or ours; None leaves the autoencoder as it is.
        transformer: "compile" is torch.compile with mode reduce-overhead, "native" one CUDA graph for each shape.

    Raises:
        ConfigError: the pipeline lacks such a part; it stays unchanged.
    """
    if transformer not in get_args(Transformer):
        raise ConfigError(unknown("transformer", transformer, get_args(Transformer)))
    needed: dict[str, Collection[str]] = {"vae": AUTOENCODERS} if vae is not None else {}
    needed |= {"transformer": (TRANSFORMER,)} if transformer != "eager" else {}
    for part, kinds in needed.items():
        found = getattr(pipeline, part, None)
        if type(found).__name__ not in kinds:
            got = "no such part" if found is None else f"the class {type(found).__name__}"
            raise ConfigError(f"{type(pipeline).__name__}.{part}: expected {' or '.join(kinds)}, got {got}")
    ledger = ledger or Ledger()
    # Everything that may fail comes before the first exchange.
    accelerated = None if vae is None else AcceleratedVae(pipeline.vae, vae, ledger=ledger)
    forward = None if transformer == "eager" else _FORWARDS[transformer](pipeline.transformer, ledger)
    undo = contextlib.ExitStack()
    if accelerated is not None:
        undo.callback(plug_in(pipeline.vae, accelerated))
    if forward is not None:
        undo.callback(exchanged(pipeline.transformer, forward=forward))
    return undo.close


def random_qwen_image(*, tiny: bool, layers: int = LAYERS, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a `QwenImagePipeline` with random weights and no text encoder: call it with `prompt_embeds`."""
    package = diffusers_module()
    config: dict[str, Any] = {"num_layers": layers}
    if tiny:
        config |= {
            "in_channels": 16,
            "out_channels": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
        }
    return package.QwenImagePipeline(
        scheduler=package.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=random_model("tiny-qwen-vae" if tiny else "qwen-vae", dtype=dtype, device=device),
        text_encoder=None,
        tokenizer=None,
        transformer=filled(lambda: package.QwenImageTransformer2DModel(**config), dtype=dtype, device=device),
    )
