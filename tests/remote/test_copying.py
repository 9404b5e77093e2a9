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

Pose = namedtuple("Pose", ["position", "gripper"])


def numpy_view() -> Any:
    whole = np.zeros((4, 6, 3), np.uint8)
    return whole[::2, 1:, ::-1], whole


def nested() -> Any:
    inner = np.zeros(3)
    return OrderedDict(cameras={"left": inner}, pose=Pose(inner, 1.0), more=[[inner], (inner, "x")]), inner


def list_of_numbers() -> Any:
    value = [0.0, 0.0]
    return value, value


def array_of_objects() -> Any:
    inner, value = np.zeros(3), np.empty(2, object)
    value[0], value[1] = inner, "x"
    return value, inner


def byte_array() -> Any:
    value = bytearray(4)
    return value, value


def memory_view() -> Any:
    owner = np.zeros((2, 3), np.float32)
    return owner.data, owner


def array_module() -> Any:
    value = array.array("d", [0.0, 0.0])
    return value, value


def tensor_view() -> Any:
    whole = pytest.importorskip("torch").zeros(4, 6, 3, dtype=pytest.importorskip("torch").uint8)
    return whole[:3, ::2], whole


def tensor_with_a_gradient() -> Any:
    value = pytest.importorskip("torch").zeros(3, requires_grad=True) * 1.0  # not a leaf, which deepcopy refuses
    return value, value.detach()


def tensor_that_shares_memory_with_numpy() -> Any:
    owner = np.zeros(3)
    return {"image": [pytest.importorskip("torch").from_numpy(owner)]}, owner


def pillow_image() -> Any:
    value = pytest.importorskip("PIL.Image").new("RGB", (3, 2))
    return value, value


CASES = {
    case.__name__: case
    for case in (
        numpy_view,
        nested,
        list_of_numbers,
        array_of_objects,
        byte_array,
        memory_view,
        array_module,
        tensor_view,
        tensor_with_a_gradient,
        tensor_that_shares_memory_with_numpy,
        pillow_image,
    )
}
"""Each returns an observation's value, and the object that the robot writes to."""


def write(target: Any) -> None:
    if hasattr(target, "putpixel"):
        target.putpixel((0, 0), (7, 7, 7))
    else:
        target[0] = 7


def seen(value: Any) -> Any:
    """The numbers in a value, as nested lists."""
    if isinstance(value, dict):
        return {key: seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [seen(one) for one in value]
    if isinstance(value, (str, float)):
        return value
    if hasattr(value, "detach"):
        value = value.detach().numpy()  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(value).tolist()


@pytest.mark.parametrize("name", CASES)
def test_a_write_to_the_original_does_not_change_the_copy(name: str) -> None:
    value, target = CASES[name]()
    before = seen(value)
    copy = copied(value)
    assert isinstance(copy, dict) if isinstance(value, dict) else type(copy) is type(value)
    write(target)
    assert seen(value) != before, "the test wrote nothing"
    assert seen(copy) == before


@pytest.mark.parametrize("name", ["nested", "tensor_view"])
def test_the_policy_sees_the_observation_of_its_tick(name: str) -> None:
    value, target = CASES[name]()
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
        write(target)
        written.set()
        assert runner._inference.wait_until(time.monotonic() + PATIENCE_S)
    assert inferred == [before] * 3


def test_a_memory_view_keeps_its_shape_and_format() -> None:
    copy = copied(np.arange(6, dtype=">f4").reshape(2, 3)[:, ::-1].data)
    assert (copy.shape, copy.format) == ((2, 3), ">f")
    np.testing.assert_array_equal(np.asarray(copy), np.arange(6).reshape(2, 3)[:, ::-1])


def test_a_tensor_keeps_dtype_and_copies_no_more_than_its_view() -> None:
    torch = pytest.importorskip("torch")
    view = torch.zeros(1000, 3, dtype=torch.bfloat16)[5:7]
    copy = copied(view)
    assert (copy.dtype, copy.shape, copy.untyped_storage().nbytes()) == (torch.bfloat16, (2, 3), 12)
    assert not copied(tensor_with_a_gradient()[0]).requires_grad


def test_an_object_that_cannot_be_copied_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ObservationError, match=r"observation\['cameras'\]\[1\]: expected .*, got a lock"):
        copied({"cameras": [1, lock]})


def test_copying_needs_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, numpy as np; from vla_accel.remote.inference import copied; "
        "copied({'a': [np.zeros(3), bytearray(3)]}); assert not {'torch', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
