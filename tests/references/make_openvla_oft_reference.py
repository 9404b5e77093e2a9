"""Write small checkpoints of OpenVLA-OFT as its trainer saves them, and the actions that its own code computes.

Run it with an interpreter that has torch, torchvision, diffusers, TensorFlow 2.15, transformers 4.40.1, tokenizers
0.19.1, timm 0.9.16 and openvla-oft's repository on PYTHONPATH::

    PYTHONPATH=openvla-oft python tests/references/make_openvla_oft_reference.py --variant libero --out DIR

Variants: `libero` (two images, a state), `bare` (one image, no state), `aloha` (three images, chunks of 25, minimum and
maximum). openvla-oft reads its robot's constants from the command line, so each variant needs a process of its own.

It writes ``DIR/VARIANT/``: the merged model in shards, ``action_head--7_checkpoint.pt``,
``proprio_projector--7_checkpoint.pt``, ``dataset_statistics.json`` and the processor's files. ``DIR/kept.json``: these
files but the weights, the names and shapes of the tensors, and the robot's actions (3, H, A) of three observations
whose images have the model's size, and of one (H, A) whose images have not; and some pixels of TensorFlow's resized and
cropped images. tests/nn/openvla_oft_reference.json holds it.

Everything is float32 on the CPU. As in the transformers fork that openvla-oft requires, no token is masked.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import whole_torchvision  # noqa: F401

# isort: split
import timm
import torch
from groot_weights import draw, weight
from PIL import Image

VIEWS = {"libero": 2, "bare": 1, "aloha": 3}
TASKS = ("Put the bowl on the plate", "open the drawer", "pick up the bowl on the stove and put it on the plate")
WHOLE, ODD = ((224, 224),), ((256, 256), (120, 200), (200, 333))
"""Sizes of cameras: of the model's images, and others, which are resized."""
STEP = 14
"""Every so many rows and columns of the images are kept."""


def stub(name: str, **content: Any) -> None:
    """Put a module into sys.modules; a package of the repository keeps its folder, but its `__init__` does not run."""
    module = types.ModuleType(name)
    found = None if content else importlib.util.find_spec(name)
    if found is not None:
        module.__path__ = list(found.submodule_search_locations or ())
    vars(module).update(content)
    sys.modules[name] = module


for _name in ("prismatic", "prismatic.extern", "prismatic.extern.hf", "prismatic.vla", "prismatic.training",
              "prismatic.models", "experiments", "experiments.robot"):  # fmt: skip
    stub(_name)
for _name in ("prismatic.vla.datasets", "prismatic.vla.datasets.rlds", "prismatic.vla.datasets.rlds.utils"):
    stub(_name, kept=None)
from prismatic.vla.constants import ACTION_DIM, PROPRIO_DIM, NormalizationType

stub("prismatic.vla.datasets.rlds.utils.data_utils", NormalizationType=NormalizationType)
stub("prismatic.models.film_vit_wrapper", FiLMedPrismaticVisionBackbone=None)
stub("json_numpy", patch=lambda: None)

from experiments.robot import openvla_utils
from prismatic.extern.hf.configuration_prismatic import OpenVLAConfig
from prismatic.extern.hf.modeling_prismatic import OpenVLAForActionPrediction
from prismatic.extern.hf.processing_prismatic import PrismaticImageProcessor, PrismaticProcessor
from prismatic.models.action_heads import L1RegressionActionHead
from prismatic.models.projectors import ProprioProjector
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaModel

WIDTH = 64
SMALL = {"embed_dim": WIDTH, "depth": 3}
TEXT = {
    "vocab_size": 32064, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 32000,
}  # fmt: skip


def unmasked(self: Any, mask: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(x.shape[0], 1, x.shape[1], x.shape[1], dtype=x.dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    """Llama's special tokens, and a token for each byte."""
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({w: i for i, w in enumerate([*special, *letters])}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def statistics(numbers: int, name: str) -> dict[str, Any]:
    low, high = -1.0 - abs(draw(f"oft.{name}.low", numbers)), 1.0 + abs(draw(f"oft.{name}.high", numbers))
    table = {"min": low - 0.1, "max": high + 0.1, "q01": low, "q99": high, "mean": (low + high) / 2, "std": high - low}
    return {k: v.astype(float).tolist() for k, v in table.items()}


def image(name: str, height: int, width: int) -> np.ndarray:
    """Cells of 8 x 8 pixels with some noise, uint8."""
    cells = draw(f"{name}.cells", -(-height // 8), -(-width // 8), 3).repeat(8, 0).repeat(8, 1)[:height, :width]
    return (128 + 50 * cells + 4 * draw(f"{name}.noise", height, width, 3)).clip(0, 255).astype(np.uint8)


def observation(variant: str, index: int, sizes: Any) -> dict[str, Any]:
    names = (
        ("full_image", "left_wrist_image", "right_wrist_image") if variant == "aloha" else ("full_image", "wrist_image")
    )
    images = {n: image(f"oft.{n}.{index}", *sizes[i % len(sizes)]) for i, n in enumerate(names[: VIEWS[variant]])}
    if variant == "aloha" and sizes != WHOLE:  # as aloha_utils.resize_image_for_preprocessing
        images = {
            n: np.array(Image.fromarray(x).resize((256, 256), Image.Resampling.BICUBIC)) for n, x in images.items()
        }
    return {**images, "state": draw(f"oft.state.{index}", PROPRIO_DIM).astype(np.float64) * 1.5}


def fill(module: torch.nn.Module, start: str = "") -> Any:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weight(start + name, tuple(parameter.shape))))
    return module.float().eval()


def build(variant: str) -> dict[str, Any]:
    made = timm.create_model
    robot = {"action": statistics(ACTION_DIM, "action"), "proprio": statistics(PROPRIO_DIM, "proprio")}
    if variant != "aloha":
        robot["action"]["mask"] = [True] * 6 + [False]
    stats = {
        f"{'aloha' if variant == 'aloha' else 'libero'}_task_no_noops": {
            **robot,
            "num_transitions": 9,
            "num_trajectories": 3,
        }
    }
    base = {"another_robot": {"action": statistics(ACTION_DIM, "other")}}
    with mock.patch.object(timm, "create_model", lambda *a, **k: made(*a, **k, **SMALL)):
        config = OpenVLAConfig(
            norm_stats=base, vision_backbone_id="dinosiglip-vit-so-224px", llm_backbone_id="llama2-7b-pure",
            image_resize_strategy="resize-naive", text_config=TEXT,
        )  # fmt: skip
        model = fill(OpenVLAForActionPrediction(config))
    model.vision_backbone.set_num_images_in_input(VIEWS[variant])
    head = fill(L1RegressionActionHead(input_dim=WIDTH, hidden_dim=WIDTH, action_dim=ACTION_DIM), "action_head.")
    projector = None if variant == "bare" else fill(ProprioProjector(WIDTH, PROPRIO_DIM), "proprio_projector.")
    pixels = PrismaticImageProcessor(
        use_fused_vision_backbone=True, image_resize_strategy="resize-naive", input_sizes=[(3, 224, 224)] * 2,
        interpolations=["bicubic"] * 2, means=[(0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5)],
        stds=[(0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5)],
    )  # fmt: skip
    processor = PrismaticProcessor(image_processor=pixels, tokenizer=tokenizer())
    return {"model": model, "head": head, "projector": projector, "processor": processor, "stats": stats}


def actions(variant: str, parts: dict[str, Any], index: int, sizes: Any) -> np.ndarray:
    """The robot's actions (H, A), as LIBERO's evaluation sends them to the simulator."""
    model = parts["model"]
    model.norm_stats = parts["stats"]
    (key,) = parts["stats"]
    cfg = SimpleNamespace(
        num_images_in_input=VIEWS[variant], center_crop=True, use_proprio=parts["projector"] is not None,
        unnorm_key=key,
    )  # fmt: skip
    with mock.patch.object(torch, "bfloat16", torch.float32):
        found = openvla_utils.get_vla_action(
            cfg, model, parts["processor"], observation(variant, index, sizes), TASKS[index],
            action_head=parts["head"], proprio_projector=parts["projector"],
        )  # fmt: skip
    chunk = np.stack(found).astype(np.float64)
    if variant != "aloha":
        chunk[:, -1] = -np.sign(2 * chunk[:, -1] - 1)
    return chunk


def sampled() -> dict[str, Any]:
    """Some pixels of TensorFlow's resized and cropped images of each size."""
    found = {}
    for height, width in (*ODD, (224, 224)):
        whole = image("oft.sampled", height, width)
        if whole.shape[:2] != (224, 224):
            whole = openvla_utils.resize_image_for_policy(whole, 224)
        found[f"{height}x{width}"] = np.asarray(openvla_utils.center_crop_image(whole))[::STEP, ::STEP].tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=sorted(VIEWS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = options.out / options.variant
    folder.mkdir(parents=True, exist_ok=True)
    with mock.patch.object(LlamaModel, "_update_causal_mask", unmasked):
        parts = build(options.variant)
        answers = {
            "whole": np.stack([actions(options.variant, parts, i, WHOLE) for i in range(3)]),
            "resized": actions(options.variant, parts, 0, ODD),
        }
    parts["model"].norm_stats = parts["model"].config.norm_stats
    parts["model"].save_pretrained(folder, max_shard_size="9MB")
    parts["processor"].save_pretrained(folder)
    (folder / "dataset_statistics.json").write_text(json.dumps(parts["stats"]))
    tensors = {**parts["model"].state_dict()}
    for name, key in (("action_head", "head"), ("proprio_projector", "projector")):
        if parts[key] is not None:
            state = {f"module.{k}": v for k, v in parts[key].state_dict().items()}
            torch.save(state, folder / f"{name}--7_checkpoint.pt")
            tensors.update({f"{name}.{k.removeprefix('module.')}": v for k, v in state.items()})
    path = options.out / "kept.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    files = {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if "index" not in p.name}
    kept[options.variant] = {
        "files": files, "shapes": {k: list(v.shape) for k, v in tensors.items()},
        "answers": {k: np.round(v, 8).tolist() for k, v in answers.items()},
    }  # fmt: skip
    kept["images"] = sampled()
    path.write_text(json.dumps(kept, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
