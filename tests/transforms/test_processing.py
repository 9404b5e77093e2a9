"""Observation to inputs and back: openpi's formulas by hand, both prompt forms, and every way to be wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.spy_tokenizer import Spy
from tests.support.tiny import TOKENIZER, WORDS, statistics, tiny_observation
from vla_accel.checkpoints.bundled import NAMED
from vla_accel.errors import CheckpointError, ObservationError, VlaAccelError
from vla_accel.transforms.normalisation import Normaliser, Statistics, load_statistics
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.tokenizer import SmallTokenizer, discretise_state, load_tokenizer, tokenize_prompt


def stats(**values: list[float]) -> Statistics:
    arrays = {k: np.array(v, dtype=np.float64) for k, v in values.items()}
    return Statistics(**{**dict.fromkeys(("mean", "std", "q01", "q99")), **arrays})  # type: ignore[arg-type]


def make_processor(**changes: Any) -> Processor:
    state = Statistics(**{k: np.array(v) for k, v in statistics()["state"].items()})
    actions = Statistics(**{k: np.array(v) for k, v in statistics()["actions"].items()})
    processor = Processor(
        tokenizer=TOKENIZER,
        state=Normaliser.of(state, "quantile", "state"),
        actions=Normaliser.of(actions, "quantile", "actions"),
        image_size=28,
        action_dim=10,
        max_token_len=48,
        discrete_state=True,
    )
    return replace(processor, **changes)


def write_statistics(folder: Path, content: Any) -> Path:
    path = folder / "norm_stats.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# -- normalisation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "normalised", "restored"),
    [
        (
            "quantile",
            {"q01": [-1.0, 10.0], "q99": [3.0, 10.5]},
            [(2.0 + 1.0) / (4.0 + 1e-6) * 2 - 1, (-2.0 - 10.0) / (0.5 + 1e-6) * 2 - 1],
            [(2.0 + 1) / 2 * (4.0 + 1e-6) - 1.0, (-2.0 + 1) / 2 * (0.5 + 1e-6) + 10.0],
        ),
        (
            "mean_std",
            {"mean": [1.0, -2.0], "std": [0.5, 0.0]},
            [(2.0 - 1.0) / (0.5 + 1e-6), (-2.0 + 2.0) / 1e-6],
            [2.0 * (0.5 + 1e-6) + 1.0, -2.0 * 1e-6 - 2.0],
        ),
    ],
)
def test_normalisation_is_openpis(kind: Any, values: Any, normalised: list[float], restored: list[float]) -> None:
    n, x = Normaliser.of(stats(**values), kind, "state"), np.array([2.0, -2.0])
    np.testing.assert_allclose(n.normalise(x), normalised, rtol=1e-15, atol=1e-15)
    np.testing.assert_allclose(n.restore(x), restored, rtol=1e-15, atol=1e-15)


def test_the_lower_quantile_is_exactly_minus_one() -> None:
    """One bit below would be bin -1 instead of 0, and constant dimensions sit exactly there."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=2000)
    span = np.where(np.arange(2000) % 4 == 0, 0.0, rng.random(2000))
    n = Normaliser.of(stats(q01=low.tolist(), q99=(low + span).tolist()), "quantile", "state")
    assert (n.normalise(low) == -1.0).all()
    assert (discretise_state(n.normalise(low)) == 0).all()


def test_actions_are_cut_to_the_robots() -> None:
    actions = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    q = {k: np.array(v) for k, v in statistics()["actions"].items()}
    expected = (actions[:, :7].astype(np.float64) + 1) / 2 * (q["q99"] - q["q01"] + 1e-6) + q["q01"]
    processor = make_processor()
    result = processor.unnormalize_actions(actions, processor.prepare(tiny_observation()))
    assert result.dtype == np.float64 and result.shape == (5, 7)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)


def test_prepared_state_is_normalised_and_padded() -> None:
    observation = tiny_observation()
    raw = observation["observation/state"]
    q = {k: np.array(v) for k, v in statistics()["state"].items()}
    inputs = make_processor().prepare(observation)
    assert inputs.state.dtype == np.float32 and inputs.state.shape == (10,)
    np.testing.assert_allclose(inputs.state[:8], (raw - q["q01"]) / (q["q99"] - q["q01"] + 1e-6) * 2 - 1, atol=1e-6)
    assert (inputs.state[8:] == 0).all()
    np.testing.assert_array_equal(inputs.raw_state, raw)


# -- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_are_read_with_and_without_the_wrapping_key(tmp_path: Path) -> None:
    for content in ({"norm_stats": statistics()}, statistics()):
        q01 = load_statistics(write_statistics(tmp_path, content))["actions"].q01
        assert q01 is not None and q01.tolist() == statistics()["actions"]["q01"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("not json", "JSON"),
        ([1, 2], "mapping|list"),
        ({"norm_stats": {"state": {}}}, r"norm_stats\.actions|\['state'\]"),
        ({"norm_stats": {"actions": {}}}, r"norm_stats\.state"),
        ({"state": {"q01": [0.0, float("nan")]}, "actions": {}}, r"state\.q01: |finite"),
        ({"state": {}, "actions": {"mean": 3.0}}, r"actions\.mean: |finite|3\.0"),
        ({"state": {"std": ["a"]}, "actions": {}}, r"state\.std: |finite"),
        ({"state": {"std": [[1.0], [1.0, 2.0]]}, "actions": {}}, r"state\.std: |finite"),
        (None, r"norm_stats\.json|no such file"),
    ],
)
def test_bad_statistics_are_named(tmp_path: Path, content: Any, parts: str) -> None:
    path = tmp_path / "norm_stats.json" if content is None else write_statistics(tmp_path, content)
    with pytest.raises(CheckpointError, match="statistics") as refused:
        load_statistics(path)
    assert all(re.search(part, str(refused.value)) for part in parts.split("|"))


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"mean": [0.0], "std": [1.0]}, "quantile", "q01 and q99"),
        ({"q01": [0.0], "q99": [1.0]}, "mean_std", "mean and std"),
        ({"q01": [0.0, 1.0], "q99": [1.0]}, "quantile", "one length"),
        ({"q01": [1.0], "q99": [0.0]}, "quantile", "q01 <= q99"),
    ],
)
def test_statistics_of_the_wrong_kind_are_refused(values: Any, kind: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"norm_stats\.state: .*{message}"):
        Normaliser.of(stats(**values), kind, "state")


def test_statistics_may_be_longer_than_the_robots_numbers() -> None:
    """openpi computes some after padding: with zeros, or to as many as the model has."""
    n = Normaliser.of(stats(mean=[0.0] * 12, std=[2.0] * 8 + [0.0] * 4), "mean_std", "state")
    processor = make_processor(state=n, actions=n.cut(9, 12, "actions"), action_dim=9)
    assert (len(processor.state.low), len(processor.actions.low)) == (8, 7)
    inputs = processor.prepare(tiny_observation())
    np.testing.assert_allclose(inputs.state[:8], tiny_observation()["observation/state"] / 2, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mean", "std", "got"),
    [
        ("state", [0.0] * 7, [1.0] * 7, r"8 numbers \(state_dim\), got 7"),
        ("actions", [0.0] * 6, [2.0] * 6, r"7 numbers \(action_dim\), got 6"),
        # Cutting these would drop a joint or a gripper without an error.
        ("actions", [0.0] * 8, [1.0] * 7 + [2e-5], r"7 numbers \(action_dim\), got 8"),
        ("actions", [0.0] * 7 + [-2e-5], [1.0] * 7 + [0.0], r"7 numbers \(action_dim\), got 8"),
    ],
)
def test_statistics_of_the_wrong_length_are_refused(name: str, mean: Any, std: Any, got: str) -> None:
    scale = Normaliser.of(stats(mean=mean, std=std), "mean_std", name)
    with pytest.raises(CheckpointError, match=rf"norm_stats\.{name}: expected the preset's {got}"):
        make_processor(**{name: scale}, action_dim=9)
    if len(mean) == 8:
        assert len(make_processor(**{name: scale}, action_dim=8).actions.low) == 7


# -- prompts ------------------------------------------------------------------------------------------------------


def words(*names: str) -> list[int]:
    return [len(SmallTokenizer.SPECIAL) + WORDS.index(n) for n in names]


def test_the_plain_prompt_ends_in_a_newline_token() -> None:
    ids = tokenize_prompt(TOKENIZER, "  pick_up the\nbowl ", None, 48)
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, *words("pick", "up", "the", "bowl", "\n")]


def test_the_state_prompt() -> None:
    # Edge of the first bin, inside the first, middle, last, above one (last), below minus one (bin -1).
    state = np.array([-1.0, -0.999, 0.0, 0.999, 5.0, -1.001])
    assert discretise_state(state).tolist() == [0, 0, 128, 255, 255, -1]
    spy = Spy()
    assert tokenize_prompt(spy, "Pick up_the bowl\n", state, 48).tolist() == [1, 7, 9]
    # Not lower-cased: that is the tokenizer's business.
    assert spy.texts == ["Task: Pick up the bowl, State: 0 0 128 255 255 -1;\nAction: "]


def test_small_tokenizer_numbers_words_and_letters() -> None:
    tokenizer = SmallTokenizer(("up", "a", "b"), state_dim=2, fill_to=9)
    assert tokenizer.vocab_size == 4 + 3 + 2 * 256
    first = 7
    assert tokenizer.encode("Up ab! 3 -1 300", add_bos=True) == [1, 4, 5, 6, 2, first + 3, first + 256, first + 511]
    assert tokenizer.finish([1, 4]) == [1, 4, *[3] * 7]
    assert tokenizer.finish([1] * 12) == [1] * 12


def test_the_prompt_carries_the_normalised_state() -> None:
    observation = tiny_observation()
    q = {k: np.array(v) for k, v in statistics()["state"].items()}
    observation["observation/state"] = q["q01"].copy()
    ids = make_processor().prepare(observation).tokens
    number = len(SmallTokenizer.SPECIAL) + len(WORDS)
    assert [i for i in ids if i >= number] == [number + 256 * slot for slot in range(8)]
    plain = make_processor(discrete_state=False).prepare(observation).tokens
    assert plain.tolist() == [1, *words("pick", "up", "the", "bowl", "\n")]


def test_a_prompt_may_be_a_numpy_scalar_or_the_default() -> None:
    expected = make_processor().prepare(tiny_observation()).tokens
    forms = (
        np.array("pick up the bowl"),
        b"pick up the bowl",
        np.str_("pick up the bowl"),
        np.array(b"pick up the bowl"),
    )
    for prompt in forms:
        wrapped = {**tiny_observation(), "prompt": prompt}
        np.testing.assert_array_equal(make_processor().prepare(wrapped).tokens, expected)
    bare = {k: v for k, v in tiny_observation().items() if k != "prompt"}
    default = make_processor(default_prompt="pick up the bowl")
    np.testing.assert_array_equal(default.prepare(bare).tokens, expected)


# -- images and whole observations --------------------------------------------------------------------------------


BAD: dict[str, list[tuple[Any, str]]] = {
    "observation/image": [
        (np.zeros((32, 28, 1), np.uint8), r"expected shape .*, got \(32, 28, 1\)"),
        ([[1], [1, 2]], "an array, got a list"),
        (np.zeros((28, 28, 3), "S1"), r"uint8, got \|S1"),
        (np.zeros((28, 28, 3), object), "uint8, got object"),
    ],
    "observation/wrist_image": [(np.zeros((1, 300, 3), np.uint8), r"resized to 28, got \(1, 300, 3\)")],
    "observation/state": [
        (np.zeros(7), r"shape \(8,\), got \(7,\)"),
        (np.zeros((1, 8)), r"shape \(8,\), got \(1, 8\)"),
        (np.array([0] * 7 + [np.nan]), "finite"),
        (np.array([0] * 7 + [np.inf]), "finite"),
        (np.ma.array(np.zeros(8), mask=np.arange(8) == 0), "without a mask, got 1"),
        (None, "expected"),
        # NumPy would convert each of these to numbers.
        (np.full(8, b"12"), r"numbers, got dtype \|S2"),
        (["1"] * 8, "numbers, got dtype <U1"),
        ([1.0] * 7 + ["1"], "numbers, got dtype <U"),
        (np.ones(8, bool), "numbers, got dtype bool"),
        (np.ones(8, complex), "numbers, got dtype complex128"),
        (np.ones(8, object), "numbers, got dtype object"),
        (np.ones(8, "m8[s]"), "numbers, got dtype timedelta64"),
        ([[1.0], [1.0, 2.0]], "numbers, got a list"),
        (np.full(8, 1e200), "the checkpoint's range"),
    ],
    "prompt": [
        ("", "an instruction"),
        (" \n_", "an instruction"),
        (3, "a str, got int"),
        (["pick"], "a str, got list"),
        (np.array([b"pick"]), "a str, got ndarray"),
        (np.array({"a": 1}, object), "a str, got dict"),
        (b"pick up the \xff\xfe bowl", "UTF-8, got b'pick"),
        (np.array(b"pick \xff"), "UTF-8, got b'pick"),
        ("pick \ud800", "UTF-8"),
        (np.array("pick \ud800"), "UTF-8"),
        ("bowl " * 49, r"at most 48 .*max_token_len\), got \d+ from 'bowl"),
    ],
}


@pytest.mark.parametrize(("key", "value", "message"), [(k, v, m) for k, rows in BAD.items() for v, m in rows])
def test_a_bad_value_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ObservationError, match=f"^{key}: .*{message}"):
        make_processor().prepare({**tiny_observation(), key: value})


@pytest.mark.parametrize("key", list(tiny_observation()))
def test_a_missing_key_is_named(key: str) -> None:
    observation = tiny_observation()
    del observation[key]
    with pytest.raises(ObservationError, match=f"observation: missing {key}; got "):
        make_processor().prepare(observation)


@pytest.mark.parametrize("observation", [None, [1], "observation"])
def test_an_observation_is_a_mapping(observation: Any) -> None:
    with pytest.raises(ObservationError, match="observation: expected a mapping, got"):
        make_processor().prepare(observation)
    assert issubclass(ObservationError, VlaAccelError) and issubclass(ObservationError, ValueError)


def test_the_demos_tokenizer_is_the_small_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(NAMED["demo"])
    assert isinstance(tokenizer, SmallTokenizer)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path) == tokenizer


def test_plain_prompts_are_tokenised_once() -> None:
    spy = Spy()
    processor = make_processor(tokenizer=spy, discrete_state=False)
    for prompt in ("open it", "close it", "open it"):
        ids = processor.prepare({**tiny_observation(), "prompt": prompt}).tokens
        assert ids.tolist() == [1, 7, 7, 9]
    assert spy.texts == ["open it", "\n", "close it", "\n"]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 0
    for number in range(2000):  # an unbounded stream of instructions is no leak
        processor.prepare({**tiny_observation(), "prompt": f"open {number}"})
    assert len(processor._prompts) <= 1024


def test_images_are_the_callers_own_and_the_state_is_a_copy() -> None:
    observation = tiny_observation()
    observation["observation/state"] = observation["observation/state"].astype(np.float64)
    inputs = make_processor().prepare(observation)
    assert inputs.images[0] is observation["observation/image"]
    # Also where only its axes are in another order; no image is ever written to.
    moved = {**observation, "observation/image": np.moveaxis(observation["observation/image"], -1, 0).copy()}
    assert np.shares_memory(make_processor().prepare(moved).images[0], moved["observation/image"])
    kept = inputs.raw_state.copy()
    observation["observation/state"][:] = 0
    np.testing.assert_array_equal(inputs.raw_state, kept)


def test_the_example_is_a_valid_observation() -> None:
    processor = make_processor()
    inputs = processor.prepare(processor.example())
    assert [v.shape for v in inputs.images] == [(28, 28, 3)] * 2 and not any(v.any() for v in inputs.images)
    np.testing.assert_allclose(inputs.state[:8], 0, atol=1e-6)
    assert len(inputs.tokens) == len(processor.prepare(tiny_observation(prompt=processor.example()["prompt"])).tokens)
    assert make_processor(default_prompt="pick it").example()["prompt"] == "pick it"


def test_processing_needs_no_torch() -> None:
    code = (
        "import sys, vla_accel.transforms.processing; assert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
