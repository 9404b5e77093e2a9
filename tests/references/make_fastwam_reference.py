"""Write folders of a small FastWAM, as lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.6.1 and diffusers (CONTRIBUTING names the packages)::

    python tests/references/make_fastwam_reference.py --out DIR [--variants plain resized bare three]

For each variant it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited, and a
  small ``tokenizer.json`` in place of UMT5's.
- ``wan/``: ``vae`` and ``text_encoder``, as diffusers and transformers save them.
- ``answers.npz``: three observations (``wrist``, ``front`` uint8 (3, H, W, 3), ``state`` (3, 8)) with prompts of
  different lengths, and the robot's actions after lerobot's postprocessor: ``batch`` (3, 16, 7) of one call, and
  ``alone`` (16, 7) of the first observation; ``latent``, the encoded image of the first.

``DIR/kept.json``: the JSON files of every variant, the names and shapes of lerobot's tensors, and its actions, which
tests/nn/fastwam_reference.json holds: weights and observations are drawn by name, so that any interpreter has the
same.

Variants: `plain`, images of the model's size, a toggled gripper and a fixed seed; `resized`, images of another size;
`bare`, scaled to a range, without the toggle, with a seed and a shift of its own; `three`, cameras that do not divide
the width, with unlike means.

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
import transformers
from safetensors.torch import load_file

# isort: split
from diffusers import AutoencoderKLWan
from fastwam_weights import weight
from groot_weights import draw
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.fastwam import modeling_fastwam as fastwam
from lerobot.policies.fastwam.configuration_fastwam import (
    FastWAMConfig,
    default_action_dit_config,
    default_video_dit_config,
)
from lerobot.policies.fastwam.processor_fastwam import make_fastwam_pre_post_processors
from lerobot.policies.fastwam.wan.adapters import WanVideoVAE38
from lerobot.policies.fastwam.wan.components import WanTextEncoder

TASKS = ("pick up the black bowl", "open it", "put the wine bottle on the rack")
WORDS = (
    "<pad>",
    "</s>",
    "<unk>",
    *sorted({w for task in TASKS for w in task.split()}),
    "A",
    "video",
    "of",
    "a",
    "robot",
    ":",
)
CAMERAS = {"plain": (64, 64), "resized": (96, 80), "bare": (64, 64), "three": (72, 56)}
VIEWS = {"three": {"wrist": 150, "front": 90, "left": 30}}
"""Cameras with their mean grey level, of variants that do not have `wrist` and `front`."""
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"toggle_action_dimensions": [-1]},
    "resized": {"toggle_action_dimensions": [-1]},
    "three": {"image_size": (96, 64)},
    "bare": {
        "inference_seed": 7, "sigma_shift": 3.0, "num_inference_steps": 3,
        "normalization_mapping": {
            "VISUAL": NormalizationMode.IDENTITY, "STATE": NormalizationMode.MIN_MAX,
            "ACTION": NormalizationMode.MIN_MAX,
        },
    },
}  # fmt: skip
SIZES = {"num_heads": 4, "attn_head_dim": 24, "num_layers": 3, "text_dim": 40}


def draw_weights(model: torch.nn.Module) -> Any:
    """Draw every parameter by its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(weight(name, tuple(parameter.shape)))))
    return model.float().eval()


def vae() -> AutoencoderKLWan:
    return draw_weights(AutoencoderKLWan(
        base_dim=16, decoder_base_dim=8, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True], is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_temporal=4, scale_factor_spatial=16, latents_mean=(0.3 * draw("wan.mean", 48)).tolist(),
        latents_std=(1.0 + 0.2 * np.abs(draw("wan.std", 48))).tolist(),
    ))  # fmt: skip


def text_encoder() -> Any:
    untied: dict[str, Any] = {"tie_word_embeddings": False}
    config = transformers.UMT5Config(
        vocab_size=64, d_model=40, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=32,
        relative_attention_max_distance=128, is_encoder_decoder=False, **untied,
    )  # fmt: skip
    return draw_weights(transformers.UMT5EncoderModel(config))


def tokenizer() -> Any:
    """Words, with an end, as UMT5's tokenizer has one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


class Words:
    """lerobot's tokenizer around the small one."""

    def __init__(self, made: Any, length: int) -> None:
        self.inner = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
        self.length = length

    def __call__(self, text: Any, return_mask: bool = False, add_special_tokens: bool = True) -> Any:
        made = self.inner(
            [text] if isinstance(text, str) else list(text), padding="max_length", truncation=True,
            max_length=self.length, add_special_tokens=add_special_tokens, return_tensors="pt",
        )  # fmt: skip
        return made.input_ids, made.attention_mask


def views(variant: str) -> dict[str, int]:
    """Cameras with their mean grey level."""
    return VIEWS.get(variant, {"wrist": 128, "front": 128})


def build(variant: str) -> tuple[Any, Any]:
    """lerobot's policy with random weights, and its tokenizer."""
    made, video, action = tokenizer(), default_video_dit_config(7), default_action_dit_config(7)
    video.update(SIZES, hidden_dim=96, ffn_dim=192)
    action.update(SIZES, hidden_dim=48, ffn_dim=96)
    settings = {"num_inference_steps": 4, "image_size": (64, 128), **CHANGES[variant]}
    (height, width), names = settings["image_size"], list(views(variant))
    # lerobot wants widths that fill the canvas, though it resizes every camera to the same width.
    sides = [width * (i + 1) // len(names) - width * i // len(names) for i in range(len(names))]
    features = {
        f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, height, side))
        for name, side in zip(names, sides, strict=True)
    }
    config = FastWAMConfig(
        device="cpu", base_model_id=None, torch_dtype="float32", video_dit_config=video, action_dit_config=action,
        action_horizon=16, n_action_steps=16, tokenizer_max_len=24,
        prompt_template="A video of a robot : {task}",
        input_features={**features, "observation.state": PolicyFeature(FeatureType.STATE, (8,))}, **settings,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "load_pretrained_wan_vae": lambda torch_dtype, device: WanVideoVAE38(torch_dtype, device, pretrained=vae()),
        "load_pretrained_wan_text_encoder": lambda model_id, torch_dtype, device: WanTextEncoder(
            torch_dtype, device, pretrained=text_encoder()
        ),
        "build_wan_tokenizer": lambda model_id, tokenizer_max_len: Words(made, tokenizer_max_len),
    }
    with mock.patch.multiple(fastwam, **parts):
        policy = fastwam.FastWAMPolicy(config)
    return draw_weights(policy), made


def chunk(policy: Any, processors: tuple[Any, Any], given: dict[str, Any], tasks: list[str]) -> np.ndarray:
    """The robot's actions (B, 16, 7) of one call."""
    before, after = processors
    pixels = {
        f"observation.images.{k}": torch.from_numpy(v).permute(0, 3, 1, 2).float() / 255
        for k, v in given.items()
        if k != "state"
    }
    batch = before({**pixels, "observation.state": torch.from_numpy(given["state"]), "task": tasks})
    return after(policy.predict_action_chunk(batch)).numpy()


def write(variant: str, out: Path, seed: int) -> None:
    policy, made = build(variant)
    processors = make_fastwam_pre_post_processors(policy.config, frame.statistics(np.random.default_rng(seed)))
    folder = out / "checkpoint"
    policy.save_pretrained(folder)
    for part in processors:
        part.save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    policy.model.vae.vae.save_pretrained(out / "wan" / "vae")
    policy.model.text_encoder.model.save_pretrained(out / "wan" / "text_encoder")
    given: dict[str, Any] = {
        k: np.uint8((grey + 60 * draw(f"wam.{k}", 3, *CAMERAS[variant], 3)).clip(0, 255))
        for k, grey in views(variant).items()
    }
    given["state"] = draw("wam.state", 3, 8)
    first = {k: v[:1] for k, v in given.items()}
    answers = {"batch": chunk(policy, processors, given, list(TASKS))}
    answers["alone"] = chunk(policy, processors, first, [TASKS[0]])[0]
    pixels = {
        f"observation.images.{k}": torch.from_numpy(v).permute(0, 3, 1, 2).float() / 255
        for k, v in first.items()
        if k != "state"
    }
    image = fastwam._input_image_from_batch(pixels, policy.config)
    answers["latent"] = policy.model._encode_input_image_latents_tensor(image)[0, :, 0].detach().numpy()
    saved: dict[str, Any] = {"tasks": np.array(TASKS), **given, **answers}
    np.savez(out / "answers.npz", **saved)
    path = out.parent / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"variants": {}}
    kept["shapes"] = {
        "checkpoint": shapes(policy), "vae": shapes(policy.model.vae.vae),
        "text_encoder": shapes(policy.model.text_encoder.model),
    }  # fmt: skip
    kept["statistics"] = {k: v.tolist() for k, v in load_file(next(folder.glob("*normalizer*"))).items()}
    kept["wan"] = {p.parent.name: json.loads(p.read_text()) for p in sorted((out / "wan").glob("*/config.json"))}
    kept["variants"][variant] = {
        "files": {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))},
        "answers": {k: np.round(v, 7).tolist() for k, v in answers.items()},
    }
    path.write_text(json.dumps(kept))


def shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Shapes of the stored tensors."""
    return {k: list(v.shape) for k, v in model.state_dict().items()}


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(CAMERAS))
