"""Write folders of small ACT policies, as an installed release of lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.3.3 to 0.6.1 and torchvision::

    python tests/references/make_act_reference.py --out DIR

It writes ``DIR/release.txt`` with lerobot's version and, for each variant, ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and, since 0.4, the two processors' ``save_pretrained`` write, not
  edited.
- ``answers.npz``: three observations (a camera's images uint8 (3, H, W, 3) by its key, ``observation.state`` and, in
  `environment`, ``observation.environment_state``) and the robot's ``actions`` (3, horizon, m).

Variants: `plain`, with two cameras of two sizes, neither of them square; `swapped`, with their statistics exchanged,
which alone shows the cameras' order; `min_max`, normalized by minimum and maximum; `environment`, with the state of an
environment; `deep`, with a ResNet34, GELU and two layers of the decoder; `published`, of the usual width. Weights and
observations of `plain`, `swapped` and `min_max` are the same.

Everything is float32 on the CPU.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import whole_torchvision  # noqa: F401

# isort: split
import lerobot_frame as frame
import numpy as np
import torch

# isort: split
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.act import modeling_act
from lerobot.policies.act.configuration_act import ACTConfig

CAMERAS = {"observation.images.top": (70, 100), "observation.images.wrist": (64, 40)}
STATE, ENVIRONMENT, ACTIONS, HORIZON, BATCH = 6, 3, 5, 7, 3
SMALL: dict[str, Any] = {"dim_model": 64, "n_heads": 4, "dim_feedforward": 96, "n_encoder_layers": 2, "latent_dim": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": SMALL,
    "swapped": SMALL,
    "min_max": SMALL,
    "environment": SMALL,
    "deep": {**SMALL, "vision_backbone": "resnet34", "feedforward_activation": "gelu", "n_decoder_layers": 2,
             "use_vae": False},
    "published": {},
}  # fmt: skip
OLD = not (Path(modeling_act.__file__).parent / "processor_act.py").is_file()
"""Whether it is lerobot 0.3, whose policies normalize by themselves."""


def config_of(variant: str) -> Any:
    found = frame.features(CAMERAS, STATE, ACTIONS)
    if variant == "environment":
        found["input_features"]["observation.environment_state"] = PolicyFeature(FeatureType.ENV, (ENVIRONMENT,))
    if variant == "min_max":
        found["normalization_mapping"] = dict.fromkeys(("VISUAL", "STATE", "ACTION"), NormalizationMode.MIN_MAX)
    return ACTConfig(
        **found, **VARIANTS[variant], chunk_size=HORIZON, n_action_steps=HORIZON, pretrained_backbone_weights=None,
        device="cpu", push_to_hub=False,
    )  # fmt: skip


def statistics(variant: str, rng: np.random.Generator) -> dict[str, Any]:
    table = frame.statistics(rng, STATE, ACTIONS)
    cameras = [
        {"mean": rng.uniform(0.2, 0.7, 3), "std": rng.uniform(0.1, 0.5, 3), "min": rng.uniform(0, 0.1, 3),
         "max": rng.uniform(0.6, 1.0, 3)}
        for _ in CAMERAS
    ]  # fmt: skip
    cameras = cameras[::-1] if variant == "swapped" else cameras
    for key, its in zip(CAMERAS, cameras, strict=True):
        table[key] = {name: value.astype(np.float32).reshape(3, 1, 1) for name, value in its.items()}
    return table


@torch.no_grad()
def randomise(policy: Any, generator: torch.Generator) -> None:
    """Draw what starts at zero or one: norms, frozen norms of the ResNet, biases. Attention becomes sharp."""
    for name, value in policy.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        if "running_var" in name or (("bn" in name or "downsample.1" in name) and name.endswith("weight")):
            value.copy_(0.8 + 0.4 * drawn.sigmoid())
        elif "norm" in name and name.startswith("model.") and name.endswith("weight"):
            value.copy_(1 + 0.2 * drawn)
        elif name.startswith("model.") and name.endswith(("bias", "running_mean")):
            value.copy_(0.1 * drawn)
        elif name.endswith("in_proj_weight"):
            value *= 3.0


def write(variant: str, out: Path, seed: int) -> None:
    (out.parent / "release.txt").write_text(importlib.metadata.version("lerobot"))
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    config, table = config_of(variant), statistics(variant, rng)
    tensors = {key: {name: torch.from_numpy(value) for name, value in its.items()} for key, its in table.items()}
    policy = (modeling_act.ACTPolicy(config, dataset_stats=tensors) if OLD else modeling_act.ACTPolicy(config)).eval()
    randomise(policy, generator)
    state = table["observation.state"]
    given: dict[str, np.ndarray] = {
        key: rng.integers(0, 256, (BATCH, *size, 3), dtype=np.uint8) for key, size in CAMERAS.items()
    }
    for key in CAMERAS:  # dark and light, so that the statistics matter
        given[key] //= np.array([1, 2, 3], np.uint8)[:, None, None, None]
    given["observation.state"] = rng.uniform(state["min"], state["max"], (BATCH, STATE)).astype(np.float32)
    if variant == "environment":
        given["observation.environment_state"] = rng.normal(size=(BATCH, ENVIRONMENT)).astype(np.float32)
    batch = {
        key: torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 if key in CAMERAS else torch.from_numpy(x)
        for key, x in given.items()
    }
    folder = out / "checkpoint"
    policy.save_pretrained(folder)
    if OLD:
        actions = policy.predict_action_chunk(batch)
    else:
        before, after = frame.processors_of("act", config, tensors, None)
        actions = after(policy.predict_action_chunk(before(batch)))
        before.save_pretrained(folder)
        after.save_pretrained(folder)
    answers: dict[str, Any] = {**given, "actions": actions.detach().numpy()}
    np.savez(out / "answers.npz", **answers)


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(VARIANTS))
