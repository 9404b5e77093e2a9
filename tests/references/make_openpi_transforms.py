"""Write what openpi's own transforms make of observations and actions, for LIBERO, DROID and ALOHA.

Run it with an interpreter that has openpi installed (CONTRIBUTING names the packages)::

    python tests/references/make_openpi_transforms.py --out DIR

The two lists of transforms round the model are put together here as openpi's training configs do (data transforms,
normalisation, resizing, tokens, padding; and back). ``DIR/{case}/`` gets:

- ``norm_stats.json`` and ``tokenizer.model``, a small SentencePiece model with PaliGemma's special tokens;
- ``{i}.npz``: ``observation.{key}`` as a client sends it (path segments joined by "/"), ``images`` of the views that
  are not masked, ``tokens`` without padding, ``state`` (32,), ``actions`` the model's, ``robot`` openpi's answer;
- ``case.json``: family, prompt and preset.

This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np
import openpi.models.tokenizer as openpi_tokenizer
import openpi.shared.normalize as normalize
import sentencepiece
from openpi import transforms
from openpi.models.model import ModelType
from openpi.policies import aloha_policy, droid_policy, libero_policy

PROMPT = "Pick up_the black bowl "
SENTENCES = ["pick up the black bowl and place it on the plate", "Task: State: Action: ;", "0123456789 - 1 2 3"]


def train_tokenizer(folder: Path) -> Path:
    """A small BPE model that splits digits and keeps the newline, as PaliGemma's does."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(SENTENCES * 40))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=90,
        model_type="bpe",
        split_digits=True,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def case(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Transforms in and out as in openpi's configs, and observations, of one case."""

    def image(height: int = 224, width: int = 224, *, first: bool = False) -> np.ndarray:
        coarse = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        fine = rng.integers(0, 32, (height, width, 3), dtype=np.uint8)
        pixels = np.repeat(np.repeat(coarse, 8, 0), 8, 1)[:height, :width] ^ fine
        return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)) if first else pixels

    def libero(size: tuple[int, int] = (224, 224)) -> dict[str, Any]:
        return {
            "observation/image": image(*size),
            "observation/wrist_image": image(*size),
            "observation/state": rng.uniform(-1, 1, 8),
        }

    def droid() -> dict[str, Any]:
        return {
            "observation/exterior_image_1_left": image(180, 320),
            "observation/wrist_image_left": image(180, 320),
            "observation/joint_position": rng.uniform(-1, 1, 7),
            "observation/gripper_position": rng.uniform(0, 1, 1),
        }

    def aloha(*cameras: str) -> dict[str, Any]:
        return {"state": rng.uniform(0.05, 1, 14), "images": {c: image(480, 640, first=True) for c in cameras}}

    mask = transforms.make_bool_mask
    kind = ModelType.PI05 if name.startswith("pi05") else ModelType.PI0
    found: dict[str, Any] = {"kind": kind, "discrete": kind == ModelType.PI05}
    if name.endswith("libero"):
        given = [libero(), libero((256, 256)), libero((128, 200))]
        delta = mask(6, -1) if kind == ModelType.PI0 else None
        found["in"], found["out"] = libero_policy.LiberoInputs(model_type=kind), libero_policy.LiberoOutputs()
        found["discrete"] = False
    elif "droid" in name:
        delta = mask(7, -1) if name.endswith("joint_position") else None
        found["in"], found["out"] = droid_policy.DroidInputs(model_type=kind), droid_policy.DroidOutputs()
        given = [droid(), droid()]
        given[1]["observation/gripper_position"] = given[1]["observation/gripper_position"][0]
    else:
        delta = None if name.endswith("sim") else mask(6, -1, 6, -1)
        found["in"], found["out"] = aloha_policy.AlohaInputs(adapt_to_pi=True), aloha_policy.AlohaOutputs(True)
        cameras = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
        given = [aloha(*cameras), aloha("cam_high", "cam_right_wrist"), aloha("cam_high")]
    return {**found, "delta": delta, "given": given}


# Case to the preset that must agree with it.
CASES = {
    "pi0_libero": "pi0_libero",
    "pi05_libero": "libero",
    "pi0_droid": "droid",
    "pi05_droid": "droid",
    "pi05_droid_joint_position": "droid_joint_position",
    "pi0_aloha": "aloha",
    "pi05_aloha": "aloha",
    "pi0_aloha_sim": "aloha_sim",
}


def flatten(tree: dict[str, Any], start: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        result |= flatten(value, f"{start}{key}/") if isinstance(value, dict) else {start + key: value}
    return result


def write_case(name: str, out: Path, tokenizer: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = case(name, rng)
    out.mkdir(parents=True, exist_ok=True)
    width = 32 if "droid" in name else {"libero": 7}.get(name.split("_")[1], 14)

    def statistics(count: int) -> normalize.NormStats:
        low = rng.uniform(-1.5, -0.5, count)
        return normalize.NormStats(
            mean=rng.uniform(-0.3, 0.3, count),
            std=rng.uniform(0.4, 0.9, count),
            q01=low,
            q99=low + rng.uniform(1.5, 3, count),
        )

    # DROID's were computed after padding: longer than the state.
    stats = {"state": statistics(32 if "droid" in name else {7: 8}.get(width, width)), "actions": statistics(width)}
    normalize.save(out, stats)
    quantiles = made["kind"] != ModelType.PI0
    openpi_tokenizer.download.maybe_download = lambda *args, **kwargs: tokenizer
    length = 200 if made["kind"] == ModelType.PI05 else 48
    tokenizer_of_length = openpi_tokenizer.PaligemmaTokenizer(length)
    before = transforms.compose(
        [
            made["in"],
            transforms.DeltaActions(made["delta"]),
            transforms.Normalize(stats, use_quantiles=quantiles),
            transforms.ResizeImages(224, 224),
            transforms.TokenizePrompt(tokenizer_of_length, discrete_state_input=made["discrete"]),
            transforms.PadStatesAndActions(32),
        ]
    )
    after = transforms.compose(
        [
            transforms.Unnormalize(stats, use_quantiles=quantiles),
            transforms.AbsoluteActions(made["delta"]),
            made["out"],
        ]
    )
    for i, observation in enumerate(made["given"]):
        given: dict[str, Any] = {f"observation.{k}": np.asarray(v) for k, v in flatten(observation).items()}
        inputs = before({**observation, "prompt": PROMPT})
        views = [inputs["image"][k] for k, present in inputs["image_mask"].items() if present]
        actions = rng.standard_normal((5, 32)).astype(np.float32)
        answer = after({"state": inputs["state"], "actions": actions.copy()})
        np.savez(
            out / f"{i}.npz",
            **given,
            images=np.stack(views),
            tokens=inputs["tokenized_prompt"][inputs["tokenized_prompt_mask"]],
            state=inputs["state"],
            actions=actions,
            robot=answer["actions"],
        )
    family = "pi05" if made["kind"] == ModelType.PI05 else "pi0"
    content = {"family": family, "discrete": made["discrete"], "prompt": PROMPT, "preset": CASES[name]}
    (out / "case.json").write_text(json.dumps(content))
    print(f"{name}: {len(made['given'])} observations")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(args.out)
    for seed, name in enumerate(CASES):
        write_case(name, args.out / name, tokenizer, seed)


if __name__ == "__main__":
    main()
