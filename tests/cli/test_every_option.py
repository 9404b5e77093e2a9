"""Every option of `serve` and `bench`: it changes what the command does, or it is refused. An option without an entry
here fails; so does one that another option leaves without effect."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="needs websockets")
pytest.importorskip("msgpack", reason="the wire format needs msgpack")

from tests.support.tiny import write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.cli import bench, main, serve
from vla_accel.cli.asked.policies import Bench, Calibrate, Parity
from vla_accel.cli.bench_server import BenchServer
from vla_accel.cli.options import REMOVED, read
from vla_accel.cli.serve import Serve
from vla_accel.errors import ConfigError
from vla_accel.server import PolicyRegistry, RayReplicas, Replicas, ServerConfig


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("options") / "tiny"
    write_tiny_checkpoint(folder, max_token_len=200)
    return str(folder)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a command runs in, with a file that holds a key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("a secret")
    (tmp_path / "cert").write_text("none")
    return tmp_path


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


# -- serve --------------------------------------------------------------------------------------------------------

SERVE = {
    "checkpoint": "smolvla_demo",
    "config": "--config eager",
    "lora": "--lora adapter",
    "host": "--host localhost",
    "port": "--port 0",
    "api_key_file": "--api-key-file key",
    "tls_cert": "--tls-cert cert",
    "tls_key": "--tls-cert cert --tls-key key",
    "insecure": "--host 0.0.0.0 --insecure",
    "no_page": "--no-page",
    "max_clients": "--max-clients 3",
    "max_payload_mib": "--max-payload-mib 2",
    "timeout_s": "--timeout-s 9",
    "grace_s": "--grace-s 1",
    "max_batch": "--max-batch 4",
    "max_observations": "--max-observations 3",
    "rate_limit": "--rate-limit 9",
    "max_wait_ms": "--max-batch 4 --max-wait-ms 8",
    "policy": "--policy a=eager:demo",
    "memory_budget_gib": "--policy a=eager:demo --memory-budget-gib 2",
    "device": "--device cpu",
    "devices": "--devices cpu",
    "ray": "--ray local",
    "num_steps": "--num-steps 3",
}
"""Each option as it is typed, behind what it needs; without its own words the command is another one."""
SERVE_ALONE = {
    "tls_key": "--tls-cert cert",
    "max_wait_ms": "--max-batch 4",
    "memory_budget_gib": "--policy a=eager:demo",
}


class Made:
    """A policy that was not loaded."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def infer(self, observation: Any) -> Any:
        raise NotImplementedError

    infer_batch = infer


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `vla-accel serve` would serve, with which limits."""
    loaded: list[Any] = []

    def from_pretrained(*given: Any, **more: Any) -> Any:
        loaded.append((given, more))
        return Made()

    monkeypatch.setattr(OptimizedPolicy, "from_pretrained", from_pretrained)
    monkeypatch.setattr(ServerConfig, "require_free", lambda self: None)
    monkeypatch.setattr(ServerConfig, "tls", lambda self: None)
    monkeypatch.setattr("vla_accel.cli.common.check_names", lambda *given: None)
    monkeypatch.setattr(serve.Load, "sized", lambda self, device: (self(device), 1))
    found: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda what, limits: found.append((what, limits)))

    def run(words: str) -> Any:
        loaded.clear()
        found.clear()
        assert main(["serve", *shlex.split(words)]) == 0
        ((what, limits),) = found
        if isinstance(what, (Replicas, RayReplicas)):
            return what, limits
        assert isinstance(what, PolicyRegistry)
        what.start()
        return [*loaded], what.names, what.budget, limits

    return run


def test_every_option_of_serve_has_an_entry_here() -> None:
    assert fields(Serve) == {*SERVE}


@pytest.mark.parametrize("option", SERVE)
def test_an_option_of_serve_changes_what_is_served(option: str, served: Any, place: Path) -> None:
    assert served(SERVE[option]) != served(SERVE_ALONE.get(option, ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-wait-ms 8", "max-wait-ms: expected --max-batch above 1 with it"),
        ("--max-batch 3", "max_batch: expected a power of two, such as 2 or 4, got 3"),
        ("--max-batch 6", "max_batch: expected a power of two, such as 4 or 8, got 6"),
        ("--insecure", "insecure: expected a --host beyond this machine"),
        ("--host 0.0.0.0 --api-key-file key --insecure", "insecure: expected"),
        ("--tls-key key", "tls_key: expected tls_cert"),
        ("--devices cpu --device cpu", "devices: expected --devices alone"),
        ("--devices cpu --ray local", "devices: expected --devices alone"),
        ("--memory-budget-gib 3", "memory-budget-gib: expected several policies"),
        ("--policy a=eager:demo --config native", "policy: expected --policy, or a checkpoint"),
        ("--policy a=eager:demo --lora adapter", "policy: expected --policy, or a checkpoint"),
        ("demo --policy a=eager:demo", "policy: expected --policy, or a checkpoint"),
        ("configs/native.yaml", "type --config configs/native.yaml"),
    ],
)
def test_what_serve_would_ignore_is_refused(
    words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ServerConfig, "require_free", lambda self: None)
    monkeypatch.setattr(OptimizedPolicy, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    assert main(["serve", *shlex.split(words)]) == 1
    assert message in capsys.readouterr().err


# -- bench --------------------------------------------------------------------------------------------------------

RANDOM = "--model pi05"
BENCH = {
    "checkpoint": "CHECKPOINT",
    "config": "CHECKPOINT --config native",
    "model": "--model pi0",
    "systems": f"{RANDOM} --systems native-fp8",
    "realtime_vla": f"{RANDOM} --realtime-vla .",
    "prompt_tokens": "CHECKPOINT --prompt-tokens 31",
    "steps": "CHECKPOINT --steps 2",
    "camera": "CHECKPOINT --camera 48x64",
    "views": f"{RANDOM} --views 3",
    "horizon": f"{RANDOM} --horizon 7",
    "batch": "CHECKPOINT --batch 2",
    "hz": "CHECKPOINT --hz 200",
    "starts": "CHECKPOINT --starts",
    "calls": "CHECKPOINT --calls 3",
    "profile": "CHECKPOINT --profile",
    "device": "CHECKPOINT --device cuda:63",
    "output": "CHECKPOINT --output a.json",
    "report": "CHECKPOINT --report a.html",
}
"""Each option as it is typed, behind what it needs."""
REFUSED_HERE = {"profile": "profile: expected a GPU", "device": "cuda:63"}
"""What a machine without a GPU says to it."""
QUICK = "--steps 1 --calls 1 --config eager --device cpu"
PLANNED = {"checkpoint", "model", "systems", "realtime_vla", "views", "horizon"}
"""Options that decide what is timed, before anything is."""


def planned(words: str) -> Any:
    """The systems that would be timed."""
    chosen = read(Bench, shlex.split(words), "vla-accel bench")
    factory = bench._factory(chosen, "cpu", None)
    told = {name: getattr(factory, name, None) for name in ("views", "horizon", "checkout", "baselines", "tokens")}
    return type(factory), factory.family.name, told, bench._systems(factory, chosen.systems, fitted=True)


@pytest.fixture
def timed(checkpoint: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was timed, and what was written."""
    asked: list[Any] = []
    run = bench.run

    def recorded(systems: Any, observe: Any, *, calls: int, **more: Any) -> Any:
        import numpy as np

        images = {k: v.shape for k, v in observe(np.random.default_rng(0)).items() if hasattr(v, "shape")}
        prompt = {k: v for k, v in observe(np.random.default_rng(0)).items() if isinstance(v, str)}
        asked.append(([(system.name, system.steps) for system in systems], calls, images, prompt))
        return run(systems, observe, calls=calls, **more)

    monkeypatch.setattr(bench, "run", recorded)
    monkeypatch.setattr(bench, "_throughput", lambda *given: asked.append(given[3]) or [])
    monkeypatch.setattr(bench, "paced", lambda system, observe, hz, calls, device: asked.append(hz) or {})
    monkeypatch.setattr(bench, "starts", lambda *given: asked.append("starts") or {})
    monkeypatch.setattr(bench, "_print", lambda report: None)
    monkeypatch.setattr(bench, "page", lambda report: "")
    monkeypatch.setattr(bench, "write", lambda page, path: asked.append(path))

    def main_of(words: str) -> Any:
        asked.clear()
        for file in place.glob("*.json"):
            file.unlink()
        given = shlex.split(words.replace("CHECKPOINT", shlex.quote(checkpoint)))
        quick = shlex.split(QUICK)
        # An option that is given takes the place of the quick one.
        pairs = [quick[i : i + 2] for i in range(0, len(quick), 2)]
        given += [word for pair in pairs if pair[0] not in given for word in pair]
        status = main(["bench", *given])
        return status, [*asked], sorted(path.name for path in place.glob("*.json"))

    return main_of


def test_every_option_of_bench_has_an_entry_here() -> None:
    assert fields(Bench) == {*BENCH}


@pytest.mark.parametrize("option", sorted(PLANNED))
def test_an_option_of_bench_changes_which_systems_are_timed(option: str, checkpoint: str, place: Path) -> None:
    words = BENCH[option].replace("CHECKPOINT", shlex.quote(checkpoint))
    assert planned(words) != planned("" if option in ("checkpoint", "model") else RANDOM)


@pytest.mark.parametrize("option", sorted(set(BENCH) - PLANNED))
def test_an_option_of_bench_changes_what_is_measured_or_written(
    option: str, timed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = timed("CHECKPOINT")
    capsys.readouterr()
    changed = timed(BENCH[option])
    assert plain[0] == 0 and changed != plain
    if option in REFUSED_HERE:
        assert changed[0] == 1 and REFUSED_HERE[option] in capsys.readouterr().err
    else:
        assert changed[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --model pi05", "model: expected none beside checkpoint demo"),
        ("demo --systems eager", "systems: expected none beside checkpoint demo"),
        ("demo --views 2", "views: expected none beside checkpoint demo"),
        ("demo --horizon 2", "horizon: expected none beside checkpoint demo"),
        ("demo --realtime-vla .", "realtime_vla: expected none beside checkpoint demo"),
        ("--config native", "config: expected a checkpoint beside it"),
        ("configs/native.yaml", "checkpoint: expected a folder or a name, got configs/native.yaml: type --config"),
    ],
)
def test_what_bench_would_ignore_is_refused(
    words: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *shlex.split(words), "--device", "cpu"]) == 1
    assert message in capsys.readouterr().err


# -- the other commands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench-server --config native", "config, num-steps: expected a checkpoint or --model"),
        ("bench-server --devices cpu --device cpu", "devices: expected --devices alone"),
        ("bench-server configs/native.yaml", "type --config configs/native.yaml"),
        ("tune demo --quick --workers 2", "workers: expected --benchmark with it"),
        ("tune demo --quick --no-films", "no-films: expected --benchmark with it"),
        ("tune demo --quick --episodes 50", "episodes: expected --benchmark with it"),
        ("tune demo --quick --draws 8", "draws: expected at most 1 with --quick, got 8"),
        ("tune demo --quick --calls 20", "calls: expected at most 10 with --quick, got 20"),
        ("build demo --dry-run --manifest m.json --targets sm89", "manifest: expected no --dry-run with it"),
        ("build demo --config tensorrt --targets sm89", "targets: only tensorrt_rtx builds for other GPUs"),
        ("build demo --config tensorrt_rtx_fp8 --targets sm86", "kv_cache: torch.float8_e4m3fn needs compute"),
        ("build demo --targets sm75", "vision: torch.bfloat16 needs compute capability 8.0"),
        ("build demo --targets sm99", "vision: TensorRT-RTX does not run on compute capability 9.9"),
        ("build-vae --vae tiny-sd-vae --output-dir o --targets sm99", "TensorRT-RTX does not run on compute capab"),
        ("build-vae --vae tiny-sd-vae --output-dir o --targets sm75 --dtype bf16", "torch.bfloat16 needs compute"),
        ("build-vae --vae tiny-sd-vae --output-dir o --library tensorrt --targets sm89", "targets: only --library"),
        ("build-unet --sd-dir tiny-random --output-dir o --targets sm99", "TensorRT-RTX does not run on compute"),
    ],
)
def test_what_a_command_would_ignore_is_refused_before_it_works(
    words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vla_accel.cli import build, build_images

    for module, name in ((build, "_checkpoint"), (build_images, "load_model")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(build_images, "load_library", lambda name: None)
    assert main(shlex.split(words)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "word", "instead"),
    [
        (Serve, "--checkpoint=demo", "the checkpoint comes first"),
        (Bench, "--checkpoint=demo", "the checkpoint comes first"),
        (BenchServer, "--random=pi05", "--model NAME"),
        (Parity, "--synthetic=pi05", "--model NAME"),
        (Calibrate, "--limit=8", "--count"),
    ],
)
def test_a_removed_option_says_what_took_its_place(
    kind: type, word: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(kind, [word], "program")
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize("name", REMOVED)
def test_no_command_has_an_option_that_is_said_to_be_removed(name: str) -> None:
    positional = {"checkpoint"}
    for kind in (Serve, Bench, BenchServer, Parity, Calibrate):
        assert name in positional or name not in fields(kind)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for name in ("configs/native.yaml", "runs/model.safetensors", "a/b.npz"):
        assert main(["parity", name]) == 1
        assert "checkpoint: expected a folder or a name" in capsys.readouterr().err


def test_bench_takes_steps_and_device_from_the_configurations(
    checkpoint: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[int] = []

    def made(self: Any, name: str, number: int) -> Any:
        steps.append(number)
        raise ConfigError("far enough")

    monkeypatch.setattr(bench.CheckpointFactory, "make", made)
    (place / "mine.yaml").write_text("num_steps: 7\n")
    for more in ((), ("--steps", "3")):
        main(["bench", checkpoint, "--config", "mine.yaml", "--device", "cpu", *more])
    assert steps == [7, 3], "--steps goes before"
    (place / "mine.yaml").write_text("device: cuda:62\n")
    (place / "other.yaml").write_text("device: cuda:61\n")
    for words, told in (("mine.yaml", "cuda:62"), ("mine.yaml,other.yaml", "device: expected one of all")):
        capsys.readouterr()
        assert main(["bench", "demo", "--config", words]) == 1
        assert told in capsys.readouterr().err
