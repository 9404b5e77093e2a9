"""A robot may write into its buffers after `step`: the policy sees a copy."""

from __future__ import annotations

import array
import subprocess
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import PATIENCE_S
from vla_accel.errors import ObservationError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.inference import copied

torch: Any = pytest.importorskip("torch")
Pose = namedtuple("Pose", ["position", "gripper"])


def case(name: str) -> tuple[Any, Any]:
    """An observation's value, and the object that the robot writes to."""
    whole, inner = np.zeros((4, 6, 3), np.uint8), np.zeros(3)
    objects = np.empty(2, object)
    objects[0], objects[1] = inner, "x"
    tensor, gradient = torch.zeros(4, 6, 3, dtype=torch.uint8), torch.zeros(3, requires_grad=True) * 1.0
    nested = OrderedDict(cameras={"left": inner}, pose=Pose(inner, 1.0), more=[[inner], (inner, "x")])
    return {
        "NumPy view": (whole[::2, 1:, ::-1], whole),
        "nested": (nested, inner),
        "array of objects": (objects, inner),
        "memory view": (inner.data, inner),
        "tensor view": (tensor[:3, ::2], tensor),
        "tensor with a gradient": (gradient, gradient.detach()),  # not a leaf, which deepcopy refuses
        "tensor that shares memory with NumPy": ({"image": [torch.from_numpy(inner)]}, inner),
        **{type(v).__name__: (v, v) for v in ([0.0, 0.0], bytearray(4), array.array("d", [0.0, 0.0]))},
    }[name]


CASES = ["NumPy view", "nested", "array of objects", "memory view", "tensor view", "tensor with a gradient"]
CASES += ["tensor that shares memory with NumPy", "list", "bytearray", "array"]


def seen(value: Any) -> Any:
    """The numbers in a value, as nested lists."""
    if isinstance(value, dict):
        return {key: seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [seen(one) for one in value]
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()  # pyright: ignore[reportAttributeAccessIssue]
    return value if isinstance(value, (str, float)) else np.asarray(value).tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_write_to_the_original_does_not_change_the_copy(name: str) -> None:
    value, target = case(name)
    before, copy = seen(value), copied(value)
    assert isinstance(copy, dict) if isinstance(value, dict) else type(copy) is type(value)
    target[0] = 7
    assert seen(value) != before, "the test wrote nothing"
    assert seen(copy) == before


def test_an_image_is_copied() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2))
    copy = copied(image)
    image.putpixel((0, 0), (7, 7, 7))
    assert type(copy) is type(image) and copy.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("name", ["nested", "tensor view"])
def test_the_policy_sees_the_observation_of_its_tick(name: str) -> None:
    value, target = case(name)
    before, inferred, written = seen(value), [], threading.Event()

    class Late:
        """Reads its observation after the robot has written the next one."""

        def infer(self, observation: Any) -> Any:
            if len(inferred) == 2:  # the robot waits for the two inferences of `start`
                assert written.wait(PATIENCE_S)
            inferred.append(seen(observation["image"]))
            return {"actions": np.zeros((8, 2))}

    with AsyncRunner(Late(), 50.0, replan_ticks=1, max_wait_s=0.0) as runner:
        runner.start({"image": value})
        runner.step({"image": value})
        runner.step({"image": value})  # begins the third inference
        target[0] = 7
        written.set()
        assert runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    assert inferred == [before] * 3


def test_views_keep_their_form_and_copy_no_more_than_they_show() -> None:
    copy = copied(np.arange(6, dtype=">f4").reshape(2, 3)[:, ::-1].data)
    assert (copy.shape, copy.format, np.asarray(copy).tolist()) == ((2, 3), ">f", [[2, 1, 0], [5, 4, 3]])
    copy = copied(torch.zeros(1000, 3, dtype=torch.bfloat16)[5:7])
    assert (copy.dtype, copy.shape, copy.untyped_storage().nbytes()) == (torch.bfloat16, (2, 3), 12)
    assert not copied(case("tensor with a gradient")[0]).requires_grad


def test_an_object_that_cannot_be_copied_is_named() -> None:
    with pytest.raises(ObservationError, match=r"observation\['cameras'\]\[1\]: expected .*, got a lock"):
        copied({"cameras": [1, threading.Lock()]})


def test_copying_needs_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, numpy as np; from vla_accel.remote.inference import copied; "
        "copied({'a': [np.zeros(3), bytearray(3)]}); assert not {'torch', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
