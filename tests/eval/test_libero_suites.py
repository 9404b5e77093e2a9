"""LIBERO's suites and LIBERO-PRO's variants, as the installed package has them. No simulator."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from eval.libero.__main__ import main
from eval.libero.benchmark import LIBERO, from_sampled, settings_for
from eval.libero.simulator import CAMERAS, PROPRIO, to_openpi
from eval.libero.suites import MAX_STEPS, SUITES, VARIANTS, VARIED, load_suite, stated_instruction
from vla_accel.errors import ConfigError, SimulatorError

PRO = [f"{suite}_{variant}" for suite in VARIED for variant in VARIANTS]


@pytest.mark.parametrize("name", PRO)
def test_a_variant_is_whole_and_has_its_suites_limit(name: str) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    suite, base = load_suite(name), load_suite(name.rpartition("_")[0])
    assert (suite.name, suite.max_steps, len(suite.tasks)) == (name, base.max_steps, 10)
    for task, plain in zip(suite.tasks, base.tasks, strict=True):
        assert task.bddl_path.is_file() and task.bddl_path != plain.bddl_path
        assert task.instruction and len(task.start_states) >= 50 and task.start_states.ndim == 2
        assert f"(:language {task.instruction})".lower() in " ".join(task.bddl_path.read_text().split()).lower()
    # The variants that are about words tell the robot something else than the suite that they vary.
    if name.endswith(("_lan", "_task")):
        assert all(a.instruction.lower() != b.instruction.lower() for a, b in zip(suite.tasks, base.tasks, strict=True))


def test_an_unknown_variant_is_named_with_the_known_ones() -> None:
    assert len(PRO) == 16 and set(SUITES) == {*MAX_STEPS, *PRO}
    with pytest.raises(ConfigError, match=r"libero_spatial_swap.*got 'libero_90_swap'"):
        load_suite("libero_90_swap")


@pytest.mark.parametrize("text", ["(define (problem x))", "(:language a)(:language b)"])
def test_a_task_file_that_does_not_say_one_thing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "task.bddl").write_text(text)
    with pytest.raises(SimulatorError, match=r"task\.bddl: expected one \(:language"):
        stated_instruction(tmp_path / "task.bddl")
    with pytest.raises(SimulatorError, match="cannot be read"):
        stated_instruction(tmp_path / "none.bddl")


def test_the_help_names_the_variants(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"_{variant}" in text for variant in VARIANTS)


def sampled(folder: Path, suite: str = "libero_object", tasks: int = 10) -> Path:
    """Start states as `eval.demo.states` leaves them; task t's are full of t."""
    place = folder / suite
    place.mkdir(parents=True)
    for task in range(tasks):
        np.savez(place / f"task_{task:02d}.npz", states=np.full((3, 5), float(task)))
    (place / "manifest.json").write_text(json.dumps({"suite": suite, "seed": 800_000}))
    return folder


def test_episodes_begin_where_they_are_told_to(tmp_path: Path) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    # It travels to worker processes.
    benchmark = pickle.loads(pickle.dumps(from_sampled(LIBERO, sampled(tmp_path), ["libero_object"])))
    suite, shipped = benchmark.load_suite("libero_object"), load_suite("libero_object")
    assert (suite.name, suite.max_steps) == (shipped.name, shipped.max_steps)
    for task, other in zip(suite.tasks, shipped.tasks, strict=True):
        assert (task.name, task.instruction, task.bddl_path) == (other.name, other.instruction, other.bddl_path)
        assert task.start_states.shape == (3, 5) and (task.start_states == task.id).all()
    told = benchmark.settings["start_states"]["libero_object"]
    assert told["seed"] == 800_000 and len(told["sha256"]) == 64
    assert {k: v for k, v in benchmark.settings.items() if k != "start_states"} == LIBERO.settings


@pytest.mark.parametrize(
    ("suite", "words", "message"),
    [
        ("libero_object", (), r"starts: expected .*libero_spatial/manifest\.json, which .* found no such file"),
        ("libero_spatial", ("--trials", "4"), "trials: expected at most 3, one for each start state, got 4"),
        ("libero_spatial", ("--suite", "libero_spacial"), "suite: expected one of .*did you mean libero_spatial"),
    ],
)
def test_start_states_that_cannot_be_are_named(
    suite: str, words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    assert main(["--starts", str(sampled(tmp_path, suite)), *words]) == 2
    assert re.search(f"error: {message}", capsys.readouterr().err)


def test_start_states_of_another_suite_or_too_few_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("libero", reason="needs LIBERO")
    folder = sampled(tmp_path, tasks=9)
    with pytest.raises(
        ConfigError,
        match=r"starts: expected task_09\.npz in .*libero_object, found none; create them: .*states --suite",
    ):
        from_sampled(LIBERO, folder, ["libero_object"]).load_suite("libero_object")
    (folder / "libero_object").rename(folder / "libero_spatial")
    with pytest.raises(ConfigError, match="expected start states of libero_spatial, got 'libero_object'"):
        from_sampled(LIBERO, folder, ["libero_spatial"])


def test_only_the_tasks_that_are_played_must_have_sampled_start_states(tmp_path: Path) -> None:
    played = from_sampled(LIBERO, sampled(tmp_path, tasks=3), ["libero_object"], "0,2").load_suite("libero_object")
    assert [len(task.start_states) > 0 for task in played.tasks] == [True, False, True] + 7 * [False]


@pytest.mark.parametrize(("asked", "given"), [(None, 224), (224, 224), (96, 96), (256, 256), (512, 256)])
def test_a_model_is_handed_images_of_its_size(asked: int | None, given: int) -> None:
    """As far as they are rendered; and runs of a size that is openpi's keep their fingerprints."""
    settings = LIBERO.settings_of({} if asked is None else {"image_size": asked})
    assert settings.get("image_size", 224) == given and ("image_size" in settings) == (given != 224)
    assert settings_for({"image_size": asked}).get("image_size", 224) == given
    rendered = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    numbers = zip(PROPRIO, (np.zeros(3), np.array([0.0, 0, 0, 1]), np.zeros(2)), strict=True)
    seen = to_openpi({**dict.fromkeys(CAMERAS.values(), rendered), **dict(numbers)}, given)
    assert all(seen[key].shape == (given, given, 3) for key in CAMERAS)
    assert all(LIBERO.example_observation(settings)[key].shape == (given, given, 3) for key in CAMERAS)
    if given == 256:
        np.testing.assert_array_equal(seen["observation/image"], rendered[::-1, ::-1])
