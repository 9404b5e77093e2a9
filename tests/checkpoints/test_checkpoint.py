"""Loading weights: every key is accounted for, in both dialects, and every kind of damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.in_memory import load_file_or_folder, load_tensors
from tests.support.openpi_dialect import EMBED_TOKENS, LANGUAGE, LM_HEAD, ROOT, to_openpi
from tests.support.tiny import random_state, tiny_config, write_tiny_checkpoint
from vla_accel.checkpoints import checkpoint as checkpoint_module
from vla_accel.checkpoints.checkpoint import save_checkpoint
from vla_accel.errors import CheckpointError
from vla_accel.families.loading import load
from vla_accel.families.pi0.network import Kind, Pi0

KINDS: tuple[Kind, ...] = ("pi0", "pi05")
CONFIG = tiny_config("pi05")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(random_state(CONFIG), CONFIG, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def equal_weights(model: Pi0, state: dict[str, Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name


# -- our dialect --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    config, state = tiny_config(kind), random_state(tiny_config(kind), dtype=dtype)
    save_checkpoint(state, config, tmp_path / "new" / "folder")
    model = load_file_or_folder(tmp_path / "new" / "folder")
    assert model.config == config
    equal_weights(model, state)
    assert not model.training and not any(p.requires_grad or p.is_meta for p in model.parameters())
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    equal_weights(load_file_or_folder(tmp_path / "new" / "folder" / "model.safetensors", config), state)
    for file in (tmp_path / "new" / "folder").iterdir():
        assert file.stat().st_mode & 0o444 == 0o444, f"{file.name} is not readable by all"


def broken(folder: Path, change: str) -> str:
    """Change one tensor of the checkpoint in a way that must be noticed; returns the message expected."""
    state = load_file(folder / "model.safetensors")
    name = "expert.layers.1.o_proj.weight"
    if change == "missing":
        del state[name]
        message = rf"1 missing: {name}$"
    elif change == "extra":
        state["expert.layers.9.o_proj.weight"] = torch.zeros(2)
        message = r"1 left over: expert\.layers\.9\.o_proj\.weight$"
    elif change == "misshaped":
        state[name] = state[name].T.contiguous()
        message = rf"1 misshaped: {name} \(expected \(14, 24\), got \(24, 14\)\)$"
    elif change == "integer":
        state[name] = torch.zeros(14, 24, dtype=torch.int8)
        message = rf"1 not float: {name} \(torch\.int8\)$"
    else:
        state[name][3, 4] = float(change)
        message = rf"non-finite values in {name}$"
    save_file(state, folder / "model.safetensors")
    return message


@pytest.mark.parametrize("change", ["missing", "extra", "misshaped", "integer", "nan", "inf"])
def test_a_wrong_key_is_named(folder: Path, change: str) -> None:
    message = broken(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_file_or_folder(folder)


def test_several_wrong_keys_are_all_counted(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    gone = [n for n in state if n.startswith("vision.")]
    state = {k: v for k, v in state.items() if k not in gone} | {"stray": torch.zeros(1)}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_file_or_folder(folder)
    text = str(caught.value)
    assert f"{len(gone)} missing: " in text and f" and {len(gone) - 8} more" in text and "1 left over: stray" in text


def test_every_single_key_is_needed() -> None:
    state = random_state(CONFIG)
    for name in state:
        with pytest.raises(CheckpointError, match="1 missing"):
            load_tensors({k: v for k, v in state.items() if k != name}, CONFIG, "memory")


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "header"])
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "garbage": b"\x80\x02" + content[2:],
            "empty": b"",
            "header": content[:8] + b"x" + content[9:],
        }[damage]
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors: damaged safetensors file"):
        load_file_or_folder(folder)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected weights, got a git-lfs pointer"):
        load_file_or_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"expected config\.json, found model\.safetensors"),
        ("model.safetensors", None, r"expected model\.safetensors, found config\.json"),
        *(("config.json", content, r"config\.json") for content in ("{", "[1]", "")),
    ],
)
def test_a_missing_or_unreadable_file_is_named(folder: Path, file: str, content: str | None, message: str) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_file_or_folder(folder)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("acton_dim",), 8, r"unknown key acton_dim: did you mean action_dim\?"),
        (("prefix", "hedas"), 4, r"unknown key prefix\.hedas: did you mean prefix\.heads\?"),
        (("action_dim",), "8", "action_dim: expected int, got '8'"),
        (("vision", "eps"), "small", r"vision\.eps: expected float"),
        (("kind",), "pi06", "kind: expected one of pi0, pi05, got 'pi06'"),
        (("prefix",), 3, "prefix: expected a mapping, got 3"),
        (("prefix", "head_dim"), 8, r"prefix\.head_dim 8 and expert\.head_dim 6 must be equal"),
        (("format",), "other/1", r"expected format 'vla_accel\.checkpoint/1'"),
    ],
)
def test_a_bad_config_is_named(folder: Path, path: tuple[str, ...], value: object, message: str) -> None:
    content = json.loads((folder / "config.json").read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_file_or_folder(folder)
    assert "config.json" in str(caught.value)


def test_weights_in_several_files(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    (folder / "model.safetensors").unlink()
    save_file({n: state[n] for n in names[:9]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: state[n] for n in names[9:]}, folder / "model-00002-of-00002.safetensors")
    save_file({"scale": torch.ones(1)}, folder / "calibration.safetensors")
    equal_weights(load_file_or_folder(folder), state)
    save_file({n: state[n] for n in names[8:]}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"key {names[8]} is in more than one file"):
        load_file_or_folder(folder)


# -- openpi's dialect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("embedding", ["head", "table", "both"])
def test_openpi_weights_load_to_the_same_tensors(tmp_path: Path, kind: Kind, embedding: str) -> None:
    config, state = tiny_config(kind), random_state(tiny_config(kind))
    theirs = to_openpi(state, config)
    assert not theirs.keys() & {n for n in state if "." in n and n.split(".")[0] in ("vision", "prefix", "expert")}
    if embedding != "head":
        theirs[EMBED_TOKENS] = theirs[LM_HEAD].clone()
    if embedding == "table":
        del theirs[LM_HEAD]
    before = dict(theirs)
    equal_weights(load_tensors(theirs, config, "memory"), state)
    assert theirs.keys() == before.keys(), "the caller's mapping was changed"
    save_file(theirs, tmp_path / "model.safetensors")
    equal_weights(load_file_or_folder(tmp_path, config), state)


def test_pieces_of_one_matrix_may_differ_in_dtype() -> None:
    """The wider dtype holds both exactly, whichever piece comes first."""
    state = random_state(CONFIG, dtype=torch.bfloat16)
    for wide in ("q_proj", "v_proj"):
        theirs = to_openpi(state, CONFIG)
        name = f"{LANGUAGE}layers.0.self_attn.{wide}.weight"
        theirs[name] = theirs[name].float() + 1e-4
        fused = load_tensors(theirs, CONFIG, "memory").state_dict()["prefix.layers.0.qkv_proj.weight"]
        parts = [theirs[f"{LANGUAGE}layers.0.self_attn.{p}.weight"].float() for p in ("q_proj", "k_proj", "v_proj")]
        assert fused.dtype == torch.float32 and torch.equal(fused, torch.cat(parts))


def test_openpi_without_its_dead_weights() -> None:
    """The expert's head and the prefix's last norm are never read, so their absence is no loss."""
    state = random_state(CONFIG)
    theirs = to_openpi(state, CONFIG)
    del theirs[ROOT + "gemma_expert.lm_head.weight"], theirs[LANGUAGE + "norm.weight"]
    equal_weights(load_tensors(theirs, CONFIG, "memory"), state)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_table_that_was_trained_apart_from_the_head_is_read(
    kind: Kind, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(kind)
    theirs = to_openpi(random_state(config), config)
    theirs[EMBED_TOKENS] = theirs[LM_HEAD] + 1
    model = load_tensors({prefix + name: value for name, value in theirs.items()}, config, "memory")
    torch.testing.assert_close(model.embed.weight, theirs[EMBED_TOKENS], rtol=0, atol=0)
    assert (EMBED_TOKENS in caplog.text) == (not prefix), "openpi ties the two: a difference is logged"


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_loading_into_a_pipe_says_how_far_it_is_now_and_then(
    every: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint_module, "_SHOWN_BYTES", 0)
    monkeypatch.setattr("vla_accel.progress.INTERVAL_S", every)
    write_tiny_checkpoint(tmp_path / "tiny")
    model = load(tmp_path / "tiny", whole=False).model
    assert model.origin is not None
    with model.origin.progress():
        model.fetch()
    said = capsys.readouterr().err.splitlines()
    assert said[-1:] == ([] if every else ["loading tiny: 100 %"])
