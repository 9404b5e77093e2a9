"""Write folders of a small Evo-1, as lerobot saves them, and the actions that it computes.

Run it with an interpreter that has lerobot 0.6.1 (CONTRIBUTING names the packages)::

    python tests/references/make_evo1_reference.py --out DIR [--variants plain resized bare full]

For each variant it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited, and a
  small ``tokenizer.json`` in place of InternVL's.
- ``answers.npz``: three observations (``front`` and ``wrist`` uint8 (3, H, W, 3), ``state`` (3, 8), ``noise``
  (3, H, 24)) with prompts of different lengths, and the robot's actions after lerobot's postprocessor: ``batch`` (3, H,
  m) of one call, ``alone`` (H, m) of the first observation, ``missing`` (H, m) without its first camera, and ``rtc``
  (H, m) of the first observation with a previous chunk, ``previous`` (H, 24), and a delay of 2.

``DIR/kept.json``: the JSON files of the small variants, the names and shapes of lerobot's tensors, and its actions,
which tests/nn/evo1_reference.json holds: weights and observations are drawn by name, so that any interpreter has the
same.

Variants: `plain`, images of the model's size; `resized`, images of two other sizes; `bare`, with a gripper of two
values, statistics that are mean and deviation, fewer numbers of an action, two embodiments and other denoising steps;
`full`, the published size with fewer steps, of which no file but the tokenizer is small (on request alone).

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

# isort: split
from evo1_weights import CONSTANT, CONSTANT_VALUE, TASKS, evo1_weight, given, previous
from lerobot.configs.types import NormalizationMode
from lerobot.policies.evo1 import internvl3_embedder, processor_evo1
from lerobot.policies.evo1.configuration_evo1 import Evo1Config
from lerobot.policies.evo1.modeling_evo1 import Evo1Policy
from lerobot.policies.rtc.configuration_rtc import RTCConfig

SPECIAL = ("<|endoftext|>", "<img>", "</img>", "<IMG_CONTEXT>")
SIDE = 56
CAMERAS = {
    "plain": {"front": (SIDE, SIDE), "wrist": (SIDE, SIDE)},
    "resized": {"front": (96, 132), "wrist": (50, 30)},
    "bare": {"front": (SIDE, SIDE), "wrist": (SIDE, SIDE)},
    "full": {"front": (448, 448), "wrist": (448, 448)},
}
SMALL: dict[str, Any] = {
    "image_resolution": (SIDE, SIDE), "vlm_num_layers": 3, "embed_dim": 128, "hidden_dim": 40, "state_hidden_dim": 48,
    "num_heads": 4, "num_layers": 3, "chunk_size": 8, "n_action_steps": 8, "num_inference_timesteps": 6,
    "max_text_length": 64,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "plain": SMALL,
    "resized": SMALL,
    "bare": {
        **SMALL, "num_inference_timesteps": 3, "binarize_gripper": True, "gripper_index": 5, "gripper_threshold": 0.1,
        "postprocess_action_dim": 6, "num_categories": 2, "default_embodiment_id": 1, "num_heads": 2,
        "normalization_mapping": {
            "VISUAL": NormalizationMode.IDENTITY, "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        },
    },
    "full": {"num_inference_timesteps": 4},
}  # fmt: skip
DELAY, HORIZON = 2, 6


def small_tokenizer() -> Any:
    """Words, digits and signs as tokens, next to the special ones."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    words = sorted({w for task in TASKS for w in task.split()} | {"Image", "-", ":", " ", "\n", "1", "2", "3"})
    vocabulary = {w: i for i, w in enumerate([*SPECIAL, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\d|[A-Za-z_]+|[:-]| "), "isolated")
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[0], unk_token="<unk>"
    )


def backbone(full: bool) -> Any:
    """InternVL with random weights, at the published size (InternVL3-1B) or a small one with heads as wide."""
    vision: dict[str, Any] = {"attention_bias": True}
    text: dict[str, Any] = {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    if not full:
        vision |= {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 144}
        vision |= {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}
        text |= {"hidden_size": 128, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 2}
        text |= {"num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 512}
    else:
        text |= {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
        text |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 32768}
    tokens = (448 if full else SIDE) ** 2 // 28**2
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=SPECIAL.index("<IMG_CONTEXT>"), image_seq_length=tokens
    )
    return transformers.InternVLModel._from_config(config, attn_implementation="eager").float().eval()


def build(variant: str) -> tuple[Any, Any]:
    """lerobot's policy with random weights, and its tokenizer."""
    tokenizer, model = small_tokenizer(), backbone(variant == "full")
    features = frame.features({f"observation.images.{k}": v for k, v in CAMERAS[variant].items()})
    config = Evo1Config(
        device="cpu", vlm_dtype="float32", use_amp=False, use_flash_attn=False, empty_cameras=1, **features,
        **CHANGES[variant],
    )  # fmt: skip
    parts = {"AutoModel": model, "AutoTokenizer": tokenizer}
    made: dict[str, Any] = {
        n: types.SimpleNamespace(from_pretrained=lambda *a, part=p, **k: part) for n, p in parts.items()
    }
    with mock.patch.multiple(internvl3_embedder, **made):
        policy = Evo1Policy(config).float().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(torch.from_numpy(evo1_weight(name, tuple(parameter.shape))))
    return policy, tokenizer


def chunk(policy: Any, processors: tuple[Any, Any], inputs: dict[str, Any], tasks: list[str], **rtc: Any) -> np.ndarray:
    """The robot's actions (B, H, m) of one call."""
    before, after = processors
    pixels = {
        f"observation.images.{k}": torch.from_numpy(v).permute(0, 3, 1, 2).float() / 255
        for k, v in inputs.items() if k in ("front", "wrist")
    }  # fmt: skip
    noise = torch.from_numpy((inputs["noise"] + 1) / 2).flatten(1)
    with mock.patch.object(torch, "rand", lambda *a, **k: noise.clone()):
        batch = before({**pixels, "observation.state": torch.from_numpy(inputs["state"]), "task": tasks})
        return after(policy.predict_action_chunk(batch, **rtc)).numpy()


def statistics(seed: int) -> dict[str, Any]:
    """Unequal for every number; the number `evo1_weights.CONSTANT` of the state has no range."""
    table = frame.statistics(np.random.default_rng(seed))
    table["observation.state"]["max"][CONSTANT] = table["observation.state"]["min"][CONSTANT] = CONSTANT_VALUE
    return table


def write(variant: str, out: Path, seed: int) -> None:
    policy, tokenizer = build(variant)
    processors = processor_evo1.make_evo1_pre_post_processors(policy.config, statistics(seed))
    folder, inputs = out / "checkpoint", given(CAMERAS[variant], policy.config.chunk_size)
    policy.save_pretrained(folder)
    for part in processors:
        part.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    first = {k: v[:1] for k, v in inputs.items()}
    answers = {"batch": chunk(policy, processors, inputs, list(TASKS))}
    answers["alone"] = chunk(policy, processors, first, [TASKS[0]])[0]
    less = {k: v for k, v in first.items() if k != "front"}
    with frame.changed(policy.config, {"empty_cameras": 2}):  # the empty one and another
        answers["missing"] = chunk(policy, processors, less, [TASKS[0]])[0]
    earlier = previous(policy.config.chunk_size)
    policy.config.rtc_config = RTCConfig(enabled=True, execution_horizon=HORIZON, max_guidance_weight=5.0)
    policy.init_rtc_processor()
    rtc = {"inference_delay": DELAY, "prev_chunk_left_over": torch.from_numpy(earlier[None]),
           "execution_horizon": HORIZON}  # fmt: skip
    answers["rtc"] = chunk(policy, processors, first, [TASKS[0]], **rtc)[0]
    saved: dict[str, Any] = {"tasks": np.array(TASKS), "previous": earlier, **inputs, **answers}
    np.savez(out / "answers.npz", **saved)
    if variant == "full":
        return
    path = out.parent / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"variants": {}}
    kept["variants"][variant] = {
        "shapes": {k: list(v.shape) for k, v in policy.state_dict().items()},
        "files": {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))},
        "answers": {k: np.round(v, 7).tolist() for k, v in answers.items()},
    }
    kept["statistics"] = {k: v.tolist() for k, v in load_file(next(folder.glob("*normalizer*"))).items()}
    path.write_text(json.dumps(kept))


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(CAMERAS), [name for name in CAMERAS if name != "full"])
