"""What a robot writes into its buffers after `step` does not change what the policy sees."""

from __future__ import annotations

import array
import subprocess
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import PATIENCE_S
from vla_accel.errors import ObservationError
from vla_accel.remote.async_runner import AsyncRunner
from vla_accel.remote.copying import copied

Pose = namedtuple("Pose", ["position", "gripper"])
Case = tuple[Any, Callable[[], None]]
"""A value, and what writes to it."""


def filled(array: Any) -> Callable[[], None]:
    def write() -> None:
        array[:] = 7

    return write


def numpy_array() -> Case:
    whole = np.zeros((4, 6, 3), np.uint8)
    view = whole[::2, 1:, ::-1]
    return view, filled(whole)


def nested_in_lists() -> Case:
    inner = np.zeros(3)
    return [[inner], (inner, "x")], filled(inner)


def named_tuple() -> Case:
    inner = np.zeros(3)
    return Pose(inner, 1.0), filled(inner)


def plain_list() -> Case:
    value = [0.0, 0.0]
    return value, lambda: value.__setitem__(0, 7.0)


def mapping() -> Case:
    inner = np.zeros(3)
    value = OrderedDict(cameras={"left": inner})

    def write() -> None:
        inner[:] = 7
        value["cameras"]["right"] = inner

    return value, write


def array_of_objects() -> Case:
    inner = np.zeros(3)
    value = np.empty(2, object)
    value[0], value[1] = inner, "x"
    return value, filled(inner)


def byte_array() -> Case:
    value = bytearray(4)
    return value, lambda: value.__setitem__(0, 7)


def memory_view() -> Case:
    owner = np.zeros((2, 3), np.float32)
    return owner.data, filled(owner)


def array_module() -> Case:
    value = array.array("d", [0.0, 0.0])
    return value, lambda: value.__setitem__(0, 7.0)


def tensor() -> Case:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(4, 6, 3, dtype=torch.uint8)
    return whole[1:, ::2], lambda: whole.fill_(7)


def tensor_with_a_gradient() -> Case:
    torch = pytest.importorskip("torch")
    value = torch.zeros(3, requires_grad=True) * 1.0  # not a leaf, which deepcopy refuses
    return value, lambda: value.detach().fill_(7)


def tensor_that_shares_with_numpy() -> Case:
    torch = pytest.importorskip("torch")
    owner = np.zeros(3)
    return {"image": [torch.from_numpy(owner)]}, filled(owner)


def pillow_image() -> Case:
    image_module = pytest.importorskip("PIL.Image")
    value = image_module.new("RGB", (3, 2))
    return value, lambda: value.putpixel((0, 0), (7, 7, 7))


CASES = (
    numpy_array, nested_in_lists, named_tuple, plain_list, mapping, array_of_objects, byte_array, memory_view,
    array_module, tensor, tensor_with_a_gradient, tensor_that_shares_with_numpy, pillow_image,
)  # fmt: skip


def seen(value: Any) -> Any:
    """The numbers in a value, as nested lists of Python's."""
    if isinstance(value, dict):
        return {key: seen(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [seen(one) for one in value]
    if isinstance(value, (str, float)):
        return value
    if hasattr(value, "detach"):
        value = value.detach().numpy()  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(value).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_write_to_the_original_does_not_change_the_copy(case: Callable[[], Case]) -> None:
    value, write = case()
    before = seen(value)
    copy = copied(value)
    assert isinstance(copy, dict) if isinstance(value, dict) else type(copy) is type(value)
    write()
    assert seen(value) != before, "the test writes nothing"
    assert seen(copy) == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_policy_sees_the_observation_of_its_tick(case: Callable[[], Case]) -> None:
    value, write = case()
    before, inferred = seen(value), []
    written = False

    class Late:
        """Reads its observation only after the robot has written the next one."""

        def infer(self, observation: Any) -> Any:
            if len(inferred) == 2:  # those of `start`, for which the robot waits
                end = time.monotonic() + PATIENCE_S
                while not written and time.monotonic() < end:
                    time.sleep(0.001)
            inferred.append(seen(observation["image"]))
            return {"actions": np.zeros((8, 2))}

    with AsyncRunner(Late(), 50.0, replan_ticks=1, max_wait_s=0.0) as runner:
        runner.start({"image": value})
        runner.step({"image": value})
        runner.step({"image": value})  # begins the third inference
        write()
        written = True
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


def test_what_cannot_be_copied_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ObservationError, match=r"observation\['cameras'\]\[1\]: expected .*, got a lock"):
        copied({"cameras": [1, lock]})


def test_copying_needs_neither_torch_nor_pillow() -> None:
    code = (
        "import sys, numpy as np; from vla_accel.remote.copying import copied; "
        "copied({'a': [np.zeros(3), bytearray(3)]}); assert not {'torch', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
