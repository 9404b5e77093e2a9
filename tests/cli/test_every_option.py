"""Every option of `serve`, and those of `bench` that choose the systems: each changes what the command does."""

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
from vla_accel.cli.bench import Bench
from vla_accel.cli.bench_server import BenchServer
from vla_accel.cli.calibrate import Calibrate
from vla_accel.cli.options import REMOVED, read
from vla_accel.cli.parity import Parity
from vla_accel.cli.serve import Serve
from vla_accel.errors import ConfigError
from vla_accel.measure import systems
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
    "schedule": "--schedule cubic",
    "view": "--view rerun:x.rrd",
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


@dataclasses.dataclass(frozen=True)
class Opened:
    """A view that was not opened."""

    target: str | None

    def close(self) -> None:
        """Nothing is open."""


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
    monkeypatch.setattr(serve, "open_view", Opened)
    monkeypatch.setattr(serve, "serve", lambda what, limits, view=None: found.append((what, limits, view)))

    def run(words: str) -> Any:
        loaded.clear()
        found.clear()
        assert main(["serve", *shlex.split(words)]) == 0
        ((what, limits, view),) = found
        if isinstance(what, (Replicas, RayReplicas)):
            return what, limits
        assert isinstance(what, PolicyRegistry)
        what.start()
        return [*loaded], what.names, what.budget, limits, view

    return run


@pytest.mark.parametrize("option", SERVE)
def test_an_option_of_serve_changes_what_is_served(option: str, served: Any, place: Path) -> None:
    assert served(SERVE[option]) != served(SERVE_ALONE.get(option, ""))


# -- bench --------------------------------------------------------------------------------------------------------

PLANNED = {
    "checkpoint": ("CHECKPOINT", ""),
    "model": ("--model pi0", ""),
    "systems": ("--model pi05 --systems native-fp8", "--model pi05"),
    "realtime_vla": ("--model pi05 --realtime-vla .", "--model pi05"),
    "views": ("--model pi05 --views 3", "--model pi05"),
    "horizon": ("--model pi05 --horizon 7", "--model pi05"),
}
"""Options that decide what is timed, as they are typed, and the command without them."""


def planned(words: str) -> Any:
    """The systems that would be timed."""
    chosen: Any = read(Bench, shlex.split(words), "vla-accel bench")
    factory = bench.make_factory(chosen, "cpu", None)
    told = {name: getattr(factory, name, None) for name in ("views", "horizon", "checkout", "baselines", "tokens")}
    return type(factory), factory.family.name, told, systems.choose_systems(factory, chosen.systems, fitted=True)


@pytest.mark.parametrize("option", PLANNED)
def test_an_option_of_bench_changes_which_systems_are_timed(option: str, checkpoint: str, place: Path) -> None:
    words, without = (text.replace("CHECKPOINT", shlex.quote(checkpoint)) for text in PLANNED[option])
    assert planned(words) != planned(without)


# -- the other commands -------------------------------------------------------------------------------------------


def test_every_option_has_an_entry_here() -> None:
    assert fields(Serve) == {*SERVE}
    for kind in (Serve, Bench, BenchServer, Parity, Calibrate):
        assert not fields(kind) & ({*REMOVED} - {"checkpoint"}), "an option that is documented as removed"


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

    monkeypatch.setattr(systems.CheckpointFactory, "make", made)
    (place / "mine.yaml").write_text("num_steps: 7\n")
    for more in ((), ("--steps", "3")):
        main(["bench", checkpoint, "--config", "mine.yaml", "--device", "cpu", *more])
    assert steps == [7, 3], "--steps goes before"
    main(["bench", checkpoint, "--config", "mine.yaml", "--device", "cpu", "--schedule", "1,0.3,0"])
    assert steps == [7, 3, 2], "as many as times"
    (place / "mine.yaml").write_text("device: cuda:62\n")
    (place / "other.yaml").write_text("device: cuda:61\n")
    for words, told in (("mine.yaml", "cuda:62"), ("mine.yaml,other.yaml", "device: expected one of all")):
        capsys.readouterr()
        assert main(["bench", "demo", "--config", words]) == 1
        assert told in capsys.readouterr().err
