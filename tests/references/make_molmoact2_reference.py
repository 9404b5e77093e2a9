"""Write folders of a small MolmoAct2, as lerobot saves them and as its authors publish them, and lerobot's actions.

Run it with an interpreter that has lerobot 0.6.1 or its main branch (CONTRIBUTING names the packages)::

    python tests/references/make_molmoact2_reference.py --out DIR [--variants plain resized robot tagged adapted]

For each variant it writes ``DIR/VARIANT/``:

- ``published/``: the model in the layout of allenai/MolmoAct2: config.json, weights, tokenizer, processor_config.json
  and norm_stats.json.
- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, not edited.
- ``answers.npz``: three observations (``front`` and ``wrist`` uint8 (3, H, W, 3), ``state`` (3, 8), ``noise``
  (3, 6, 32)) with prompts of different lengths, and the robot's actions after lerobot's postprocessor: ``alone`` (3, 6,
  7) of a call for each observation, ``missing`` (6, 7) without a camera of the first one, ``guided`` (6, 7) with
  real-time chunking, and ``published`` (3, 6, 7) by the authors' own call on their folder.

``DIR/kept.json``: the JSON files of every variant, the names and shapes of the tensors, and the actions, which
tests/nn/molmoact2_reference.json holds: weights and observations are drawn by name, so that any interpreter has the
same. The kept `adapted` was written by lerobot's main branch, the others by 0.6.1.

Variants: `plain`, images of the model's size, and a prompt that 0.6.1's expert sees in part; `resized`, images of two
sizes, tokens at the end of image rows, and all of the prompt; `robot`, whose joints are converted, cameras in an order
of its own, and grippers scaled as well; `tagged`, statistics and cameras of norm_stats.json; `adapted` (only on
request, needs peft), `plain` with a LoRA adapter within the policy. `guided` are the actions of `plain` in a call with
a previous chunk.

lerobot 0.6.1 counts the positions of a batch's shorter prompts from the padding before them, which changes the actions;
every answer here is of one observation. Everything is float32 on the CPU. This file imports nothing of vla_accel on
purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

# isort: split
from lerobot.policies.molmoact2 import modeling_molmoact2, processor_molmoact2
from lerobot.policies.molmoact2.configuration_molmoact2 import MolmoAct2Config
from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import MolmoAct2Config as Published
from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import MolmoAct2ForConditionalGeneration
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from molmoact2_weights import CAMERAS, SIZES, TASKS, images_of, noise, previous, state, weight
from transformers import Qwen2Tokenizer

IMAGE_TOKENS = (
    "<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>", "<frame_start>",
    "<frame_end>",
)  # fmt: skip
ADDED = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS, "<action_output>", "<action_start>", "<action_end>",
    "<state_start>", "<state_end>", "<setup_start>", "<setup_end>", "<control_start>", "<control_end>",
    *(f"<state_{index}>" for index in range(256)),
)  # fmt: skip
WORDS = 320
NAMES = {
    "observation.state": ["x", "y", "z", "a", "b", "c", "left_gripper", "d"],
    "action": ["x", "y", "z", "a", "b", "c", "gripper"],
}
SETUP, CONTROL = "one arm", "delta end-effector pose"
MAIN = "train_mode_vlm" in MolmoAct2Config.__dataclass_fields__
"""Whether lerobot is its main branch."""
PLAIN: dict[str, Any] = {"setup_type": SETUP, "control_mode": CONTROL, "dataset_feature_names": NAMES}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "resized": {
        "setup_type": SETUP, "add_control_tokens": False, "control_mode": CONTROL, "num_inference_steps": 4,
        # Without names of dimensions 0.6.1 scales grippers as well; the main branch requires this setting.
        **({"normalize_gripper": True} if MAIN else {}),
    },
    "robot": {
        **PLAIN, "normalize_gripper": True,
        "image_keys": ["observation.images.wrist", "observation.images.front"], "normalize_language": False,
        "joint_signs": [1.0, -1.0, 1.0], "joint_offsets": [0.0, 0.3, -0.2],
    },
    "tagged": {"norm_tag": "libero"},
    "adapted": {
        **PLAIN, **({"train_mode_vlm": "lora"} if MAIN else {"enable_lora_vlm": True}), "lora_rank": 4, "lora_alpha": 6,
    },
}  # fmt: skip


def tokenizer() -> Qwen2Tokenizer:
    """Qwen's words over a small vocabulary, with MolmoAct2's special tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [
        *(t.lower() for t in TASKS),
        "The task is to. The setup is. The current state of the robot is. The expected control mode is. Given these, "
        "what action should the robot take to complete the task? Image user assistant",
        SETUP, CONTROL,
    ]  # fmt: skip
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts * 3, trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=sorted(alphabet)))
    model = json.loads(trained.to_str())["model"]
    merges: Any = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    made = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": list(ADDED)})
    made.padding_side = "left"
    return made


def published(variant: str, folder: Path) -> MolmoAct2ForConditionalGeneration:
    """Write the model in the layout of its authors, and return it."""
    made = tokenizer()
    ids = {token: made.convert_tokens_to_ids(token) for token in ADDED}
    sdpa = {"attn_implementation": "sdpa"}
    config = Published(
        vit_config={
            "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 24, "image_default_input_size": [70, 70], "image_num_pos": 25, **sdpa,
        },
        adapter_config={
            "vit_layers": [-2, -4], "pooling_attention_mask": variant != "resized", "hidden_size": 72,
            "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24, "intermediate_size": 80,
            "text_hidden_size": 64, **sdpa,
        },
        text_config={
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 352,
            "additional_vocab_size": 280, "qkv_bias": False, "num_hidden_layers": 3, "intermediate_size": 96,
            "max_position_embeddings": 1024, "rope_theta": 5000000.0, "use_qk_norm": True, "qk_norm_type": "qwen3",
            **sdpa,
        },
        action_expert_config={
            "hidden_size": 48, "num_layers": 3, "num_heads": 4, "ffn_multiple_of": 16, "timestep_embed_dim": 32,
        },
        image_start_token_id=ids["<im_start>"], image_end_token_id=ids["<im_end>"], image_patch_id=ids["<im_patch>"],
        image_col_id=ids["<im_col>"], low_res_image_start_token_id=ids["<low_res_im_start>"],
        image_low_res_id=ids["<im_low>"], frame_start_token_id=ids["<frame_start>"],
        frame_end_token_id=ids["<frame_end>"], action_output_token_id=ids["<action_output>"],
        action_start_token_id=ids["<action_start>"], action_end_token_id=ids["<action_end>"],
        state_start_token_id=ids["<state_start>"], state_end_token_id=ids["<state_end>"],
        state_token_start_id=ids["<state_0>"], num_state_tokens=256, max_action_horizon=6, n_obs_steps=1,
        action_mode="continuous" if variant == "resized" else "both", flow_matching_num_steps=5,
        mask_action_dim_padding=True, eos_token_id=ids["<|im_end|>"],
    )  # fmt: skip
    model = MolmoAct2ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    images = {
        "crop_mode": "resize", "do_convert_rgb": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "image_processor_type": "MolmoAct2ImageProcessor", "max_crops": 8, "overlap_margins": [4, 4], "patch_size": 14,
        "pooling_size": [2, 2], "resample": 2, "size": {"height": 70, "width": 70},
        "auto_map": {"AutoProcessor": "processing_molmoact2.MolmoAct2Processor"},
    }  # fmt: skip
    processor = {
        "image_processor": images, "image_use_col_tokens": True, "use_frame_special_tokens": True,
        "processor_class": "MolmoAct2Processor", "use_single_crop_start_token": True,
        "use_single_crop_col_tokens": None if variant == "resized" else False,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "norm_stats.json").write_text(json.dumps(norm_stats()))
    return model


def statistics() -> dict[str, Any]:
    """Unlike in every dimension; grippers, without a scaling, lie in [-1, 1]; one number of the state never varies."""
    found = {n: dict(table) for n, table in frame.statistics(np.random.default_rng(0)).items()}
    for key, at in (("observation.state", 6), ("action", 6)):
        found[key]["min"][at], found[key]["max"][at] = -1.0, 1.0
    return found


def norm_stats() -> dict[str, Any]:
    """As the authors write them, of two robots."""
    tables = {n: {k: v.tolist() for k, v in table.items()} for n, table in statistics().items()}
    masks = {n: ["gripper" not in name for name in names] for n, names in NAMES.items()}
    tables["observation.state"]["q99"][3] += 1.0
    tables["observation.state"]["max"][3] = tables["observation.state"]["min"][3]
    one = {
        "action_stats": {**tables["action"], "mask": masks["action"], "names": NAMES["action"]},
        "state_stats": {**tables["observation.state"], "mask": masks["observation.state"]},
        "camera_keys": ["observation.images.wrist", "observation.images.front"], "setup_type": SETUP,
        "control_mode": CONTROL, "action_horizon": 6, "n_action_steps": 6,
    }  # fmt: skip
    other = {**one, "setup_type": "another arm", "camera_keys": one["camera_keys"][::-1], "action_horizon": 4}
    return {"norm_mode": "q01_q99", "metadata_by_tag": {"libero": one, "other": other}}


def given(variant: str) -> dict[str, Any]:
    return {**images_of(variant), "state": state(), "noise": noise()}


def build(variant: str, folder: Path) -> tuple[Any, Any]:
    """lerobot's policy and its processors."""
    sizes = SIZES.get(variant, dict.fromkeys(CAMERAS, (70, 70)))
    plain = {"dtype": "float32", "train_mode_vlm": "fft"} if MAIN else {"model_dtype": "float32"}
    config = MolmoAct2Config(
        checkpoint_path=str(folder), device="cpu", action_mode="continuous", inference_action_mode="continuous",
        chunk_size=6, n_action_steps=6, **frame.features({f"observation.images.{k}": v for k, v in sizes.items()}),
        **{**plain, **CHANGES[variant]},
    )  # fmt: skip
    policy = modeling_molmoact2.MolmoAct2Policy(config).float().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    table = None if "norm_tag" in CHANGES[variant] else statistics()
    return policy, processor_molmoact2.make_molmoact2_pre_post_processors(config, table)


def loaded(policy: Any, folder: Path) -> Any:
    """Save a policy, and return it as lerobot loads it: its main branch remembers that it comes from a folder."""
    policy.save_pretrained(folder)
    config = MolmoAct2Config.from_pretrained(folder)
    config.pretrained_path = folder
    return modeling_molmoact2.MolmoAct2Policy.from_pretrained(folder, config=config, strict=True)


def chunk(
    policy: Any, processors: tuple[Any, Any], one: dict[str, Any], task: str, **options: Any
) -> np.ndarray:  # fmt: skip
    """The robot's actions (6, 7) of one call."""
    before, after = processors
    pixels = {
        f"observation.images.{k}": torch.from_numpy(one[k]).permute(2, 0, 1).float() / 255 for k in CAMERAS if k in one
    }
    drawn = torch.from_numpy(one["noise"][None])
    with mock.patch.object(torch, "randn", lambda *a, **k: drawn.clone()):
        batch = before({**pixels, "observation.state": torch.from_numpy(one["state"]), "task": task})
        return after(policy.predict_action_chunk(batch, **options))[0].numpy()


def theirs(model: Any, processor: Any, one: dict[str, Any], task: str) -> np.ndarray:
    """The same by the authors' own call, which has no lerobot around it."""
    drawn = torch.from_numpy(one["noise"][None])
    with mock.patch.object(torch, "randn", lambda *a, **k: drawn.clone()):
        found = model.predict_action(
            processor=processor, images=[one["wrist"], one["front"]], task=task, state=one["state"], norm_tag="libero",
            inference_action_mode="continuous", enable_cuda_graph=False,
        )  # fmt: skip
    return found.actions[0].numpy()


def write(variant: str, out: Path, seed: int) -> None:
    del seed
    model = published(variant, out / "published")
    policy, processors = build(variant, out / "published")
    folder = out / "checkpoint"
    policy = loaded(policy, folder)
    for part in processors:
        part.save_pretrained(folder)
    inputs = given(variant)
    each = [{k: v[i] for k, v in inputs.items()} for i in range(3)]
    answers = {"alone": np.stack([chunk(policy, processors, *one) for one in zip(each, TASKS, strict=True)])}
    if variant != "robot":  # whose cameras are required
        answers["missing"] = chunk(policy, processors, {k: v for k, v in each[0].items() if k != "wrist"}, TASKS[0])
    if variant == "tagged":
        processor = processor_molmoact2._load_local_molmoact2_processor(str(out / "published"))
        model.config._name_or_path = str(out / "published")
        answers["published"] = np.stack([theirs(model, processor, *one) for one in zip(each, TASKS, strict=True)])
    if variant == "plain":
        policy.config.rtc_config = RTCConfig(enabled=True, execution_horizon=5)
        policy.init_rtc_processor()
        left = torch.from_numpy(np.pad(previous(), ((0, 0), (0, 25))))[None]
        options = {"prev_chunk_left_over": left, "inference_delay": 2, "execution_horizon": 5}
        answers["guided"] = chunk(policy, processors, each[0], TASKS[0], **options)
    saved: dict[str, Any] = {"tasks": np.array(TASKS), **inputs, **answers}
    np.savez(out / "answers.npz", **saved)
    path, shared = out.parent / "kept.json", ("tokenizer.json", "tokenizer_config.json")
    kept = json.loads(path.read_text()) if path.is_file() else {"variants": {}}
    shapes = {k: list(v.shape) for k, v in policy.state_dict().items()}
    if variant != "adapted":
        kept["shapes"] = shapes
    kept["variants"][variant] = {
        **({"shapes": shapes} if variant == "adapted" else {}),
        "files": {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))},
        "published": {
            p.name: json.loads(p.read_text())
            for p in sorted((out / "published").glob("*.json")) if p.name not in ("norm_stats.json", *shared)
        },
        "statistics": {
            p.name: {k: v.tolist() for k, v in load_file(p).items()} for p in sorted(folder.glob("policy*.safetensors"))
        },
        "answers": {k: np.round(v, 7).tolist() for k, v in answers.items()},
    }  # fmt: skip
    kept["shared"] = {name: json.loads((out / "published" / name).read_text()) for name in shared}
    kept["norm_stats"] = norm_stats()
    # Where the model was is of this machine alone.
    path.write_text(json.dumps(kept).replace(str(out / "published"), "PUBLISHED"))


if __name__ == "__main__":
    frame.write_variants(__doc__, write, list(CHANGES), [name for name in CHANGES if name != "adapted"])
