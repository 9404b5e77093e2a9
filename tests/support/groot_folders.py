"""Small GR00T checkpoint folders with the key names and shapes of the original code, which it left in
tests/nn/groot*_reference.json (tests/references/make_groot*_reference.py): N1.7, and at the end N1.6 and N1.5."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.references.groot_weights import draw, weight
from tests.support.lerobot_saved import Change

REFERENCES = {
    name: json.loads((Path(__file__).parents[1] / "nn" / f"{file}_reference.json").read_text())
    for name, file in (("groot", "groot"), ("groot_n16", "groot_n16"), ("groot_n15", "groot_n15"))
}
REFERENCE = REFERENCES["groot"]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>", "<unk>")  # fmt: skip
EAGLE = ("<img>", "</img>", "<IMG_CONTEXT>")
EAGLE_WORDS = ("system", "You", "are", "a", "helpful", "assistant", ".", "<", "image", "1>", "2>", "['", "']", "go")
WORDS = ("user", "\n", "pick", "up", "the", "black", "bowl", "open", "it", "put", "perform", "task")
TAG = "libero_sim"
STATE = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 2}
ACTION = {"x": 1, "y": 1, "z": 1, "roll": 1, "pitch": 1, "yaw": 1, "gripper": 1}
ROWS = 6
CONFIG: dict[str, Any] = {
    "architectures": ["Gr00tN1d7"], "model_type": "Gr00tN1d7", "model_name": "nvidia/Cosmos-Reason2-2B",
    "select_layer": 4, "backbone_embedding_dim": 128, "hidden_size": 56, "input_embedding_dim": 96, "max_seq_len": 24,
    "action_horizon": 8, "max_num_embodiments": 5, "max_state_dim": 132, "max_action_dim": 132,
    "use_alternate_vl_dit": True, "attend_text_every_n_blocks": 2, "add_pos_embed": True, "use_vlln": True,
    "state_history_length": 1, "num_inference_timesteps": 4, "num_timestep_buckets": 1000, "rtc_ramp_rate": 6.0,
    "diffusion_model_cfg": {
        "positional_embeddings": None, "num_layers": 8, "num_attention_heads": 2, "attention_head_dim": 48,
        "norm_type": "ada_norm", "output_dim": 56, "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64,
    },
}  # fmt: skip


@functools.cache
def tensors(release: str = "groot") -> dict[str, Tensor]:
    """Isaac-GR00T's tensors of a small model, BF16. The head of the language model is its table once more."""
    found = {n: torch.from_numpy(weight(n, tuple(s))).bfloat16() for n, s in REFERENCES[release]["shapes"].items()}
    if release != "groot":
        return found
    table = "backbone.model.model.language_model.embed_tokens.weight"
    return {**found, "backbone.model.lm_head.weight": found[table].clone()}


def statistics(groups: dict[str, int], rows: int = 0) -> dict[str, Any]:
    """Unequal for every number; with `rows`, a row for each action of a chunk."""
    table = {}
    for name, count in groups.items():
        shape = (rows, count) if rows else (count,)
        low, high = -1.0 - abs(draw(f"{name}.low", *shape)), 1.0 + abs(draw(f"{name}.high", *shape))
        entry = {"min": low - 0.1, "max": high + 0.1, "q01": low, "q99": high, "mean": (low + high) / 2}
        table[name] = {k: v.tolist() for k, v in {**entry, "std": (high - low) / 4}.items()}
    return table


def modality(state: dict[str, int], action: dict[str, int], cameras: tuple[str, ...], forms: Any = None) -> Any:
    """One embodiment's part of processor_config.json."""
    plain = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
    return {
        "video": {"delta_indices": [0], "modality_keys": list(cameras)},
        "state": {"delta_indices": [0], "modality_keys": list(state)},
        "action": {"delta_indices": list(range(ROWS)), "modality_keys": list(action),
                   "action_configs": forms or [plain] * len(action)},
    }  # fmt: skip


LIBERO = modality(STATE, ACTION, ("image", "wrist_image"))
SETTINGS: dict[str, Any] = {
    "use_percentiles": True, "clip_outliers": True, "formalize_language": True, "use_albumentations": False,
    "image_target_size": [64, 64], "image_crop_size": [60, 60], "shortest_image_edge": 64, "crop_fraction": 0.95,
    "max_action_horizon": 8, "use_relative_action": False, "letter_box_transform": False,
}  # fmt: skip
IDS = {TAG: 2, "new_embodiment": 4}


def write_tokenizer(folder: Path) -> None:
    """Words as tokens in Hugging Face's form, in place of Qwen's file."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate((*SPECIAL, *WORDS, *EAGLE_WORDS, *EAGLE))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" "), "removed"), pre_tokenizers.Split(Regex(r"\n|[A-Za-z_]+|[.,]"), "isolated")]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (*SPECIAL, *EAGLE)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_isaac(
    folder: Path, *, weights: dict[str, Tensor] | None = None, config: Any = CONFIG, modalities: Any = None,
    settings: Any = SETTINGS, stats: Any = None, ids: Any = IDS, change: Change = lambda files: None,
) -> Path:  # fmt: skip
    """Isaac-GR00T's layout: two shards and their index, and four JSON files, edited by `change`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    given = tensors() if weights is None else weights
    names, table = sorted(given), {}
    for part, half in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({n: given[n] for n in half}, str(folder / file))
        table |= dict.fromkeys(half, file)
    stats = {TAG: {"state": statistics(STATE), "action": statistics(ACTION)}} if stats is None else stats
    files = {
        "config.json": config,
        "model.safetensors.index.json": {"metadata": {}, "weight_map": table},
        "processor_config.json": {"processor_kwargs": {"modality_configs": modalities or {TAG: LIBERO}, **settings}},
        "statistics.json": stats,
        "embodiment_id.json": ids,
    }
    files = copy.deepcopy(files)
    change(files)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    write_tokenizer(folder)
    return folder


def put(file: str, *path: Any) -> Change:
    """Change a value in a file: `path` is its keys, then the value."""

    def change(files: dict[str, Any]) -> None:
        *keys, name, value = path
        place = files[file]
        for key in keys:
            place = place[key]
        place[name] = value

    return change


def write_lerobot(
    folder: Path, *, flat: bool = False, change: Change = lambda files: None, **changes: Any
) -> Path:  # fmt: skip
    """lerobot's form: one file with a prefix, and the saved processors, which `change` may edit before. `flat`: trained
    without a checkpoint's own groups; `changes`: to the step that packs inputs. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # lerobot writes a tied table under the head's name alone.
    table = "backbone.model.model.language_model.embed_tokens.weight"
    save_file({f"_groot_model.{n}": v for n, v in tensors().items() if n != table}, str(folder / "model.safetensors"))
    stats = {"state": statistics(STATE), "action": statistics(ACTION)}
    groups = {"raw_stats": None if flat else stats, "modality_config": None if flat else LIBERO}
    pack = {
        "state_horizon": 1, "action_horizon": 8, "valid_action_horizon": ROWS, "video_horizon": 1, "max_state_dim": 132,
        "max_action_dim": 132, "language_key": "task", "formalize_language": True, "embodiment_tag": TAG,
        "embodiment_mapping": IDS, "normalize_min_max": True, "clip_outliers": True, "use_percentiles": True,
        "video_modality_keys": ["image", "wrist_image"], **groups, **changes,
    }  # fmt: skip
    image_keys = ("image_crop_size", "image_target_size", "shortest_image_edge", "crop_fraction", "use_albumentations")
    encode = {k: SETTINGS[k] for k in (*image_keys, "letter_box_transform")}
    decode: dict[str, Any] = {
        "env_action_dim": 7, **groups, "use_percentiles": True, "use_relative_action": False,
        "action_decode_transform": "libero",
    }  # fmt: skip
    name = "groot_n1_7_action_decode_v1"
    if flat:
        name = "groot_action_unpack_unnormalize_v2"
        decode = {"env_action_dim": 7, "normalize_min_max": True, "libero_gripper_action": True}
    state_file = "policy_preprocessor_step_2_groot_n1_7_pack_inputs_v1.safetensors"
    features = {f"observation.images.{n}": {"type": "VISUAL", "shape": [3, 64, 64]} for n in ("image", "image2")}
    files = {
        "config.json": {
            "type": "groot", "chunk_size": 8, "embodiment_tag": TAG, "num_inference_timesteps": None,
            "input_features": {**features, "observation.state": {"type": "STATE", "shape": [8]}},
            "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        },
        "policy_preprocessor.json": {"name": "policy_preprocessor", "steps": [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {"registry_name": "groot_n1_7_pack_inputs_v1", "config": pack, "state_file": state_file},
            {"registry_name": "groot_n1_7_vlm_encode_v1", "config": encode},
            {"registry_name": "device_processor", "config": {"device": "cpu"}},
        ]},
        "policy_postprocessor.json": {"name": "policy_postprocessor", "steps": [
            {"registry_name": name, "config": decode},
            {"registry_name": "device_processor", "config": {"device": "cpu"}},
        ]},
    }  # fmt: skip
    files = copy.deepcopy(files)
    change(files)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    flat_stats = {}
    for feature, table_of in (("observation.state", stats["state"]), ("action", stats["action"])):
        for stat, source in (("min", "q01"), ("max", "q99"), ("mean", "mean"), ("std", "std")):
            joined = np.concatenate([entry[source] for entry in table_of.values()])
            flat_stats[f"{feature}.{stat}"] = torch.from_numpy(joined).float()
    save_file(flat_stats, str(folder / state_file))
    write_tokenizer(folder)
    return folder


def observation(seed: int = 0, prompt: str = "Pick up the bowl!") -> dict[str, Any]:
    """What LIBERO gives, 64 pixels a side."""
    rng = np.random.default_rng(seed)
    images = {f"observation/{n}": rng.integers(0, 256, (64, 64, 3), np.uint8) for n in ("image", "wrist_image")}
    return {**images, "observation/state": rng.uniform(-1, 1, 8), "prompt": prompt}


def plain_observation(seed: int = 0, prompt: str = "Pick up the bowl!") -> dict[str, Any]:
    """The same for an embodiment that is not LIBERO's."""
    given = observation(seed, prompt)
    images = {f"observation.images.{n}": given[f"observation/{n}"] for n in ("image", "wrist_image")}
    return {**images, "observation.state": given["observation/state"], "task": prompt}


OBSERVATIONS = {"groot": observation, "groot_n16": observation, "groot_n15": plain_observation}
"""What the small checkpoint of a release takes, by the family's name."""


# -- N1.6 and N1.5 ------------------------------------------------------------------------------------------------

N16_TAG, N15_TAG = "libero_panda", "new_embodiment"
N16_CONFIG: dict[str, Any] = {
    "architectures": ["Gr00tN1d6"], "model_type": "Gr00tN1d6", "model_name": "nvidia/Eagle-Block2A-2B-v2",
    "backbone_model_type": "eagle", "select_layer": 3, "backbone_embedding_dim": 128, "hidden_size": 56,
    "input_embedding_dim": 96, "max_seq_len": 24, "action_horizon": 8, "max_num_embodiments": 5, "max_state_dim": 20,
    "max_action_dim": 12, "use_alternate_vl_dit": True, "attend_text_every_n_blocks": 2, "eagle_collator": False,
    "diffusion_model_cfg": CONFIG["diffusion_model_cfg"], "num_inference_timesteps": 4,
}  # fmt: skip
N15_CONFIG: dict[str, Any] = {
    "architectures": ["GR00T_N1_5"], "model_type": "gr00t_n1_5", "action_dim": 32, "action_horizon": 16,
    "compute_dtype": "bfloat16", "hidden_size": 128, "torch_dtype": "bfloat16",
    "backbone_cfg": {"select_layer": 3, "project_to_dim": None, "reproject_vision": False, "tune_llm": False},
    "action_head_cfg": {
        "action_dim": 32, "action_horizon": 16, "max_action_dim": 32, "max_state_dim": 64, "hidden_size": 56,
        "input_embedding_dim": 96, "backbone_embedding_dim": 128, "max_seq_len": 24, "num_inference_timesteps": 4,
        "num_target_vision_tokens": 5, "num_timestep_buckets": 1000, "use_vlln": True, "add_pos_embed": True,
        "diffusion_model_cfg": {**CONFIG["diffusion_model_cfg"], "num_layers": 4, "cross_attention_dim": 128},
        "vl_self_attention_cfg": CONFIG["vl_self_attention_cfg"],
    },
}  # fmt: skip


def write_n16(folder: Path, **options: Any) -> Path:
    """Isaac-GR00T's layout of N1.6. `options`: as of `write_isaac`."""
    settings = {**SETTINGS, "model_type": "eagle", "image_target_size": [56, 56], "image_crop_size": [54, 54]}
    stats = {N16_TAG: {"state": statistics(STATE), "action": statistics(ACTION)}}
    usual = {
        "weights": tensors("groot_n16"), "config": N16_CONFIG, "settings": settings, "modalities": {N16_TAG: LIBERO},
        "stats": stats, "ids": {N16_TAG: 2},
    }  # fmt: skip
    return write_isaac(folder, **{**usual, **options})


def write_n15(folder: Path, change: Change = lambda files: None) -> Path:
    """Isaac-GR00T's layout of N1.5: statistics in experiment_cfg/metadata.json. `change` edits the files before."""
    (folder / "experiment_cfg").mkdir(parents=True, exist_ok=True)
    save_file(tensors("groot_n15"), str(folder / "model.safetensors"))
    stats = {"state": statistics(STATE), "action": statistics(ACTION)}
    video = {name: {"resolution": [64, 64], "channels": 3, "fps": 20.0} for name in ("image", "wrist_image")}
    parts = {kind: {name: {"shape": [size]} for name, size in groups.items()}
             for kind, groups in (("state", STATE), ("action", ACTION))}  # fmt: skip
    entry = {"statistics": stats, "modalities": {"video": video, **parts}, "embodiment_tag": N15_TAG}
    files = copy.deepcopy({"config.json": N15_CONFIG, "experiment_cfg/metadata.json": {N15_TAG: entry}})
    change(files)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    write_tokenizer(folder)
    return folder


def write_n15_lerobot(folder: Path, change: Change = lambda files: None) -> Path:
    """The files that lerobot 0.5.1 saves, which `change` may edit before."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"_groot_model.{n}": v for n, v in tensors("groot_n15").items()}, str(folder / "model.safetensors"))
    features = {f"observation.images.{n}": {"type": "VISUAL", "shape": [3, 64, 64]} for n in ("wrist", "front")}
    ids = {"new_embodiment": 31, "oxe_droid": 17, "agibot_genie1": 26, "gr1": 24, "so100": 2, "unitree_g1": 3}
    pack = {
        "state_horizon": 1, "action_horizon": 16, "max_state_dim": 64, "max_action_dim": 32, "language_key": "task",
        "formalize_language": False, "embodiment_tag": N15_TAG, "embodiment_mapping": ids, "normalize_min_max": True,
    }  # fmt: skip
    stored = "step.safetensors"
    files = {
        "config.json": {
            "type": "groot", "chunk_size": 50, "n_action_steps": 50, "base_model_path": "nvidia/GR00T-N1.5-3B",
            "tokenizer_assets_repo": "lerobot/eagle2hg-processor-groot-n1p5", "embodiment_tag": N15_TAG,
            "image_size": [224, 224], "lora_rank": 0, "use_bf16": True,
            "input_features": {**features, "observation.state": {"type": "STATE", "shape": [8]}},
            "output_features": {"action": {"type": "ACTION", "shape": [7]}},
        },
        "policy_preprocessor.json": {"name": "policy_preprocessor", "steps": [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {"registry_name": "groot_pack_inputs_v3", "config": pack, "state_file": stored},
            {"registry_name": "groot_eagle_encode_v3", "config": {}},
            {"registry_name": "groot_eagle_collate_v3", "config": {}},
            {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        ]},
        "policy_postprocessor.json": {"name": "policy_postprocessor", "steps": [
            {"registry_name": "groot_action_unpack_unnormalize_v1",
             "config": {"env_action_dim": 7, "normalize_min_max": True}, "state_file": stored},
            {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        ]},
    }  # fmt: skip
    files = copy.deepcopy(files)
    change(files)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    flat = {}
    for feature, size in (("observation.state", 8), ("action", 7)):
        (entry,) = statistics({"all": size}).values()
        flat |= {f"{feature}.{stat}": torch.tensor(entry[stat]).float() for stat in ("min", "max", "mean", "std")}
    save_file(flat, str(folder / stored))
    write_tokenizer(folder)
    return folder
