"""lerobot's async server as `lerobot_policy_vla_accel.policy_server` starts it: gRPC, lerobot's own messages, frames of
the sizes that the robot's cameras have.

Runs where lerobot and the package are installed: CONTRIBUTING says how. On the CPU, with tiny checkpoints.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "lerobot_policy_vla_accel", reason="NOT RUN: needs the environment of the plugins (see CONTRIBUTING)"
)

import grpc

with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    # It opens a log in the current folder.
    from lerobot.async_inference import policy_server
from lerobot.async_inference.configs import PolicyServerConfig
from lerobot.async_inference.helpers import RemotePolicyConfig, TimedObservation
from lerobot.transport import services_pb2, services_pb2_grpc
from lerobot.transport.utils import send_bytes_in_chunks
from lerobot.utils.feature_utils import hw_to_dataset_features
from lerobot_policy_vla_accel import policy_server as ours
from lerobot_policy_vla_accel.__main__ import main

from tests.plugins.folders import write_arm
from tests.support.tiny import write_tiny_checkpoint
from vla_accel import OptimizedPolicy

pytestmark = pytest.mark.filterwarnings("default")
JOINTS = tuple(f"joint{i}.pos" for i in range(8))


class Robot:
    """lerobot's client of one robot, without its threads."""

    def __init__(self, address: str, shapes: dict[str, tuple[int, int, int]], joints: int) -> None:
        self.stub = services_pb2_grpc.AsyncInferenceStub(grpc.insecure_channel(address))
        self.shapes, self.joints = shapes, JOINTS[:joints]
        self.step = 0

    def connect(self, folder: Path, **more: Any) -> None:
        features = hw_to_dataset_features({**dict.fromkeys(self.joints, float), **self.shapes}, "observation", False)
        asked = RemotePolicyConfig("vla_accel", str(folder), features, actions_per_chunk=50, device="cpu", **more)
        self.stub.Ready(services_pb2.Empty())
        self.stub.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(asked)))

    def frames(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {k: rng.integers(0, 256, shape, np.uint8) for k, shape in self.shapes.items()}

    def actions(self, frames: dict[str, np.ndarray], state: np.ndarray, must_go: bool = True) -> np.ndarray | None:
        """The chunk that answers an observation; None where the server has none."""
        joints = {k: float(v) for k, v in zip(self.joints, state, strict=True)}
        self.step += 1
        sent = TimedObservation(
            timestamp=float(self.step), timestep=self.step, must_go=must_go,
            observation={**joints, **frames, "task": "pick up the bowl"},
        )  # fmt: skip
        parts = send_bytes_in_chunks(pickle.dumps(sent), services_pb2.Observation, silent=True)
        self.stub.SendObservations(parts)
        answer = self.stub.GetActions(services_pb2.Empty()).data
        return np.stack([a.get_action().numpy() for a in pickle.loads(answer)]) if answer else None


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("PolicyServer", "raw_observation_to_observation"):
        monkeypatch.setattr(policy_server, name, getattr(policy_server, name))
    monkeypatch.setattr(policy_server, "SUPPORTED_POLICIES", [*policy_server.SUPPORTED_POLICIES])
    ours.install()
    with serving() as found:
        yield found


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """As `lerobot.async_inference.policy_server.serve`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    service = policy_server.PolicyServer(PolicyServerConfig(inference_latency=0.0, obs_queue_timeout=0.3))
    services_pb2_grpc.add_AsyncInferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def write_folder(path: Path, write: Callable[[Path], Any] = write_arm) -> None:
    """A checkpoint, and lerobot's folder of it."""
    write(path / "checkpoint")
    assert main([str(path / "checkpoint"), str(path / "folder"), "--num-steps", "2"]) == 0


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_arm, {"front": "observation.images.front", "wrist": "observation.images.wrist"}),
        (write_tiny_checkpoint, {"image": "observation/image", "image2": "observation/wrist_image"}),
    ],
)
def test_frames_reach_the_policy_in_their_own_sizes(
    address: str, tmp_path: Path, write: Callable[[Path], Any], names: dict[str, str]
) -> None:
    write_folder(tmp_path, write)
    policy = OptimizedPolicy.from_pretrained(tmp_path / "checkpoint", num_steps=2, device="cpu")
    preset = policy.processor.preset
    robot = Robot(address, dict(zip(names, ((48, 64, 3), (90, 40, 3)), strict=True)), preset.state_dim)
    robot.connect(tmp_path / "folder")
    state = np.linspace(0.1, 0.8, preset.state_dim, dtype=np.float32)
    for seed in range(2):
        frames = robot.frames(seed)
        seen = {names[k]: v for k, v in frames.items()}
        expected = policy.infer({**seen, preset.state[0]: state, preset.prompt: "pick up the bowl"})["actions"]
        np.testing.assert_array_equal(robot.actions(frames, state), expected.astype(np.float32))


def test_cameras_are_renamed_and_others_are_not_looked_at(address: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    policy = OptimizedPolicy.from_pretrained(tmp_path / "checkpoint", num_steps=2, device="cpu")
    robot = Robot(address, {"top": (48, 64, 3), "wrist": (30, 70, 3), "depth": (24, 32, 1)}, 6)
    robot.connect(tmp_path / "folder", rename_map={"observation.images.top": "observation.images.front"})
    frames, state = robot.frames(), np.linspace(0.1, 0.8, 6, dtype=np.float32)
    seen = {"observation.images.front": frames["top"], "observation.images.wrist": frames["wrist"]}
    expected = policy.infer({**seen, "observation.state": state, "task": "pick up the bowl"})["actions"]
    np.testing.assert_array_equal(robot.actions(frames, state), expected.astype(np.float32))


def test_an_observation_is_used_although_its_joints_are_near_the_last_ones(address: str, tmp_path: Path) -> None:
    """In radians nearly all are; and an object that moves is seen by the cameras alone."""
    write_folder(tmp_path)
    robot = Robot(address, {"front": (48, 64, 3), "wrist": (30, 70, 3)}, 6)
    robot.connect(tmp_path / "folder")
    state = np.zeros(6)
    first = robot.actions(robot.frames(0), state)
    second = robot.actions(robot.frames(1), state, must_go=False)
    assert first is not None and second is not None and not np.array_equal(first, second)
    # A time step that was answered is not answered again.
    robot.step -= 1
    assert robot.actions(robot.frames(2), state, must_go=False) is None
