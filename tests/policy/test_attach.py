"""`attach`: a policy object answers as before from this package's engines, or stays as it is with one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import vla_accel
from tests.support.small_lerobot_policy import Policy, batch_of
from vla_accel.attachment.lerobot import LerobotReader
from vla_accel.attachment.noise import RecordedNoise
from vla_accel.attachment.prepared import PreparedReader, one_length, one_number
from vla_accel.config import PolicyConfig, load_config
from vla_accel.errors import ConfigError, ObservationError

CLOSE = 1e-4
HOLE = torch.tensor([[True, False, True, True, True, True, True]])


def answer(policy: Policy, count: int = 1, **others: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return policy.predict_action_chunk(batch_of(count), **others)


def prepared(settings: PolicyConfig) -> Any:
    """The reader of a policy whose batches are the model's inputs, as far as its settings need it."""

    class Small(PreparedReader):
        _network = _variant = _inputs = Mock(side_effect=AssertionError("the settings are read first"))

    return Small(Policy(), settings, "groot")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "vla_accel.attach" and r.levelno >= logging.WARNING]


def test_an_attached_policy_answers_as_before_from_the_engines() -> None:
    policy = Policy()
    before = {count: answer(policy, count) for count in (1, 3)}
    attached = vla_accel.attach(policy)
    assert attached.active and attached.engine is None
    for count in (1, 3, 1):
        ours = answer(policy, count)
        assert ours.dtype == before[count].dtype and (ours - before[count]).abs().max() < CLOSE
    assert attached.engine is not None and attached.difference is not None and attached.difference < CLOSE
    assert policy.calls == 3, "of the calls after attach only the first one asks the policy"
    noise = torch.randn(1, 5, 9)
    given = [policy.predict_action_chunk(batch_of(1), noise=noise) for _ in range(2)]
    assert torch.equal(*given), "the caller's noise is not used"


def test_the_state_has_the_size_of_the_first_batch() -> None:
    """A policy that was trained from a base for another robot keeps the base's features."""
    policy = Policy()
    policy.config.content["input_features"]["observation.state"]["shape"] = [9]
    before = answer(policy, 3)
    attached = vla_accel.attach(policy)
    assert (answer(policy, 3) - before).abs().max() < CLOSE and attached.active
    with pytest.raises(ObservationError, match="state"):
        policy.predict_action_chunk({**batch_of(1), "observation.state": torch.zeros(1, 5)})


@pytest.mark.parametrize("uniform", [True, False])
def test_a_draw_is_recorded_and_repeated(uniform: bool) -> None:
    draw = torch.rand if uniform else torch.randn

    def policy(batch: int) -> torch.Tensor:  # as Evo-1, whose noise is one row of numbers
        _ = torch.randint(9, (batch, 6)), (torch.randn if uniform else torch.rand)(batch, 6), draw(batch, 7)
        drawn = draw(batch, 6)
        return (drawn * 2 - 1 if uniform else drawn).view(batch, 2, 3)

    with RecordedNoise((2, 3), uniform=uniform) as recorded:
        expected = policy(2)
    noise = recorded.draws.noise()
    assert noise is not None and torch.equal(noise, expected)
    torch.manual_seed(5)
    again = recorded.draws.again(4).noise()
    torch.manual_seed(5)
    drawn = draw(4, 6)
    assert again is not None and torch.equal(again.flatten(1), drawn * 2 - 1 if uniform else drawn)


@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (lambda rows: one_number(torch.tensor(rows), "domain_id"), ([3, 3], [3, 2])),
        (lambda rows: len(one_length([np.zeros(row) for row in rows], "mask")[0]), ([3, 3], [3, 2])),
    ],
    ids=["embodiment or domain", "padding that changes actions"],
)
def test_a_batch_has_one_of_what_a_network_has_once(read: Callable[[Any], int], rows: tuple[Any, Any]) -> None:
    good, bad = rows
    assert read(good) == 3
    with pytest.raises(ConfigError, match="expected"):
        read(bad)


def test_noise_follows_torchs_seed() -> None:
    policy = Policy()
    vla_accel.attach(policy)
    first, second = answer(policy), policy.predict_action_chunk(batch_of(1))
    assert torch.equal(first, answer(policy)) and not torch.equal(first, second)


@pytest.mark.parametrize("first", [True, False])
def test_calls_may_be_in_inference_mode_or_not(first: bool) -> None:
    policy, plain = Policy(), Policy()
    vla_accel.attach(policy)
    for inference in (first, not first):
        with torch.inference_mode(inference):
            assert (answer(policy) - answer(plain)).abs().max() < CLOSE
    assert not any(p.is_inference() for p in policy.parameters())


def test_detach_restores_the_policy() -> None:
    policy = Policy()
    before, names = answer(policy), set(vars(policy))
    attached = vla_accel.attach(policy)
    answer(policy)
    attached.detach()
    assert set(vars(policy)) - {"calls"} == names - {"calls"} and not attached.active and attached.engine is None
    assert torch.equal(answer(policy), before)


def test_a_second_attach_returns_the_first() -> None:
    policy = Policy()
    assert vla_accel.attach(policy) is vla_accel.attach(policy)


def test_a_first_answer_that_differs_detaches_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    policy = Policy()
    policy.moved = 0.5
    before = answer(policy)
    attached = vla_accel.attach(policy)
    assert torch.equal(answer(policy), before) and torch.equal(answer(policy), before)
    assert not attached.active and attached.difference is not None and attached.difference > 0.01
    (warning,) = warnings(caplog)
    assert "first answer" in warning and attached.reason is not None and attached.reason in warning
    assert vla_accel.attach(policy, limit=10.0).active and not torch.equal(answer(policy), before - 0.5)


def changed(**fields: Any) -> Callable[[Policy], object]:
    return lambda policy: policy.config.content.update(fields)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (changed(type="tdmpc"), "tdmpc"),
        (changed(type="multi_task_dit"), "does not support multi_task_dit: load its folder"),
        (changed(add_image_special_tokens=True), "add_image_special_tokens"),
        (changed(unheard_of=1), "unheard_of"),
        (lambda policy: policy.model.register_parameter("more", torch.nn.Parameter(torch.ones(1))), "model.more"),
        (changed(normalization_mapping={"VISUAL": "MEAN_STD"}), "preprocessor"),
    ],
    ids=["type", "type without a reader", "setting", "unknown setting", "weight", "normalized images"],
)
def test_a_policy_of_another_kind_stays_as_it_is(
    change: Callable[[Policy], object], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy()
    change(policy)
    before = answer(policy)
    attached = vla_accel.attach(policy)
    assert not attached.active and torch.equal(answer(policy), before)
    (warning,) = warnings(caplog)
    assert word in warning and "Policy" in warning


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint": {"lora": "/nonexistent"}}, {"checkpoint": {"tokenizer": "/nonexistent"}},
        {"checkpoint": {"embodiment": "x"}}, {"checkpoint": {"domain": 3}}, {"checkpoint": {"action_horizon": 5}},
        {"preset": "libero"}, {"default_prompt": "pick up"}, {"warm_up": ["pick up"]}, {"seed": 1},
        {"warm_start": 0.5}, {"rtc": {"schedule": "exp"}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("make", [lambda s: LerobotReader(Policy(), s, None), prepared], ids=["raw", "prepared"])
def test_a_setting_that_is_not_read_is_refused(make: Callable[[PolicyConfig], Any], settings: dict[str, Any]) -> None:
    (name,) = settings
    name += f".{next(iter(settings[name]))}" if name == "checkpoint" else ""
    with pytest.raises(ConfigError, match=rf"^{name}: .*an attached \w+"):
        make(load_config(settings))


@pytest.mark.parametrize("named", ["meta:1", "meta", "cpu"])
def test_the_engines_run_on_the_policys_device_alone(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another device than the configuration's a policy stays as it is, also if it moves there after `attach`."""
    monkeypatch.setattr(sys.modules["vla_accel.attachment.attach"], "resolve_device", torch.device)
    policy = Policy()
    attached = vla_accel.attach(policy, {"device": named})
    assert attached.active == (named == "cpu")
    if not attached.active:
        assert attached.reason == f"device: expected auto or the policy's cpu, got {named}"
        return
    monkeypatch.setattr(sys.modules["vla_accel.attachment.attach"], "resolve_device", lambda name: torch.device("meta"))
    answer(policy)
    assert not attached.active and policy.calls == 1, "the policy answered itself"


def test_warm_start_needs_real_time_chunking() -> None:
    """With `rtc_config` calls have a previous chunk."""
    policy = Policy()
    policy.config.rtc_config = SimpleNamespace(
        enabled=True, debug=False, execution_horizon=4, max_guidance_weight=1.0,
        prefix_attention_schedule=SimpleNamespace(value="LINEAR"),
    )  # fmt: skip
    assert vla_accel.attach(policy, {"warm_start": 0.5}).active


def test_an_object_that_is_no_policy_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    assert not vla_accel.attach(torch.nn.Linear(1, 1)).active
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(
    ("entries", "others"),
    [
        ({"observation.language.attention_mask": HOLE}, {}),
        ({"observation.images.front_padding_mask": torch.ones(1)}, {}),
        ({}, {"temperature": 2.0}),
    ],
    ids=["padding within the prompt", "mask of an image", "argument"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_a_call_of_another_kind_detaches_the_policy(
    entries: dict[str, Any], others: dict[str, Any], first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy()
    batch = {**batch_of(1), **entries}
    torch.manual_seed(3)
    before = policy.predict_action_chunk(batch, **others)
    attached = vla_accel.attach(policy)
    if not first:
        answer(policy)
        assert attached.active
    torch.manual_seed(3)
    assert torch.equal(policy.predict_action_chunk(batch, **others), before)
    assert not attached.active and len(warnings(caplog)) == 1


def test_an_input_that_no_policy_accepts_is_an_error() -> None:
    policy = Policy()
    attached = vla_accel.attach(policy)
    answer(policy)
    for name, value in (("images.front", torch.full((1, 3, 32, 32), 2.0)), ("state", torch.full((1, 6), torch.nan))):
        with pytest.raises(ObservationError, match=name.partition(".")[0]):
            policy.predict_action_chunk({**batch_of(1), f"observation.{name}": value})
    assert attached.active
