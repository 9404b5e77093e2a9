"""Write folders of a small X-VLA, as lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.4.4 to 0.6.1 (CONTRIBUTING names the packages)::

    python tests/references/make_xvla_reference.py --out DIR [--variants plain libero joint ...]

For each variant it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited, and a
  small ``tokenizer.json`` in place of BART's.
- ``answers.npz``: three observations (each camera's images uint8 (3, H, W, 3), ``state`` (3, S), ``noise`` (3, H, A))
  with prompts of different lengths, and the robot's actions after lerobot's postprocessor: ``batch`` (3, H, A) of one
  call, ``alone`` (H, A) of the first observation, and ``missing`` (H, A) without its first camera.

``DIR/kept.json``: the JSON files of every variant, the names and shapes of lerobot's tensors (of each variant those
that differ from the first one's, None for those that it lacks), and its actions. tests/nn/xvla_reference.json holds
those of 0.6.1, tests/nn/xvla_old_reference.json those of 0.5.1: weights and observations are drawn by name, so that any
interpreter has the same.

Variants: `plain`, two cameras of other shapes than the network's square; `libero`, with an empty camera, without the
step that normalises images, which lerobot's evaluation then does, and with the step that makes axis-angles; `joint`,
with statistics and projections of each domain; `agibot`, whose images are bytes for a moment; and the other action
spaces, `auto` with maps that are not square, which lerobot before 0.6.1 refuses.

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
from groot_weights import draw
from safetensors.torch import load_file
from xvla_weights import weight

# isort: split
from lerobot.configs.types import NormalizationMode
from lerobot.policies.xvla import modeling_xvla, processor_xvla
from lerobot.policies.xvla.configuration_xvla import XVLAConfig

TASKS = ("pick up the black bowl", "open it", "put the wine bottle on the rack")
WORDS = ("<s>", "<pad>", "</s>", "<unk>", *sorted({w for t in TASKS for w in t.split()}))
FLORENCE = {
    "vision_config": {
        "model_type": "davit", "dim_embed": [32, 64, 96], "num_heads": [1, 2, 3], "num_groups": [2, 4, 3],
        "depths": [1, 2, 1], "patch_size": [7, 3, 3], "patch_stride": [4, 2, 2], "patch_padding": [3, 1, 1],
        "patch_prenorm": [False, True, True], "window_size": 5, "projection_dim": 48, "drop_path_rate": 0.1,
        "image_pos_embed": {"type": "learned_abs_2d", "max_pos_embeddings": 8},
        "visual_temporal_embedding": {"type": "COSINE", "max_temporal_embeddings": 4},
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
    },
    "text_config": {
        "model_type": "florence2_language", "vocab_size": 40, "d_model": 48, "encoder_layers": 2, "decoder_layers": 1,
        "encoder_ffn_dim": 80, "decoder_ffn_dim": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 96, "activation_function": "gelu", "pad_token_id": 1, "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "projection_dim": 48, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "vocab_size": 40,
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "depth": 3, "num_heads": 4, "num_domains": 4, "len_soft_prompts": 6, "dim_time": 8,
    "max_len_seq": 160, "chunk_size": 8, "n_action_steps": 8, "tokenizer_max_length": 12, "num_denoising_steps": 4,
    "max_state_dim": 20,
}  # fmt: skip
STATES = {"joint": 14, "franka": 9}
"""Numbers of the state, else 20."""
SQUARE = {"image": (64, 64), "image2": (64, 64)}
CAMERAS: dict[str, dict[str, tuple[int, int]]] = {
    "plain": {"front": (48, 80), "wrist": (96, 64)}, "joint": {"front": (96, 64), "wrist": (50, 70)}
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"resize_imgs_with_padding": (64, 64), "num_image_views": 3},
    "libero": {"empty_cameras": 1},
    "joint": {
        "action_mode": "joint", "resize_imgs_with_padding": (64, 64), "use_hetero_proj": True, "max_state_dim": 16,
        "num_denoising_steps": 3,
    },
    "agibot": {"action_mode": "agibot_ee6d"},
    "franka": {"action_mode": "franka_joint7"},
    "so101": {"action_mode": "so101_bimanual"},
    "auto": {"action_mode": "auto", "max_action_dim": 20, "resize_imgs_with_padding": (96, 64)},
}  # fmt: skip
ACTIONS = {"joint": 14, "franka": 7, "so101": 12, "auto": 9}
DOMAINS = {"plain": 2, "libero": 3, "joint": 1}


def tokenizer() -> Any:
    """Words as tokens, between `<s>` and `</s>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def build(variant: str) -> Any:
    """lerobot's policy with random weights."""
    cameras, action = CAMERAS.get(variant, SQUARE), ACTIONS.get(variant, 20)
    modes = {}
    if variant == "joint":
        names = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
        modes = {"normalization_mapping": {k: NormalizationMode(v) for k, v in names.items()}}
    config = XVLAConfig(
        device="cpu", florence_config=json.loads(json.dumps(FLORENCE)), **modes,
        **frame.features({f"observation.images.{k}": v for k, v in cameras.items()}, STATES.get(variant, 20), action),
        **{**SIZES, **CHANGES[variant]},
    )  # fmt: skip
    policy = modeling_xvla.XVLAPolicy(config).float().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return policy


def chunk(policy: Any, processors: tuple[Any, Any], given: dict[str, Any], tasks: list[str], variant: str) -> Any:
    """The robot's actions (B, H, A) of one call."""
    before, after = processors
    pixels = {
        f"observation.images.{k}": torch.from_numpy(given[k]).permute(0, 3, 1, 2).float() / 255
        for k in CAMERAS.get(variant, SQUARE) if k in given
    }  # fmt: skip
    noise = torch.from_numpy(given["noise"])
    batch = before({**pixels, "observation.state": torch.from_numpy(given["state"]), "task": tasks})
    if variant == "libero":
        mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        batch |= {k: (batch[k] - mean) / std for k in pixels}
    with mock.patch.object(torch, "randn", lambda *a, **k: noise.clone()):
        actions = policy.predict_action_chunk(batch)
    return torch.stack([after(actions[:, i]) for i in range(actions.shape[1])], 1).numpy()


def write(variant: str, out: Path, seed: int) -> None:
    policy, words = build(variant), tokenizer()
    action = ACTIONS.get(variant, 20)
    stats = frame.statistics(np.random.default_rng(seed), STATES.get(variant, 20), action)
    before, after = frame.processors_of("xvla", policy.config, stats, words)
    steps = [s for s in before.steps if variant != "libero" or "ImageNet" not in type(s).__name__]
    for one in steps:
        if type(one).__name__ == "XVLAAddDomainIdProcessorStep":
            one.domain_id = DOMAINS.get(variant, 0)
    if variant == "agibot":
        steps.insert(3, processor_xvla.XVLAImageScaleProcessorStep())
    before.steps = steps
    if variant == "libero":
        after.steps = [*after.steps, processor_xvla.XVLARotation6DToAxisAngleProcessorStep()]
    folder = out / "checkpoint"
    frame.save_policy(policy, (before, after), words, folder)
    # lerobot counts an empty camera again when it loads a folder.
    policy = modeling_xvla.XVLAPolicy.from_pretrained(folder).float().eval()
    given: dict[str, Any] = {
        k: np.uint8((128 + 60 * draw(f"xvla.{k}", 3, *size, 3) + shift).clip(0, 255))
        for shift, (k, size) in zip((0, 50), CAMERAS.get(variant, SQUARE).items(), strict=True)
    }
    numbers = policy.model.dim_action
    given |= {"state": draw("xvla.state", 3, STATES.get(variant, 20)), "noise": draw("xvla.noise", 3, 8, numbers)}
    first = {k: v[:1] for k, v in given.items()}
    dropped = next(iter(CAMERAS.get(variant, SQUARE)))
    both = policy, (before, after)
    answers = {
        "batch": chunk(*both, given, list(TASKS), variant), "alone": chunk(*both, first, [TASKS[0]], variant)[0],
        "missing": chunk(*both, {k: v for k, v in first.items() if k != dropped}, [TASKS[0]], variant)[0],
    }  # fmt: skip
    saved: dict[str, Any] = {"tasks": np.array(TASKS), **given, **answers}
    np.savez(out / "answers.npz", **saved)
    path = out.parent / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"shapes": {}, "variants": {}}
    shapes = {k: list(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    kept["shapes"] = known = kept["shapes"] or shapes
    statistics = next(folder.glob("*_normalizer*.safetensors"))
    kept["variants"][variant] = {
        "files": {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))},
        "shapes": {k: shapes.get(k) for k in {**known, **shapes} if shapes.get(k) != known.get(k)},
        "statistics": {k: v.tolist() for k, v in load_file(statistics).items()},
        "answers": {k: np.round(v, 6).tolist() for k, v in answers.items()},
    }
    path.write_text(json.dumps(kept))


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(CHANGES))
