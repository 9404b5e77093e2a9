"""An image under an unknown key while an optional camera is missing: one error that names both."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.tiny import tiny_observation, write_tiny_checkpoint
from vla_accel import OptimizedPolicy
from vla_accel.client import PolicyClient
from vla_accel.errors import ObservationError, ServerError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.server import ServerConfig, background
from vla_accel.transforms import observations
from vla_accel.transforms.observations import Reader
from vla_accel.transforms.robots import PRESETS, Preset, preset_from

LEROBOT = ("observation.images.front", "observation.images.wrist")
LIBERO = ("observation/image", "observation/wrist_image")


def test_a_robot_may_have_more_cameras_than_the_model_sees() -> None:
    preset = Preset(LEROBOT, ("observation.state",), 6, 6, prompt="task", optional_images=LEROBOT)
    given: dict[str, Any] = dict.fromkeys((*LEROBOT, "observation.images.side"), np.zeros((8, 8, 3), np.uint8))
    given |= {"observation.state": np.zeros(6), "task": "go"}
    assert list(Reader(preset).read(given).views) == list(LEROBOT)
    less = {k: v for k, v in given.items() if "side" not in k and "wrist" not in k}
    assert list(Reader(preset).read(less).views) == [LEROBOT[0]]


def image(height: int = 12, width: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


FLAT = {"base": "libero", "images": ["front", "wrist"], "state": ["pose"], "optional_images": ["wrist"]}
PRESETS_WITH_OPTIONAL_CAMERAS = {
    "lerobot": Preset(LEROBOT, ("observation.state",), 6, 6, prompt="task", optional_images=LEROBOT[1:]),
    "aloha": PRESETS["aloha"],
    "libero": preset_from({"base": "libero", "optional_images": [LIBERO[1]]}),
    "flat": preset_from(FLAT),
}


def placed(path: str, value: Any) -> dict[str, Any]:
    """`value` in mappings nested along a path; keys are separated by "|"."""
    for key in reversed(path.split("|")):
        value = {key: value}
    return value


@pytest.mark.parametrize("robot", PRESETS_WITH_OPTIONAL_CAMERAS)
@pytest.mark.parametrize(
    "key",
    [
        "observation.image.wrist", "observation.images.wrsit", "observation/images/wrist", "wrist ", "Wrist", "wirst",
        "observation.wrist", "cam_rihgt", "image/cam_left_wrist", "images/cam_left", "observation/wrist_imgae",
        "observation|images|wrist", "images|cam_left", "images|left|rgb", "sensors|cameras|hand|color|image",
    ],
)  # fmt: skip
def test_any_spelling_is_refused(robot: str, key: str) -> None:
    preset = PRESETS_WITH_OPTIONAL_CAMERAS[robot]
    given = {preset.images[0]: image(), **preset.split(np.zeros(preset.state_dim)), preset.prompt: "go"}
    reader = Reader(preset)
    assert list(reader.read(given).views) == [preset.images[0]]
    with pytest.raises(ObservationError) as refused:
        reader.read({**given, **placed(key, image())})
    expected, _, got = str(refused.value).partition(", got ")
    assert key.replace("|", "/") in got and preset.images[1] in expected
    # A robot may have more cameras than the model sees, and cameras that the preset ignores.
    whole = given | dict.fromkeys(preset.images, image())
    assert list(reader.read({**whole, **placed(key, image())}).views) == list(preset.images)
    ignoring = dataclasses.replace(preset, ignored_images=(key.replace("|", "/"),))
    assert list(Reader(ignoring).read({**given, **placed(key, image())}).views) == [preset.images[0]]


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image()).save(file, kind)
    return file.getvalue()


class Frame:
    """A driver's own image, which NumPy reads."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return image()


def objects(*values: Any) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


IMAGES: dict[str, Any] = {
    "channels first": np.moveaxis(image(), -1, 0),
    "not contiguous": image(24, 40)[::2, ::-2],
    "float": image().astype(np.float16) / 255,
    "gray": image()[..., :1],
    "alpha": np.zeros((12, 20, 4), np.uint8),
    "history": np.stack([image()] * 2),
    "history, channels first": np.zeros((2, 3, 12, 20), np.float32),
    "torch": torch.from_numpy(image()).permute(2, 0, 1),
    "pillow": Image.fromarray(image()),
    "lists": image().tolist(),
    "list of arrays": [image(), image()],
    "jpeg": encoded("jpeg"),
    "png": memoryview(encoded("png")),
    "jpeg in an array": np.frombuffer(encoded("jpeg"), np.uint8),
    "webp": encoded("webp"),
    "memoryview": image().data,
    "frame": Frame(),
    "time and image": (1.5, image()),
    "time and jpeg": ["12:00", encoded("jpeg")],
    "pillow in an array": objects(Image.fromarray(image())),
    "jpeg in an array of objects": objects(encoded("jpeg")),
    "one jpeg as an array": np.array(encoded("jpeg"), object),
    "jpeg as raw bytes": np.void(encoded("jpeg")),
}
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
OTHERS: dict[str, Any] = {
    "joints": np.zeros(7),
    "one number": 3,
    "text": "a photo",
    "bytes": b"\x00\x01\xff\xd8\xff",
    "nothing": None,
    "flags": np.zeros((12, 20, 3), bool),
    "texts": [["a"] * 12] * 20,
    "pose": np.eye(4)[None],
    "keypoints": np.zeros((21, 3)),
    "tactile": np.zeros((4, 4, 3), np.float32),
    "empty": np.zeros((0, 20, 3), np.uint8),
    "empty list": [],
    "mapping": {"force": [0.0, 1.0], "none": {}},
    "time and joints": (1.5, np.zeros(7)),
    "objects": objects("a", None, [1.0, 2.0]),
    "nothing but itself": ITSELF,
}


MESSAGE = (
    r"expected an image at wrist, got one at (hand|cameras/0/image); .* remove it, or add its key to ignored_images"
)


@pytest.mark.parametrize("kind", IMAGES)
def test_whatever_holds_an_image_is_refused(kind: str) -> None:
    preset = preset_from(FLAT)
    given = {"front": image(), "pose": np.zeros(8), "prompt": "go"}
    for extra in ({"hand": IMAGES[kind]}, {"cameras": [{"name": "hand", "image": IMAGES[kind]}]}):
        with pytest.raises(ObservationError, match=MESSAGE):
            Reader(preset).read({**given, **extra})


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_image_may_come_with_the_others(kind: str) -> None:
    given = {"front": image(), "pose": np.zeros(8), "prompt": "go", "extra": OTHERS[kind]}
    assert list(Reader(preset_from(FLAT)).read(given).views) == ["front"]


def test_a_path_in_other_mappings_than_the_key_is_unknown() -> None:
    """`a/b/c` is one key or three, not two."""
    views = ("a/b/c", "top")
    preset = Preset(views, ("state",), 2, 2, optional_images=views)
    given = {"top": image(), "state": np.zeros(2), "prompt": "go"}
    for known in ({"a/b/c": image()}, {"a": {"b": {"c": image()}}}):
        assert list(Reader(preset).read({**given, **known}).views) == list(views)
    with pytest.raises(ObservationError, match="expected an image at a/b/c, got one at a/b/c;"):
        Reader(preset).read({**given, "a/b": {"c": image()}})


def test_nothing_is_searched_while_every_camera_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "unknown_images", None)
    preset = preset_from(FLAT)
    given = {"front": image(), "wrist": image(), "pose": np.zeros(8), "prompt": "go", "hand": image()}
    assert len(Reader(preset).read(given).views) == 2


def test_a_client_hears_of_it(tmp_path: Path) -> None:
    """Through the wire and the server, and from the runner's thread."""
    write_tiny_checkpoint(tmp_path)
    robot = tmp_path / "robot.yaml"
    robot.write_text(f"base: libero\noptional_images: [{LIBERO[1]}]\n")
    policy = OptimizedPolicy.from_pretrained(tmp_path, {"preset": str(robot)}, device="cpu", num_steps=1)
    given = tiny_observation()
    given["wrist"] = {"rgb": given.pop(LIBERO[1])}
    with pytest.raises(ObservationError, match="got one at wrist/rgb"):
        policy.infer_batch([tiny_observation(), given])
    with background(policy, ServerConfig(port=0)) as server, PolicyClient(server.address) as client:
        with pytest.raises(ServerError, match="got one at wrist/rgb"):
            client.infer(given)
        with AsyncRunner(client, hz=20) as runner, pytest.raises(ServerError, match="got one at wrist/rgb"):
            runner.start(given)
