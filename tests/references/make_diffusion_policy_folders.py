"""Write folders of small Diffusion Policies, as an installed release of lerobot saves them, and its actions.

Run it with an interpreter that has lerobot 0.3.3, 0.4.4, 0.5.1 or 0.6.1 and diffusers::

    python tests/references/make_diffusion_policy_folders.py --out DIR

It writes ``DIR/release.txt`` with lerobot's version and, for each variant, ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the processors' ``save_pretrained`` write, not edited. lerobot
  0.3.3 has no processors: its statistics are among the weights.
- ``answers.npz``: three observations of `n_obs_steps` moments, ``images`` uint8 (3, moments, cameras, H, W, 3) and
  ``state`` (3, moments, n); ``noise`` of a call for each, (3, T, A), or (3, steps, T, A) where the scheduler draws
  more; and the robot's ``actions`` (3, n_action_steps, A) after lerobot's postprocessor.

`episode` also has ``frames`` (ticks, cameras, H, W, 3), ``states`` (ticks, n), ``noises`` (ticks, T, A) and the
``played`` actions (ticks, A) of `select_action`, which keeps the history itself.

Everything is float32 on the CPU. The script imports nothing of this package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a compiled policy runs uncompiled, under the names of a compiled one

import numpy as np
import torch
from history_frames import ACTION_DIM, STATE_DIM, TICKS, batch_of, observations, statistics_of


def define_missing_operators() -> None:
    """Let torchvision be imported where its operators were built for another torch: the ResNets need none."""
    for name in ("nms", "qnms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


KEPT: list[Any] = []
try:
    import torchvision  # noqa: F401
except RuntimeError:
    define_missing_operators()

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig  # noqa: E402
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy  # noqa: E402

SMALL: dict[str, Any] = {"down_dims": (32, 64, 96), "horizon": 16, "n_action_steps": 8}
GROUPS: dict[str, Any] = {"use_group_norm": True, "use_separate_rgb_encoder_per_camera": False}
RESIZED: dict[str, Any] = {"resize_shape": (49, 61), "crop_ratio": 0.9}
VARIANTS: dict[str, dict[str, Any]] = {
    "ddpm": {"cameras": 1, "size": (48, 48), "crop_shape": (41, 41), "num_inference_steps": 10, **GROUPS},
    "ddim": {"cameras": 2, "noise_scheduler_type": "DDIM", "num_inference_steps": 10, "crop_shape": None, **GROUPS},
    "separate": {
        "cameras": 2, "noise_scheduler_type": "DDIM", "num_inference_steps": 16, "crop_shape": None,
        "use_group_norm": False, "use_separate_rgb_encoder_per_camera": True, **RESIZED,
    },
    "sample": {
        "cameras": 1, "prediction_type": "sample", "use_film_scale_modulation": False, "num_inference_steps": 7,
        "crop_shape": (40, 55), "vision_backbone": "resnet34", "beta_schedule": "linear", **GROUPS,
    },
    "ddim_sample": {
        "cameras": 1, "prediction_type": "sample", "noise_scheduler_type": "DDIM", "num_inference_steps": 7,
        "n_groups": 4, "clip_sample": False, "beta_schedule": "scaled_linear", "crop_shape": None, **GROUPS,
    },
    "episode": {
        "cameras": 2, "noise_scheduler_type": "DDIM", "num_inference_steps": 5, "n_obs_steps": 3, "n_action_steps": 2,
        "crop_shape": (48, 48), **GROUPS,
    },
    "compiled": {"cameras": 1, "num_inference_steps": 3, "crop_shape": None, "compile_model": True, **GROUPS},
    "published": {
        "cameras": 1, "size": (96, 96), "crop_shape": (84, 84), "noise_scheduler_type": "DDIM",
        "num_inference_steps": 10, "down_dims": (512, 1024, 2048), **GROUPS,
    },
}  # fmt: skip
PUBLISHED = "published"
"""The variant of the published size (263 million parameters), on request alone."""
CAMERA = (48, 64)


def build(variant: str) -> DiffusionPolicy:
    options = {**SMALL, **VARIANTS[variant]}
    cameras, size = options.pop("cameras"), options.pop("size", CAMERA)
    inputs = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
              for name in ("wrist", "front")[:cameras]}  # fmt: skip
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE_DIM,))
    known = DiffusionConfig.__dataclass_fields__
    config = DiffusionConfig(
        input_features=inputs, output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        pretrained_backbone_weights=None, device="cpu", **{k: v for k, v in options.items() if k in known},
    )  # fmt: skip
    statistics = statistics_of(inputs)
    policy = DiffusionPolicy(config, **({} if has_processors() else {"dataset_stats": statistics}))
    policy.statistics = statistics
    return policy.eval()


def has_processors() -> bool:
    """Whether lerobot has processors of policies, as since 0.4."""
    return importlib.util.find_spec("lerobot.policies.diffusion.processor_diffusion") is not None


@torch.no_grad()
def randomise(policy: Any) -> None:
    """Change norms, biases and statistics of batch norms, which start as identities."""
    generator = torch.Generator().manual_seed(1)
    for name, value in policy.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        if "running_var" in name:
            value.copy_(0.75 + 0.5 * drawn.abs())
        elif ("running_mean" in name or value.ndim == 1) and value.is_floating_point() and "buffer" not in name:
            value.add_(0.1 * drawn)


def processors_of(policy: Any) -> tuple[Any, Any]:
    if not has_processors():
        return policy.normalize_inputs, lambda actions: policy.unnormalize_outputs({"action": actions})["action"]
    from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

    return make_diffusion_pre_post_processors(policy.config, policy.statistics)


@torch.no_grad()
def answer(
    policy: Any, processors: tuple[Any, Any], images: np.ndarray, state: np.ndarray, seed: int
) -> dict[str, np.ndarray]:
    """lerobot's actions of one observation of several moments, and the noise that it draws."""
    config = policy.config
    chunk = (1, config.horizon, ACTION_DIM)
    torch.manual_seed(seed)
    drawn = config.num_inference_steps if config.noise_scheduler_type == "DDPM" else 1
    noise = torch.stack([torch.randn(chunk) for _ in range(drawn)], 1)
    torch.manual_seed(seed)
    torch.randn(chunk)
    batch = processors[0](batch_of(policy, images[None], state[None]))
    batch["observation.images"] = torch.stack([batch[key] for key in config.image_features], dim=-4)
    batch = {key: batch[key] for key in ("observation.images", "observation.state")}
    condition = policy.diffusion._prepare_global_conditioning(batch)
    sample, scheduler = noise[:, 0], policy.diffusion.noise_scheduler
    assert scheduler.config.num_train_timesteps == config.num_train_timesteps
    with_noise = "noise" in policy.diffusion.generate_actions.__code__.co_varnames
    if with_noise:
        actions = policy.diffusion.generate_actions(batch, noise=sample)
    else:  # lerobot 0.3 draws the first noise itself
        torch.manual_seed(seed)
        actions = policy.diffusion.generate_actions(batch)
    assert condition.isfinite().all()
    return {"noise": (noise[0] if drawn > 1 else sample[0]).numpy(), "actions": processors[1](actions)[0].numpy()}


@torch.no_grad()
def play(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An episode of lerobot's `select_action`, one observation a tick."""
    images, states = (part[0] for part in observations(policy, rng, 1, TICKS))
    noises, played = rng.standard_normal((TICKS, policy.config.horizon, ACTION_DIM)).astype(np.float32), []
    policy.reset()
    for tick in range(TICKS):
        batch = processors[0](batch_of(policy, images[tick : tick + 1], states[tick : tick + 1]))
        played.append(processors[1](policy.select_action(batch, noise=torch.from_numpy(noises[tick : tick + 1])))[0])
    return {"frames": images, "states": states, "noises": noises, "played": torch.stack(played).numpy()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--published", action="store_true", help="the published size alone")
    args = parser.parse_args()
    out = args.out
    torch.set_num_threads(1)
    release = "0.3.3" if not has_processors() else importlib.metadata.version("lerobot")
    out.mkdir(parents=True, exist_ok=True)
    (out / "release.txt").write_text(release)
    for variant, options in VARIANTS.items():
        if args.published != (variant == PUBLISHED):
            continue
        known = DiffusionConfig.__dataclass_fields__
        if not all(name in known or name in ("cameras", "size") for name in options):
            continue  # a setting that this release does not have
        if variant == "episode" and not has_processors():
            continue
        torch.manual_seed(0)
        policy, folder = build(variant), out / variant / "checkpoint"
        randomise(policy)
        processors = processors_of(policy)
        policy.save_pretrained(folder)
        for processor in processors if has_processors() else ():
            processor.save_pretrained(folder)
        rng = np.random.default_rng(7)
        images, state = observations(policy, rng, 3, policy.config.n_obs_steps)
        found = [answer(policy, processors, images[i], state[i], 5 + i) for i in range(3)]
        answers = {name: np.stack([one[name] for one in found]) for name in found[0]}
        if variant == "episode":
            answers |= play(policy, processors, rng)
        answers |= {"images": images, "state": state}
        np.savez(out / variant / "answers.npz", **answers)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
