"""Write folders of small policies, as an installed release of lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.4.4, 0.5.1 or 0.6.1 (CONTRIBUTING names the packages)::

    python tests/references/make_lerobot_release_folders.py --out DIR --variants pi0 pi05 pi0_fast smolvla

For each family it writes ``DIR/release.txt`` with lerobot's version and, for each variant, ``DIR/FAMILY/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited, and a
  small ``tokenizer.json`` in place of the hub's; for π0-FAST a small FAST in ``fast/``.
- ``answers.npz``: one observation (``front`` and ``wrist`` uint8 (H, W, 3) of different sizes, neither of them square,
  ``state`` (n,), ``noise`` (horizon, 32) where the family has it) and, for each of ``tasks``, the robot's ``actions``
  (tasks, horizon, m) after lerobot's postprocessor.

Variants: `plain`; `steps4`, with four denoising steps (not π0-FAST); `visual`, with images normalized by statistics;
`no_state_feature`, whose normalizer does not name the state; `delta` (0.5.1) or `relative` (since 0.6.0), with actions
relative to the state, but for the gripper (not SmolVLA). Weights, statistics and observation are the same in all
variants of a family, so a variant's actions show what its setting changes.

Everything is float32 on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import make_lerobot_reference as flow
import make_pi0_fast_reference as fast
import make_smolvla_reference as smolvla
import numpy as np
import torch

# isort: split
# After lerobot_frame, which replaces what lerobot imports and its policies do not need.
from lerobot import processor as steps
from lerobot.configs.types import NormalizationMode

# The first is enlarged to the model's size (but for SmolVLA's small one), the second reduced.
CAMERAS = {"observation.images.front": (96, 132), "observation.images.wrist": (250, 150)}
TASKS = ("pick up the black bowl", "pick_up_the black_bowl")
JOINTS = ("shoulder_pan.pos", "shoulder_lift.pos", "elbow.pos", "Gripper.pos", "wrist_flex.pos", "wrist_roll.pos", "x")
STATE_UNIT, SHARP = 4.0, 3.0
"""Factors of the state's statistics, and of the random weights of the queries."""
VISUAL = {"pi0": "MEAN_STD", "pi05": "QUANTILES", "pi0_fast": "MIN_MAX", "smolvla": "MEAN_STD"}
FAMILIES = tuple(VISUAL)
OBSERVATIONS = 50
"""Observations that are tried for π0-FAST."""


@dataclass(frozen=True)
class Family:
    """lerobot's policy of a family with random weights, and what its processors are made of."""

    name: str
    policy: Any
    tokenizer: Any
    statistics: Mapping[str, Any]
    fast: Any = None

    def processors(self) -> tuple[Any, Any]:
        """lerobot's pre- and postprocessor for the policy's present config."""
        return frame.processors_of(self.name, self.policy.config, self.statistics, self.tokenizer, self.fast)


def family_of(name: str, fast_folder: Path, seed: int) -> Family:
    """Build a family's policy with random weights. Args: `fast_folder`: where π0-FAST's action tokenizer is written."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    if name == "smolvla":
        policy = smolvla.build("base", CAMERAS)
        frame.randomise(policy, generator, offset_norms="")
        tokenizer = frame.small_tokenizer(opening=False)
        return Family(name, policy, tokenizer, in_robot_units(smolvla.statistics(rng, 6, 6), rng))
    if name == "pi0_fast":
        text, actions = fast.text_tokenizer(fast.VOCAB - 1), fast.fast_tokenizer(rng, fast_folder)
        policy = fast.build(text, actions, CAMERAS)
        fast.randomise(policy, False, generator)
        write_only_actions(policy)
        return Family(name, policy, text, in_robot_units(frame.statistics(rng), rng), actions)
    policy = flow.build(name, CAMERAS)
    frame.randomise(policy, generator)
    # With random weights every token attends alike to all 500 of the images, and the state hardly changes actions.
    frame.sharpen(policy, SHARP, "q_proj.weight")
    return Family(name, policy, frame.small_tokenizer(), in_robot_units(frame.statistics(rng), rng))


@torch.no_grad()
def write_only_actions(policy: Any) -> None:
    """π0-FAST decodes a chunk with any other token to zeros, which would agree whatever the tokens are."""
    head = policy.model.paligemma_with_expert.paligemma.lm_head.weight
    last = fast.VOCAB - 1 - fast.SKIPPED
    head[: last + 1 - fast.FAST_VOCAB] = 0
    head[last + 1 :] = 0


def in_robot_units(table: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Statistics with a state that is far from normalized as it is, and with those of the cameras as lerobot computes
    them: by channel, (3, 1, 1), for images in [0, 1]."""
    state = {name: STATE_UNIT * value for name, value in table["observation.state"].items()}

    def drawn(low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, (3, 1, 1)).astype(np.float32)

    cameras = {
        key: {"mean": drawn(0.3, 0.6), "std": drawn(0.22, 0.35), "min": drawn(0.0, 0.1), "max": drawn(0.8, 1.0),
              "q01": drawn(0.0, 0.2), "q99": drawn(0.7, 0.9)}
        for key in CAMERAS
    }  # fmt: skip
    return {**table, "observation.state": state, **cameras}


def variants(family: Family) -> dict[str, dict[str, Any]]:
    """What each variant changes in the policy's config."""
    config = family.policy.config
    found: dict[str, dict[str, Any]] = {"plain": {}, "no_state_feature": {}}
    for name in ("num_inference_steps", "num_steps"):
        if hasattr(config, name):
            found["steps4"] = {name: 4}
    mode = NormalizationMode[VISUAL[family.name]]
    found["visual"] = {"normalization_mapping": {**config.normalization_mapping, "VISUAL": mode}}
    if hasattr(config, "use_relative_actions"):
        # delta_actions_processor or relative_actions_processor, in the registry of the release.
        step = steps.RelativeActionsProcessorStep._registry_name
        found[step.partition("_")[0]] = {
            "use_relative_actions": True,
            "relative_exclude_joints": ["gripper"],
            "action_feature_names": list(JOINTS),
        }
    return found


@contextlib.contextmanager
def as_variant(family: Family, variant: str) -> Iterator[tuple[Any, Any]]:
    """The policy's config as the variant has it; yields its processors."""
    with frame.changed(family.policy.config, variants(family)[variant]):
        processors = family.processors()
        if variant == "no_state_feature":
            for step in processors[0].steps:
                if isinstance(step, steps.NormalizerProcessorStep):
                    del step.features["observation.state"]
        yield processors


def observation(family: Family, rng: np.random.Generator) -> dict[str, Any]:
    """One observation: images of coloured blocks, whose edges show how an image is resized."""
    found: dict[str, Any] = {}
    for key, (height, width) in CAMERAS.items():
        blocks = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = np.repeat(np.repeat(blocks, 8, 0), 8, 1)[:height, :width]
        found[key.rpartition(".")[2]] = np.ascontiguousarray(image)
    state = family.statistics["observation.state"]
    low, high = (
        (state["q01"], state["q99"]) if "q01" in state else (state["mean"] - state["std"], state["mean"] + state["std"])
    )
    found["state"] = rng.uniform(low, high).astype(np.float32)
    config = family.policy.config
    if hasattr(family.policy.model, "sample_noise"):
        found["noise"] = rng.standard_normal((config.chunk_size, config.max_action_dim)).astype(np.float32)
    return found


def answer(family: Family, processors: tuple[Any, Any], given: Mapping[str, np.ndarray], task: str) -> np.ndarray:
    """The robot's actions (horizon, m) that lerobot computes from an observation."""
    images = {key: given[key.rpartition(".")[2]] for key in CAMERAS}
    chunk = frame.chunk_of(family.policy, processors[0], images, given["state"], task, given.get("noise"))
    return processors[1](chunk)[0].detach().numpy()


def is_clear(family: Family, given: Mapping[str, np.ndarray]) -> bool:
    """Whether π0-FAST writes the same tokens for images of whole grey levels, which this project's models get, and
    other tokens in each variant. With random weights two tokens may be as likely, and a state may change none."""
    resized = family.policy._preprocess_images

    def of_whole_levels(batch: Any) -> Any:
        images, masks = resized(batch)
        return [((image + 1) * 127.5).round() / 127.5 - 1 for image in images], masks

    found: list[np.ndarray] = []
    for variant in variants(family):
        with as_variant(family, variant) as processors:
            found.append(answer(family, processors, given, TASKS[0]))
            with mock.patch.object(family.policy, "_preprocess_images", of_whole_levels):
                rounded = answer(family, processors, given, TASKS[0])
        if not np.array_equal(rounded, found[-1]) or any(np.array_equal(rounded, other) for other in found[:-1]):
            return False
    return True


def write_family(name: str, out: Path, seed: int) -> None:
    (out.parent / "release.txt").write_text(importlib.metadata.version("lerobot"))
    fast_folder = out / "fast"
    family = family_of(name, fast_folder, seed)
    drawn = (observation(family, np.random.default_rng((seed, number))) for number in range(OBSERVATIONS))
    given = next(one for one in drawn if name != "pi0_fast" or is_clear(family, one))
    for variant in variants(family):
        folder = out / variant / "checkpoint"
        with as_variant(family, variant) as processors:
            frame.save_policy(family.policy, processors, family.tokenizer, folder)
            actions = np.stack([answer(family, processors, given, task) for task in TASKS])
        if fast_folder.is_dir():
            shutil.copytree(fast_folder, folder / "fast")
        answers: dict[str, Any] = {**given, "tasks": np.array(TASKS), "actions": actions}
        np.savez(out / variant / "answers.npz", **answers)


if __name__ == "__main__":
    frame.write_variants(__doc__, write_family, FAMILIES)
