"""Write folders of small Multi-task DiTs, as an installed release of lerobot saves them, and its actions.

Run it with an interpreter that has lerobot 0.5.1 or 0.6.1, transformers and diffusers::

    python tests/references/make_multi_task_dit_folders.py --out DIR

It writes ``DIR/release.txt`` with lerobot's version, ``DIR/openai/clip-vit-base-patch16``, a small CLIP with its
tokenizer, and for each variant ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the processors' ``save_pretrained`` write, not edited.
- ``answers.npz``: three observations of `n_obs_steps` moments, ``images`` uint8 (3, moments, cameras, H, W, 3),
  ``state`` (3, moments, n) and ``tasks``; ``noise`` of a call for each, (3, T, A), or (3, steps, T, A) where the
  scheduler draws more; and the robot's ``actions`` (3, n_action_steps, A) after lerobot's postprocessor.

`episode` also has ``frames`` (ticks, cameras, H, W, 3), ``states`` (ticks, n), ``noises`` (ticks, T, A) and the
``played`` actions (ticks, A) of `select_action`, which keeps the history itself.

Everything is float32 on the CPU. The script imports nothing of this package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from history_frames import ACTION_DIM, STATE_DIM, TICKS, observations, statistics_of
from history_frames import batch_of as frames_and_states
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig
from lerobot.policies.multi_task_dit.modeling_multi_task_dit import MultiTaskDiTPolicy
from lerobot.policies.multi_task_dit.processor_multi_task_dit import make_multi_task_dit_pre_post_processors
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

CLIP = "openai/clip-vit-base-patch16"
SMALL: dict[str, Any] = {
    "horizon": 12, "n_action_steps": 8, "hidden_dim": 96, "num_layers": 2, "num_heads": 4, "timestep_embed_dim": 32,
    "image_crop_shape": (32, 32), "tokenizer_max_length": 40,
}  # fmt: skip
FLOW: dict[str, Any] = {"objective": "flow_matching", "num_integration_steps": 7}
VARIANTS: dict[str, dict[str, Any]] = {
    "ddpm": {"cameras": 2, "num_inference_steps": 10},
    "ddim": {
        "cameras": 1, "size": (32, 32), "image_crop_shape": (40, 40), "noise_scheduler_type": "DDIM",
        "prediction_type": "sample", "num_inference_steps": 7, "clip_sample": False, "rope_base": 100.0,
        "use_positional_encoding": True, "n_obs_steps": 1, "beta_schedule": "linear",
    },
    "flow": {
        "cameras": 2, "image_resize_shape": (37, 41), "use_separate_rgb_encoder_per_camera": True, "use_rope": False,
        "use_positional_encoding": True, "n_obs_steps": 3, "tokenizer_padding": "longest", **FLOW,
    },
    "plain": {"cameras": 1, "use_rope": False, **FLOW},
    "episode": {"cameras": 2, "n_obs_steps": 3, "n_action_steps": 2, **FLOW},
    "published": {
        "cameras": 2, "size": (240, 256), "noise_scheduler_type": "DDIM", "num_inference_steps": 5, "horizon": 32,
        "n_action_steps": 24, "hidden_dim": 512, "num_layers": 6, "num_heads": 8, "timestep_embed_dim": 256,
        "image_crop_shape": (224, 224), "tokenizer_max_length": 77,
    },
}  # fmt: skip
PUBLISHED = "published"
"""The variant of the published size, on request alone: lerobot's defaults with CLIP's ViT-B/16."""
WORDS = 49_408
"""Of CLIP's table."""
CAMERA = (48, 64)
TASKS = ("pick up the Bowl", "put the plate on the stove, slowly", "open_it")


def write_clip(folder: Path, *, published: bool) -> None:
    """A CLIP whose tokenizer spells every word, small or of the published size."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    # A prompt ends in the last row of the table.
    words += [f"unused {i}" for i in range(WORDS - len(words) - 2 if published else 0)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    ids = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    small = CLIPConfig(
        text_config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 1,
                     "vocab_size": len(words), "max_position_embeddings": 40, **ids},
        vision_config={"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
                       "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )  # fmt: skip
    config = CLIPConfig(text_config=ids, vision_config={"patch_size": 16}) if published else small
    CLIPModel(config).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(words)}
    length = config.text_config.max_position_embeddings
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length).save_pretrained(folder)


def build(variant: str) -> MultiTaskDiTPolicy:
    options = {**SMALL, **VARIANTS[variant]}
    cameras, size = options.pop("cameras"), options.pop("size", CAMERA)
    inputs = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
              for name in ("wrist", "front")[:cameras]}  # fmt: skip
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    config = MultiTaskDiTConfig(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        device="cpu", **options,
    )  # fmt: skip
    policy = MultiTaskDiTPolicy(config)
    policy.statistics = statistics_of(inputs)
    return policy.eval()


@torch.no_grad()
def randomise(policy: Any) -> None:
    """Change all weights, so that frames, prompt and state matter; modulations start as zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, value in policy.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        if value.ndim == 1:
            value.add_(0.1 * drawn)
        else:
            inputs = value[0].numel() if "embedding" not in name or "patch" in name else 4
            value.copy_((0.3 if "adaLN" in name else 1.0) * drawn / inputs**0.5)


def batch_of(policy: Any, images: np.ndarray, state: np.ndarray, task: str) -> dict[str, Any]:
    """lerobot's batch of images (..., cameras, H, W, 3), states and their instruction."""
    return {**frames_and_states(policy, images, state), "task": [task] * len(state)}


@torch.no_grad()
def answer(
    policy: Any, processors: tuple[Any, Any], images: np.ndarray, state: np.ndarray, index: int
) -> dict[str, np.ndarray]:
    """lerobot's actions of one observation of several moments, and the noise that it draws."""
    config = policy.config
    chunk = (1, config.horizon, ACTION_DIM)
    torch.manual_seed(5 + index)
    draws = config.is_diffusion and config.noise_scheduler_type == "DDPM"
    drawn = config.num_inference_steps if draws else 1
    noise = torch.stack([torch.randn(chunk) for _ in range(drawn)], 1)
    torch.manual_seed(5 + index)
    batch = processors[0](batch_of(policy, images[None], state[None], TASKS[index]))
    actions = policy._generate_actions(policy._prepare_batch(batch))
    found = {"noise": noise[0] if drawn > 1 else noise[0, 0], "actions": processors[1](actions)[0]}
    return {name: value.numpy() for name, value in found.items()}


@torch.no_grad()
def play(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An episode of lerobot's `select_action`, one observation a tick."""
    images, states = (part[0] for part in observations(policy, rng, 1, TICKS))
    noises, played = [], []
    policy.reset()
    for tick in range(TICKS):
        torch.manual_seed(tick)
        noises.append(torch.randn(1, policy.config.horizon, ACTION_DIM)[0])
        torch.manual_seed(tick)
        batch = processors[0](batch_of(policy, images[tick : tick + 1], states[tick : tick + 1], TASKS[0]))
        played.append(processors[1](policy.select_action(batch))[0])
    tensors = {"noises": torch.stack(noises), "played": torch.stack(played)}
    return {"frames": images, "states": states, **{name: value.numpy() for name, value in tensors.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--published", action="store_true", help="the published size alone")
    args = parser.parse_args()
    out = args.out
    torch.set_num_threads(1)
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # where the hub's name of the CLIP is a folder
    Path("release.txt").write_text(importlib.metadata.version("lerobot"))
    write_clip(Path(CLIP), published=args.published)
    for variant in VARIANTS:
        if args.published != (variant == PUBLISHED):
            continue
        policy, folder = build(variant), Path(variant) / "checkpoint"
        randomise(policy)
        processors = make_multi_task_dit_pre_post_processors(policy.config, policy.statistics)
        policy.save_pretrained(folder)
        for processor in processors:
            processor.save_pretrained(folder)
        rng = np.random.default_rng(7)
        images, state = observations(policy, rng, 3, policy.config.n_obs_steps)
        found = [answer(policy, processors, images[i], state[i], i) for i in range(3)]
        answers = {name: np.stack([one[name] for one in found]) for name in found[0]}
        if variant == "episode":
            answers |= play(policy, processors, rng)
        answers |= {"images": images, "state": state, "tasks": np.array(TASKS)}
        np.savez(Path(variant) / "answers.npz", **answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
