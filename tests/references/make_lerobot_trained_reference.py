"""Write a small π0.5 checkpoint of lerobot as one trained with clean prefixes, and the chunks lerobot's own code gives.

Run it with an interpreter that has lerobot at the commit of its pull request 4056 (CONTRIBUTING names the packages)::

    python tests/references/make_lerobot_trained_reference.py --out DIR

It writes ``DIR/pi05/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited,
  and a small ``tokenizer.json`` in place of PaliGemma's, which is not free to ship.
- ``robot.npz``: an observation (``images`` uint8 (2, H, W, 3), ``state`` (8,)), ``noise`` (2, horizon, 32) of a first
  and a second call, ``first`` (horizon, 7), what lerobot answers without a previous chunk, in the robot's units.
- ``cases.json``: by case `steps`, `played` (how many actions of ``first`` were executed when the second call began),
  `delay`, and `actions` (horizon, 7), what lerobot's ``predict_action_chunk`` answers to the second call in
  ``mode="trained"``, after its postprocessor.

Everything is float32 on the CPU; weights are random. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

# isort: split
from make_lerobot_reference import (
    CAMERA,
    HORIZON,
    IMAGES,
    TASKS,
    randomise,
    small,
    small_tokenizer,
    statistics,
    write_variants,
)

# isort: split
# After make_lerobot_reference, which steps over what lerobot imports and its policies do not need.
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.processor import tokenizer_processor

MAX_DELAY = 4
CASES = ((1, 1, 1), (3, 1, 2), (10, 2, 4), (10, 3, 2), (10, 1, 0))


def build() -> Any:
    """lerobot's policy at a small size."""
    features = {k: PolicyFeature(FeatureType.VISUAL, (3, CAMERA, CAMERA)) for k in IMAGES}
    config = PI05Config(
        input_features={**features, "observation.state": PolicyFeature(FeatureType.STATE, (8,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        tokenizer_max_length=160,
        rtc_training_max_delay=MAX_DELAY,
        rtc_config=RTCConfig(mode="trained"),
        device="cpu",
    )
    with small(modeling_pi05):
        return modeling_pi05.PI05Policy(config).eval()


def robot_cases(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator) -> tuple[dict[str, Any], list[Any]]:
    """One observation asked about twice: the second call pins what the robot plays of the first chunk meanwhile."""
    preprocess, postprocess = processors
    images = np.repeat(rng.integers(0, 256, (2, 1, 1, 3), dtype=np.uint8), CAMERA, 1).repeat(CAMERA, 2)
    state = rng.uniform(-1, 1, 8).astype(np.float32)
    noise = rng.standard_normal((2, HORIZON, 32)).astype(np.float32)

    def ask(call: int, steps: int, **given: Any) -> torch.Tensor:
        batch = {key: torch.from_numpy(images[i]).permute(2, 0, 1).float() / 255 for i, key in enumerate(IMAGES[:2])}
        batch = preprocess({**batch, "observation.state": torch.from_numpy(state), "task": TASKS[0]})
        drawn = torch.from_numpy(noise[call : call + 1])
        policy.config.num_inference_steps = steps
        with mock.patch.object(policy.model, "sample_noise", lambda shape, device: drawn.clone()):
            return policy.predict_action_chunk(batch, **given)

    first = ask(0, 10)
    cases = []
    for steps, played, delay in CASES:
        second = ask(1, steps, prev_chunk_left_over=first[:, played:], inference_delay=delay)
        answer = postprocess(second)[0].tolist()
        cases.append({"steps": steps, "played": played, "delay": delay, "actions": answer})
    return {"images": images, "state": state, "noise": noise, "first": postprocess(first)[0].numpy()}, cases


def write(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    policy = build()
    randomise(policy, generator)
    tokenizer = small_tokenizer()
    with mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer):
        processors = make_pi05_pre_post_processors(policy.config, dataset_stats=statistics(rng))
    robot, cases = robot_cases(policy, processors, rng)
    np.savez(out / "robot.npz", **robot)
    (out / "cases.json").write_text(json.dumps(cases))
    # The names say nothing true of the small size; a loader checks them against the weights.
    policy.config.paligemma_variant = policy.config.action_expert_variant = None
    folder = out / "checkpoint"
    policy.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    print(f"{variant}: {sorted(p.name for p in folder.iterdir())}")


if __name__ == "__main__":
    write_variants(__doc__, write, ("pi05",))
