"""What `attach` reads of a MolmoAct2 policy of lerobot 0.6.1 and of its main branch, without lerobot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.molmoact2_folders import adapted, given, tensors, write
from vla_accel import PolicyConfig
from vla_accel.attachment.molmoact2 import MolmoAct2Reader
from vla_accel.errors import ConfigError
from vla_accel.families.loading import load
from vla_accel.families.molmoact2.checkpoint import load_folder


class Saved(SimpleNamespace):
    """A policy's config, as lerobot's writes itself."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text(json.dumps(self.content))


class Policy(nn.Module):
    """As much of lerobot's policy as the reader needs: its config, its tensors, and where it comes from."""

    def __init__(self, folder: Path, stored: dict[str, Tensor], mode: str | None, *, guided: bool) -> None:
        super().__init__()
        content, model = (json.loads((path / "config.json").read_text()) for path in (folder, folder / "base"))
        rtc = SimpleNamespace(
            enabled=True, execution_horizon=4, max_guidance_weight=10.0, debug=False,
            prefix_attention_schedule=SimpleNamespace(value="LINEAR"),
        )  # fmt: skip
        self.config = Saved(content=content, chunk_size=content["chunk_size"], rtc_config=rtc if guided else None)
        self._checkpoint_action_mode = mode
        for name, value in stored.items():
            owner: nn.Module = self
            *path, leaf = f"model.{name}".split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(leaf, value)
        self.model: Any
        self.model.config = SimpleNamespace(eos_token_id=model["eos_token_id"], action_mode=model["action_mode"])


def batch_of(folder: Path) -> dict[str, Tensor]:
    """Two prompts of unlike lengths, padded on the left to a multiple of eight, and positions without the padding."""
    checkpoint = load(folder, PolicyConfig())
    sizes, rows = checkpoint.model.config, []
    for one in given()[:2]:
        tokens = checkpoint.processor.prepare(one).tokens
        is_image = sizes.is_image(2, len(tokens) + 2 * sizes.image_tokens).numpy()
        ids = np.zeros(len(is_image), np.int64)
        ids[is_image], ids[~is_image] = np.tile(sizes.frame(), 2), tokens
        rows.append(ids)
    width = -(-max(map(len, rows)) // 8) * 8 + 1
    padded = torch.from_numpy(np.stack([np.pad(row, (width - len(row), 0)) for row in rows]))
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    patches = sizes.vision.tokens
    return {
        "input_ids": padded, "attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "pixel_values": torch.zeros(4, patches, 3 * sizes.vision.patch_size**2),
        "action_dim_is_pad": torch.arange(32).expand(2, 32) >= 7,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("main"), "adapted", plainly_trained, stored=tensors())


def plainly_trained(files: dict[str, Any]) -> None:
    files["config.json"]["train_mode_vlm"] = "fft"


def reader(folder: Path, mode: str | None = None, *, guided: bool = False) -> MolmoAct2Reader:
    return MolmoAct2Reader(Policy(folder, tensors(), mode, guided=guided), PolicyConfig())


@pytest.mark.parametrize(
    ("mode", "guided", "hidden"),
    [(None, False, True), ("continuous", False, False), (None, True, False)],
    ids=["the authors' model", "from a folder", "guided"],
)
def test_the_main_branch_hides_tokens_unless_a_folder_or_guidance_says_otherwise(
    folder: Path, mode: str | None, guided: bool, hidden: bool
) -> None:
    found = reader(folder, mode, guided=guided)
    found.call(batch_of(folder))
    assert bool(found.config.hidden) is hidden


def test_0_6_1_hides_tokens_in_every_case(tmp_path: Path) -> None:
    folder = write(tmp_path, "plain")
    found = reader(folder, "continuous", guided=True)
    batch = batch_of(folder)
    found.call({name: value[:1] if name != "pixel_values" else value[:2] for name, value in batch.items()})
    assert found.config.hidden


def test_prompts_may_have_unlike_lengths_if_positions_leave_padding_out(folder: Path) -> None:
    batch, found = batch_of(folder), reader(folder)
    rows: list[Any] = found.call(batch).observations
    prompts = [row.tokens for row in rows]
    assert len(prompts[0]) != len(prompts[1])
    with pytest.raises(ConfigError, match="prompts of one length"):
        reader(folder).call({name: value for name, value in batch.items() if name != "position_ids"})
    counted = {**batch, "position_ids": torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])}
    with pytest.raises(ConfigError, match="position_ids: expected the positions of each prompt from 0 on"):
        reader(folder).call(counted)


def test_an_adapter_within_the_policy_is_merged(tmp_path: Path) -> None:
    folder = write(tmp_path, "adapted")
    attached = MolmoAct2Reader(Policy(folder, adapted(), None, guided=False), PolicyConfig()).checkpoint.model
    whole, _ = load_folder(folder, PolicyConfig())
    assert whole.origin is not None and attached.origin is not None
    for name in whole.state_dict():
        one, other = (o.read(name, None, torch.device("cpu")) for o in (attached.origin, whole.origin))
        assert torch.equal(one, other), name
