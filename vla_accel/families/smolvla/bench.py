"""How SmolVLA is measured, and against what: lerobot's own code (`lerobot` 0.4.4 or 0.6.1 from the package index)."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from vla_accel.families.bench import DenoisingBench, Infer, dummy_processor
from vla_accel.families.lerobot_bench import batch_of, importing, without_hub
from vla_accel.families.smolvla.family import SMOLVLA
from vla_accel.families.smolvla.network import SmolVlaConfig, smolvla, smolvla_demo
from vla_accel.numeric import matmul_precision
from vla_accel.transforms.processing import Processor

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-compile": True}
"""Systems of lerobot, with whether it compiles its model (torch.compile, max-autotune)."""
_TOKENS = 20
"""Tokens of the prompt, about those of a LIBERO instruction: lerobot pads to the longest of a batch."""


class SmolVlaBench(DenoisingBench[SmolVlaConfig]):
    """SmolVLA."""

    family = SMOLVLA
    sizes: ClassVar = {"smolvla": smolvla, "smolvla_demo": smolvla_demo}
    baselines = tuple(LEROBOT_MODES)
    bound_by_reading = ("kv_cache",)

    def published(self, horizon: int | None = None) -> SmolVlaConfig:
        return smolvla(action_horizon=horizon or 50)

    def dummy(self, config: SmolVlaConfig, views: int) -> Processor:
        return dummy_processor(config, views, padded_state=config.state_dim, prompt_form="line")

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        with matmul_precision():
            policy = lerobot_policy(horizon, device, LEROBOT_MODES[name], steps)
            # A compiled policy sets TF32 products, which apply to its own calls only.
            precision = torch.get_float32_matmul_precision()

        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            with matmul_precision(precision):
                return _infer(policy, device, observation)

        return infer


def lerobot_policy(horizon: int, device: str, compiled: bool, steps: int) -> Any:
    """Return lerobot's policy of the published size with random weights, in the dtypes of its loaded checkpoint: BF16
    except for the small projections and those of the prefix's keys and values."""
    with importing("SmolVLA"):
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.smolvla import smolvlm_with_expert
        from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
        from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    config = SmolVLAConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (8,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        chunk_size=horizon, n_action_steps=horizon, num_steps=steps, load_vlm_weights=False, device=device,
        compile_model=compiled,
    )  # fmt: skip
    with _without_hub(smolvlm_with_expert), torch.device(device):
        policy = SmolVLAPolicy(config).eval()
    for name, parameter in policy.model.vlm_with_expert.named_parameters():
        cross = "lm_expert" in name and name.endswith(("k_proj.weight", "v_proj.weight"))
        if not (cross and parameter.shape[0] == parameter.shape[1]):
            parameter.data = parameter.data.to(torch.bfloat16)
    return policy.to(device)


def _without_hub(module: Any) -> Any:
    """Replace SmolVLM2's sizes and tokenizer, which lerobot would load from the hub, within a block."""
    from transformers.models.smolvlm import SmolVLMConfig

    ours = smolvla()
    v, p = ours.vision, ours.prefix
    vision = {"hidden_size": v.width, "num_hidden_layers": v.depth, "intermediate_size": v.mlp_dim,
              "num_attention_heads": v.heads, "image_size": v.image_size, "patch_size": v.patch_size}  # fmt: skip
    text = {"model_type": "llama", "hidden_size": p.width, "num_hidden_layers": 2 * p.depth,
            "intermediate_size": p.mlp_dim, "num_attention_heads": p.heads, "num_key_value_heads": p.kv_heads,
            "head_dim": p.head_dim, "vocab_size": ours.vocab_size, "rms_norm_eps": p.eps,
            "pad_token_id": 0}  # fmt: skip
    whole: dict[str, Any] = {"vision_config": vision, "text_config": text, "pad_token_id": 0}
    config = SmolVLMConfig(**whole, scale_factor=ours.shuffle)
    tokenizer = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    return without_hub(module, {"AutoConfig": config, "AutoProcessor": SimpleNamespace(tokenizer=tokenizer)})


@torch.inference_mode()
def _infer(policy: Any, device: str, observation: Mapping[str, Any]) -> dict[str, Any]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    batch = batch_of(observation, device)
    if not policy.config.image_features:
        for key, image in batch.items():
            if "images" in key:
                policy.config.input_features[key] = PolicyFeature(FeatureType.VISUAL, tuple(image.shape[1:]))
    batch["observation.language.tokens"] = torch.arange(2, _TOKENS + 2, device=device)[None]
    batch["observation.language.attention_mask"] = torch.ones(1, _TOKENS, dtype=torch.bool, device=device)
    return {"actions": policy.predict_action_chunk(batch).float().cpu().numpy()[0]}


CARDS = {"smolvla": SmolVlaBench()}
