"""lerobot's SmolVLA folders: keys, sizes, statistics, cameras, prompts, and every contradiction."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.lerobot_saved import step
from tests.support.published_folders import stored_shapes
from tests.support.tiny import TOKENIZER
from tests.support.tiny import statistics as own_statistics
from tests.support.tiny_smolvla import (
    CAMERAS,
    expected_actions,
    libero_config,
    observation,
    statistics,
    tiny_config,
    tiny_model,
    write_lerobot,
)
from vla_accel import OptimizedPolicy, PolicyConfig
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.config import CheckpointSpec, load_config
from vla_accel.errors import CheckpointError, ConfigError, ObservationError
from vla_accel.families.loading import load
from vla_accel.families.smolvla.checkpoint import DEAD, pieces
from vla_accel.families.smolvla.network import SmolVla, smolvla
from vla_accel.transforms.tokenizer import load_line_tokenizer

FP32 = load_config("eager_fp32")


def test_keys_and_shapes_are_lerobots() -> None:
    """Of the published size, as `lerobot/smolvla_base` has them."""
    root, shapes = "model.vlm_with_expert.", stored_shapes(SmolVla, smolvla(), pieces)
    layer = root + "vlm.model.text_model.layers.15."
    expert = root + "lm_expert.layers."
    expected = {
        root + "vlm.model.vision_model.embeddings.patch_embedding.weight": (768, 3, 16, 16),
        root + "vlm.model.vision_model.embeddings.position_embedding.weight": (1024, 768),
        root + "vlm.model.vision_model.encoder.layers.11.self_attn.k_proj.bias": (768,),
        root + "vlm.model.vision_model.encoder.layers.11.mlp.fc2.weight": (768, 3072),
        root + "vlm.model.vision_model.post_layernorm.bias": (768,),
        root + "vlm.model.connector.modality_projection.proj.weight": (960, 12_288),
        root + "vlm.model.text_model.embed_tokens.weight": (49_280, 960),
        layer + "self_attn.q_proj.weight": (960, 960),
        layer + "self_attn.v_proj.weight": (320, 960),
        layer + "mlp.up_proj.weight": (2560, 960),
        layer + "post_attention_layernorm.weight": (960,),
        expert + "0.self_attn.k_proj.weight": (320, 720),
        expert + "1.self_attn.k_proj.weight": (320, 320),
        expert + "1.self_attn.v_proj.weight": (320, 320),
        expert + "1.self_attn.q_proj.weight": (960, 720),
        expert + "15.self_attn.o_proj.weight": (720, 960),
        expert + "15.mlp.gate_proj.weight": (2048, 720),
        root + "lm_expert.norm.weight": (720,),
        "model.state_proj.weight": (960, 32),
        "model.action_time_mlp_in.weight": (720, 1440),
        "model.action_out_proj.bias": (32,),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert not [name for name in shapes if "layers.16." in name] and not set(DEAD) & set(shapes)


@pytest.mark.parametrize("libero", [False, True])
def test_a_folder_becomes_a_policy(libero: bool, tmp_path: Path) -> None:
    """From pixels, state and task to the robot's numbers, compared with the formulas written down a second time."""
    model = write_lerobot(tmp_path, libero=libero)
    policy = OptimizedPolicy.from_pretrained(tmp_path, FP32, num_steps=3)
    config = policy.model.config
    assert config == (libero_config() if libero else tiny_config())
    given = observation(libero=libero)
    noise = np.random.default_rng(1).standard_normal((config.action_horizon, config.action_dim)).astype(np.float32)
    ours = policy.infer(given, noise=noise)["actions"]
    images = [v for v in given.values() if isinstance(v, np.ndarray) and v.ndim == 3]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).double() / 255 * 2 - 1
    tokens = torch.tensor(TOKENIZER.encode("pick up the bowl\n", add_bos=True))
    (raw,) = (v for v in given.values() if isinstance(v, np.ndarray) and v.ndim == 1)
    scale, count = statistics(len(raw)), 7 if libero else 6
    state = torch.zeros(config.state_dim)
    state[: len(raw)] = torch.from_numpy((raw - scale["mean"]) / scale["std"])
    expected = expected_actions(model.state_dict(), config, pixels, tokens, state, torch.from_numpy(noise), 3)
    back = statistics(count)
    np.testing.assert_allclose(ours, expected[:, :count].numpy() * back["std"] + back["mean"], rtol=0, atol=3e-4)


def test_what_the_observation_may_lack(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    policy = OptimizedPolicy.from_pretrained(tmp_path, FP32, num_steps=1)
    given = observation()
    whole = policy.processor.prepare(given)
    one = policy.processor.prepare({k: v for k, v in given.items() if k != CAMERAS[0]})
    assert len(whole.images) == 2 and np.array_equal(one.images[0], whole.images[1])
    assert np.isfinite(policy.infer({k: v for k, v in given.items() if k != CAMERAS[1]})["actions"]).all()
    with pytest.raises(ObservationError, match=rf"missing {' or '.join(CAMERAS)}; got observation\.state, task"):
        policy.infer({k: v for k, v in given.items() if k not in CAMERAS})
    with pytest.raises(ObservationError, match=r"observation\.state: expected shape \(6,\), got \(11,\)"):
        policy.infer({**given, "observation.state": np.zeros(11)})
    with pytest.raises(ObservationError, match="task: expected an instruction"):
        policy.infer({**given, "task": " \n"})


def test_prompts_are_lines(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    processor = load(tmp_path).processor
    plain, ended = (processor.prepare(observation(prompt=p)).tokens for p in ("Pick up", "Pick up\n"))
    assert plain.tolist() == ended.tolist() == TOKENIZER.encode("pick up\n", add_bos=True)
    with pytest.raises(ObservationError, match=r"expected at most 48 tokens \(max_token_len\), got 51"):
        processor.prepare(observation(prompt="the " * 49))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its tokens would be looked up beyond the table's end."""
    size = tiny_config().vocab_size
    words = {"type": "WordLevel", "unk_token": "w0", "vocab": {f"w{i}": i for i in range(size + 1)}}
    (tmp_path / "its.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    write_lerobot(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"^tokenizer .*its\.json: expected at most the model's {size} tokens, got {size + 1}$"
    ):
        load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(tokenizer=str(tmp_path / "its.json"))))


def test_a_folder_that_lerobot_names_as_the_tokenizer_is_read(tmp_path: Path) -> None:
    """lerobot keeps `vlm_model_name` as it was given: on a robot without the hub, a folder."""
    folder, vlm = tmp_path / "policy", tmp_path / "vlm"

    def named(files: dict[str, Any]) -> None:
        step(files, "tokenizer_processor")["config"]["tokenizer_name"] = str(vlm)

    write_lerobot(folder, change=named)
    vlm.mkdir()
    (folder / "tokenizer.json").rename(vlm / "tokenizer.json")
    tokens = load(folder).processor.prepare(observation(prompt="Pick up")).tokens
    assert tokens.tolist() == TOKENIZER.encode("pick up\n", add_bos=True)
    (vlm / "tokenizer.json").unlink()
    hint = r"put its tokenizer\.json into the checkpoint's folder, or set checkpoint\.tokenizer in the configuration "
    hint += "to a file, a folder or a hub name"
    wrong = rf"^tokenizer: expected tokenizer\.json in {vlm}, found none; {hint}$"
    with pytest.raises(CheckpointError, match=wrong):
        load(folder)
    for path in ("./nowhere/tokenizer.json", "../a/b/tokenizer.json", "a/tokenizer.json"):
        said = rf"^tokenizer: expected a file at {re.escape(str(Path(path).absolute()))}, found none$"
        with pytest.raises(CheckpointError, match=said):
            load_line_tokenizer(tmp_path, path, "owner/name")
    with pytest.raises(CheckpointError, match=r"^tokenizer: expected tokenizer\.json in \./nowhere, found none; put"):
        load_line_tokenizer(tmp_path, "./nowhere", "owner/name")
    vlm.rmdir()  # as on another machine
    with pytest.raises(CheckpointError, match=wrong):
        load(folder)


@pytest.mark.parametrize(("width", "heads"), [(64, 1), (1152, 16)])
def test_the_heads_are_smolvlm2s(width: int, heads: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of its 2.2 B's tower are 72 wide; no weight shows it, and 64 would compute something else."""
    config = tiny_config()
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, width=width, heads=heads))
    write_lerobot(tmp_path, config)
    assert load(tmp_path).model.config.vision.heads == heads
    assert "assuming heads of width 64" in caplog.text, "its text is 48 wide"
    caplog.clear()
    load("smolvla_demo")
    assert not caplog.text


def test_other_heads_than_smollm2s_are_refused(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {k: v[:32] if "text_model.layers.0.self_attn.k_proj" in k else v for k, v in load_file(path).items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    with pytest.raises(
        CheckpointError, match="prefix: expected heads 64 wide, as every SmolLM2 has, got 256 and 32 rows"
    ):
        load(tmp_path)


def test_this_packages_own_form(tmp_path: Path) -> None:
    config = tiny_config()
    model = tiny_model(config)
    save_checkpoint(model.state_dict(), config, tmp_path, "smolvla")
    TOKENIZER.save(tmp_path / "tokenizer.json")
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": own_statistics()}))
    checkpoint = load(tmp_path)
    assert checkpoint.family.name == "smolvla" and checkpoint.model.config == config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), checkpoint.model.parameters(), strict=True))
    changed = load(tmp_path, PolicyConfig(checkpoint=CheckpointSpec(action_horizon=3, max_token_len=9)))
    assert (changed.model.config.action_horizon, changed.model.config.max_token_len) == (3, 9)


def test_every_key_is_accounted_for(tmp_path: Path) -> None:
    write_lerobot(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.state_proj.bias"], tensors["model.vlm_with_expert.lm_expert.layers.1.self_attn.v_proj.weight"]
    tensors["model.vlm_with_expert.lm_expert.embed_tokens.weight"] = torch.ones(2, 2)
    save_file(tensors, path)
    missing = r"2 missing: model\.state_proj\.bias, .*layers\.1\.self_attn\.v_proj\.weight"
    with pytest.raises(CheckpointError, match=missing + r"; 1 left over: .*lm_expert\.embed_tokens\.weight"):
        load(tmp_path)


def test_a_robot_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_lerobot(tmp_path, tiny_config(state_dim=5))
    with pytest.raises(ConfigError, match="expected at most 5 state dimensions, got 6"):
        load(tmp_path)
