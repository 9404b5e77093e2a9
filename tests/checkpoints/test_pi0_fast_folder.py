"""lerobot's folders of π0-FAST: what becomes of every file and key, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.published_folders import stored_shapes
from tests.support.tiny_pi0_fast import HORIZON, STOP, VOCABULARY, observation, tiny_config, write_fast, write_lerobot
from tests.support.tiny_smolvla import statistics
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.loading import load
from vla_accel.families.pi0_fast.checkpoint import pieces
from vla_accel.families.pi0_fast.network import Pi0Fast, pi0_fast

ROOT = "model.paligemma_with_expert.paligemma."
TABLE, HEAD = ROOT + "model.language_model.embed_tokens.weight", ROOT + "lm_head.weight"


def test_keys_and_shapes_are_lerobots() -> None:
    """Of the published size."""
    shapes = stored_shapes(Pi0Fast, pi0_fast(tied=False), pieces)
    layer = ROOT + "model.language_model.layers.17."
    tower = ROOT + "model.vision_tower.vision_model."
    expected = {
        TABLE: (257_152, 2048),
        HEAD: (257_152, 2048),
        ROOT + "model.language_model.norm.weight": (2048,),
        layer + "self_attn.q_proj.weight": (2048, 2048),
        layer + "self_attn.k_proj.weight": (256, 2048),
        layer + "self_attn.o_proj.weight": (2048, 2048),
        layer + "mlp.up_proj.weight": (16_384, 2048),
        layer + "mlp.down_proj.weight": (2048, 16_384),
        layer + "input_layernorm.weight": (2048,),
        ROOT + "model.multi_modal_projector.linear.bias": (2048,),
        tower + "embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        tower + "embeddings.position_embedding.weight": (256, 1152),
        tower + "encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        tower + "post_layernorm.bias": (1152,),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    # Two tables, tower, projector, 18 layers of nine, and the final norm: what lerobot's `save_pretrained` writes.
    assert len(shapes) == 2 + (3 + 27 * 16 + 2) + 2 + 18 * 9 + 1


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_becomes_a_model(tied: bool, tmp_path: Path) -> None:
    model = write_lerobot(tmp_path, tiny_config(tied=tied))
    checkpoint = load(tmp_path)
    assert checkpoint.family.name == "pi0_fast" and checkpoint.model.config == tiny_config(tied=tied)
    stored, loaded = model.state_dict(), checkpoint.model.state_dict()
    assert stored.keys() == loaded.keys() and all(torch.equal(stored[n], loaded[n]) for n in stored)
    given = observation()
    inputs = checkpoint.processor.prepare(given)
    scale = statistics(len(given["observation.state"]))
    normal = (given["observation.state"] - scale["mean"]) / scale["std"]
    bins = np.digitize(normal, np.linspace(-1, 1, 257)[:-1]) - 1
    text = checkpoint.processor.tokenizer
    said = text.encode(f"Task: pick up the bowl, State: {' '.join(map(str, bins))};\n", add_bos=True)
    assert inputs.tokens.tolist() == [*said, 2] and checkpoint.model.config.stop_token == STOP
    with pytest.raises(ObservationError, match="expected at most 49 tokens"):
        checkpoint.processor.prepare(observation(prompt="the " * 40))


@pytest.mark.parametrize("only", [TABLE, HEAD])
def test_one_table_is_both(only: str, tmp_path: Path) -> None:
    model = write_lerobot(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[HEAD if only == TABLE else TABLE]
    save_file(tensors, path)
    found = load(tmp_path).model
    assert isinstance(found, Pi0Fast) and found.config.tied and torch.equal(found.embed.weight, model.embed.weight)


def test_what_the_user_knows_better(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    write_fast(elsewhere, scale=5)
    given = CheckpointSpec(
        action_tokenizer=str(elsewhere), relaxed_actions=True, action_horizon=HORIZON + 2, max_token_len=60
    )
    checkpoint = load(tmp_path, PolicyConfig(checkpoint=given))
    detokeniser = checkpoint.processor.detokeniser
    assert (detokeniser.fast.scale, detokeniser.relaxed, detokeniser.horizon) == (5, True, HORIZON + 2)
    assert (checkpoint.model.config.action_horizon, checkpoint.model.config.max_token_len) == (HORIZON + 2, 60)


def test_a_robot_or_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    (tmp_path / "mine.yaml").write_text("{base: libero, state_dim: 4}")
    with pytest.raises(ConfigError, match=r"preset: expected 3 numbers of action, got .*mine\.yaml's 7"):
        load(tmp_path, PolicyConfig(preset=str(tmp_path / "mine.yaml")))
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["one more"] = VOCABULARY
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="tokenizer: expected at most the model's 384 tokens, got 385"):
        load(tmp_path)


def test_every_key_is_accounted_for(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    norm = ROOT + "model.language_model.norm.weight"
    del tensors[norm]
    tensors["model.action_in_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as raised:
        load(tmp_path)
    assert f"1 missing: {norm}; 1 left over: model.action_in_proj.weight" in str(raised.value)
