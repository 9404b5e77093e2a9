"""`python -m benchmarks.measure` runs jobs on the GPUs present; every stored run has a job that parses."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import signal
import sys
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.jobs import EXCEPTIONS, JOBS, Job
from benchmarks.measure import CONTINUED, DONE, FAILED, LEFT_OUT, Outcome, Runner, gpus, selected, slots
from benchmarks.tables.registry import RESULTS, TABLES
from tests.support.waiting import PATIENCE_S
from vla_accel.config import load_config
from vla_accel.errors import ConfigError, EngineError
from vla_accel.families.family import family_named
from vla_accel.measure.systems import Factory

TOY = """
import json, os, pathlib, sys, time
kind, path = sys.argv[1], pathlib.Path(sys.argv[2])
log, order = path.with_suffix(".episodes"), pathlib.Path(__file__).with_name("order")
with open(order, "a") as file:
    file.write(f"begin {path.stem}\\n")
if kind == "fails":
    path.write_text('{"half":')
    print("first words")
    sys.exit("the last words")
if kind == "half":
    path.write_text('{"half":')
if kind == "cut_off":
    path.write_text('{"rows": [1], "complete": false}')
if kind == "resumes":  # an episode each time it is begun; three are all
    with open(log, "a") as file:
        file.write("an episode\\n")
    if len(log.read_text().splitlines()) < 3:
        time.sleep(60)
if kind == "waits":  # for a file, such as another job's
    while not pathlib.Path(sys.argv[3]).exists():
        time.sleep(0.01)
if kind not in ("half", "fails", "cut_off"):
    seen = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "cores": sorted(os.sched_getaffinity(0)), "words": sys.argv[3:]}
    path.write_text(json.dumps(seen))
with open(order, "a") as file:
    file.write(f"end {path.stem}\\n")
"""
CORE = min(os.sched_getaffinity(0))


@pytest.fixture
def toy(tmp_path: Path) -> str:
    (tmp_path / "toy.py").write_text(TOY)
    return f"python {tmp_path / 'toy.py'}"


def runner(folder: Path, jobs: list[Job], gpus: tuple[str, ...] = ("0",), **more: Any) -> Runner:
    return Runner(jobs, slots(gpus, [CORE]), folder / "work", folder / "results", **more)


def ran(folder: Path, jobs: list[Job], **more: Any) -> dict[str, Outcome]:
    """The outcomes of jobs that have all the time they need."""
    found = runner(folder, jobs, **more)
    found.run(time.monotonic() + PATIENCE_S, grace_s=PATIENCE_S)
    assert not found.running
    return found.outcomes


def begun(folder: Path) -> list[str]:
    lines = (folder / "order").read_text().splitlines()
    return [line.removeprefix("begin ") for line in lines if line.startswith("begin")]


def test_a_successful_run_is_stored_and_not_made_again(toy: str, tmp_path: Path) -> None:
    jobs = [Job("one", f"{toy} plain {{json}} {{workers}} {{given}}"), Job("step/two", f"{toy} plain {{json}}")]
    assert ran(tmp_path, jobs, inputs={"given": "a b"}) == {"one": Outcome(DONE), "step/two": Outcome(DONE)}
    assert json.loads((tmp_path / "results/one.json").read_text())["words"] == ["1", "a b"]
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["one.json"], "a step is not stored"
    assert (tmp_path / "work/step/two.json").is_file()
    assert {one.kind for one in ran(tmp_path, jobs).values()} == {DONE} and begun(tmp_path).count("one") == 1


@pytest.mark.parametrize(
    ("kind", "why"), [("fails", "the last words"), ("half", "expected JSON"), ("cut_off", "expected a complete run")]
)
def test_a_failure_is_reported_and_nothing_partial_is_stored(toy: str, tmp_path: Path, kind: str, why: str) -> None:
    before = tmp_path / "results" / "bad.json"
    before.parent.mkdir()
    before.write_text('{"stored": "before"}')
    jobs = [Job("bad", f"{toy} {kind} {{json}}"), Job("from_it", f"{toy} plain {{json}} {{work}}/bad.json")]
    found = ran(tmp_path, [*jobs, Job("other", f"{toy} plain {{json}}")])
    assert found["bad"].kind == FAILED and why in found["bad"].why
    assert found["from_it"].kind == LEFT_OUT and "bad" in found["from_it"].why
    assert found["other"] == Outcome(DONE)
    assert before.read_text() == '{"stored": "before"}' and not (tmp_path / "work/bad.json").exists()


def test_a_run_that_the_deadline_interrupts_continues_in_the_next_call(toy: str, tmp_path: Path) -> None:
    jobs = [Job("long", f"{toy} resumes {{json}}"), Job("next", f"{toy} plain {{json}}")]
    log = tmp_path / "work/partial/long.episodes"
    for call in (1, 2):
        found = runner(tmp_path, jobs)

        def clock(lines: int = call) -> float:
            """Past every deadline once the log has so many lines: no test waits for a time."""
            return 100.0 if log.is_file() and len(log.read_text().splitlines()) >= lines else 0.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure.time, "monotonic", clock)
            found.run(end=50.0, grace_s=PATIENCE_S)
        assert {name: one.kind for name, one in found.outcomes.items()} == {"long": CONTINUED, "next": CONTINUED}
        assert "KeyboardInterrupt" in (tmp_path / "work/partial/long.log").read_text()
        assert not (tmp_path / "results").exists()
    assert {one.kind for one in ran(tmp_path, jobs).values()} == {DONE}
    assert len(log.read_text().splitlines()) == 3, "it continued from its log"


def test_an_interrupt_ends_the_commands_even_those_that_ignore_it(tmp_path: Path) -> None:
    """This one also sends another Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    deaf = "import os, signal, time, pathlib, sys;"
    deaf += "signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT));"
    deaf += "pathlib.Path(sys.argv[1]).write_text('{}'); time.sleep(60)"
    found = runner(tmp_path, [Job("deaf", f"python -c {shlex.quote(deaf)} {{json}}")])
    original, pids = found._collect, []

    def collect() -> bool:
        if found.partial(found.jobs[0], ".json").is_file():
            pids.extend(running.process.pid for running in found.running)
            raise KeyboardInterrupt
        return original()

    found._collect = collect
    found.run(time.monotonic() + PATIENCE_S, grace_s=0.1)
    assert found.outcomes["deaf"].kind == CONTINUED and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_jobs_run_at_the_same_time_on_gpus_of_their_own(toy: str, tmp_path: Path) -> None:
    """The first two each wait until the other has begun; the next needs both GPUs, and is not overtaken."""
    jobs = [
        Job("a", f"{toy} waits {{json}} {tmp_path / 'work/partial/b'}"),
        Job("b", f"{toy} waits {{json}} {tmp_path / 'work/partial/a'}"),
        Job("both", f"{toy} plain {{json}}", gpus=2),
        Job("c", f"{toy} plain {{json}}", gpus=0),
        Job("machine", f"{toy} plain {{json}}", whole_machine=True),
    ]
    found = ran(tmp_path, jobs, gpus=("3", "5"))
    assert {one.kind for one in found.values()} == {DONE}
    order = begun(tmp_path)
    assert set(order[:2]) == {"a", "b"} and order[2:] == ["both", "c", "machine"]
    seen = {job.name: json.loads((tmp_path / f"results/{job.name}.json").read_text())["gpus"] for job in jobs}
    assert {seen["a"], seen["b"]} == {"3", "5"} and seen["both"] == "3,5" and seen["c"] == ""


def test_every_slot_has_a_share_of_the_cores() -> None:
    two = [(slot.gpu, slot.cores) for slot in slots(["3", "5"], range(8))]
    assert two == [("3", (0, 1, 2, 3)), ("5", (4, 5, 6, 7))]
    assert [(slot.gpu, slot.cores) for slot in slots([], range(2))] == [(None, (0, 1))]
    assert [slot.cores for slot in slots(["0", "1"], [7])] == [(7,), (7,)], "at least one core each"


@pytest.mark.parametrize(("visible", "usable"), [(None, ["0", "1"]), ("1", ["1"]), ("", [])])
def test_only_visible_gpus_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, usable: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ([], [])
    (tmp_path / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('NVIDIA H200\\nNVIDIA H200')\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == (usable, ["NVIDIA H200"] * 2)


def test_a_job_waits_for_the_jobs_that_it_is_made_from(toy: str, tmp_path: Path) -> None:
    jobs = [
        Job("step/a", f"{toy} plain {{json}}"),
        Job("pair", f"{toy} plain {{json}} {{work}}/step/a.json {{work}}/step/b.json", gpus=0),
        Job("step/b", f"{toy} plain {{json}}"),
    ]
    assert jobs[1].after == ("step/a", "step/b")
    assert {one.kind for one in ran(tmp_path, jobs).values()} == {DONE}
    assert begun(tmp_path) == ["a", "b", "pair"]
    assert all(Path(word).is_file() for word in json.loads((tmp_path / "results/pair.json").read_text())["words"])


@pytest.mark.parametrize(
    ("lacks", "names"),
    [
        ({"gpus": 2}, ("2 GPUs", "found 1")),
        ({"needs": ("no_such_package",)}, ("no_such_package",)),
        ({"needs": ("observations",)}, ("--observations",)),
        ({"checkpoint": "other_demo"}, ("other_demo", "found demo")),
        ({"only": "H100"}, ("H100", "NVIDIA L40S")),
    ],
)
def test_a_job_that_cannot_run_here_is_left_out(
    toy: str, tmp_path: Path, lacks: dict[str, Any], names: tuple[str, ...]
) -> None:
    jobs = [Job("not_here", f"{toy} plain {{json}}", **lacks), Job("here", f"{toy} plain {{json}}")]
    found = ran(tmp_path, jobs, inputs={"observations": None}, models=["NVIDIA L40S"])
    assert found["not_here"].kind == LEFT_OUT and all(name in found["not_here"].why for name in names)
    assert found["here"] == Outcome(DONE)
    without = runner(tmp_path, [Job("gpu", "python")], gpus=())
    assert "found 0" in str(without.why_not(without.jobs[0]))


@pytest.mark.parametrize(
    ("model", "stored"), [("H100 80GB", ["one_h100.json", "plain.json"]), ("H200", ["plain.json", "two_h200.json"])]
)
def test_a_run_is_stored_under_the_name_of_its_gpu_only(
    toy: str, tmp_path: Path, model: str, stored: list[str]
) -> None:
    jobs = [Job("one_h100", f"{toy} plain {{json}}", only="H100"), Job("plain", f"{toy} plain {{json}}")]
    jobs.append(Job("two_h200", f"{toy} plain {{json}}"))
    found = ran(tmp_path, jobs, models=[f"NVIDIA {model}"])
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == stored
    assert found["two_h200"].kind == DONE and ("not stored" in found["two_h200"].why) == (model != "H200")
    assert (tmp_path / "work/two_h200.json").is_file()


def test_the_summary_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    measure.report({"one": Outcome(DONE)})
    assert json.loads(capsys.readouterr().out)[DONE] == {"one": ""}
    with pytest.raises(EngineError, match="2 of 3"):
        measure.report({"a": Outcome(DONE), "b": Outcome(FAILED, "oh"), "c": Outcome(LEFT_OUT, "no GPU")})
    out, err = capsys.readouterr()
    assert json.loads(out) == {DONE: {"a": ""}, CONTINUED: {}, FAILED: {"b": "oh"}, LEFT_OUT: {"c": "no GPU"}}
    assert "b: oh" in err and "c: no GPU" in err


def test_selecting_a_job_selects_those_that_it_is_made_from() -> None:
    runs = list(JOBS[[j.name for j in JOBS].index("libero_stress")].after)
    found = [job.name for job in selected(["libero_stress", "parity_native"], JOBS)]
    assert found == [*runs, "libero_stress", "parity_native"], "in the order of the names"
    assert [job.name for job in selected(["*"], JOBS)] == [job.name for job in JOBS]
    chain = [Job("a", "python"), Job("b", "python {work}/a.json"), Job("c", "python {work}/b.json")]
    assert selected(["c"], chain) == chain
    with pytest.raises(ConfigError, match="parity_nativ'"):
        selected(["parity_nativ"], JOBS)


def test_listing_runs_nothing_and_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> None:
        raise AssertionError("a job was begun")

    monkeypatch.setattr(Runner, "run", forbid)
    assert measure.main(["--list", "--work", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(f"{job.name}: " in out for job in JOBS) and "bench_record_h200: stored, commit " in out
    for words, name in (
        (["--minutes", "0"], "minutes"),
        (["--observations", "no.npz"], "observations"),
        (["bench_record_h200", "--stress", "noise=0.2"], "stress"),
    ):
        assert measure.main(words) == 1
        assert f"{name}: expected" in capsys.readouterr().err


def test_a_work_folder_belongs_to_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with measure.exclusive(tmp_path):
        assert measure.main(["memory_counted", "--work", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_the_stress_of_the_stored_run_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert measure.stored_stress(path) is None
    path.write_text(json.dumps({"protocol": {"stress": {"noise": 0.2, "occlusion": 0.1}}}))
    assert measure.stored_stress(path) == "noise=0.2,occlusion=0.1"


# -- the table of jobs --------------------------------------------------------------------------------------------


def test_every_stored_run_that_a_table_reads_has_a_job() -> None:
    patterns = {name for _, names in TABLES.values() for name in ([names] if isinstance(names, str) else names)}
    patterns = {name.replace("{gpu}", "*") for name in patterns}
    stored = {path.stem for path in RESULTS.glob("*.json")}
    read = {name for name in stored if any(fnmatchcase(name, pattern) for pattern in patterns)}
    jobs = [job.name for job in JOBS]
    assert read - {*jobs, *EXCEPTIONS} == set()
    assert len(set(jobs)) == len(jobs) and not set(jobs) & set(EXCEPTIONS)
    assert set(EXCEPTIONS) <= stored
    patterns.discard("*")  # the table of GPUs counts them all
    assert all(any(fnmatchcase(job.name, pattern) for pattern in patterns) for job in JOBS if job.stored)


def test_a_job_follows_the_jobs_that_it_is_made_from() -> None:
    for index, job in enumerate(JOBS):
        assert set(job.after) <= {before.name for before in JOBS[:index]}, job.name


class Parsed(Exception):
    """The options were parsed."""


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_command_accepts_the_options_of_its_job(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parsed_by(options: object) -> None:
        raise Parsed(options)

    given = {"observations": "o.npz", "realtime_vla": "checkout", "stress": "noise=0.2", "starts": "states"}
    words = runner(tmp_path, [job], inputs=given).command(job, 8)
    assert "{" not in "".join(words) and words[:2] == [sys.executable, "-m"]
    assert all(need in given or need.isidentifier() for need in job.needs)
    for option in given:
        assert (f"{{{option}}}" in job.command) == (option in job.needs)
    monkeypatch.setattr("vla_accel.cli.options.check", parsed_by)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: parsed_by(parse_args(self)))
    monkeypatch.setattr(sys, "argv", words[2:])
    with pytest.raises(Parsed) as told, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported before
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    options = told.value.args[0]
    where = {str(value) for value in vars(options).values() if isinstance(value, Path)}
    assert where & {str(tmp_path / f"work/partial/{job.name}{end}") for end in (".json", "")}, "where it writes"
    configs = getattr(options, "config", None)
    for config in configs if isinstance(configs, tuple) else (configs,):
        load_config(config)
    if job.name.startswith("bench_") and getattr(options, "systems", ()):
        family = family_named(options.model or "pi05")
        factory = Factory(family, views=2, horizon=10, device="cpu", ceilings=None, checkout=options.realtime_vla)
        assert set(options.systems) <= set(factory.names)
