"""LoRA adapters of every family: an adapted checkpoint has the weights of one that was merged on disk, and an adapter's
settings are honoured or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints.test_lora import ALPHA, RANK, factors, write_adapter
from tests.support import groot_folders, tiny_pi0_fast, tiny_smolvla
from tests.support.published_folders import write_lerobot
from tests.support.tiny import write_tiny_checkpoint
from vla_accel import PolicyConfig
from vla_accel.checkpoints.lora import CONFIG, WEIGHTS, read_lora
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load

GEMMA = "paligemma_with_expert."
SMOL = "vlm_with_expert."
LLM = "backbone.model.model.language_model.layers."


# How lerobot saves a small base, what its names begin with, the modules to adapt, and those that no action depends on
# (with the number of their columns, where the base does not store them).
BASES: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...], dict[str, tuple[int, int]]]] = {
    "pi0": (
        partial(write_lerobot, kind="pi0"), "model.",
        (f"{GEMMA}gemma_expert.model.layers.1.self_attn.v_proj", "state_proj", "action_time_mlp_in"),
        {f"{GEMMA}gemma_expert.lm_head": (9, 14), f"{GEMMA}paligemma.lm_head": (9, 18)},
    ),
    "pi05": (
        partial(write_lerobot, kind="pi05"), "model.",
        (f"{GEMMA}paligemma.model.language_model.layers.0.mlp.up_proj", "time_mlp_in"),
        {f"{GEMMA}gemma_expert.lm_head": (9, 14), f"{GEMMA}paligemma.lm_head": (9, 18)},
    ),
    "smolvla": (
        tiny_smolvla.write_lerobot, "model.",
        (f"{SMOL}lm_expert.layers.0.self_attn.q_proj", f"{SMOL}lm_expert.layers.1.self_attn.v_proj",
         f"{SMOL}vlm.model.text_model.layers.0.self_attn.k_proj", "state_proj", "action_time_mlp_out"),
        {f"{SMOL}vlm.lm_head": (9, 64)},
    ),
    "pi0_fast": (
        partial(tiny_pi0_fast.write_lerobot, config=tiny_pi0_fast.tiny_config(tied=False)), "model.",
        (f"{GEMMA}paligemma.model.language_model.layers.0.self_attn.q_proj", f"{GEMMA}paligemma.lm_head"), {},
    ),
    "groot": (
        groot_folders.write_lerobot, "_groot_model.",
        ("action_head.model.transformer_blocks.0.attn1.to_k", "action_head.model.transformer_blocks.1.attn1.to_v",
         f"{LLM}1.self_attn.q_proj", "action_head.model.proj_out_1"),
        {"backbone.model.lm_head": (9, 128)},
    ),
}  # fmt: skip


def drawn(shape: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    a, b = (0.3 * torch.randn(*shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
    return a, b


def merged(base: Path, folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Path:
    """The base with the product of the factors added to its stored weights, as peft's `merge_and_unload` does it."""
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, (a, b) in pairs.items():
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = (weight.float() + ALPHA / RANK * b @ a).to(weight.dtype)
    save_file(weights, file)
    return folder


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_adapted_checkpoint_has_the_weights_of_a_merged_one(
    family: str, wrapped: bool, small_images: None, tmp_path: Path
) -> None:
    """Names with and without the module that lerobot wraps the model in; factors of dead heads are left out."""
    write, prefix, names, dead = BASES[family]
    write(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    pairs = {name: drawn(stored[f"{prefix}{name}.weight"].shape, seed) for seed, name in enumerate(names)}
    more = {name: drawn(shape, 7) for name, shape in dead.items()}
    write_adapter(tmp_path / "adapter", {**pairs, **more}, wrapped=prefix if wrapped else "")
    settings = PolicyConfig().with_lora(str(tmp_path / "adapter"))
    reference = merged(tmp_path / "base", tmp_path / "merged", {prefix + name: pair for name, pair in pairs.items()})
    plain, got, want = (
        load(folder, given).model.state_dict()
        for folder, given in (
            (tmp_path / "base", PolicyConfig()), (tmp_path / "base", settings), (reference, PolicyConfig()),
        )
    )  # fmt: skip
    assert got.keys() == want.keys()
    changed = [name for name in want if not torch.equal(want[name], plain[name])]
    assert len(changed) == len(names)
    for name in want:
        torch.testing.assert_close(got[name].float(), want[name].float(), rtol=1e-2, atol=1e-5)


def test_an_adapter_of_smolvla_names_its_base_and_brings_its_own_statistics(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder in (base, adapter):
        tiny_smolvla.write_lerobot(folder)
    (adapter / "model.safetensors").unlink()
    shape = load_file(base / "model.safetensors")["model.action_out_proj.weight"].shape
    write_adapter(adapter, {"action_out_proj": drawn(shape, 0)}, wrapped="model.", base_model_name_or_path=str(base))
    for file in {*adapter.glob("*.safetensors")} - {adapter / WEIGHTS}:
        save_file({name: 2 * value for name, value in load_file(file).items()}, file)
    given, plain, adapted = tiny_smolvla.observation(), load(base), load(adapter)
    assert (adapted.folder, adapted.lora, adapted.family.name) == (base, adapter, "smolvla")
    twice = {**given, "observation.state": 2 * given["observation.state"]}
    np.testing.assert_allclose(
        adapted.processor.prepare(twice).state, plain.processor.prepare(given).state, rtol=1e-5, atol=1e-6
    )


def test_a_tied_head_of_pi0_fast_that_an_adapter_changes_leaves_the_embedding(tmp_path: Path) -> None:
    model = tiny_pi0_fast.write_lerobot(tmp_path / "base")
    head = f"{GEMMA}paligemma.lm_head"
    pair = drawn(model.embed.weight.shape, 0)
    write_adapter(tmp_path / "adapter", {head: pair}, wrapped="model.")
    adapted = load(tmp_path / "base", PolicyConfig().with_lora(str(tmp_path / "adapter"))).model
    state = adapted.state_dict()
    torch.testing.assert_close(state["embed.weight"], model.embed.weight, rtol=0, atol=0)
    change = (model.embed.weight.float() + ALPHA / RANK * pair[1] @ pair[0]).to(state["head.weight"].dtype)
    torch.testing.assert_close(state["head.weight"], change)


def test_whole_modules_of_one_embodiment_and_of_dead_heads(small_images: None, tmp_path: Path) -> None:
    """What peft keeps whole (`modules_to_save`): GR00T stacks its embodiments' weights, (in, out) each."""
    groot_folders.write_lerobot(tmp_path / "base")
    stored = load_file(tmp_path / "base" / "model.safetensors")
    name = "action_head.action_decoder.layer2.W"
    whole = torch.randn(stored[f"_groot_model.{name}"].shape, generator=torch.Generator().manual_seed(0))
    adapter = write_adapter(
        tmp_path / "adapter", {}, wrapped="_groot_model.",
        more={name: whole, "backbone.model.lm_head.weight": torch.zeros(3, 3)},
    )  # fmt: skip
    adapted = load(tmp_path / "base", PolicyConfig().with_lora(str(adapter))).model
    expected = whole[groot_folders.IDS[groot_folders.TAG]].T
    torch.testing.assert_close(adapted.state_dict()["head.decode_out.weight"].float(), expected, rtol=1e-2, atol=1e-2)


# -- adapter_config.json ------------------------------------------------------------------------------------------

NEUTRAL: dict[str, Any] = {
    "auto_mapping": {"base_model_class": "PI05Policy", "parent_library": "lerobot"}, "bias": "none",
    "exclude_modules": "vision", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": "gaussian",
    "layers_to_transform": [0, 1], "layers_pattern": "layers", "loftq_config": {}, "lora_dropout": 0.1,
    "megatron_core": "megatron.core", "modules_to_save": ["state_proj"], "peft_version": "0.21.2",
    "qalora_group_size": 16, "target_modules": "all-linear", "task_type": "FEATURE_EXTRACTION", "use_dora": False,
    "trainable_token_indices": None, "revision": None, "target_parameters": [],
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "use_dora": True, "fan_in_fan_out": True, "bias": "lora_only", "init_lora_weights": "pissa", "lora_bias": True,
    "target_parameters": ["experts.weight"], "trainable_token_indices": [1, 2], "layer_replication": [[0, 4]],
    "use_qalora": True, "megatron_config": {"a": 1}, "ensure_weight_tying": True, "velora_config": {"num_groups": 8},
    "a_field_of_a_later_peft": 3,
}  # fmt: skip


def test_settings_for_training_change_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "plain", factors())
    write_adapter(tmp_path / "full", factors(), **NEUTRAL)
    plain, full = (read_lora(tmp_path / name).changes for name in ("plain", "full"))
    assert plain.keys() == full.keys() and all(plain[n].scale == full[n].scale for n in plain)


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_mean_more_than_factors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, factors(), **{name: REFUSED[name]})
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: .*\b{name}\b.*merge_and_unload"):
        read_lora(adapter)


# -- bases ----------------------------------------------------------------------------------------------------------

ELSEWHERE = "/media/somebody/outputs/pretrained_model"


def test_a_base_of_another_machine_is_named_with_what_to_type(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, factors(), base_model_name_or_path=ELSEWHERE)
    with pytest.raises(CheckpointError) as caught:
        load(adapter)
    said = str(caught.value)
    for part in (f"lora {adapter}", "base_model_name_or_path", CONFIG, ELSEWHERE, f"--lora {adapter}"):
        assert part in said


def test_a_base_of_another_machine_may_be_named_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny_checkpoint(tmp_path / "base", max_token_len=200)
    adapter = write_adapter(tmp_path / "adapter", factors(), base_model_name_or_path=ELSEWHERE)
    assert load(tmp_path / "base", PolicyConfig().with_lora(str(adapter))).lora == adapter
    assert ELSEWHERE in caplog.text and json.loads((adapter / CONFIG).read_text())["r"] == RANK
