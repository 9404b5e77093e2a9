"""A camera by a name that the checkpoint does not know: one error with that name and those that were expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import groot_folders, tiny_smolvla
from vla_accel.checkpoints.loading import load
from vla_accel.errors import ObservationError
from vla_accel.transforms.observations import Reader
from vla_accel.transforms.robots import Preset

LEROBOT = ("observation.images.front", "observation.images.wrist")
LIBERO = ("observation/image", "observation/wrist_image")


def smolvla(folder: Path) -> None:
    tiny_smolvla.write_lerobot(folder)


def smolvla_libero(folder: Path) -> None:
    tiny_smolvla.write_lerobot(folder, libero=True)


def groot(folder: Path) -> None:
    """Another robot than LIBERO's."""
    robot = groot_folders.modality(groot_folders.STATE, groot_folders.ACTION, ("front", "wrist"))
    stats = {
        "state": groot_folders.statistics(groot_folders.STATE), "action": groot_folders.statistics(groot_folders.ACTION)
    }  # fmt: skip
    groot_folders.write_isaac(folder, modalities={"new_embodiment": robot}, stats={"new_embodiment": stats})


def groot_libero(folder: Path) -> None:
    groot_folders.write_isaac(folder)


@pytest.mark.parametrize(
    ("write", "cameras"), [(smolvla, LEROBOT), (smolvla_libero, LIBERO), (groot, LEROBOT), (groot_libero, LIBERO)]
)
def test_one_error_names_it_and_the_expected_ones(
    write: Callable[[Path], None], cameras: tuple[str, str], tmp_path: Path
) -> None:
    write(tmp_path)
    processor = load(tmp_path).processor
    assert processor.preset.images == cameras
    example = processor.example()
    processor.prepare(example)
    first, second = cameras
    unknown = re.sub(r"\w+$", "side", first)
    # Both misspelt, and one of them.
    for kept in ((), (second,)):
        given = {k: v for k, v in example.items() if k not in cameras or k in kept} | {unknown: example[first]}
        with pytest.raises(ObservationError) as refused:
            processor.prepare(given)
        said = str(refused.value)
        assert unknown in said and first in said and "\n" not in said
        assert second in said


def test_a_robot_may_have_more_cameras_than_the_model_sees() -> None:
    preset = Preset(LEROBOT, ("observation.state",), 6, 6, prompt="task", optional_images=LEROBOT)
    given: dict[str, Any] = dict.fromkeys((*LEROBOT, "observation.images.side"), np.zeros((8, 8, 3), np.uint8))
    given |= {"observation.state": np.zeros(6), "task": "go"}
    assert list(Reader(preset).read(given).views) == list(LEROBOT)
    less = {k: v for k, v in given.items() if "side" not in k and "wrist" not in k}
    assert list(Reader(preset).read(less).views) == [LEROBOT[0]]


def test_a_misspelt_one_among_keys_with_slashes() -> None:
    views = ("images/top", "images/left", "images/right")
    preset = Preset(views, ("state",), 2, 2, optional_images=views[1:])
    image = np.zeros((8, 8, 3), np.uint8)
    given: dict[str, Any] = {"images/top": image, "images/left": image, "state": np.zeros(2), "prompt": "go"}
    assert list(Reader(preset).read(given).views) == list(views[:2])
    with pytest.raises(ObservationError, match=r"expected some of images/top, .*, got also images/rihgt$"):
        Reader(preset).read({**given, "images/rihgt": image})
    assert len(Reader(preset).read({**given, "images/right": image, "images/more": image}).views) == 3


def test_what_stands_beside_the_state_is_no_camera() -> None:
    preset = Preset(("observation.image", "observation.wrist"), ("observation.state",), 2, 2, prompt="task",
                    optional_images=("observation.wrist",))  # fmt: skip
    given = {"observation.image": np.zeros((8, 8, 3), np.uint8), "observation.state": np.zeros(2), "task": "go"}
    assert list(Reader(preset).read({**given, "observation.effort": np.zeros(2)}).views) == ["observation.image"]
