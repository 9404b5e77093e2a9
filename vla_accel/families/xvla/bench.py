"""How X-VLA is measured, and against what: lerobot's own code (`lerobot` 0.6.1, with transformers)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import BenchCard, DummyTokenizer, Infer, dummy_transforms, libero_observation
from vla_accel.families.lerobot_bench import batch_of, cached_model, features, importing
from vla_accel.families.xvla.calibration import calibrate
from vla_accel.families.xvla.family import XVLA
from vla_accel.families.xvla.network import XvlaConfig, xvla
from vla_accel.families.xvla.transforms import XvlaProcessor
from vla_accel.fp8 import Scales
from vla_accel.nn.random_weights import BRANCH_ENDS, Drawn
from vla_accel.numeric import matmul_precision
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN
from vla_accel.transforms.processing import Inputs

LEROBOT_MODES: dict[str, tuple[str, bool]] = {
    "lerobot-eager": ("float32", False), "lerobot-eager-bf16": ("bfloat16", False),
    "lerobot-compile-bf16": ("bfloat16", True),
}  # fmt: skip
"""Systems of lerobot: their dtype, and whether torch.compile runs the transformer of each step."""
_TABLES = ("rows.", "columns.", "frame", "position_embedding", "soft_prompts", "embed.", "encoder.positions.")


class DrawnXvla(Drawn):
    """Weights of an X-VLA."""

    def _normal(self, name: str) -> tuple[float, float]:
        if name.endswith("bias"):
            return 0.0, 0.02
        if name.startswith(_TABLES):
            return 0.0, 0.5
        if "norm" in name:
            return 1.0, 0.1
        shape = self.shapes[name]
        if name.endswith(".fc"):  # a domain's product, as one row
            outputs = self.shapes[f"{name.removesuffix('fc')}bias"][0]
            return 0.0, 1.0 / math.sqrt(shape[0] // outputs)
        branch = name.endswith(BRANCH_ENDS) or (".halves." in name and name.endswith("conv.weight"))
        gain = 0.2 if branch else 1.0
        return 0.0, gain / math.sqrt(shape[1:].numel())

    def _query_key_rows(self, name: str) -> int:
        return 0  # attention is not sharpened


class XvlaBench(BenchCard[XvlaConfig, Inputs]):
    """X-VLA with two of its three views, as for LIBERO."""

    family, drawn = XVLA, DrawnXvla
    sizes: ClassVar = {"xvla": xvla}
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}
    baselines = tuple(LEROBOT_MODES)

    def shallow(self, config: XvlaConfig, depth: int) -> XvlaConfig:
        """Change the encoder and the transformer; vision keeps its depth."""
        return replace(config, depth=depth, encoder=replace(config.encoder, depth=depth))

    def published(self, horizon: int | None = None) -> XvlaConfig:
        return xvla() if horizon is None else xvla(action_horizon=horizon)

    def dummy(self, config: XvlaConfig, views: int) -> XvlaProcessor:
        return dummy_transforms(XvlaProcessor, config, views, DummyTokenizer(config.encoder.vocab_size), config=config)

    def random_observation(self, transforms: XvlaProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, transforms.image_shape, rng, transforms.ordinary_prompt())

    def internals(self, config: XvlaConfig, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (V, rows, W) and `context` (C, W)."""
        return {name: outputs[name][0] for name in ("image_tokens", "context")}

    def calibrate(self, model: Any, inputs: Sequence[Inputs], source: str) -> Scales:
        return calibrate(model, inputs, source)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        dtype, compiled = LEROBOT_MODES[name]
        with matmul_precision():
            policy = cached_model(_policy, self.published(horizon), dtype, device)
            policy.config.num_denoising_steps = steps
            if compiled:
                policy.model.transformer = torch.compile(policy.model.transformer, mode="max-autotune-no-cudagraphs")
        return _infer(policy, self.published(horizon), device)


def _infer(policy: Any, config: XvlaConfig, device: str) -> Infer:
    scale = torch.tensor((IMAGENET_MEAN, IMAGENET_DEVIATION), device=device)[..., None, None]
    tokens = torch.full((1, config.max_token_len), config.pad_token, device=device)
    tokens[:, :20] = torch.arange(1000, 1020, device=device)
    domain = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
        batch = batch_of(observation, device, [scale] * config.views)
        batch |= {"observation.language.tokens": tokens, "domain_id": domain}
        return {"actions": policy.predict_action_chunk(batch).float().cpu().numpy()[0]}

    return infer


def _policy(config: XvlaConfig, dtype: str, device: str) -> Any:
    """Return lerobot's policy of the published size with random weights."""
    with importing("X-VLA"):
        from lerobot.policies.xvla.configuration_xvla import XVLAConfig
        from lerobot.policies.xvla.modeling_xvla import XVLAPolicy
    settings = XVLAConfig(
        florence_config=florence(config), chunk_size=config.action_horizon, n_action_steps=config.action_horizon,
        **features([(224, 224)] * 2, config.state_dim, config.action_dim), dtype=dtype,
        max_state_dim=config.state_dim, num_image_views=config.views, tokenizer_max_length=config.max_token_len,
        resize_imgs_with_padding=config.image_size, device=device,
    )  # fmt: skip
    with torch.device(device):
        return XVLAPolicy(settings).eval().to(device)


def florence(config: XvlaConfig) -> dict[str, Any]:
    """Florence-2's sizes as its first implementation names them."""
    stages, text = config.vision.stages, config.encoder
    vision = {
        "model_type": "davit", "dim_embed": [s.width for s in stages], "depths": [s.depth for s in stages],
        "num_heads": [s.heads for s in stages], "num_groups": [s.groups for s in stages],
        "patch_size": [s.patch for s in stages], "patch_stride": [s.stride for s in stages],
        "patch_padding": [s.padding for s in stages], "patch_prenorm": [s.norm_first for s in stages],
        "window_size": config.vision.window, "projection_dim": text.width,
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": config.vision.positions},
        "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 100},
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    }  # fmt: skip
    language = {
        "model_type": "florence2_language", "vocab_size": text.vocab_size, "d_model": text.width,
        "encoder_layers": text.depth, "encoder_ffn_dim": text.mlp_dim, "encoder_attention_heads": text.heads,
        "decoder_layers": 1, "decoder_ffn_dim": text.mlp_dim, "decoder_attention_heads": text.heads,
        "max_position_embeddings": text.positions - 2, "activation_function": "gelu",
    }  # fmt: skip
    return {
        "vision_config": vision, "text_config": language, "projection_dim": text.width,
        "pad_token_id": config.pad_token, "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip


CARDS = {"xvla": XvlaBench()}
