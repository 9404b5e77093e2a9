"""Write small checkpoints of starVLA as its trainer saves them, and the actions that its own code computes.

Run it with an interpreter that has lerobot 0.6.1's packages and omegaconf, and starVLA's repository on PYTHONPATH::

    PYTHONPATH=starVLA python tests/references/make_starvla_reference.py --out DIR [--variants groot state oft]

For each variant it writes ``DIR/VARIANT/``:

- ``run/config.yaml``, ``run/dataset_statistics.json`` and ``run/checkpoints/steps_1_pytorch_model.pt``, a pickle of the
  framework's ``state_dict``.

``DIR/kept.json``: these files but the weights, a small tokenizer, the names and shapes of the tensors, and starVLA's
actions, normalized: ``batch`` (3, H, 7) of one call with prompts of different lengths, and ``alone`` (H, 7), which
tests/nn/starvla_reference.json holds. Weights and observations are drawn by name.

Variants: `groot` (QwenGR00T without a state), `state` (with one), `pi` (QwenPI), `oft` (QwenOFT). Everything is float32
on the CPU. Qwen3-VL's hidden states are those of transformers 4.57, with which starVLA is trained: the last one is
taken before the final norm.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
import transformers

# isort: split
from groot_weights import draw, weight
from make_vla_jepa_reference import TASKS, backbone
from make_vla_jepa_reference import processor as qwen_processor
from omegaconf import OmegaConf
from PIL import Image
from starVLA.model.framework.VLM4A import QwenGR00T, QwenOFT, QwenPI
from starVLA.model.modules.action_model import GR00T_ActionHeader
from starVLA.model.modules.vlm import QWen3

COT = "Your task is {instruction}. produce the actions"
SIZE = (256, 256)
"""Of the cameras: that of whole tokens, and that which `obs_image_size` names."""
HORIZON = {"groot": 5, "state": 5, "pi": 6, "oft": 4}
FRAMEWORKS = {
    "groot": QwenGR00T.Qwen_GR00T,
    "state": QwenGR00T.Qwen_GR00T,
    "pi": QwenPI.Qwen_PI,
    "oft": QwenOFT.Qwenvl_OFT,
}
TRANSFORMER = {
    "dropout": 0.2, "final_dropout": True, "interleave_self_attention": True, "norm_type": "ada_norm", "num_layers": 4,
    "output_dim": 56, "positional_embeddings": None,
}  # fmt: skip


def settings(variant: str) -> dict[str, Any]:
    """config.yaml."""
    action: dict[str, Any] = {"action_dim": 7, "action_horizon": HORIZON[variant]}
    if variant == "oft":
        action |= {"action_model_type": "MLP"}
    else:
        kind = "LayerwiseFM" if variant == "pi" else "DiT-B"
        action |= {"action_model_type": kind, "hidden_size": 56, "state_dim": 8, "num_target_vision_tokens": 5,
                   "max_seq_len": 24, "num_inference_timesteps": 4, "diffusion_model_cfg": TRANSFORMER}  # fmt: skip
    name = {"oft": "QwenOFT", "pi": "QwenPI"}.get(variant, "QwenGR00T")
    data = {
        "data_mix": "libero_all",
        "CoT_prompt": COT,
        "obs_image_size": list(SIZE),
        "include_state": variant == "state",
    }
    return {
        "framework": {"name": name, "qwenvl": {"base_vlm": "Qwen3-VL-4B-Instruct"}, "action_model": action},
        "datasets": {"vla_data": data},
    }  # fmt: skip


def processor() -> Any:
    """As VLA-JEPA's, with the tokens of this prompt."""
    made = qwen_processor()
    made.tokenizer.add_tokens(["🔍"])
    made.tokenizer.padding_side = "left"
    return made


@contextlib.contextmanager
def before_the_norm(model: Any) -> Any:
    """Hidden states as transformers 4.57 returns them: the last one without the final norm."""
    norm = model.model.language_model.norm
    with mock.patch.object(norm, "forward", lambda x: x):
        yield


def build(variant: str) -> tuple[Any, Any]:
    made, model = processor(), backbone()
    small = {"input_embedding_dim": 128, "attention_head_dim": 64, "num_attention_heads": 2}
    with (
        mock.patch.dict(GR00T_ActionHeader.DiTConfig, {"DiT-B": small}),
        mock.patch.object(QWen3.Qwen3VLForConditionalGeneration, "from_pretrained", lambda *a, **k: model),
        mock.patch.object(QWen3.AutoProcessor, "from_pretrained", lambda *a, **k: made),
    ):
        policy = FRAMEWORKS[variant](OmegaConf.create(settings(variant))).float().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return policy, made.tokenizer


def chunk(policy: Any, examples: list[dict[str, Any]], noise: np.ndarray) -> np.ndarray:
    """Normalized actions (B, H, 7) of one call."""
    drawn = torch.from_numpy(noise)
    with (
        before_the_norm(policy.qwen_vl_interface.model),
        mock.patch.object(torch, "autocast", lambda *a, **k: contextlib.nullcontext()),
        mock.patch.object(torch, "randn", lambda *a, **k: drawn.clone()),
    ):
        return policy.predict_action(examples=examples)["normalized_actions"]


def write(variant: str, out: Path, seed: int) -> None:
    del seed
    policy, tokenizer = build(variant)
    run = out / "run"
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    content, horizon = settings(variant), HORIZON[variant]
    OmegaConf.save(OmegaConf.create(content), run / "config.yaml")
    low, high = -1.0 - abs(draw("starvla.low", 7)), 1.0 + abs(draw("starvla.high", 7))
    table = {"min": low - 0.1, "max": high + 0.1, "q01": low, "q99": high, "mean": (low + high) / 2, "std": high - low}
    statistics = {"franka": {"action": {k: np.float32(v).tolist() for k, v in table.items()}}}
    (run / "dataset_statistics.json").write_text(json.dumps(statistics))
    torch.save(policy.state_dict(), run / "checkpoints" / "steps_1_pytorch_model.pt")
    images: dict[str, Any] = {
        k: np.uint8((128 + 60 * draw(f"starvla.{k}", 3, *SIZE, 3)).clip(0, 255)) for k in ("image", "wrist")
    }
    state, noise = draw("starvla.state", 3, 8), draw("starvla.noise", 3, horizon, 7)
    examples = []
    for i, task in enumerate(TASKS):
        example: dict[str, Any] = {"image": [Image.fromarray(images[k][i]) for k in images], "lang": task}
        examples.append({**example, "state": state[i : i + 1]} if variant == "state" else example)
    answers = {"batch": chunk(policy, examples, noise), "alone": chunk(policy, examples[:1], noise[:1])[0]}
    path = out.parent / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    kept[variant] = {
        "config": content, "statistics": statistics, "tokenizer": json.loads(tokenizer.backend_tokenizer.to_str()),
        "shapes": {k: list(v.shape) for k, v in policy.state_dict().items()},
        "answers": {k: np.round(v.astype(float), 7).tolist() for k, v in answers.items()},
    }  # fmt: skip
    path.write_text(json.dumps(kept, ensure_ascii=False))
    print(variant, {k: (v.shape, float(np.abs(v).max())) for k, v in answers.items()}, transformers.__version__)


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(HORIZON))
