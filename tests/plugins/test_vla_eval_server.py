"""`vla_eval_vla_accel` with vla-eval's own client and its LIBERO benchmark, and the commands of docs/vla_eval.md.

Runs where vla-eval and the package are installed: CONTRIBUTING says how. On the CPU, with tiny checkpoints; one episode
of LIBERO with the bundled one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import yaml

pytest.importorskip("vla_eval_vla_accel", reason="NOT RUN: needs the environment of the plugins (see CONTRIBUTING)")

from vla_eval.api import serve_background
from vla_eval.connection import Connection
from vla_eval_vla_accel import VlaAccelModelServer
from vla_eval_vla_accel.model_server import camera_names, observation

from tests.plugins.programs import free_port, process, reachable, replaced, run, until
from tests.support import tiny_act
from tests.support.lerobot_saved import configure
from tests.support.pages import ROOT, blocks, commands
from tests.support.tiny import write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.transforms.robots import LIBERO, PRESETS

pytestmark = pytest.mark.filterwarnings("default")
PAGE = ROOT / "docs/vla_eval.md"
SHOWN = [command.line for command in commands(PAGE)]
INSTALL, SERVE, RUN = "pip install ", "python -m vla_eval_vla_accel ", "vla-eval run "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path) -> VlaAccelModelServer:
    return VlaAccelModelServer(str(tiny), device="cpu", num_steps=2, chunk_size=2, max_batch_size=4, max_wait_time=0.5)


@pytest.fixture
def address(server: VlaAccelModelServer) -> Iterator[str]:
    server.policy.reset()
    with serve_background(server) as handle:
        yield handle.url


def seen(seed: int) -> dict[str, Any]:
    """What vla-eval's LIBERO benchmark sends."""
    rng = np.random.default_rng(seed)
    images = {name: rng.integers(0, 256, (28, 28, 3), dtype=np.uint8) for name in ("agentview", "wrist")}
    return {"images": images, "states": rng.random(8), "task_description": "pick up the bowl"}


def as_ours(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "observation/image": given["images"]["agentview"],
        "observation/wrist_image": given["images"]["wrist"],
        "observation/state": given["states"],
        "prompt": given["task_description"],
    }


def test_vla_evals_client_gets_the_policys_actions_one_by_one(address: str, tiny: Path) -> None:
    policy = OptimizedPolicy.from_pretrained(tiny, device="cpu", num_steps=2)
    expected = [policy.infer(as_ours(seen(seed)))["actions"][:2] for seed in (0, 2)]

    async def episode() -> tuple[dict[str, Any], list[np.ndarray]]:
        async with Connection(address) as client:
            await client.start_episode({"task": {"name": "x"}})
            actions = [(await client.act(seen(seed)))["actions"] for seed in (0, 1, 2)]
            await client.end_episode({"success": False})
            return client.server_info, actions

    told, actions = anyio.run(episode)
    np.testing.assert_array_equal(actions[:2], expected[0].astype(np.float32))
    np.testing.assert_array_equal(actions[2], expected[1][0].astype(np.float32))
    assert told["model_server"] == "VlaAccelModelServer"
    assert told["observation_params"] == {"send_state": True, "send_wrist_image": True, "quat_no_antipodal": True}
    assert {"agentview", "wrist", "state", "language"} == set(told["observation_spec"])
    assert {"position", "rotation", "gripper"} == set(told["action_spec"])


def test_shards_are_run_together(
    address: str, server: VlaAccelModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    sizes = []

    def counted(batch: list[Any], contexts: list[Any]) -> list[Any]:
        sizes.append(len(batch))
        return VlaAccelModelServer.predict_batch(server, batch, contexts)

    monkeypatch.setattr(server, "predict_batch", counted)

    async def shard(seed: int) -> None:
        async with Connection(address) as client:
            await client.start_episode({"task": {"name": "x"}})
            assert (await client.act(seen(seed)))["actions"].shape == (7,)

    async def shards() -> None:
        async with anyio.create_task_group() as group:
            for seed in range(4):
                group.start_soon(shard, seed)

    anyio.run(shards)
    assert sum(sizes) == 4 and max(sizes) > 1


def test_an_observation_without_what_the_policy_needs_is_an_error_that_says_so(address: str) -> None:
    async def ask(given: dict[str, Any]) -> None:
        async with Connection(address) as client:
            await client.start_episode({"task": {"name": "x"}})
            await client.act(given)

    with pytest.raises(RuntimeError, match="expected states, got agentview, wrist"):
        anyio.run(ask, {k: v for k, v in seen(0).items() if k != "states"})
    one = {**seen(0), "images": {"agentview": np.zeros((28, 28, 3), np.uint8)}}
    with pytest.raises(ObservationError, match=r"expected wrist, got agentview, .*send_wrist_image"):
        observation(one, LIBERO, camera_names(LIBERO, None))


def test_cameras_of_other_robots_must_be_named() -> None:
    droid = PRESETS["droid"]
    with pytest.raises(ConfigError, match="cameras: expected the benchmark's name of each of observation/exterior"):
        camera_names(droid, None)
    with pytest.raises(ConfigError, match=r"cameras: expected observation/exterior_image_1_left, .*, got wrist"):
        camera_names(droid, {"hand": "wrist"})
    names = camera_names(droid, {"side": droid.images[0], "hand": droid.images[1]})
    given = {"images": {n: np.zeros((8, 8, 3), np.uint8) for n in names}, "state": np.arange(8.0)}
    row = observation(given, droid, names)
    assert set(row) == {*droid.images, *droid.state}
    assert [len(row[key]) for key in droid.state] == [7, 1]


def test_a_camera_that_is_not_named_is_no_missing_one() -> None:
    aloha = PRESETS["aloha"]
    names = dict(zip(("top", "left", "right"), aloha.images, strict=True))
    image, state = np.zeros((8, 10, 3), np.uint8), np.zeros(14)
    given = {"images": {"top": image, "left": image}, "state": state}
    assert aloha.images[2] not in observation(given, aloha, names)
    with pytest.raises(ObservationError, match="expected right, got top, left, rihgt"):
        observation({"images": {**given["images"], "rihgt": image}, "state": state}, aloha, names)
    whole = {"images": dict.fromkeys((*names, "more"), image), "state": state}
    assert set(aloha.images) < set(observation(whole, aloha, names))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"chunk_size": 6}, "chunk_size: expected 1 to 5, .*, got 6"),
        ({"chunk_size": 0}, "chunk_size: expected 1 to 5, .*, got 0"),
        ({"max_batch_size": 0}, "max_batch_size: expected at least 1, got 0"),
        ({"max_wait_time": -1.0}, r"max_wait_time: expected at least 0 seconds, got -1\.0"),
        ({"config": {"warm_start": 0.5}}, r"config: expected no warm_start, .*, got 0\.5"),
    ],
)
def test_a_setting_that_cannot_be_done_is_refused(tiny: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VlaAccelModelServer(str(tiny), device="cpu", num_steps=1, **setting)


def test_a_checkpoint_with_temporal_ensembling_is_refused(tmp_path: Path) -> None:
    saved = configure(temporal_ensemble_coeff=0.01, n_action_steps=1)
    folder = tiny_act.write_lerobot(tmp_path, saved, libero=True)
    with pytest.raises(ConfigError, match=r"checkpoint: expected no temporal_ensemble_coeff, .*, got 0\.01"):
        VlaAccelModelServer(str(folder), device="cpu")


@pytest.mark.slow
def test_vla_eval_plays_libero_as_the_page_says(tmp_path: Path) -> None:
    """One episode; the server's words and the harness's are the page's."""
    write_smaller(tmp_path)
    port = free_port()
    serve = replaced(
        SHOWN, SERVE, "--args.checkpoint=demo", "--args.num_steps=3", "--args.chunk_size=5", "--args.device=cpu",
        f"--port={port}", "--host=127.0.0.1",
    )  # fmt: skip
    (line,) = [line for line in SHOWN if line.startswith(RUN)]
    words = line.replace(":8000", f":{port}").split()
    with process(serve, tmp_path) as started:
        until(lambda: reachable(port), started)
        said = run(words, tmp_path)
    assert "100.0%" in said and "errored" not in said
    assert "quat_no_antipodal" in said
    results = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    assert [r["mean_success"] for r in results if "mean_success" in r] == [1.0]


@pytest.mark.slow
def test_vla_eval_plays_libero_within_a_program_as_the_page_says(tmp_path: Path) -> None:
    write_smaller(tmp_path)
    (text,) = blocks(PAGE, "python")
    assert run(["python", "-c", text], tmp_path).splitlines().count("1.0") == 1


def write_smaller(folder: Path) -> None:
    """The page's configuration, for one episode of one task, drawn without a GPU."""
    pytest.importorskip("libero", reason="needs LIBERO")
    (text,) = blocks(PAGE, "yaml")
    config = yaml.safe_load(text)
    config["benchmarks"][0] |= {"episodes_per_task": 1, "max_tasks": 1}
    (folder / "libero_spatial.yaml").write_text(yaml.safe_dump({**config, "render": "cpu"}))


def test_every_command_of_the_page_is_run_here() -> None:
    assert [[s for s in (INSTALL, SERVE, RUN) if line.startswith(s)] for line in SHOWN] == [
        [INSTALL],
        [SERVE],
        [INSTALL],
        [RUN],
    ]
