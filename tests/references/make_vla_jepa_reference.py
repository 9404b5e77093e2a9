"""Write folders of a small VLA-JEPA, as lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.6.1 or its main branch (CONTRIBUTING names the packages)::

    python tests/references/make_vla_jepa_reference.py --out DIR [--variants plain resized bare full relative]

For each variant it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited, and a
  small ``tokenizer.json`` in place of Qwen's.
- ``answers.npz``: three observations (``front`` and ``wrist`` uint8 (3, H, W, 3), ``state`` (3, 8), ``noise``
  (3, 7, 7)) with prompts of different lengths, and the robot's actions after lerobot's postprocessor: ``batch`` (3, 7,
  7) of one call, ``alone`` (7, 7) of the first observation, and ``missing`` (7, 7) without its second camera.

``DIR/kept.json``: the JSON files of every variant, the names and shapes of lerobot's tensors, and its actions, which
tests/nn/vla_jepa_reference.json holds: weights and observations are drawn by name, so that any interpreter has the
same. The kept `relative` was written by lerobot's main branch, the others by 0.6.1.

Variants: `plain`, images as they are (their size is that of whole tokens); `resized`, images of two sizes, resized to
224 x 224; `bare`, without the steps that snap the gripper, and with other denoising steps; `full`, the published size
except for the vocabulary (on request alone, 20 GB of memory and 8 of disk); `relative` (on request alone, main branch),
with actions relative to the state but for the gripper, which their names place, and unclipped by mean and deviation.

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose. The chat template is written here
from Qwen's published form.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

# isort: split
from groot_weights import draw, weight
from lerobot.configs.types import NormalizationMode
from lerobot.policies.vla_jepa import modeling_vla_jepa, qwen_interface
from lerobot.policies.vla_jepa.configuration_vla_jepa import VLAJEPAConfig
from lerobot.policies.vla_jepa.processor_vla_jepa import make_vla_jepa_pre_post_processors
from make_groot_reference import SPECIAL, small_backbone, small_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TASKS = ("pick up the black bowl", "open it", "put the wine_bottle on the rack")
WORDS = (
    "assistant", "Your", "is", "Infer", "temporal", "dynamics", "from", "frames", "and", "produce", "corresponding",
    "policy", "actions", ".",
)  # fmt: skip
CAMERAS = {
    "plain": {"front": (256, 288), "wrist": (256, 288)},
    "resized": {"front": (96, 132), "wrist": (250, 150)},
    "bare": {"front": (256, 256), "wrist": (256, 256)},
    "full": {"front": (256, 256), "wrist": (256, 256)},
    "relative": {"front": (256, 256), "wrist": (256, 256)},
}
GRIPPER = {"binarize_gripper_action": True, "pre_snap_gripper_action": True}
"""The defaults of 0.6.1, which the main branch changed."""
CHANGES: dict[str, dict[str, Any]] = {
    "plain": GRIPPER,
    "resized": {**GRIPPER, "resize_images_to": (224, 224)},
    "bare": {
        "binarize_gripper_action": False, "pre_snap_gripper_action": False, "clip_normalized_actions": False,
        "num_inference_timesteps": 3,
    },
    "full": GRIPPER,
    "relative": {
        **GRIPPER, "use_relative_actions": True, "relative_exclude_joints": ["jaw"], "gripper_joint_names": ["JAW"],
        "action_feature_names": ["x", "y", "z", "roll", "pitch", "jaw.pos", "yaw"], "gripper_threshold": 0.125,
        "normalization_mapping": dict.fromkeys(("STATE", "ACTION"), NormalizationMode.MEAN_STD)
        | {"VISUAL": NormalizationMode.IDENTITY},
    },
}  # fmt: skip
SMALL: dict[str, Any] = {
    "action_model_type": "DiT-test", "action_num_heads": 2, "action_attention_head_dim": 48, "action_hidden_size": 56,
    "action_num_layers": 4, "num_embodied_action_tokens_per_instruction": 6, "num_action_tokens_per_timestep": 2,
}  # fmt: skip
"""Of the action head; those of `full` are lerobot's defaults."""
QWEN: dict[str, dict[str, Any]] = {
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128,
    },
    "vision_config": {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
"""Sizes of Qwen3-VL-2B."""


AUTOCAST = next(n for n in ("_get_autocast_context", "get_autocast_context") if hasattr(modeling_vla_jepa, n))
"""The function of 0.6.1, and of the main branch."""


def processor() -> Any:
    """Qwen's processor with a small tokenizer."""
    from tokenizers import Tokenizer

    saved = json.loads(small_tokenizer().backend_tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    vocabulary.update({w: len(vocabulary) + i for i, w in enumerate(WORDS)})
    names = ("image_token", "video_token", "vision_bos_token", "vision_eos_token")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(saved)), pad_token=SPECIAL[0], eos_token=SPECIAL[2],
        unk_token="<unk>", extra_special_tokens=dict(zip(names, (SPECIAL[5], SPECIAL[6], *SPECIAL[3:5]), strict=True)),
        chat_template=TEMPLATE,
    )  # fmt: skip
    images = transformers.Qwen2VLImageProcessor(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )  # fmt: skip
    return transformers.Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )  # fmt: skip


def backbone(variant: str = "plain") -> Any:
    config = small_backbone()
    config.text_config.vocab_size = 128
    if variant == "full":
        for part, sizes in QWEN.items():
            vars(getattr(config, part)).update(sizes)
        config.text_config.rope_parameters["mrope_section"] = [24, 20, 20]
    config._attn_implementation = "sdpa"
    return transformers.Qwen3VLForConditionalGeneration(config).float().eval()


def build(variant: str) -> tuple[Any, Any]:
    """lerobot's policy with random weights, and its tokenizer before tokens are added."""
    made, model = processor(), backbone(variant)
    tokenizer = made.tokenizer.backend_tokenizer.to_str()
    config = VLAJEPAConfig(
        device="cpu", enable_world_model=False, torch_dtype="float32", **({} if variant == "full" else SMALL),
        **frame.features({f"observation.images.{k}": v for k, v in CAMERAS[variant].items()}), **CHANGES[variant],
    )  # fmt: skip
    with (
        mock.patch.object(qwen_interface.Qwen3VLForConditionalGeneration, "from_pretrained", lambda *a, **k: model),
        mock.patch.object(qwen_interface.AutoProcessor, "from_pretrained", lambda *a, **k: made),
    ):
        policy = modeling_vla_jepa.VLAJEPAPolicy(config).float().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return policy, tokenizer


def chunk(policy: Any, processors: tuple[Any, Any], given: dict[str, Any], tasks: list[str]) -> np.ndarray:
    """The robot's actions (B, 7, 7) of one call."""
    before, after = processors
    pixels = {
        f"observation.images.{k}": torch.from_numpy(v).permute(0, 3, 1, 2).float() / 255
        for k, v in given.items() if k in ("front", "wrist")
    }  # fmt: skip
    noise = torch.from_numpy(given["noise"])
    with (
        mock.patch.object(modeling_vla_jepa, AUTOCAST, lambda *a, **k: contextlib.nullcontext()),
        mock.patch.object(torch, "randn", lambda *a, **k: noise.clone()),
    ):
        batch = before({**pixels, "observation.state": torch.from_numpy(given["state"]), "task": tasks})
        return after(policy.predict_action_chunk(batch)).numpy()


def write(variant: str, out: Path, seed: int) -> None:
    policy, tokenizer = build(variant)
    processors = make_vla_jepa_pre_post_processors(policy.config, frame.statistics(np.random.default_rng(seed)))
    folder = out / "checkpoint"
    policy.save_pretrained(folder)
    for part in processors:
        part.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer)
    given: dict[str, Any] = {
        k: np.uint8((128 + 60 * draw(f"jepa.{k}", 3, *size, 3)).clip(0, 255)) for k, size in CAMERAS[variant].items()
    }
    given |= {"state": draw("jepa.state", 3, 8), "noise": draw("jepa.noise", 3, 7, 7)}
    first = {k: v[:1] for k, v in given.items()}
    answers = {"batch": chunk(policy, processors, given, list(TASKS))}
    answers["alone"] = chunk(policy, processors, first, [TASKS[0]])[0]
    policy.config.input_features.pop("observation.images.wrist")
    answers["missing"] = chunk(policy, processors, {k: v for k, v in first.items() if k != "wrist"}, [TASKS[0]])[0]
    saved: dict[str, Any] = {"tasks": np.array(TASKS), **given, **answers}
    np.savez(out / "answers.npz", **saved)
    path = out.parent / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"variants": {}}
    kept["shapes"] = {k: list(v.shape) for k, v in policy.state_dict().items()}
    kept["statistics"] = {k: v.tolist() for k, v in load_file(next(folder.glob("*normalizer*"))).items()}
    kept["variants"][variant] = {
        "files": {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))},
        "answers": {k: np.round(v, 7).tolist() for k, v in answers.items()},
    }
    path.write_text(json.dumps(kept))


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(CAMERAS), [name for name in CAMERAS if name not in ("full", "relative")])
