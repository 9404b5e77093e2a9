"""The command that compares with lerobot's answers, on this package's own: it says what agrees and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.parity import compare_with_lerobot
from tests.support import tiny_pi0_fast
from tests.support.tiny_smolvla import write_lerobot
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.families.loading import load
from vla_accel.families.pi0_fast.network import Pi0Fast
from vla_accel.families.smolvla.network import SmolVla


@pytest.mark.parametrize(
    ("moved", "nearer", "status"), [(0.0, 1.0, 0), (1e-3, 1.0, 1), (0.0, 2.0, 1)], ids=["agrees", "float32", "bfloat16"]
)
def test_it_tells_whether_actions_agree(
    moved: float, nearer: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`moved`: lerobot's float32 from ours; `nearer`: its bfloat16 to its float32 than ours is to ours."""
    (tmp_path / "checkpoint").mkdir()
    write_lerobot(tmp_path / "checkpoint")
    model = load(tmp_path / "checkpoint", device="cpu", dtype=torch.float32).model.whole()
    assert isinstance(model, SmolVla)
    config, generator = model.config, torch.Generator().manual_seed(0)
    side = config.vision.image_size
    given = {
        "batch3.images": torch.rand(3, 2, 3, side, side, generator=generator),
        "batch3.tokens": torch.ones(3, 4, dtype=torch.long),
        "batch3.token_mask": torch.arange(4)[None] < torch.tensor([4, 2, 3])[:, None],
        "batch3.state": torch.randn(3, config.state_dim, generator=generator),
        "batch3.noise": torch.randn(3, config.action_horizon, config.action_dim, generator=generator),
    }
    answer = compare_with_lerobot.ask_smolvla(model, given, "batch3", 2)
    low = load(tmp_path / "checkpoint", device="cpu", dtype=torch.bfloat16).model
    assert isinstance(low, SmolVla)
    rounded = compare_with_lerobot.ask_smolvla(low, given, "batch3", 2).float()
    theirs = {"steps2": answer + moved, "bf16_steps2": answer + moved + (rounded - answer) / nearer}
    given |= {f"batch3.{name}": value for name, value in theirs.items()}
    save_file(given, tmp_path / "model.safetensors", {"lerobot": "0.6.1"})
    output = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--output", str(output)])
    assert compare_with_lerobot.main() == status
    found = json.loads(output.read_text())["models"]["smolvla"]
    assert found["versions"] == {"lerobot": "0.6.1"} and found["size"] == "small"
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    (row,) = found["cases"]
    assert (row["case"], row["batch"], row["views"], row["steps"]) == ("batch 3", 3, 2, 2)
    assert row["float32_max"] == pytest.approx(moved, abs=1e-5)
    error = compare_with_lerobot.rms(rounded - answer)
    assert row["lerobot_bfloat16_rms_to_float32"] == pytest.approx(error / nearer, rel=1e-3)
    if not moved:
        assert row["bfloat16_rms_to_float32"] == pytest.approx(error, rel=1e-3)
        assert row["bfloat16_rms_to_lerobot_bfloat16"] == pytest.approx(error - error / nearer, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(("moved", "status"), [(0.0, 0), (1e-3, 1)])
def test_tokens_are_compared_as_actions(
    moved: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchecked(files: dict[str, Any]) -> None:
        files["config"]["validate_action_token_prefix"] = False

    tiny_pi0_fast.write_lerobot(tmp_path / "checkpoint", change=unchecked)
    settings = PolicyConfig(checkpoint=CheckpointSpec(relaxed_actions=True))
    checkpoint = load(tmp_path / "checkpoint", settings, dtype=torch.float32)
    assert isinstance(checkpoint.model, Pi0Fast)
    given = {
        "batch3.images": torch.rand(3, 2, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
        "batch3.tokens": torch.arange(12).view(3, 4) + 10,
        "batch3.token_mask": torch.arange(4)[None] < torch.tensor([4, 2, 3])[:, None],
    }
    answer = compare_with_lerobot.ask_pi0_fast(checkpoint.processor, checkpoint.model, given, "batch3", 9)
    save_file(given | {"batch3.steps9": answer * (1 + moved)}, tmp_path / "model.safetensors", {"lerobot": "0.6.1"})
    output = tmp_path / "report.json"
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path), "--output", str(output)])
    assert compare_with_lerobot.main() == status
    (row,) = json.loads(output.read_text())["models"]["pi0_fast"]["cases"]
    assert (row["case"], row["batch"], row["views"], row["steps"]) == ("batch 3", 3, 2, 9)
    assert row["float32_max"] == pytest.approx(moved * float(answer.abs().max()), rel=1e-2)
