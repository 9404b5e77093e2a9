"""FAST: from tokens back to actions, and what is no chunk of actions. A small one in the hub's format stands in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.spy_tokenizer import Spy
from tests.support.tiny_pi0_fast import (
    ACTION_DIM,
    HIGHEST,
    HORIZON,
    LOWEST,
    SCALE,
    SKIPPED,
    STOP,
    VOCABULARY,
    cosines,
    rounded,
    write_fast,
    write_text_tokenizer,
    written,
)
from vla_accel.errors import ActionError, CheckpointError
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastTokenizer, load_fast
from vla_accel.transforms.tokenizer import PaliGemmaTokenizer, tokenize_fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fast")
    write_fast(made)
    write_text_tokenizer(made / "text.json")
    return made


@pytest.fixture(scope="module")
def detokeniser(folder: Path) -> Detokeniser:
    return made_of(folder)


def made_of(folder: Path, horizon: int = HORIZON, vocabulary: int = VOCABULARY, **more: Any) -> Detokeniser:
    text = PaliGemmaTokenizer(folder / "text.json")
    text.vocab_size = vocabulary
    return Detokeniser.of(FastTokenizer.load(folder), text, SKIPPED, horizon, ACTION_DIM, **more)


def actions_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (HORIZON, ACTION_DIM))


@pytest.mark.parametrize("seed", range(4))
def test_actions_come_back_rounded(seed: int, folder: Path, detokeniser: Detokeniser) -> None:
    actions = actions_of(seed)
    tokens = written(actions, folder)
    assert len(tokens) < HORIZON * ACTION_DIM + 3, "some tokens are of several characters"
    # What is behind the stop token stands for nothing.
    found = detokeniser.chunk(np.array([*tokens, 17, 0, 0]))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rounded(actions), rtol=0, atol=1e-6)
    assert np.abs(found - actions).max() > 1e-3


def test_the_opening_is_left_out_wherever_it_is(folder: Path, detokeniser: Detokeniser) -> None:
    tokens = written(actions_of(0), folder)
    again = [*tokens[:4], *tokens[:2], *tokens[4:]]
    np.testing.assert_array_equal(detokeniser.chunk(np.array(again)), detokeniser.chunk(np.array(tokens)))


WRONG: dict[str, tuple[Callable[[list[int]], list[int]], str]] = {
    "no opening": (lambda t: t[2:], r"expected tokens that begin with 'Action:', \(6, 12\), got \[\d+, \d+\]"),
    "a word": (lambda t: [*t[:3], HIGHEST + 4, *t[3:]], r"expected FAST tokens 0 to \d+, got -4"),
    "above FAST": (lambda t: [*t[:3], 9, *t[3:]], r"expected FAST tokens 0 to \d+, got 369"),
    "one too few": (lambda t: [*t[:2], *t[3:]], r"expected 15 coefficients, 5 actions of 3, got 1\d of \d+ tokens"),
    "one too many": (lambda t: [*t[:3], *t[2:]], r"expected 15 coefficients, 5 actions of 3, got 1\d of \d+ tokens"),
    "nothing": (lambda t: [*t[:2], STOP], "expected 15 coefficients, 5 actions of 3, got 0 of 0 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_no_chunk_is_an_error(name: str, folder: Path, detokeniser: Detokeniser) -> None:
    change, message = WRONG[name]
    tokens = np.array(change(written(actions_of(0), folder)))
    with pytest.raises(ActionError, match=message) as caught:
        detokeniser.chunk(tokens)
    # The way out is named where it is one.
    try:
        made_of(folder, relaxed=True).chunk(tokens)
        helps = True
    except ActionError:
        helps = False
    assert ("; checkpoint.relaxed_actions: true in the configuration" in str(caught.value)) == helps
    assert helps == (name != "no opening")


def test_parts_of_a_character_are_an_error(folder: Path, detokeniser: Detokeniser) -> None:
    """A byte that only another one makes a character of."""
    content = json.loads((folder / "tokenizer.json").read_text())
    half = content["model"]["vocab"]["Ã"]
    tokens = written(actions_of(0), folder)
    with pytest.raises(ActionError, match=r"whole characters .*; checkpoint\.relaxed_actions: true"):
        detokeniser.chunk(np.array([*tokens[:-1], HIGHEST - half, STOP]))


def test_relaxed_it_does_as_lerobot(folder: Path) -> None:
    relaxed = made_of(folder, opened=False, relaxed=True)
    tokens = written(actions_of(0), folder)
    exact = relaxed.chunk(np.array(tokens))
    np.testing.assert_array_equal(exact, made_of(folder).chunk(np.array(tokens)))
    # Too many are cut; those above FAST's vocabulary are left out.
    for longer in ([*tokens[:-1], HIGHEST - 40, STOP], [*tokens[:4], 9, *tokens[4:]]):
        np.testing.assert_array_equal(relaxed.chunk(np.array(longer)), exact)
    # One below 0 makes zeros of all.
    assert not relaxed.chunk(np.array([*tokens[:3], HIGHEST + 4, *tokens[3:]])).any()
    # Missing ones are zeros.
    few = relaxed.fast.text([HIGHEST - t for t in tokens[2:5]])
    coefficients = np.zeros(HORIZON * ACTION_DIM)
    coefficients[: len(few)] = [ord(c) + LOWEST for c in few]
    expected = np.linalg.inv(cosines(HORIZON)) @ coefficients.reshape(HORIZON, ACTION_DIM) / SCALE
    np.testing.assert_allclose(relaxed.chunk(np.array([*tokens[:5], STOP])), expected, rtol=0, atol=1e-6)


def test_sizes_must_fit(folder: Path, tmp_path: Path) -> None:
    for said, message in (
        ({"time_horizon": 8}, "expected one for 5 actions a chunk, got one for 8"),
        ({"action_dim": 7}, "expected one for 3 numbers an action, got one for 7"),
    ):
        write_fast(tmp_path, **said)
        write_text_tokenizer(tmp_path / "text.json")
        with pytest.raises(CheckpointError, match=message):
            made_of(tmp_path)
    write_fast(tmp_path, time_horizon=HORIZON, action_dim=ACTION_DIM)
    assert made_of(tmp_path).fast.time_horizon == HORIZON
    with pytest.raises(CheckpointError, match=r"expected at most 194 tokens with a vocabulary of 199 .* got \d+"):
        made_of(folder, vocabulary=199)


def test_files_that_are_missing_or_something_else(folder: Path, tmp_path: Path) -> None:
    write_fast(tmp_path)
    assert load_fast([tmp_path.parent / "fast"], str(tmp_path), "nobody/fast").scale == SCALE
    # The name that lerobot keeps may be a folder, too.
    assert load_fast([tmp_path.parent / "fast"], None, str(tmp_path)).scale == SCALE
    (tmp_path / "processor_config.json").write_text('{"scale": 0, "min_token": -3}')
    with pytest.raises(CheckpointError, match=r"processor_config\.json: expected scale, min_token.* got: scale: 0"):
        FastTokenizer.load(tmp_path)
    (tmp_path / "processor_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected scale, min_token and sizes"):
        FastTokenizer.load(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json and .*, found no processor_config\.json"):
        FastTokenizer.load(tmp_path)


def test_a_tokenizer_without_the_signs_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected one token of '\|' and two or more"):
        Detokeniser.of(FastTokenizer.load(folder), Spy(), SKIPPED, HORIZON, ACTION_DIM)


def test_the_prompt_ends_in_a_second_bos(folder: Path) -> None:
    text = PaliGemmaTokenizer(folder / "text.json")
    found = tokenize_fast(text, " Pick_up\n", np.array([-2.0, 0.0, 0.999]), 40, "task")
    whole = "Task: Pick up, State: -1 128 255;\n"
    assert found.tolist() == [2, *text.encode(whole, add_bos=False), 2]
    assert text.vocab_size == VOCABULARY, "what was added to the vocabulary does not count"
    assert replace(made_of(folder), opened=False).highest == VOCABULARY - 1 - SKIPPED
