"""lerobot's own code as a policy of the evaluation, with a dummy package in place of lerobot."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

import eval.libero.__main__ as libero
from eval.harness import command
from eval.harness.benchmark import Benchmark, Suite
from eval.harness.policies import PolicyBySteps, PolicySource, identity, make_actor
from eval.harness.protocol import EpisodeKey, Protocol
from eval.libero.benchmark import LIBERO
from eval.libero.lerobot_policy import LerobotPolicy
from eval.libero.suites import LiberoTask
from tests.support.eval_support import OBSERVATION, FakeEnv
from tests.support.toy_benchmark import TOY
from vla_accel.cli.options import read
from vla_accel.errors import CheckpointError, ConfigError, DependencyError

SUITE = Suite("libero_spatial", (LiberoTask(0, "task_0", "do it", np.zeros((50, 3)), Path("x.bddl")),), 20)
PLAYED: Benchmark = replace(
    LIBERO, load_suite=lambda name: SUITE, make_environment=lambda task, settings, render: FakeEnv(7)
)
MODULES = {
    "__init__": "",
    "utils/__init__": "",
    "utils/import_utils": "def require_package(name, extra): raise ImportError(name)",
    "scripts/__init__": "",
    "scripts/lerobot_train": """
        from lerobot.utils.import_utils import require_package
        require_package("datasets", extra="dataset")
        """,
    "configs/__init__": "",
    "configs/policies": """
        import json
        from types import SimpleNamespace
        class PreTrainedConfig:
            @classmethod
            def from_pretrained(cls, folder):
                config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
                shape = SimpleNamespace(shape=(3, 224, 224))
                config.input_features = {"observation.images.image": shape}
                return config
        """,
    "policies/__init__": "",
    "policies/factory": """
        import torch
        BATCHES, NOISES = [], []
        class Policy(torch.nn.Module):
            @classmethod
            def from_pretrained(cls, folder, config):
                return cls()
            def predict_action_chunk(self, batch, **options):
                BATCHES.append(batch)
                NOISES.append(options.get("noise"))
                rows = len(batch["observation.state"])
                return torch.full((rows, 8, 7), 0.25) if not options else options["noise"][:, 1:9]
        def get_policy_class(kind):
            return Policy
        def make_pre_post_processors(config, pretrained_path, preprocessor_overrides):
            assert preprocessor_overrides == {"device_processor": {"device": "cpu"}}
            return (lambda batch: batch), (lambda actions: actions * 2)
        """,
}
ACT = {"type": "act", "n_obs_steps": 1, "action_delta_indices": [*range(8)], "n_action_steps": 8, "chunk_size": 8}
ACT |= {"temporal_ensemble_coeff": None}
DIFFUSION = {"type": "diffusion", "n_obs_steps": 2, "action_delta_indices": [*range(-1, 15)], "n_action_steps": 8}
DIFFUSION |= {"num_inference_steps": 10, "num_train_timesteps": 100, "noise_scheduler_type": "DDIM"}
CPU = torch.device("cpu")


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lerobot"]:
        del sys.modules[name]


@pytest.fixture
def lerobot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the dummy package, on the path of imports."""
    place = tmp_path / "packages"
    for name, text in MODULES.items():
        path = place / "lerobot" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    (place / "lerobot-0.6.1.dist-info").mkdir()
    (place / "lerobot-0.6.1.dist-info" / "METADATA").write_text("Name: lerobot\nVersion: 0.6.1\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    forget()
    yield place / "lerobot"
    forget()


@pytest.fixture
def folder(tmp_path: Path, lerobot: Path) -> Path:
    """A saved Diffusion Policy."""
    return save(tmp_path / "trained", DIFFUSION)


def save(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def factory() -> Any:
    return importlib.import_module("lerobot.policies.factory")


def test_observations_are_those_of_its_training(folder: Path) -> None:
    images = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    whole = {
        "observation/image": images,
        "observation/wrist_image": images[::-1].copy(),
        "observation/state": np.eye(2, 8),
    }
    first = {name: value[1] for name, value in whole.items()}
    policy = LerobotPolicy(folder, CPU)
    assert policy.metadata["history"] == 2 and policy.metadata["num_steps"] == 10
    policy.infer_batch([whole, first])
    (batch,) = factory().BATCHES
    seen = batch["observation.images.image"]
    assert seen.shape == (2, 2, 3, 4, 6) and seen.dtype == torch.float32
    torch.testing.assert_close(seen[0], torch.from_numpy(images).permute(0, 3, 1, 2) / 255)
    assert (seen[1] == seen[0, 1]).all(), "an episode's first observation is repeated"
    assert (batch["observation.images.image2"][0] == seen[0].flip(0)).all()
    assert (batch["observation.state"][0] == torch.eye(2, 8)).all()


def test_noise_starts_diffusion_policy_and_act_has_none(folder: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).standard_normal((16, 7)).astype(np.float32)
    (found,) = LerobotPolicy(folder, CPU).infer(OBSERVATION, noise=noise).values()
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, 2 * noise[1:9])
    act = LerobotPolicy(save(tmp_path / "act", ACT), CPU)
    np.testing.assert_array_equal(act.infer(OBSERVATION, noise=noise)["actions"], np.full((8, 7), 0.5))
    assert factory().BATCHES[-1]["observation.images.image"].shape == (1, 3, 224, 224)
    assert (act.metadata["num_steps"], act.metadata["returned_actions"], "history" in act.metadata) == (1, 8, False)
    with pytest.raises(ConfigError, match=r"steps: .* got 3"):
        act.with_steps(3)


def test_the_evaluations_noise_reaches_it(folder: Path) -> None:
    source = PolicySource.parse(f"lerobot:{folder}", LIBERO, config=None, device="cpu")
    protocol = Protocol("libero_spatial", (0,), 1, (10,), 20)
    actor = make_actor(source, PolicyBySteps(source.load()), PLAYED, protocol)
    env = FakeEnv()
    env.reset_to(np.zeros(3), seed=[0])
    actor.begin(EpisodeKey(10, 0, 0), "do it")
    actor.actions(env, None)
    expected = np.random.default_rng([protocol.seed, 0, 0, 0]).standard_normal((16, 7)).astype(np.float32)
    np.testing.assert_array_equal(factory().NOISES[-1][0].numpy(), expected)


def test_it_plays_by_command_and_the_result_identifies_its_folder(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.json"
    words = ["--policy", f"lerobot:{folder}", "--trials", "1", "--device", "cpu", "--output", str(output)]
    assert command.main(PLAYED, libero.Arguments, words) == 0, capfd.readouterr().err
    result = json.loads(output.read_text())
    source = PolicySource.parse(f"lerobot:{folder}", LIBERO, config=None, device="cpu")
    own = identity(source, source.load(), LIBERO)
    assert own.items() <= result["policy"].items()
    assert (own["kind"], own["name"], own["device"]) == ("lerobot", "trained", "cpu")
    assert result["policy"]["metadata"]["engines"][0]["used"] == "lerobot"
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert identity(source, source.load(), LIBERO)["sha256"] != own["sha256"]
    assert command.main(PLAYED, libero.Arguments, words) == 2
    assert "belongs to another run: policy.sha256" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**ACT, "type": "tdmpc"}, "expected a policy of type act or diffusion, got tdmpc"),
        ({**ACT, "temporal_ensemble_coeff": 0.01}, "temporal_ensemble_coeff: expected none, .* got 0.01"),
        ({**DIFFUSION, "noise_scheduler_type": "DDPM"}, "noise_scheduler_type: expected DDIM, .* got DDPM"),
    ],
)
def test_a_policy_that_cannot_be_compared_is_refused(config: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        LerobotPolicy(save(folder, config), CPU)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"found no {name}"):
        LerobotPolicy(folder, CPU)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("__init__", "import diffusers_is_missing"),
        ("scripts/lerobot_train", "import diffusers_is_missing"),
        ("policies/factory", "from lerobot.utils import import_utils; import_utils.require_package('diffusers', 'x')"),
    ],
)
def test_without_lerobot_or_its_packages_the_error_names_the_page(
    module: str, text: str, folder: Path, lerobot: Path
) -> None:
    (lerobot / f"{module}.py").write_text(text)
    with pytest.raises(DependencyError, match=r"lerobot .* docs/evaluation\.md .*diffusers"):
        LerobotPolicy(folder, CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ray auto", "ray: a cluster plays this package's own policies"),
        ("--config native", "leave --config and --chunking out"),
        ("--chunking rtc", "leave --config and --chunking out"),
    ],
)
def test_options_that_it_cannot_honour_are_refused(words: str, message: str) -> None:
    chosen = read(libero.Arguments, ["--policy", "lerobot:some/folder", *words.split()], "eval.libero")
    with pytest.raises(ConfigError, match=message):
        command.make_request(PLAYED, chosen, [])


def test_a_benchmark_without_a_loader_refuses_it() -> None:
    with pytest.raises(ConfigError, match="policy: toy runs no policies with lerobot's own code, got lerobot:some/"):
        PolicySource.parse("lerobot:some/folder", TOY, config=None, device="cpu")
