"""Settings of lerobot's folders that are unknown, unsupported or contradictory raise an error that names them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import evo1_folders, fastwam_folders, molmoact2_folders, vla_jepa_folders, xvla_folders
from tests.support.lerobot_folders import KINDS, made, write
from tests.support.lerobot_saved import Change, configure, edit, relative, saved_files, step, together, without
from vla_accel.checkpoints.lerobot_settings import FIELDS, STEPS
from vla_accel.checkpoints.settings import Setting, refused
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load

NORMALIZE, UNNORMALIZE, TOKENIZE = "normalizer_processor", "unnormalizer_processor", "tokenizer_processor"
STATE_IN_PROMPT, RENAME = "pi05_prepare_state_tokenizer_processor_step", "rename_observations_processor"
PREPROCESSOR = "policy_preprocessor"
STATE, IMAGE, HAND = "observation.state", "observation.images.image", "observation.images.hand"
NO_SIZE = r"expected a whole number from 1 to 4096, got"


def drop(name: str) -> Change:
    return lambda files: files.__setitem__(name, None)


def pop(field: str) -> Change:
    return lambda files: files["config"].pop(field)


def put(name: str, **entries: Any) -> Change:
    return lambda files: step(files, name).update(entries)


def shape(group: str, feature: str, *sizes: Any) -> Change:
    return lambda files: files["config"][group][feature].update(shape=[*sizes])


def append(entry: dict[str, Any]) -> Change:
    return lambda files: files[PREPROCESSOR]["steps"].append(entry)


def reverse(files: dict[str, Any]) -> None:
    files[PREPROCESSOR]["steps"].reverse()


def double(files: dict[str, Any]) -> None:
    files[PREPROCESSOR]["steps"].append(step(files, NORMALIZE))


def rename(names: dict[str, str]) -> Change:
    return edit(RENAME, rename_map=names)


CASES: list[tuple[str, Change, str]] = [
    # Files, classes and fields.
    ("pi05", drop(PREPROCESSOR), r"expected policy_preprocessor\.json with the statistics, found no such file"),
    ("pi05", drop("policy_postprocessor"), r"expected policy_postprocessor\.json"),
    ("pi05", configure(type="tdmpc"), "expected a policy of type pi0 or pi05 or .*, got .tdmpc."),
    ("pi05", configure(type="pi0"), f"expected steps among .*, got {STATE_IN_PROMPT}"),
    *((kind, pop(name), rf"config\.json: expected {name}, as lerobot saves it, found ")
      for kind in KINDS for name in ("type", "input_features")),
    *((kind, configure(use_peft=True), "expected adapter_config.json next to a policy with use_peft")
      for kind in ("pi05", "smolvla")),
    *((kind, configure(n_action_steps=99), r"n_action_steps: expected at most chunk_size, \d+, got 99")
      for kind in KINDS),
    *((kind, configure(use_depth_encoder=True), r"config\.json: expected settings of lerobot 0\.3\.3 to 0\.6\.1 and "
       "main.* use_depth_encoder True") for kind in KINDS),
    *(("pi05", configure(use_depth_encoder=value), "use_depth_encoder") for value in (3, "deep", [1], {"a": 1})),
    ("pi0", configure(proj_width=1024, num_steps=10), r"proj_width 1024, .*: the π0 of lerobot 0\.3 is another"),
    ("pi0_fast", configure(temperature=0.7), r"config\.json: temperature: expected 0\.0, got 0\.7"),
    # Sizes.
    *((kind, configure(chunk_size=value), rf"/config\.json: chunk_size: {NO_SIZE} {value}")
      for kind, value in (("pi05", None), ("pi05", -1), ("pi0_fast", 10**9), ("smolvla", 10**9), ("smolvla", None))),
    *(("pi05", edit(TOKENIZE, max_length=value), rf"/policy_preprocessor\.json: max_length: {NO_SIZE} {value!r}")
      for value in (10**9, 0, "long", None)),
    *((kind, configure(**{name: value}), rf"config\.json: {name}: expected .*got {value!r}")
      for kind, name in (("pi05", "num_inference_steps"), ("smolvla", "num_steps"))
      for value in (0, -1, 1001, "ten", 2.5)),
    ("pi0_fast", pop("max_decoding_steps"), rf"max_decoding_steps: {NO_SIZE} None"),
    ("pi0_fast", configure(max_decoding_steps=10**9), rf"/config\.json: max_decoding_steps: {NO_SIZE} 1000000000"),
    ("pi05", configure(rtc_training_max_delay=5), "rtc_training_max_delay: expected 0 to 4, got 5"),
    ("pi05", shape("input_features", STATE, 10**9), rf"/config\.json: observation\.state: {NO_SIZE} 1000000000"),
    ("pi05", shape("output_features", "action", "7"), rf"action: {NO_SIZE} '7'$"),
    ("pi05", configure(input_features={STATE: 8}), "a type and a shape, got others: observation.s"),
    ("pi05", configure(output_features={}), "expected a feature action of one axis, got None"),
    ("smolvla", shape("output_features", "action", 10), "expected statistics of action's 10 values, got 6"),
    # Against the weights.
    ("pi05", configure(image_resolution=[28, 56]), "expected a square image_resolution"),
    ("pi05", configure(image_resolution=[56, 56]), "image_size: config says 56, weights say 28"),
    ("pi05", configure(paligemma_variant=2), "expected prefix one of .*, got 2"),
    ("pi05", configure(paligemma_variant="gemma_2b"), "contradict each other: prefix gemma_2b: config says Gemma"),
    ("pi0_fast", configure(paligemma_variant="gemma_9b"), "expected prefix one of gemma_2b, .* got 'gemma_9b'"),
    ("pi0_fast", configure(image_resolution=[28, 56]), r"config says \[28, 56\], weights say \[28, 28\]"),
    ("pi0_fast", pop("action_tokenizer_name"), "expected action_tokenizer_name of type str"),
    ("pi0_fast", configure(fast_skip_tokens=200), "expected at most 184 tokens with"),
    ("smolvla", configure(num_vlm_layers=2), "num_vlm_layers: config says 2, weights say 3"),
    ("smolvla", configure(num_expert_layers=1), "num_expert_layers: config says 1, weights say 3"),
    ("smolvla", configure(expert_width_multiplier=0.5), r"config says \(24, 256\), weights say \(36, 256\)"),
    ("smolvla", configure(max_state_dim=32), "max_state_dim: config says 32, weights say 10"),
    ("smolvla", configure(self_attn_every_n_layers=0), r"misshaped.*layers\.0\.self_attn\.k_proj"),
    ("smolvla", configure(resize_imgs_with_padding=[64, 32]), r"expected two equal sizes, got \[64, 32\], images"),
    ("smolvla", configure(resize_imgs_with_padding=[64, 64]), r"config says \[64, 64\], weights say \[32, 32\]"),
    ("smolvla", configure(resize_imgs_with_padding=None), "expected two equal sizes, got null, with which"),
    # Steps.
    *((kind, append({"registry_name": "rotate"}), "expected steps among .*, got .*rotate") for kind in KINDS),
    ("pi05", put("to_batch_processor", registry_name="delta_actions"), "expected steps among .*, got delta_actions"),
    *(("pi05", put(RENAME, **{name: value}), r"policy_preprocessor\.json: expected steps with settings, got \[")
      for name, value in (("config", 3), ("config", {"rename_map": 3}), ("registry_name", [NORMALIZE]),
                          ("config", {"norm_map": {"STATE": ["MEAN_STD"]}}))),
    *((kind, without(name), f"expected a {name} step, as lerobot saves it, found ") for kind, name in (
        ("pi05", NORMALIZE), ("pi05", UNNORMALIZE), ("pi05", TOKENIZE), ("pi05", STATE_IN_PROMPT),
        ("pi0", "pi0_new_line_processor"), ("smolvla", "smolvla_new_line_processor"),
        ("pi0_fast", "pi0_fast_prepare_state_tokenizer_processor_step"), ("smolvla", NORMALIZE))),
    *((kind, reverse, r"policy_preprocessor\.json: expected .* before .*, got ") for kind in KINDS),
    ("pi0", double, "expected one normalizer_processor step, got 2"),
    *(("pi05", edit(name, **{setting: value}), rf"policy_preprocessor\.json: {name}: {setting}: expected ")
      for name, setting, value in (
        (TOKENIZE, "task_key", "instruction"), (TOKENIZE, "padding_side", "left"),
        ("device_processor", "float_dtype", "bfloat16"), (NORMALIZE, "stats", {"action": {"mean": [0.0]}}),
        (STATE_IN_PROMPT, "task_key", "instruction"), (STATE_IN_PROMPT, "include_state_in_prompt", False),
        (STATE_IN_PROMPT, "max_state_dim", 20))),
    # Statistics.
    ("pi05", edit(NORMALIZE, eps="x"), "normalizer_processor: expected eps of 0 or more, got 'x'"),
    ("pi05", put(NORMALIZE, state_file="../x.safetensors"), "expected the statistics of normalizer_pro"),
    ("pi05", edit(NORMALIZE, norm_map={"STATE": "LOGARITHM"}),
     "expected MEAN_STD or .* of observation.state, got 'LOGARITHM'"),
    ("pi0", edit(NORMALIZE, norm_map={"STATE": "MIN_MAX"}),
     r"expected observation\.state\.min and observation\.state\.max for MIN_"),
    # The robot's names.
    ("pi05", rename({"a": STATE, "b": STATE}), f"rename_map.*one name renamed to {STATE}, got a, b"),
    ("pi05", rename({HAND: IMAGE, "b": IMAGE}), f"rename_map.*one name renamed to {IMAGE}, got {HAND}, b"),
    ("pi05", rename({STATE: "observation.other"}), f"rename_map.*a name renamed to {STATE}.* as observation.other"),
    # Relative actions.
    *((kind, change, "relative actions: expected one value in all files, got ") for kind in ("pi0", "pi05", "pi0_fast")
      for change in (
        configure(use_relative_actions=True),
        edit("relative_actions_processor", enabled=True),
        edit("absolute_actions_processor", enabled=True),
        together(relative(), configure(use_relative_actions=False)),
        together(relative(), without("absolute_actions_processor")),
        together(relative(), without("relative_actions_processor")))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "message"), CASES)
def test_a_folder_that_is_not_understood_is_refused_by_name(
    kind: str, change: Change, message: str, tmp_path: Path
) -> None:
    write(tmp_path, kind, change, release="main" if "rtc_training" in message else "0.6.1")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


FIXED = [(kind, n, s) for kind in KINDS for s in FIELDS[kind] if s.use == "fixed" for n in s.names]


@pytest.mark.parametrize(("kind", "name", "setting"), FIXED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_fixed_field_is_refused_by_name(kind: str, name: str, setting: Setting, tmp_path: Path) -> None:
    value = next(v for v in (True, False, 7) if v not in setting.values)
    write(tmp_path, kind, configure(**{name: value}), release="main")
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert f"config.json: {name}: expected " in str(raised.value) and setting.reason in str(raised.value)


@pytest.mark.parametrize("name", [*STEPS])
def test_an_unknown_setting_of_a_step_is_refused(name: str, tmp_path: Path) -> None:
    others = vla_jepa_folders.write, evo1_folders.write, fastwam_folders.write, molmoact2_folders.write
    own = (partial(xvla_folders.write, variant=variant) for variant in ("plain", "libero", "agibot"))
    main = partial(vla_jepa_folders.write, variant="relative")
    writers = [*(partial(write, kind=kind) for kind in KINDS), *others, *own, main]
    folders = (make(tmp_path / str(number)) for number, make in enumerate(writers))
    folder, files = next((folder, files) for folder in folders if f"'{name}'" in str(files := saved_files(folder)))
    edit(name, speed=3)(files)
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{name}: expected settings of lerobot .*got speed 3"):
        load(folder)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_unknown_field_that_is_off_changes_nothing(value: Any, tmp_path: Path) -> None:
    assert made(tmp_path, "pi05", configure(use_depth_encoder=value)).family.name == "pi05"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"num_inference_timesteps": 8, "lora_rank": 0}, []),
        ({"tokenizer_assets_repo": "lerobot/eagle"}, []),
        ({"use_depth_encoder": True}, ["use_depth_encoder True"]),
    ],
)
def test_groots_config_has_a_table_too(content: dict[str, Any], expected: list[str]) -> None:
    found = [*refused({"type": "groot", **content}, FIELDS["groot"], "lerobot")]
    assert len(found) == len(expected) and all(part in text for part, text in zip(expected, found, strict=True))
