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
import tyro

from benchmarks import measure
from benchmarks.jobs import EXCEPTIONS, JOBS, Job
from benchmarks.measure import CONTINUED, DONE, FAILED, LEFT_OUT, Measuring, Outcome, chosen
from benchmarks.places import Place, gpus, places, room
from benchmarks.tables import RESULTS, TABLES
from eval.throughput import by_core
from tests.support.waiting import PATIENCE_S
from vla_accel.config import load_config
from vla_accel.errors import ConfigError, EngineError
from vla_accel.measure.systems import Factory
from vla_accel.models.family import family_named

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
SOON = PATIENCE_S
"""A deadline that no toy meets, unless it hangs."""


def one_gpu() -> list[Place]:
    return places(["0"], [CORE])


@pytest.fixture
def toy(tmp_path: Path) -> str:
    (tmp_path / "toy.py").write_text(TOY)
    return f"python {tmp_path / 'toy.py'}"


def measuring(folder: Path, jobs: list[Job], **more: Any) -> Measuring:
    found = Measuring(jobs, more.pop("places", one_gpu()), folder / "work", folder / "results", **more)
    return found


def played(folder: Path, jobs: list[Job], until: float = SOON, **more: Any) -> Measuring:
    found = measuring(folder, jobs, **more)
    found.run(time.monotonic() + until, grace_s=SOON)
    assert not found.running
    return found


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().splitlines()


def test_what_ended_well_is_stored_and_is_not_made_again(toy: str, tmp_path: Path) -> None:
    jobs = [Job("one", f"{toy} plain {{json}} {{workers}} {{given}}"), Job("step/two", f"{toy} plain {{json}}")]
    found = played(tmp_path, jobs, given={"given": "a b"})
    assert found.outcomes == {"one": Outcome(DONE), "step/two": Outcome(DONE)}
    assert json.loads((tmp_path / "results/one.json").read_text())["words"] == ["1", "a b"]
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == ["one.json"], "a step is not stored"
    assert (tmp_path / "work/step/two.json").is_file()
    again = played(tmp_path, jobs)
    assert {one.kind for one in again.outcomes.values()} == {DONE}
    assert order(tmp_path).count("begin one") == 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fails", "status 1: the last words"),
        ("half", "expected JSON in"),
        ("cut_off", "expected a complete run in"),
    ],
)
def test_a_failure_is_named_and_nothing_half_written_is_kept(toy: str, tmp_path: Path, kind: str, why: str) -> None:
    before = tmp_path / "results" / "bad.json"
    before.parent.mkdir()
    before.write_text('{"stored": "before"}')
    jobs = [Job("bad", f"{toy} {kind} {{json}}"), Job("from_it", f"{toy} plain {{json}} {{work}}/bad.json")]
    found = played(tmp_path, [*jobs, Job("other", f"{toy} plain {{json}}")])
    assert found.outcomes["bad"].kind == FAILED and found.outcomes["bad"].why.startswith(why)
    assert found.outcomes["from_it"] == Outcome(LEFT_OUT, "it is made from bad")
    assert found.outcomes["other"] == Outcome(DONE)
    assert before.read_text() == '{"stored": "before"}' and not (tmp_path / "work/bad.json").exists()


def test_what_the_deadline_interrupts_goes_on_in_the_next_call(toy: str, tmp_path: Path) -> None:
    jobs = [Job("long", f"{toy} resumes {{json}}"), Job("next", f"{toy} plain {{json}}")]
    log = tmp_path / "work/partial/long.episodes"
    for call in (1, 2):
        found = measuring(tmp_path, jobs)
        # The clock is over once the toy has its episode: no test waits for a time.
        watched = Until(log, call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure.time, "monotonic", watched)
            found.run(end=SOON, grace_s=SOON)
        assert found.outcomes == {"long": Outcome(CONTINUED, "interrupted"), "next": Outcome(CONTINUED, "not begun")}
        assert "KeyboardInterrupt" in (tmp_path / "work/partial/long.log").read_text()
        assert not (tmp_path / "results").exists()
    assert {one.kind for one in played(tmp_path, jobs).outcomes.values()} == {DONE}
    assert len(log.read_text().splitlines()) == 3, "it went on where it was"


class Until:
    """A clock that stands at 0 until a log has so many lines, then beyond every deadline."""

    def __init__(self, log: Path, lines: int) -> None:
        self.log, self.lines = log, lines

    def __call__(self) -> float:
        return 100.0 if self.log.is_file() and len(self.log.read_text().splitlines()) >= self.lines else 0.0


def test_interrupted_by_hand_or_ended_by_another_it_ends_its_jobs(tmp_path: Path) -> None:
    """Also one that heeds no interrupt, and has another Ctrl-C sent meanwhile."""
    before = signal.getsignal(signal.SIGINT)
    deaf = "import os, signal, time, pathlib, sys;"
    deaf += "signal.signal(signal.SIGINT, lambda *_: os.kill(os.getppid(), signal.SIGINT));"
    deaf += "pathlib.Path(sys.argv[1]).write_text('{}'); time.sleep(60)"
    found = measuring(tmp_path, [Job("deaf", f"python -c {shlex.quote(deaf)} {{json}}")])
    original = found._end_some

    def end_some() -> bool:
        if found.partial(found.jobs[0], ".json").is_file():
            pids.extend(process.pid for _, process, _ in found.running.values())
            raise KeyboardInterrupt
        return original()

    pids: list[int] = []
    found._end_some = end_some
    found.run(time.monotonic() + SOON, grace_s=0.1)
    assert found.outcomes == {"deaf": Outcome(CONTINUED, "interrupted")}
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_two_share_a_gpu_and_one_that_takes_times_has_it_alone(toy: str, tmp_path: Path) -> None:
    """The two that share each wait for the other to have begun; the one that takes times comes between them."""
    jobs = [
        Job("a", f"{toy} waits {{json}} {tmp_path / 'work/partial/b'}", room="shared"),
        Job("b", f"{toy} waits {{json}} {tmp_path / 'work/partial/a'}", room="shared"),
        Job("times", f"{toy} plain {{json}}"),
        Job("c", f"{toy} plain {{json}}", room="shared"),
    ]
    found = played(tmp_path, jobs)
    assert {one.kind for one in found.outcomes.values()} == {DONE}
    lines = order(tmp_path)
    assert set(lines[4:6]) == {"begin times", "end times"}, "after both, and before c, which overtakes none"
    assert lines[6:] == ["begin c", "end c"]


def test_none_overtakes_one_that_waits_for_room(toy: str, tmp_path: Path) -> None:
    jobs = [
        Job("a", f"{toy} waits {{json}} {tmp_path / 'go'}", room="shared"),
        Job("times", f"{toy} plain {{json}}"),
        Job("c", f"{toy} plain {{json}}", room="shared"),
    ]
    found = measuring(tmp_path, jobs)
    assert found._begin_some() and list(found.running) == ["a"], "there were room for c"
    (tmp_path / "go").touch()
    found.run(time.monotonic() + SOON)
    assert [line for line in order(tmp_path) if line.startswith("begin")] == ["begin a", "begin times", "begin c"]


@pytest.mark.parametrize(("visible", "may"), [(None, ["0", "1"]), ("1", ["1"]), ("", [])])
def test_the_gpus_are_those_that_may_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, may: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == ([], [])
    (tmp_path / "nvidia-smi").write_text(f"#!{sys.executable}\nprint('NVIDIA H200\\nNVIDIA H200')\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == (may, ["NVIDIA H200"] * 2)


def test_what_is_made_from_others_comes_after_them_and_holds_up_nobody(toy: str, tmp_path: Path) -> None:
    jobs = [
        Job("step/a", f"{toy} plain {{json}}"),
        Job("pair", f"{toy} plain {{json}} {{work}}/step/a.json {{work}}/step/b.json", gpus=0),
        Job("step/b", f"{toy} plain {{json}}"),
    ]
    assert jobs[1].after == ("step/a", "step/b")
    found = played(tmp_path, jobs)
    assert {one.kind for one in found.outcomes.values()} == {DONE}
    assert [line for line in order(tmp_path) if line.startswith("begin")] == ["begin a", "begin b", "begin pair"]
    seen = json.loads((tmp_path / "results/pair.json").read_text())
    assert seen["gpus"] == "", "without need of a GPU it sees none"
    assert all(Path(word).is_file() for word in seen["words"])
    assert json.loads((tmp_path / "work/step/a.json").read_text()) == {"gpus": "0", "cores": [CORE], "words": []}


def test_places_are_halves_and_room_is_what_a_job_needs() -> None:
    two = places(["3", "5"], range(8))
    assert [(p.gpu, p.cores) for p in two] == [("3", (0, 1)), ("3", (2, 3)), ("5", (4, 5)), ("5", (6, 7))]
    shared, alone, machine = (Job("x", "", room=kind) for kind in ("shared", "alone", "machine"))
    both = Job("x", "", gpus=2)
    assert room(alone, two, two) == two[:2] and room(both, two, two) == two == room(machine, two, two)
    assert room(shared, two[1:], two) == [two[2]], "the emptier GPU"
    assert room(shared, two[1:2], two) == [two[1]] and room(shared, [], two) is None
    assert room(alone, two[1:], two) == two[2:] and room(alone, [two[1], two[2]], two) is None
    assert room(both, two[1:], two) is None and room(machine, two[1:], two) is None
    assert [p.gpu for p in places([], range(2))] == [None, None]
    assert places(["0"], [7])[0].cores == (7,), "at least one core each"


def test_a_share_of_a_machine_has_whole_cores(tmp_path: Path) -> None:
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        folder.joinpath("thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert by_core(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert by_core({6, 1, 2, 5}, tmp_path) == [1, 5, 2, 6]
    assert by_core([9, 3, 8], tmp_path / "hidden") == [3, 8, 9], "the system does not tell"


def test_what_is_missing_is_said_and_the_job_is_left_out(toy: str, tmp_path: Path) -> None:
    jobs = [
        Job("two", f"{toy} plain {{json}}", gpus=2),
        Job("package", f"{toy} plain {{json}}", needs=("no_such_package",)),
        Job("option", f"{toy} plain {{json}}", needs=("observations",)),
        Job("cpu", f"{toy} plain {{json}}", gpus=0),
    ]
    found = played(tmp_path, jobs, given={"observations": None})
    assert found.outcomes == {
        "two": Outcome(LEFT_OUT, "it needs 2 GPUs, found 1"),
        "package": Outcome(LEFT_OUT, "it needs the package no_such_package, which is not installed"),
        "option": Outcome(LEFT_OUT, "it needs --observations"),
        "cpu": Outcome(DONE),
    }
    found = measuring(tmp_path, [Job("gpu", "python")], places=places([], [CORE]))
    assert found.lacking(found.jobs[0]) == "it needs 1 GPU, found 0"


def test_another_gpus_runs_are_kept_and_not_stored(toy: str, tmp_path: Path) -> None:
    jobs = [
        Job("times_h200", f"{toy} plain {{json}}"),
        Job("from_it_h200", f"{toy} plain {{json}} {{work}}/times_h200.json", gpus=0),
        Job("wins", f"{toy} plain {{json}}"),
    ]
    found = played(tmp_path, jobs, models=["NVIDIA L40S"])
    said = "not stored: its name says H200, this is an NVIDIA L40S"
    assert found.outcomes["times_h200"] == found.outcomes["from_it_h200"] == Outcome(DONE, said)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["wins.json"]
    assert (tmp_path / "work/times_h200.json").is_file()


def test_a_run_whose_times_count_says_its_machine() -> None:
    timed = [job.name for job in JOBS if job.stored and job.room != "shared"]
    assert [name for name in timed if not name.endswith(("_h200", "_h100", "_cpu"))] == []


def test_a_run_of_an_h100_is_stored_from_one_and_made_nowhere_else(toy: str, tmp_path: Path) -> None:
    jobs = [Job("times_h100", f"{toy} plain {{json}}", only="H100"), Job("times_h200", f"{toy} plain {{json}}")]
    found = played(tmp_path / "h100", jobs, models=["NVIDIA H100 80GB HBM3"])
    assert found.outcomes["times_h100"] == Outcome(DONE)
    assert [path.name for path in (tmp_path / "h100/results").iterdir()] == ["times_h100.json"]
    found = played(tmp_path / "h200", jobs, models=["NVIDIA H200"])
    assert found.outcomes["times_h100"] == Outcome(LEFT_OUT, "it needs an H100, found an NVIDIA H200")
    assert [path.name for path in (tmp_path / "h200/results").iterdir()] == ["times_h200.json"]


def test_a_job_whose_checkpoint_is_not_bundled_is_left_out(
    toy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job("paired_other/native", f"{toy} plain {{json}}", gpus=0, checkpoint="other_demo")]
    jobs.append(Job("compared", f"{toy} plain {{json}} {{work}}/paired_other/native.json", gpus=0))
    found = played(tmp_path / "without", jobs)
    assert found.outcomes["paired_other/native"].kind == LEFT_OUT
    assert found.outcomes["paired_other/native"].why.startswith(
        "it needs the bundled checkpoint other_demo, found demo"
    )
    assert found.outcomes["compared"] == Outcome(LEFT_OUT, "it is made from paired_other/native")
    monkeypatch.setitem(measure.NAMED, "other_demo", tmp_path)
    assert played(tmp_path / "with", jobs[:1]).outcomes["paired_other/native"] == Outcome(DONE)


def test_the_summary_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    measure.report({"one": Outcome(DONE)})
    assert json.loads(capsys.readouterr().out)[DONE] == {"one": ""}
    with pytest.raises(EngineError, match="not done: 2 of 3 jobs"):
        measure.report({"a": Outcome(DONE), "b": Outcome(FAILED, "oh"), "c": Outcome(LEFT_OUT, "no GPU")})
    out, err = capsys.readouterr()
    assert json.loads(out) == {DONE: {"a": ""}, CONTINUED: {}, FAILED: {"b": "oh"}, LEFT_OUT: {"c": "no GPU"}}
    assert "b: oh" in err and "c: no GPU" in err


def test_names_bring_what_they_are_made_from() -> None:
    runs = list(JOBS[[j.name for j in JOBS].index("libero_stress")].after)
    found = [job.name for job in chosen(["libero_stress", "parity_native"], JOBS)]
    assert found == [*runs, "libero_stress", "parity_native"], "what is named first is begun first"
    assert [job.name for job in chosen(["*"], JOBS)] == [job.name for job in JOBS]
    assert {job.name for job in chosen(["bench_server_*"], JOBS)} == {j.name for j in JOBS if "bench_server" in j.name}
    chain = [Job("a", "python"), Job("b", "python {work}/a.json"), Job("c", "python {work}/b.json")]
    assert chosen(["c"], chain) == chain, "also what they are made from in turn"
    with pytest.raises(ConfigError, match="got 'parity_nativ'"):
        chosen(["parity_nativ"], JOBS)


def test_listing_runs_nothing_and_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> None:
        raise AssertionError("a job was begun")

    monkeypatch.setattr(Measuring, "run", forbid)
    assert measure.main(["--list", "--work", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(f"{job.name}: " in out for job in JOBS) and "bench_record_h200: stored, commit " in out
    for words, why in (
        (["--minutes", "0"], "minutes: expected"),
        (["--observations", "no.npz"], "observations: expected"),
        (["bench_record_h200", "--stress", "noise=0.2"], "stress: expected a run that reads it, got bench_record_h200"),
    ):
        assert measure.main(words) == 1
        assert why in capsys.readouterr().err


def test_a_folder_of_work_is_one_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two would begin the same jobs, and each fail at the other's logs."""
    with measure.alone_in(tmp_path):
        assert measure.main(["memory_counted", "--work", str(tmp_path)]) == 1
    assert f"{tmp_path}: another process works in it" in capsys.readouterr().err
    with measure.alone_in(tmp_path):
        pass


def test_the_stress_of_the_stored_run_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert measure.stored_stress(path) is None
    path.write_text(json.dumps({"protocol": {"stress": {"noise": 0.2, "occlusion": 0.1}}}))
    assert measure.stored_stress(path) == "noise=0.2,occlusion=0.1"


# -- the table of jobs --------------------------------------------------------------------------------------------


def test_every_stored_run_that_a_table_reads_has_a_job() -> None:
    patterns = {name for _, names in TABLES.values() for name in ([names] if isinstance(names, str) else names)}
    stored = {path.stem for path in RESULTS.glob("*.json")}
    read = {name for name in stored if any(fnmatchcase(name, pattern) for pattern in patterns)}
    jobs = [job.name for job in JOBS]
    assert read - {*jobs, *EXCEPTIONS} == set()
    assert len(set(jobs)) == len(jobs) and not set(jobs) & set(EXCEPTIONS)
    assert set(EXCEPTIONS) <= stored
    # A job that no table reads would be measured for nobody.
    patterns.discard("*")  # the table of GPUs counts them all
    assert all(any(fnmatchcase(job.name, pattern) for pattern in patterns) for job in JOBS if job.stored)


def test_a_job_comes_after_jobs_that_are_there_and_stand_before_it() -> None:
    for index, job in enumerate(JOBS):
        assert set(job.after) <= {before.name for before in JOBS[:index]}, job.name


class Parsed(Exception):
    """A command has understood its words."""


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_jobs_words_are_its_commands(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, parse_args = tyro.cli, argparse.ArgumentParser.parse_args

    def parsed(*args: Any, **more: Any) -> None:
        raise Parsed(original(*args, **more))

    given = {"observations": "o.npz", "realtime_vla": "checkout", "stress": "noise=0.2", "starts": "states"}
    words = measuring(tmp_path, [job], given=given).words(job, 8)
    assert "{" not in "".join(words) and words[:2] == [sys.executable, "-m"]
    assert all(need in given or need.isidentifier() for need in job.needs)
    for option in given:
        assert (f"{{{option}}}" in job.command) == (option in job.needs)
    monkeypatch.setattr(tyro, "cli", parsed)
    monkeypatch.setattr(sys, "argv", words[2:])
    if words[2] in ("benchmarks.time_attention", "benchmarks.accumulation"):
        monkeypatch.setattr(
            argparse.ArgumentParser, "parse_args", lambda self: (_ for _ in ()).throw(Parsed(parse_args(self)))
        )
    with pytest.raises(Parsed) as told, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module was imported before: it is run anew
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
