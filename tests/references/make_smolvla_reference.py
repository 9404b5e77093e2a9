"""Write SmolVLA checkpoints with random weights, whole as lerobot saves them, and the answers lerobot's own code gives.

Run it with an interpreter that has lerobot installed (CONTRIBUTING names the packages)::

    python tests/references/make_smolvla_reference.py --out DIR --variants base libero

Variants: `base`, small and shaped as `lerobot/smolvla_base` (three cameras of any robot); `libero`, small and shaped as
`HuggingFaceVLA/smolvla_libero` (every layer crosses, an expert half as wide, all layers of the language model); `full`,
the published size. For each it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited,
  and a small ``tokenizer.json`` in place of SmolVLM2's.
- ``model.safetensors``: ``{case}.{images,tokens,token_mask,state,noise}`` as lerobot's model got them and
  ``{case}.steps{n}`` as it answered, float32 (B, horizon, 32), normalised; ``{case}.bf16_steps{n}``: as it answers in
  the dtypes that its published checkpoint loads in, BF16 but for the small projections and those of the prefix's keys
  and values.
- ``robot.npz``: whole observations (``images`` uint8 (N, views, H, W, 3), ``state`` (N, n), ``noise``) and ``actions``
  after lerobot's pre- and postprocessor; in the first the last camera is missing (`base`). ``tasks.json`` has the
  instructions.

All else is float32 on the CPU. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from make_lerobot_reference import TASKS, small_tokenizer, write_variants
from safetensors.torch import save_file
from transformers.models.smolvlm import SmolVLMConfig

# isort: split
# After make_lerobot_reference, which steps over what lerobot imports and its policies do not need.
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.smolvla import smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from lerobot.processor import tokenizer_processor

VOCAB = 320
LIBERO_CAMERAS = ("observation.images.image", "observation.images.image2")
CAMERAS = ("observation.images.camera1", "observation.images.camera2", "observation.images.camera3")
SMALL = {
    "vision": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 80, "num_attention_heads": 2,
               "image_size": 64, "patch_size": 8},
    "text": {"hidden_size": 96, "num_hidden_layers": 5, "intermediate_size": 88, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB},
}  # fmt: skip
FULL = {
    "vision": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "num_attention_heads": 12,
               "image_size": 512, "patch_size": 16},
    "text": {"hidden_size": 960, "num_hidden_layers": 32, "intermediate_size": 2560, "num_attention_heads": 15,
             "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49_280},
}  # fmt: skip
# Sizes, cameras, state and action numbers, camera pixels (height, width), and what lerobot's config says.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...], int, int, tuple[int, int], dict[str, Any]]] = {
    "base": (SMALL, CAMERAS, 6, 6, (48, 64), {"num_vlm_layers": 4, "chunk_size": 6}),
    "libero": (SMALL, LIBERO_CAMERAS, 8, 7, (64, 64), {
        "num_vlm_layers": 0, "self_attn_every_n_layers": 0, "expert_width_multiplier": 0.5, "num_expert_layers": 0,
        "chunk_size": 7,
    }),
    "full": (FULL, CAMERAS, 6, 6, (512, 512), {}),
}  # fmt: skip


def build(variant: str, cameras: Mapping[str, tuple[int, int]] | None = None) -> Any:
    """Build lerobot's policy. lerobot takes the sizes from the hub; they are passed in its place.

    Args: `cameras`: height and width of each camera's images, instead of the variant's.
    """
    sizes, names, state, action, camera, changes = VARIANTS[variant]
    cameras = cameras or dict.fromkeys(names, camera)
    text = {"model_type": "llama", "rms_norm_eps": 1e-5, "pad_token_id": 0, **sizes["text"]}
    whole: dict[str, Any] = {"vision_config": sizes["vision"], "text_config": text, "pad_token_id": 0}
    vlm = SmolVLMConfig(**whole, scale_factor=4)
    processor = mock.Mock()
    processor.tokenizer.fake_image_token_id, processor.tokenizer.global_image_token_id = 1, 2
    side = sizes["vision"]["image_size"]
    config = SmolVLAConfig(
        input_features={
            **{k: PolicyFeature(FeatureType.VISUAL, (3, *size)) for k, size in cameras.items()},
            "observation.state": PolicyFeature(FeatureType.STATE, (state,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (action,))},
        resize_imgs_with_padding=(side, side),
        load_vlm_weights=False,
        device="cpu",
        **{"n_action_steps": changes.get("chunk_size", 50), **changes},
    )
    with (
        mock.patch.object(smolvlm_with_expert.AutoConfig, "from_pretrained", lambda name: vlm),
        mock.patch.object(smolvlm_with_expert.AutoProcessor, "from_pretrained", lambda name: processor),
    ):
        return SmolVLAPolicy(config).eval()


@torch.no_grad()
def randomise(policy: Any, generator: torch.Generator) -> None:
    """Every weight set; the activations' size stays of order one."""
    for name, parameter in policy.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            value = 0.2 * drawn + (1.0 if name.endswith("weight") else 0.0)
        elif "embed_tokens" in name:
            value = drawn / parameter.shape[1] ** 0.5
        elif "modality_projection" in name:
            # Times the square root of its width on the way in.
            value = drawn / (parameter.shape[0] * parameter.shape[1]) ** 0.5
        else:
            matrix = parameter.ndim > 1 and "position_embedding" not in name
            value = drawn / parameter[0].numel() ** 0.5 if matrix else 0.2 * drawn
        parameter.copy_(value)


def statistics(rng: np.random.Generator, state: int, action: int) -> dict[str, Any]:
    """Unequal for every dimension; one state dimension is constant, as robots have it."""

    def of(count: int) -> dict[str, np.ndarray]:
        mean = rng.uniform(-0.3, 0.3, count).astype(np.float32)
        return {"mean": mean, "std": rng.uniform(0.4, 0.9, count).astype(np.float32)}

    table = {"observation.state": of(state), "action": of(action)}
    table["observation.state"]["mean"][3] = table["observation.state"]["std"][3] = 0.0
    return table


def model_case(policy: Any, batch: int, views: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What the model alone is given, with padded prompts."""
    length, config = 16, policy.config
    vocabulary = policy.model.vlm_with_expert.config.text_config.vocab_size
    lengths = torch.tensor([9, length, 5])[:batch]
    token_mask = torch.arange(length)[None] < lengths[:, None]
    side = config.resize_imgs_with_padding[0]
    return {
        "images": torch.rand(batch, views, 3, side, side, generator=generator) * 2 - 1,
        "tokens": torch.randint(1, vocabulary, (batch, length), generator=generator) * token_mask,
        "token_mask": token_mask,
        "state": torch.randn(batch, config.max_state_dim, generator=generator),
        "noise": torch.randn(batch, config.chunk_size, config.max_action_dim, generator=generator),
    }


@torch.no_grad()
def answer(policy: Any, case: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """lerobot's actions (B, horizon, 32), float32."""
    images = list(case["images"].unbind(1))
    masks = [torch.ones(len(image), dtype=torch.bool) for image in images]
    with mock.patch.object(policy.config, "num_steps", steps):
        given = (case[n] for n in ("tokens", "token_mask", "state"))
        return policy.model.sample_actions(images, masks, *given, noise=case["noise"].clone()).float()


def to_bfloat16(policy: Any) -> None:
    """In place, the dtypes in which lerobot runs a published checkpoint: it makes the crossing layers' projections of
    keys and values, which are square, and the small ones itself, in float32."""
    for name, parameter in policy.model.vlm_with_expert.named_parameters():
        crossing = "lm_expert" in name and name.endswith(("k_proj.weight", "v_proj.weight"))
        if not (crossing and parameter.shape[0] == parameter.shape[1]):
            parameter.data = parameter.data.to(torch.bfloat16)


def robot_cases(policy: Any, variant: str, processors: tuple[Any, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Whole observations through lerobot's own pipelines; `base` lacks its last camera in the first."""
    _, cameras, states, _, camera, _ = VARIANTS[variant]
    preprocess, postprocess = processors
    config, count = policy.config, len(TASKS)
    images = rng.integers(0, 256, (count, len(cameras), *camera, 3), dtype=np.uint8)
    state = rng.uniform(-1, 1, (count, states)).astype(np.float32)
    state[:, 3] = 0.0  # what does not move in the data has no deviation to divide by
    noise = rng.standard_normal((count, config.chunk_size, config.max_action_dim)).astype(np.float32)
    actions = []
    for i, task in enumerate(TASKS):
        seen = cameras[:-1] if i == 0 and variant != "libero" else cameras
        batch = {key: torch.from_numpy(images[i, v]).permute(2, 0, 1).float() / 255 for v, key in enumerate(seen)}
        batch = preprocess({**batch, "observation.state": torch.from_numpy(state[i]), "task": task})
        chunk = policy.predict_action_chunk(batch, noise=torch.from_numpy(noise[i : i + 1]))
        actions.append(postprocess(chunk)[0].numpy())
    return {"images": images, "state": state, "noise": noise, "actions": np.stack(actions)}


def write_variant(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    _, cameras, state, action, _, _ = VARIANTS[variant]
    policy = build(variant)
    randomise(policy, generator)
    tokenizer, folder = small_tokenizer(), out / "checkpoint"
    # SmolVLM2's tokenizer puts nothing in front.
    tokenizer.backend_tokenizer.post_processor = None  # type: ignore[assignment]
    with mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda name: tokenizer):
        processors = make_smolvla_pre_post_processors(policy.config, dataset_stats=statistics(rng, state, action))
    policy.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    views = len(cameras)
    cases = {"batch1": (1, views, (1, 10)), "batch3": (3, views, (10,)), "missing": (1, views - 1, (10,))}
    if variant == "full":
        cases = {"batch1": (1, 2, (10,)), "batch3": (3, 2, (10,)), "missing": (1, 1, (10,))}
    made = {name: model_case(policy, batch, seen, generator) for name, (batch, seen, _) in cases.items()}
    answers = {name: {f"steps{n}": answer(policy, made[name], n) for n in steps} for name, (*_, steps) in cases.items()}
    if variant != "full":
        np.savez(out / "robot.npz", **robot_cases(policy, variant, processors, rng))
    to_bfloat16(policy)
    for name, (*_, steps) in cases.items():
        answers[name] |= {f"bf16_steps{n}": answer(policy, made[name], n) for n in steps}
    tensors = {f"{c}.{n}": v.contiguous() for c in cases for n, v in (made[c] | answers[c]).items()}
    versions = {n: importlib.metadata.version(n) for n in ("lerobot", "torch")}
    save_file(tensors, str(out / "model.safetensors"), versions | {"transformers": transformers.__version__})
    (out / "tasks.json").write_text(json.dumps(TASKS))
    print(f"{variant}: {sorted(p.name for p in folder.iterdir())}")


if __name__ == "__main__":
    write_variants(__doc__, write_variant, tuple(VARIANTS), ("base", "libero"))
