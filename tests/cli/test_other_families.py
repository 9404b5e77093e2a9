"""Commands that π0.5 has tests of, on folders of other families: calibrate, serve, and the evaluation in LIBERO."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eval.libero.__main__ as libero
from eval.harness import command
from eval.harness.benchmark import Suite
from eval.libero.benchmark import LIBERO
from eval.libero.suites import LiberoTask
from tests.support import groot_folders, tiny_act, tiny_diffusion_policy, tiny_smolvla
from tests.support.eval_support import FakeEnv
from tests.support.server_support import serve_command
from vla_accel import OptimizedPolicy
from vla_accel.cli import main
from vla_accel.client import PolicyClient
from vla_accel.config import load_config
from vla_accel.fp8 import FILE
from vla_accel.measure.recording import save_observations


def smolvla(folder: Path) -> Path:
    """Shaped as LIBERO's checkpoints."""
    tiny_smolvla.write_lerobot(folder, libero=True)
    return folder


def groot(folder: Path) -> Path:
    groot_folders.write_isaac(folder)
    return folder


def act(folder: Path) -> Path:
    """As LIBERO's robot; it has no prompt and no steps."""
    return tiny_act.write_lerobot(folder, libero=True)


def diffusion_policy(folder: Path) -> Path:
    """As LIBERO's robot; it has no prompt, and reads two observations."""
    return tiny_diffusion_policy.write_libero(folder)


STEPS = {"smolvla": 2, "groot": 2, "act": 1, "diffusion_policy": 2}


def seen(folder: Path, count: int = 3) -> list[dict[str, Any]]:
    """Observations of a folder's robot."""
    if folder.name == "act":
        return [tiny_act.observation(seed, libero=True) for seed in range(count)]
    if folder.name == "diffusion_policy":
        return [tiny_diffusion_policy.libero_observation(seed) for seed in range(count)]
    if folder.name == "groot":
        return [groot_folders.observation(seed) for seed in range(count)]
    return [tiny_smolvla.observation(seed, libero=True) for seed in range(count)]


FAMILIES = pytest.mark.parametrize("write", [smolvla, groot, act, diffusion_policy])


@pytest.mark.slow
def test_smolvla_is_calibrated_for_native_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The scales lie where a policy finds them, and are of every product that it then has in FP8."""
    folder, recorded = smolvla(tmp_path / "smolvla"), tmp_path / "observations.npz"
    save_observations(seen(folder), recorded)
    assert "make them with `vla-accel calibrate`" in str(in_fp8(folder).ledger.entries["kv_cache"].reason)
    assert main(["calibrate", str(folder), "--observations", str(recorded), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / FILE}: ")
    policy = in_fp8(folder)
    assert policy.checkpoint.scales is not None and policy.checkpoint.scales.observations == 3
    entry = policy.ledger.entries["kv_cache"]
    assert (entry.used, entry.fell_back) == ("native", False)
    assert entry.detail.endswith("FP8: o_proj, gate_up_proj, down_proj")
    assert np.isfinite(policy.infer(seen(folder)[0])["actions"]).all()


def in_fp8(folder: Path) -> OptimizedPolicy:
    """With `native_fp8`; on a CPU a policy is FP32, which takes no FP8, unless BF16 is asked for."""
    config = replace(load_config("native_fp8"), precision="bf16")
    return OptimizedPolicy.from_pretrained(folder, config, device="cpu", num_steps=2)


def test_groot_needs_no_calibration_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, recorded = groot(tmp_path / "groot"), tmp_path / "observations.npz"
    save_observations(seen(folder), recorded)
    assert main(["calibrate", str(folder), "--observations", str(recorded), "--device", "cpu"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == ("vla-accel calibrate: groot: this family quantizes no inputs and needs no calibration")
    assert not (folder / FILE).exists()


@pytest.mark.slow
@FAMILIES
def test_a_served_folder_answers_as_in_process(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder, steps = write(tmp_path / write.__name__), STEPS[write.__name__]
    local = OptimizedPolicy.from_pretrained(folder, "eager_fp32", device="cpu", num_steps=steps)
    words = (str(folder), "--config", "eager_fp32", "--num-steps", str(steps), "--device", "cpu")
    with serve_command(*words) as address, PolicyClient(address) as client:
        assert (client.metadata["policy"], client.metadata["num_steps"]) == (str(folder), steps)
        for observation in seen(folder, 2):  # the noise of both begins with the configured seed
            expected = local.infer(observation)["actions"]
            np.testing.assert_allclose(client.infer(observation)["actions"], expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@FAMILIES
def test_a_folder_plays_in_libero(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command with a real policy and a simulator without physics, which gives LIBERO's cameras and state."""
    folder, output, acted = write(tmp_path / write.__name__), tmp_path / "run.json", []

    class Env(FakeEnv):
        def step(self, action: np.ndarray, *, look: bool) -> bool:
            acted.append(np.asarray(action))
            return super().step(action, look=look)

    tasks = (LiberoTask(0, "task_0", "pick up the bowl", np.zeros((50, 3)), Path("x.bddl")),)
    suite = Suite("libero_spatial", tasks, 220)
    benchmark = replace(
        LIBERO, load_suite=lambda name: suite, make_environment=lambda task, settings, render: Env(succeed_after=7)
    )
    steps = str(STEPS[write.__name__])
    words = ["--policy", str(folder), "--config", "eager_fp32", "--steps", steps, "--tasks", "0", "--trials", "2"]
    assert command.main(benchmark, libero.Arguments, [*words, "--device", "cpu", "--output", str(output)]) == 0
    line = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (line["rows"][0]["rate"], line["errors"]) == (1.0, 0)
    assert {a.shape for a in acted} == {(7,)} and np.isfinite(acted).all() and np.ptp(acted) > 0
    result = json.loads(output.read_text())
    assert [e["success"] for e in result["episodes"]] == [True, True]
    (row,) = result["summary"]["rows"]
    assert row["breakdown"]["components"]["transformer" if write is act else "denoise"]["mean_ms"] > 0
