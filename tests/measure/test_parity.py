"""Agreement with the reference: what is judged, several noises an observation, commands that fell the other way."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel import cli
from vla_accel.config import EngineSpec
from vla_accel.ledger import Ledger
from vla_accel.measure.parity import compare


class Stub:
    """A policy whose actions are the noise and, as the last dimension, its sign; `flip`: calls that turn it once."""

    def __init__(self, error: float = 0.0, flip: tuple[int, ...] = ()) -> None:
        self.error, self.flip, self.calls = error, flip, 0
        self.model = SimpleNamespace(config=SimpleNamespace(action_horizon=3, action_dim=2), dtype=torch.float32)
        self.family = SimpleNamespace(action_shape=lambda config: (config.action_horizon, config.action_dim))
        self.num_steps, self.specs = 4, {"all": EngineSpec()}
        self.ledger = Ledger()
        self.noises: list[np.ndarray] = []

    def infer_with_internals(self, observation: Any, *, noise: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
        self.noises.append(noise)
        actions = np.stack([noise[:, 0] + self.error, np.sign(noise[:, 1])], axis=1)
        if self.calls in self.flip:
            actions[0, 1] *= -1
        self.calls += 1
        one = np.ones(4)
        return {"actions": actions}, {"actions": actions, "image_tokens": one, "keys": one, "values": one}


def report(policy: Stub, reference: Stub, count: int = 4, **more: Any) -> Any:
    return compare(policy, reference, [{}] * count, name="stub", **more)  # type: ignore[arg-type]


def test_every_draw_has_its_own_noise_and_both_policies_get_it() -> None:
    policy, reference = Stub(), Stub()
    found = report(policy, reference, draws=3)
    assert len(policy.noises) == 12 and found.observations == 4 and found.draws == 3
    assert all(np.array_equal(a, b) for a, b in zip(policy.noises, reference.noises, strict=True))
    assert len({n.tobytes() for n in policy.noises}) == 12
    assert found.passed and found.actions.cosine == pytest.approx(1) and found.flipped == 0
    assert set(found.components) == {"image_tokens", "keys", "values"}


def test_one_draw_is_what_it_was() -> None:
    once = Stub()
    report(once, Stub())
    rng = np.random.default_rng(0)
    assert np.array_equal(once.noises[3], [rng.standard_normal((3, 2)).astype(np.float32) for _ in range(4)][3])


def test_flipped_commands_are_counted_and_still_judged() -> None:
    found = report(Stub(error=0.01, flip=(1, 5)), Stub(), draws=2)
    assert found.flipped == 2 and found.rest_cosine > 0.9999
    assert not found.passed and found.actions.cosine < 0.95
    assert report(Stub(error=0.9), Stub()).flipped == 0
    everything = report(Stub(flip=(0, 1, 2, 3)), Stub())
    assert everything.flipped == 4 and everything.rest_cosine is None
    json.dumps(everything.as_dict())


def test_the_command_draws(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "eager.yaml"
    config.write_text("num_steps: 1\nprecision: fp32\n")
    words = ["parity", str(config), "--count", "1", "--draws", "2", "--device", "cpu"]
    assert cli.main(words) == 0
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert content["draws"] == 2 and content["observations"] == 1 and content["flipped"] == 0
    assert cli.main([*words[:-4], "--draws", "0"]) == 1
    assert "draws: expected at least 1, got 0" in capsys.readouterr().err
