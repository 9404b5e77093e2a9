"""LIBERO's suites and LIBERO-PRO's variants, as the installed package has them. No simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.libero.__main__ import main
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


def test_sixteen_of_them_beside_the_five() -> None:
    assert len(PRO) == 16 and set(SUITES) == {*MAX_STEPS, *PRO}


def test_an_unknown_variant_is_named_with_what_there_is() -> None:
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
