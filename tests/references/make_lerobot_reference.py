"""Write small lerobot checkpoints of π0 and π0.5, whole as lerobot saves them, and the answers of lerobot's code.

Run it with an interpreter that has lerobot installed (CONTRIBUTING names the packages)::

    python tests/references/make_lerobot_reference.py --out DIR [--variants pi0 pi05 trained]

For pi0 and pi05 it builds lerobot's policy at a small size with random weights and writes ``DIR/{pi0,pi05}/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited,
  and a small ``tokenizer.json`` in place of PaliGemma's, which is not free to ship.
- ``model.safetensors``: ``{case}.{images,image_mask,tokens,token_mask,state,noise}`` as lerobot's model got them and
  ``{case}.steps{n}`` as it answered, float32 (B, horizon, 32), normalised.
- ``robot.npz``: whole observations (``images`` uint8 (N, views, H, W, 3), ``state`` (N, 8), ``noise``) and
  ``actions`` (N, horizon, 7) after lerobot's pre- and postprocessor; ``tasks.json`` has the instructions.

The variant ``trained`` needs lerobot at the commit of its pull request 4056. It is a π0.5 that was trained with clean
prefixes; ``DIR/trained/`` has ``checkpoint/``, and

- ``robot.npz``: an observation (``images`` uint8 (2, H, W, 3), ``state`` (8,)), ``noise`` (2, horizon, 32) of a first
  and a second call, ``first`` (horizon, 7), the answer without a previous chunk, in the robot's units.
- ``cases.json``: by case `steps`, `played` (how many actions of ``first`` were executed when the second call began),
  `delay`, and `actions` (horizon, 7), the answer to the second call in ``mode="trained"``.

Everything is float32 on the CPU. It does not cover bfloat16, training, or the rotation of lerobot's LIBERO environment.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lerobot_frame as frame
import numpy as np
import torch

STEPS = (1, 10)
VOCAB, HORIZON, MAX_DELAY = 320, 6, 4
SQUARE: Mapping[str, tuple[int, int]] = dict.fromkeys(
    (*frame.IMAGES, "observation.images.empty_camera_0"), (frame.CAMERA, frame.CAMERA)
)
TRAINED = ((1, 1, 1), (3, 1, 2), (10, 2, 4), (10, 3, 2), (10, 1, 0))
"""Steps, actions that were executed, delay."""


def build(family: str, cameras: Mapping[str, tuple[int, int]] = SQUARE, **options: Any) -> Any:
    """Build lerobot's policy at the small size."""
    module = importlib.import_module(f"lerobot.policies.{family}.modeling_{family}")
    configuration = importlib.import_module(f"lerobot.policies.{family}.configuration_{family}")
    config = getattr(configuration, f"{family.upper()}Config")(
        **frame.features(cameras), chunk_size=HORIZON, n_action_steps=HORIZON,
        tokenizer_max_length=160 if family == "pi05" else 24, device="cpu", **options,
    )  # fmt: skip
    with frame.small(module, vocab=VOCAB):
        return getattr(module, f"{family.upper()}Policy")(config).eval()


@torch.no_grad()
def model_case(policy: Any, family: str, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The model alone: a masked third view, then a masked second view, then none; padded prompts."""
    case = frame.model_inputs(
        generator, batch, 3, 224, (12, 24, 5), VOCAB, state_dim=32, horizon=HORIZON, action_dim=32
    )  # fmt: skip
    case["image_mask"] = mask = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)[:batch]
    state = () if family == "pi05" else (case["state"],)
    for steps in STEPS:
        case[f"steps{steps}"] = policy.model.sample_actions(
            list(case["images"].unbind(1)), list(mask.unbind(1)), case["tokens"], case["token_mask"], *state,
            noise=case["noise"].clone(), num_steps=steps,
        )  # fmt: skip
    return case


def write_trained(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator, out: Path) -> None:
    """One observation in two calls: the second pins what the robot executes of the first chunk meanwhile."""
    preprocess, postprocess = processors
    flat = rng.integers(0, 256, (2, 1, 1, 3), dtype=np.uint8)
    images = np.repeat(flat, frame.CAMERA, 1).repeat(frame.CAMERA, 2)
    state = rng.uniform(-1, 1, 8).astype(np.float32)
    noise = rng.standard_normal((2, HORIZON, 32)).astype(np.float32)

    def call(index: int, steps: int, **chunk: Any) -> torch.Tensor:
        policy.config.num_inference_steps = steps
        seen: dict[str, np.ndarray] = dict(zip(frame.IMAGES, images, strict=True))
        return frame.chunk_of(policy, preprocess, seen, state, frame.TASKS[0], noise[index], **chunk)

    first = call(0, 10)
    cases = []
    for steps, played, delay in TRAINED:
        second = call(1, steps, prev_chunk_left_over=first[:, played:], inference_delay=delay)
        answer = postprocess(second)[0].tolist()
        cases.append({"steps": steps, "played": played, "delay": delay, "actions": answer})
    np.savez(out / "robot.npz", images=images, state=state, noise=noise, first=postprocess(first)[0].numpy())
    (out / "cases.json").write_text(json.dumps(cases))


def write_family(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    family, options = variant, {}
    if variant == "trained":
        from lerobot.policies.rtc.configuration_rtc import RTCConfig

        family, options = "pi05", {"rtc_training_max_delay": MAX_DELAY, "rtc_config": RTCConfig(mode="trained")}
    policy, tokenizer = build(family, **options), frame.small_tokenizer()
    frame.randomise(policy, generator)
    processors = frame.processors_of(family, policy.config, frame.statistics(rng), tokenizer)
    frame.save_policy(policy, processors, tokenizer, out / "checkpoint")
    if variant == "trained":
        return write_trained(policy, processors, rng, out)
    frame.save_cases(
        out / "model.safetensors", {f"batch{b}": model_case(policy, family, b, generator) for b in (1, 3)}
    )  # fmt: skip
    given = {
        "images": frame.blocky_images(rng), "state": rng.uniform(-1, 1, (3, 8)).astype(np.float32),
        "noise": rng.standard_normal((3, HORIZON, 32)).astype(np.float32),
    }  # fmt: skip
    frame.write_robot(out, policy, processors, given, frame.IMAGES)


if __name__ == "__main__":
    frame.write_variants(__doc__, write_family, ("pi0", "pi05", "trained"), ("pi0", "pi05"))
