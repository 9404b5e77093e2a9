"""What a bench says besides times: memory, seconds of a start, calls at a robot's rate, prompts of a length, and other
projects' code from a checkout."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_config, write_robot, write_tiny_checkpoint
from vla_accel import OptimizedPolicy, PolicyConfig, cli
from vla_accel.config.mapping import from_mapping
from vla_accel.errors import ConfigError, DependencyError, EngineError
from vla_accel.families.bench import bench_card
from vla_accel.families.pi0.family import PI0, PI05
from vla_accel.kernels import phases
from vla_accel.measure import bench, paced, start, systems
from vla_accel.measure import random_policy as random_policy_module
from vla_accel.measure.bench import System
from vla_accel.measure.random_policy import random_policy
from vla_accel.measure.roofline import Ceilings, floors_ms
from vla_accel.measure.systems import CheckpointFactory, Factory, observer, timed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """A factory of π0.5 with random weights of a small size."""
    sizes = tiny_config("pi05", vocab_size=4000, max_token_len=64)
    monkeypatch.setattr(
        type(bench_card(PI05)), "published", lambda self, horizon=None: replace(sizes, action_horizon=horizon)
    )
    return Factory(PI05, views=2, horizon=5, device="cpu", ceilings=None)


# -- phases of a start --------------------------------------------------------------------------------------------


def test_time_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with phases.recorded() as spent:
        now[0] += 1
        with phases.phase("prepare"):
            now[0] += 2
            with phases.phase("read"):
                now[0] += 4
            now[0] += 16
        with phases.phase("capture"), phases.phase("compile"):
            now[0] += 32
    want = {"read": 4, "prepare": 18, "compile": 32, "tune": 0, "capture": 0, "other": 1, "total": 55}
    assert spent.described == want
    with phases.phase("read"):
        now[0] += 64
    assert spent.described == want, "the recording has ended"


def test_triton_s_compiler_is_a_phase_wherever_it_is_called() -> None:
    knobs = pytest.importorskip("triton").knobs
    with phases.recorded() as spent, phases.phase("capture"):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=SimpleNamespace(total=3e6),
                                   cache_hit=False)  # fmt: skip
        beside = threading.Thread(target=knobs.compilation.listener, kwargs={"times": SimpleNamespace(total=5e6)})
        beside.start()
        beside.join()
    assert spent.seconds["compile"] == 3.0 and spent.seconds["capture"] < 0, "another thread's time is waited for"
    assert knobs.compilation.listener is None


def test_a_policy_knows_how_it_started(folder: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, {"device": "cpu", "vision": "native", "num_steps": 1})
    assert policy.start is not None
    assert policy.start["read"] > 0 and policy.start["prepare"] > 0 and policy.start["compile"] == 0
    parts = [policy.start[name] for name in (*phases.PHASES, "other")]
    assert sum(parts) == pytest.approx(policy.start["total"])


def test_two_starts_find_the_cold_one_s_caches(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What is run is looked at here; tests/cli runs it."""
    asked: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        cache = Path(options["env"]["XDG_CACHE_HOME"])
        given = (options["env"][name] for name in ("TRITON_CACHE_DIR", "PYTHONPYCACHEPREFIX"))
        assert all(Path(place).parent == cache for place in given)
        assert "PYTHONDONTWRITEBYTECODE" not in options["env"]
        left = [path.name for path in cache.glob("*")]
        asked.append({"what": json.loads(options["input"])["what"], "left": left, "cache": cache})
        cache.mkdir(exist_ok=True)
        (cache / "left").touch()
        return SimpleNamespace(returncode=len(asked) == 6, stdout='a line\n{"first_action": 1.5}\n', stderr="no luck")

    monkeypatch.setattr(start.subprocess, "run", run)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = start.starts(PolicyConfig(), {"checkpoint": str(folder)})
    assert found["cold"] == found["warm"] == {"first_action": 1.5} and found["file_read"] > 0
    assert [(one["what"], one["left"]) for one in asked] == [("start", []), ("start", ["left"])]
    assert asked[0]["cache"] == asked[1]["cache"] and not asked[0]["cache"].exists()
    # Random weights are written first, which leaves nothing for the cold start to find.
    source = {"family": "pi05", "views": 2, "horizon": 10}
    start.starts(PolicyConfig(), source)
    assert [(one["what"], one["left"]) for one in asked[2:]] == [("write", []), ("start", []), ("start", ["left"])]
    with pytest.raises(EngineError, match="no luck"):
        start.starts(PolicyConfig(), source)


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_random_weights_are_written_and_started_from(precision: str, small: Factory, tmp_path: Path) -> None:
    prefix = {"engine": "native", "precision": precision}
    config = from_mapping(PolicyConfig, {"device": "cpu", "precision": "bf16", "num_steps": 1, "kv_cache": prefix})
    source = {"family": "pi05", "views": 2, "horizon": 5, "weights": str(tmp_path / "weights")}
    start._write(config, source)
    policy, phases = start._begin(config, source)
    assert phases["read"] > 0 and policy.metadata["engines"][1]["used"] == "native"
    assert (policy.scales is not None) == (precision == "fp8")
    same, _ = random_policy("pi05", config, views=2, horizon=5)
    observation, noise = same.processor.example(), np.zeros((5, same.model.config.action_dim))
    ours, theirs = (p.infer(observation, noise=noise)["actions"] for p in (policy, same))
    np.testing.assert_array_equal(ours, theirs)


# -- calls at a rate ----------------------------------------------------------------------------------------------


def test_paced_calls_wait_for_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def look() -> float:
        now[0] += 1e-9  # time goes on, so that even the first call does not begin at once
        return now[0]

    monkeypatch.setattr(paced, "time", SimpleNamespace(perf_counter=look, sleep=sleep))
    takes = iter([0.25, 1.25, 0.25, 0.25])

    def infer(_: Any) -> dict[str, Any]:
        now[0] += next(takes)
        return {}

    found = paced.paced(System("slow", infer, 1), dict, 1.0, 4, CPU)
    # The third call is late by a quarter of a second, the fourth is on time again.
    assert slept == pytest.approx([0.75, 0.5]) and found["late"] == 1 and found["power_w"] is None
    assert [found["min_ms"], found["max_ms"], found["hz"]] == pytest.approx([250.0, 1250.0, 1.0])


def test_power_comes_from_nvml_or_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 310_500)
    assert paced._watts(gpu) == 310.5
    monkeypatch.setattr(torch.cuda, "power_draw", missing)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc"))
    asked: list[list[str]] = []

    def smi(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout="297.25\n")

    monkeypatch.setattr(paced.subprocess, "run", smi)
    assert paced._watts(gpu) == 297.25 and "--id=GPU-abc" in asked[0]
    monkeypatch.setattr(paced.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="[N/A]\n"))
    assert paced._watts(gpu) is None


# -- what is timed ------------------------------------------------------------------------------------------------


def test_other_processes_are_heard_while_calls_are_timed_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """First calls compile, in processes of their own."""
    calls: list[int] = []

    class Others:
        def __init__(self) -> None:
            self.before = len(calls)

        def cores(self) -> float:
            return float(len(calls) - self.before)

    def infer(_: Any) -> dict[str, Any]:
        calls.append(1)
        return {}

    monkeypatch.setattr(bench, "Others", Others)
    told: list[float | None] = []
    bench.run([System("theirs", infer, 1)], lambda _: {}, calls=3, turn=1, warmup=4, heard=told.append)
    assert told == [3.0] and len(calls) == 7


def test_a_warm_up_names_system_and_steps_once() -> None:
    lines: list[str] = []
    systems = [System(name, lambda _: {}, steps) for name, steps in (("native", 3), ("10 steps", 10), ("1 step", 1))]
    bench.run(systems, lambda _: {}, calls=1, warmup=1, progress=lines.append)
    expected = ["warming up native, 3 steps", "warming up 10 steps", "warming up 1 step"]
    assert [line for line in lines if line.startswith("warming up")] == expected


def test_a_system_s_memory_is_its_own(small: Factory) -> None:
    """Whatever else the run has made, such as eager, which reads the whole module."""
    first = small.make("native-bf16", 2).memory
    eager = small.make("eager", 2).memory
    again = small.make("native-bf16", 1).memory
    assert first and eager and again
    assert first["unused"] == eager["unused"] == again["unused"] == 0 and eager["total"] > 0
    assert {n: again["weights"][n] for n in ("vision", "kv_cache")} == {
        n: first["weights"][n] for n in ("vision", "kv_cache")
    }
    observation = small.processor.example()
    noise = np.zeros((5, small.policies["eager"].model.config.action_dim))
    ours, theirs = (small.policies[n].infer(observation, noise=noise)["actions"] for n in ("native-bf16", "eager"))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_scales_are_not_calibrated_while_a_policy_loads(small: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the whole module's memory, which is not the policy's. And once for all systems."""
    order: list[str] = []
    calibrated = random_policy_module.calibrate_on_noise

    @contextlib.contextmanager
    def peak() -> Iterator[list[int]]:
        order.append("loading")
        found: list[int] = []
        yield found
        order.append("loaded")
        found.append(7 * len(order))

    def calibrate(*arguments: Any, **options: Any) -> Any:
        order.append("calibrated")
        return calibrated(*arguments, **options)

    monkeypatch.setattr(systems, "peak", peak)
    monkeypatch.setattr(random_policy_module, "calibrate_on_noise", calibrate)
    small.configs = {name: replace(config, precision="bf16") for name, config in small.configs.items()}
    made = [small.make(name, steps) for name, steps in (("native-fp8", 2), ("native-int8", 2), ("native-fp8", 1))]
    assert order == ["calibrated", *["loading", "loaded"] * 3]
    told = [system.memory["peak_loading"] for system in made if system.memory]
    assert told == [21, 35, 21], "with other steps nothing is loaded anew"


@pytest.mark.slow
def test_other_projects_code_holds_what_the_allocator_gave(small: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [5 << 30]

    @contextlib.contextmanager
    def peak() -> Iterator[list[int]]:
        found: list[int] = []
        yield found
        found.append(9 << 30)

    def baseline(name: str, **_: Any) -> Any:
        there[0] += (6 << 30) if name == "openpi-eager" and there[0] == 5 << 30 else 0
        return lambda _: {}

    monkeypatch.setattr(systems, "allocated", lambda: there[0])
    monkeypatch.setattr(systems, "peak", peak)
    monkeypatch.setattr(bench_card(PI05), "baseline", baseline, raising=False)
    held = {"total": 6 << 30, "peak_loading": 9 << 30}
    assert small.make("openpi-eager", 2).memory == held
    assert small.make("openpi-eager", 1).memory == held, "its model is there already"
    assert small.make("openpi-compile", 1).memory == held, "and is the same one"
    there[0] = 0
    monkeypatch.setattr(systems, "peak", bench.peak)
    without = Factory(PI05, views=2, horizon=5, device="cpu", ceilings=None)
    assert without.make("openpi-eager", 1).memory is None, "on a CPU nobody tells"


def test_missing_modelopt_is_said_before_anything_is_built(
    small: Factory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    words = ["bench", "--model", "pi05", "--horizon", "5", "--steps", "1", "--calls", "1", "--device", "cpu"]
    assert cli.main([*words, "--systems", "eager,native-fp8"]) == 1
    said = capsys.readouterr().err
    assert "FP8 needs nvidia-modelopt" in said and "preparing" not in said
    assert cli.main([*words, "--systems", "eager"]) == 0


def test_default_systems_that_need_a_missing_modelopt_are_left_out(
    small: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    output = tmp_path / "bench.json"
    words = ["bench", "--model", "pi05", "--horizon", "5", "--steps", "1", "--calls", "1", "--device", "cpu"]
    assert cli.main([*words, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    low = ["native-fp8", "native-fp8-vision"]
    assert [name for name in report["left_out"] if name in small.configs] == low
    assert all("nvidia-modelopt" in report["left_out"][name] for name in low)
    assert {row["system"] for row in report["rows"]} == {"native-bf16", "eager"}
    assert "left out: native-fp8, native-fp8-vision: FP8 needs nvidia-modelopt" in capsys.readouterr().err


def test_portable_triton_and_host_systems_are_native_ones_with_an_option() -> None:
    factory = Factory(PI05, views=2, horizon=10, device="cpu", ceilings=None)
    names = ("native-bf16", "native-fp8", "native-fp8-vision")
    assert factory.default == ("eager", *names) and "realtime-vla" not in factory.names
    low = {"vision": "fp8", "kv_cache": "fp8", "denoise": "int8"}
    smallest = "native-fp8-vision-int8-denoise-host"
    assert [n for n in factory.configs if n.endswith("-host")] == [
        smallest.replace("native", kind) for kind in ("native", "portable", "triton")
    ]
    for name in (*names, smallest):
        for kind, kernels in (("native", "auto"), ("portable", "portable"), ("triton", "triton")):
            specs = factory.configs[name.replace("native", kind)].specs(PI05.parts)
            precisions = {n: s.precision for n, s in specs.items()}
            assert precisions == {n: s.precision for n, s in factory.configs[name].specs(PI05.parts).items()}
            assert name != smallest or precisions == low
            assert {s.native.kernels for s in specs.values()} == {kernels}
            assert {s.native.embeddings for s in specs.values()} == {"host" if name == smallest else "gpu"}


def test_the_floor_is_of_the_prompt_that_is_timed(folder: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(folder, {"device": "cpu", "num_steps": 1})
    rng = np.random.default_rng(0)
    for tokens in (40, 30):
        system = timed("ours", policy, 0.0, Ceilings(1e15, 1e15, 1e12), tokens)
        prepared = policy.processor.prepare(observer(policy.family, policy.processor, tokens)(rng))
        work = bench_card(policy.family).work(policy.model.config, prepared, 1, policy.specs)
        assert system.notes["work"] == {name: asdict(one) for name, one in work.items()}
        assert system.floors == floors_ms(work, Ceilings(1e15, 1e15, 1e12))
        assert len(prepared.tokens) == tokens
    factory = CheckpointFactory(str(folder), ["eager"], device="cpu", ceilings=None, tokens=30)
    assert factory.make("eager", 1).notes["work"] == system.notes["work"], "its factory hands the length on"
    made = observer(policy.family, policy.processor, 30, (48, 64))(rng)
    assert {value.shape for value in made.values() if np.ndim(value) == 3} == {(48, 64, 3)}
    for tokens, error in ((1, "got 1$"), (1000, "expected at most [0-9]+, got 1000$")):
        with pytest.raises(ConfigError, match=f"prompt_tokens: .*{error}"):
            observer(policy.family, policy.processor, tokens)


def test_what_one_configuration_says_of_the_robot_holds_for_those_that_say_nothing(
    folder: Path, tmp_path: Path
) -> None:  # fmt: skip
    robot = write_robot(tmp_path / "robot.yaml")
    (tmp_path / "mine.yaml").write_text(f"preset: {robot}\ncheckpoint: {{max_token_len: 150}}\n")
    (tmp_path / "other.yaml").write_text("preset: droid\n")
    names = ["eager", str(tmp_path / "mine.yaml"), str(tmp_path / "other.yaml")]
    factory = CheckpointFactory(str(folder), names, device="cpu", ceilings=None, tokens=30)
    eager, mine, other = factory.configs.values()
    assert (eager.preset, eager.checkpoint) == (mine.preset, mine.checkpoint) and eager.vision.engine == "eager"
    assert other.preset == "droid" and other.checkpoint.max_token_len is None
    factory.make("eager", 1)
    made = observer(factory.family, factory.processor, 30)(np.random.default_rng(0))
    assert made.keys() == {"front", "wrist", "joints", "gripper", "prompt"}
    assert factory.processor.prepare(made).raw_state.shape == (8,)


CHECKOUT = """
import torch
class {name}:
    def __init__(self, checkpoint, num_views, chunk_size, **options):
        assert tuple(checkpoint["language_embeds"].shape) == (60, 2048)
        self.weights = {{"w": torch.full((2,), float("nan"))}}
        rows = torch.empty((51, 8), dtype=torch.bfloat16)
        assert rows.shape == (51, 8) and rows.untyped_storage().nbytes() >= 64 * 8 * rows.itemsize
        self.views, self.chunk, self.options = num_views, chunk_size, options
    def forward(self, images, *rest):
        assert images.shape == (self.views, 224, 224, 3) and images.dtype == torch.bfloat16
        assert images.min() >= -1 and images.max() <= 1 and self.weights["w"].isfinite().all()
        assert self.options == ({{"discrete_state_input": False}} if len(rest) == 1 else {{}})
        return rest[-1] + 1
"""


@pytest.mark.parametrize("family", [PI05, PI0])
def test_realtime_vla_is_fed_as_its_own_benchmark_does(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of its interface, on the CPU. That buffers are followed by memory: π0 failed on an H200 without."""
    for attribute in ("randn", "zeros"):
        real = getattr(torch, attribute)
        monkeypatch.setattr(torch, attribute, lambda *a, _r=real, **k: _r(*a, **{**k, "device": "cpu"}))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    (tmp_path / "pi05_infer.py").write_text(CHECKOUT.format(name="Pi05Inference"))
    (tmp_path / "pi0_infer.py").write_text(CHECKOUT.format(name="Pi0Inference"))
    (tmp_path / "pi05_infer_autotune.py").write_text("import transformers_that_are_not_there")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    given: dict[str, Any] = {"views": 3, "horizon": 7, "tokens": 60}
    try:
        infer = bench_card(family).from_checkout("realtime-vla", tmp_path, **given)
    finally:
        for name in ("pi05_infer", "pi0_infer"):
            sys.modules.pop(name, None)
    processor = bench_card(family).dummy(bench_card(family).published(), 3)
    result = infer(bench_card(family).random_observation(processor, np.random.default_rng(0)))
    assert result["actions"].shape == (7, 32) and result["actions"].dtype == np.float32
    with pytest.raises(ConfigError, match=r"expected a checkout with pi0.*_infer\.py, got"):
        bench_card(family).from_checkout("realtime-vla", tmp_path / "nothing", **given)
    if family is PI05:
        with pytest.raises(DependencyError, match="transformers_that_are_not_there"):
            bench_card(family).from_checkout("realtime-vla-autotune", tmp_path, **given)


@pytest.mark.slow
def test_a_run_that_is_cut_off_leaves_its_rows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(systems: list[System], *arguments: Any, **options: Any) -> list[dict[str, Any]]:
        if systems[0].steps == 1:
            raise KeyboardInterrupt
        return run(systems, *arguments, **options)

    run = bench.run
    monkeypatch.setattr(bench, "run", cut_off)
    output = tmp_path / "bench.json"
    words = "--config eager --steps 2,1 --calls 2 --prompt-tokens 19 --output"
    assert cli.main(["bench", str(folder), *words.split(), str(output)]) == 130
    report = json.loads(output.read_text())
    assert [row["steps"] for row in report["rows"]] == [2] and report["model"] and report["throughput"] == []
    assert report["complete"] is False


def test_which_systems_take_turns(tmp_path: Path) -> None:
    def chosen(*named: str, checkout: Path | None = tmp_path, fitted: bool = True) -> tuple[str, ...]:
        factory = Factory(PI05, views=2, horizon=10, device="cpu", ceilings=None, checkout=checkout)
        return systems.choose_systems(factory, named, fitted=fitted)

    ours, both = ("native-bf16", "native-fp8", "native-fp8-vision", "eager"), ("realtime-vla", "realtime-vla-autotune")
    assert chosen() == (*ours, "openpi-eager", *both) and chosen(checkout=None) == (*ours, "openpi-eager")
    assert chosen("eager") == ("eager", *both) and chosen("eager", checkout=None) == ("eager",)
    assert chosen("eager", "realtime-vla") == ("eager", "realtime-vla")
    assert chosen(fitted=False) == ours and chosen("native-fp8", fitted=False) == ("native-fp8",)
    assert chosen("native_fp8", fitted=False) == ("native-fp8",), "as the file of the configuration is called"
    with pytest.raises(ConfigError, match="camera: expected systems that fit images themselves, got openpi-eager"):
        chosen("eager", "openpi-eager", fitted=False)


@pytest.mark.slow
def test_a_baseline_is_made_once_and_a_slow_system_timed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`eager` plays another project's code, `native_fp8` one that is not installed, and `native` the slow system."""
    made: list[tuple[str, int]] = []
    real = CheckpointFactory.make

    def make(self: Any, name: str, steps: int) -> System:
        made.append((name, steps))
        if name == "native_fp8":
            raise DependencyError("nothing to import")
        return real(self, name, steps)

    monkeypatch.setattr(CheckpointFactory, "make", make)
    monkeypatch.setattr(systems, "choose_systems", lambda factory, named, fitted: ("native", "eager", "native_fp8"))
    initial = CheckpointFactory.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        initial(self, *arguments, **options)
        self.baselines = ("eager", "native_fp8")

    monkeypatch.setattr(CheckpointFactory, "__init__", init)
    once = {"native": {"steps": 2, "why": "it is slow"}}
    monkeypatch.setattr(systems, "timed_once", lambda factory, names, sweep: once)
    words = f"bench {folder} --config native,native_fp8 --steps 2,1 --calls 1 --device cpu --prompt-tokens 19"
    assert cli.main(words.split()) == 0
    out, err = capsys.readouterr()
    assert made == [("eager", 2), ("native_fp8", 2), ("native", 2), ("eager", 1)]
    report = json.loads(out.splitlines()[-1])
    assert report["left_out"] == {"native_fp8": "nothing to import"} and report["timed_once"] == once
    assert [(row["system"], row["steps"]) for row in report["rows"]] == [("native", 2), ("eager", 2), ("eager", 1)]
    assert report["complete"] is True and "left out: native_fp8: nothing to import" in err


def test_what_compiles_for_minutes_is_timed_once(tmp_path: Path) -> None:
    factory = Factory(PI05, views=2, horizon=10, device="cpu", ceilings=None, checkout=tmp_path)
    names = ("native-bf16", "openpi-eager", "openpi-max-autotune", "realtime-vla")
    found = systems.timed_once(factory, names, (3, 10, 1))
    assert {name: told["steps"] for name, told in found.items()} == {"openpi-max-autotune": 3, "realtime-vla": 10}
    assert "torch.compile takes minutes" in found["openpi-max-autotune"]["why"]
    assert systems.timed_once(factory, names, (10,)) == systems.timed_once(factory, names[:2], (3, 1)) == {}
    with pytest.raises(ConfigError, match="steps: expected a list with 10 for realtime-vla, got 3,1"):
        systems.timed_once(factory, names, (3, 1))
