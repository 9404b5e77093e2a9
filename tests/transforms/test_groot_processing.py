"""GR00T's transforms: groups of states and actions, images, prompts, histories, and what is refused."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel.errors import CheckpointError, ObservationError
from vla_accel.families.groot.bench import CARDS
from vla_accel.families.groot.images import Cropping, whole_tokens
from vla_accel.families.groot.modalities import Group, Groups
from vla_accel.families.groot.network import groot_n17
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.transforms.robots import Preset

LOW, HIGH = np.array([-1.0, 0.0, 2.0]), np.array([1.0, 4.0, 2.0])


def test_a_range_is_mapped_and_cut() -> None:
    group = Group("arm", 3, low=LOW, high=HIGH)
    # The third has no range: 0 inside, its one value outside.
    np.testing.assert_allclose(group.normalise(np.array([0.5, 1.0, 7.0])), [0.5, -0.5, 0.0])
    np.testing.assert_allclose(group.normalise(np.array([9.0, -9.0, 2.0])), [1.0, -1.0, 0.0])
    np.testing.assert_allclose(group.restore(np.array([[0.5, -0.5, 0.3], [7.0, -7.0, 0.0]])), [[0.5, 1, 2], [1, 0, 2]])
    assert dataclasses.replace(group, clipped=False).normalise(np.array([3.0, 0.0, 0.0]))[0] == 3.0


def test_mean_and_spread_and_angles() -> None:
    group = Group("arm", 2, "mean_std", np.array([1.0, 5.0]), np.array([2.0, 0.0]))
    np.testing.assert_allclose(group.normalise(np.array([5.0, 3.0])), [2.0, 3.0])
    np.testing.assert_allclose(group.restore(np.array([[2.0, 3.0]])), [[5.0, 3.0]])
    angles = Group("wrist", 2, "sin_cos")
    np.testing.assert_allclose(angles.normalise(np.array([0.0, np.pi / 2])), [0, 1, 1, 0], atol=1e-12)
    assert (angles.size, angles.width) == (2, 4)


def pose(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    return np.concatenate((rng.standard_normal(3), rows[0], rows[1]))


def test_relative_actions_come_back() -> None:
    rows = np.linspace(0.5, 1.5, 6)[:, None]
    groups = Groups(
        (
            Group("arm", 2, low=-3 * rows * np.ones(2), high=3 * rows * np.ones(2), relative="difference"),
            Group("hand", 9, low=np.full((6, 9), -9.0), high=np.full((6, 9), 9.0), relative="pose", reference="tool"),
            Group("gripper", 1, low=np.zeros(1), high=np.ones(1)),
        )
    )
    state = {"arm": np.array([0.3, -0.2]), "tool": pose(1), "gripper": np.zeros(1)}
    actions = np.stack([np.concatenate(([0.1 * i, 0.2], pose(i), [0.5])) for i in range(4)])
    normalised = groups.normalise(groups.before_scaling(actions, state))
    # Row i has the i-th row's range.
    assert normalised[2, 0] == pytest.approx((0.2 - 0.3) / (3 * rows[2, 0]))
    np.testing.assert_allclose(groups.restore(normalised, state), actions, atol=1e-12)
    still = groups.groups[1].against(actions[1:2, 2:11], actions[1, 2:11])
    np.testing.assert_allclose(still, [[0, 0, 0, 1, 0, 0, 0, 1, 0]], atol=1e-12)
    with pytest.raises(CheckpointError, match="statistics of arm: expected 7 rows, got 6"):
        groups.normalise(np.zeros((7, 12)))


def test_statistics_of_another_size_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"statistics of arm: expected \(2,\), got \(3,\)"):
        Group("arm", 2, low=LOW, high=HIGH)


# -- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [((256, 256), (256, 256)), ((256, 340), (256, 352)), ((100, 100), (256, 256)), ((5000, 5000), (4096, 4096))],
)
def test_whole_tokens(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert whole_tokens(*size, 32) == expected


def test_area_keeps_the_aspect_ratio_and_the_middle() -> None:
    pytest.importorskip("cv2")
    image = np.zeros((480, 640, 3), np.uint8)
    image[:, 310:330] = 255
    found = Cropping("area", edge=256, crop=0.95)(image)
    assert found.shape == (256, 352, 3) and found.dtype == np.uint8
    column = found[128, :, 0].astype(int)
    assert column.argmax() in range(165, 187) and column[:150].max() == column[200:].max() == 0


def test_bicubic_is_square() -> None:
    image = np.full((480, 640, 3), 77, np.uint8)
    found = Cropping("bicubic")(image)
    assert found.shape == (256, 256, 3) and (found == 77).all()
    boxed = Cropping("bicubic", crop=1.0, letterbox=True)(image)
    assert (boxed[:30] == 0).all() and (boxed[100:150] == 77).all()


@pytest.mark.filterwarnings("error")
def test_an_image_that_came_over_the_wire_is_taken_without_a_warning(request: pytest.FixtureRequest) -> None:
    image = np.full((480, 640, 3), 77, np.uint8)
    image.flags.writeable = False  # as msgpack's bytes are
    request.addfinalizer(partial(torch.set_warn_always, torch.is_warn_always_enabled()))
    torch.set_warn_always(True)  # not only once a process
    assert (Cropping("bicubic")(image) == 77).all()


# -- whole observations -------------------------------------------------------------------------------------------


@pytest.fixture
def processor() -> GrootProcessor:
    return CARDS["groot"].dummy(groot_n17(), 2)


def observation(**changes: Any) -> dict[str, Any]:
    images = {f"observation/{n}": np.zeros((256, 256, 3), np.uint8) for n in ("image", "wrist_image")}
    return {**images, "observation/state": np.arange(8) / 10, "prompt": "pick it up", **changes}


def test_an_observation(processor: GrootProcessor) -> None:
    inputs = processor.prepare(observation())
    assert [i.shape for i in inputs.images] == [(256, 256, 3)] * 2
    # Three tokens in front, two around each view, three words, the end and a newline.
    assert len(inputs.tokens) == 3 + 4 + 3 + 2
    np.testing.assert_allclose(inputs.state[:9], [*np.arange(8) / 10, 0], rtol=1e-6)
    assert inputs.state.shape == (132,) and inputs.raw_state.dtype == np.float64


def test_prompts(processor: GrootProcessor) -> None:
    def tokens(prompt: Any, **changes: Any) -> list[int]:
        return dataclasses.replace(processor, **changes).prepare(observation(prompt=prompt)).tokens.tolist()

    assert tokens("Pick it, up!") == tokens("pick it up") != tokens("Pick it, up!", formal=False)
    assert tokens("pick_it") != tokens("pickit"), "an underscore stays"
    assert tokens("") == tokens("Perform the task."), "as lerobot has it"


def test_a_missing_or_misspelt_prompt_is_no_task(processor: GrootProcessor) -> None:
    given = observation(promt="open the drawer")
    wanted = processor.prepare(observation(prompt="open the drawer")).tokens
    del given["prompt"]
    with pytest.raises(ObservationError, match=r"missing prompt; .*default_prompt"):
        processor.prepare(given)
    told = dataclasses.replace(processor, default_prompt="open the drawer")
    np.testing.assert_array_equal(told.prepare(given).tokens, wanted)


def test_a_missing_camera_is_left_out(processor: GrootProcessor) -> None:
    cameras = ("observation.images.front", "observation.images.wrist")
    preset = Preset(cameras, ("observation.state",), 8, 7, prompt="task", optional_images=cameras)
    robot = dataclasses.replace(processor, preset=preset)
    given = {
        "observation.images.wrist": np.ones((256, 256, 3), np.uint8),
        "observation.state": np.zeros(8),
        "task": "go",
    }
    inputs = robot.prepare(given)
    assert len(inputs.images) == 1 and inputs.images[0].max() == 1 and len(inputs.tokens) == 3 + 2 + 1 + 2
    with pytest.raises(ObservationError, match=r"missing observation\.images\.front or"):
        robot.prepare({k: v for k, v in given.items() if "images" not in k})


def test_images_of_earlier_control_steps(processor: GrootProcessor) -> None:
    """All views of a moment, then those of the next one; of a short history, the oldest image is repeated."""
    four = [np.full((256, 256, 3), n, np.uint8) for n in range(1, 5)]

    def given(count: int, **more: Any) -> dict[str, Any]:
        """The last `count` of four moments."""
        views = {"observation/image": np.stack(four[-count:]), "observation/wrist_image": np.stack(four[-count:]) + 10}
        return observation(
            **{**views, "observation/state": np.stack([np.full(8, n / 10) for n in range(count)]), **more}
        )

    spaced = dataclasses.replace(processor, moments=(-3, -1, 0))
    for count, wanted in ((4, [1, 11, 3, 13, 4, 14]), (3, [2, 12, 3, 13, 4, 14]), (1, [4, 14, 4, 14, 4, 14])):
        inputs = spaced.prepare(given(count))
        assert [image.max() for image in inputs.images] == wanted
        np.testing.assert_array_equal(inputs.raw_state, np.full(8, (count - 1) / 10))
    with pytest.raises(ObservationError, match="observation/image: expected 1 to 4 images, got 5"):
        spaced.prepare(observation(**{k: np.zeros((5, 256, 256, 3), np.uint8) for k in processor.preset.images}))
    with pytest.raises(ObservationError, match=r"wrist_image: expected the same number of images.*, got \[3, 4\]"):
        spaced.prepare(given(4, **{"observation/image": np.stack(four[1:])}))
    repeated = dataclasses.replace(processor, moments=(0, 0))
    assert repeated.history == 1 and len(repeated.prepare(observation()).images) == 4
    with pytest.raises(ObservationError, match="observation/image: expected one image, got 2"):
        processor.prepare(observation(**{k: np.zeros((2, 256, 256, 3), np.uint8) for k in processor.preset.images}))


def test_actions_and_back(processor: GrootProcessor) -> None:
    robot = dataclasses.replace(processor, rows=16, gripper=True)
    inputs = robot.prepare(observation())
    chunk = np.clip(np.random.default_rng(0).standard_normal((40, 132)), -1, 1)
    # A gripper's group reaches from 0 to 1; the stand-in's from -1 to 1.
    actions = robot.unnormalize_actions(chunk, inputs)
    assert actions.shape == (16, 7) and set(actions[:, 6]) <= {-1.0, 0.0, 1.0}
    np.testing.assert_allclose(actions[:, :6], chunk[:16, :6])
    np.testing.assert_array_equal(actions[:, 6], -np.sign(2 * chunk[:16, 6] - 1))
    back = robot.normalize_actions(actions, inputs)
    assert back.shape == (16, 132) and back.dtype == np.float32 and not back[:, 7:].any()
    np.testing.assert_allclose(back[:, :6], chunk[:16, :6], rtol=1e-6)
    np.testing.assert_array_equal(robot.unnormalize_actions(back, inputs)[:, 6], actions[:, 6])
    with pytest.raises(ObservationError, match=r"prev_chunk: expected shape \(k, 7\), k from 1 to 16, got \(17, 7\)"):
        robot.normalize_actions(np.zeros((17, 7)), inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation/state": np.zeros(9)}, r"observation/state: expected shape \(8,\), got \(9,\)"),
        ({"observation/state": np.full(8, 1e300)}, "expected a state in the checkpoint's range"),
        ({"observation/image": np.zeros((256, 256))}, r"observation/image: expected shape \(height, width, 3\)"),
        ({"prompt": 5}, "prompt: expected a str, got int"),
        ({"prompt": "  "}, "prompt: expected an instruction, got '  '"),
        ({"prompt": "?!"}, r"prompt: expected an instruction, got '\?!'"),
        ({"prompt": "a " * 200}, r"prompt: expected at most 128 tokens \(max_token_len\), got 209"),
    ],
)
def test_refused(processor: GrootProcessor, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ObservationError, match=message):
        processor.prepare(observation(**changes))


def test_views_of_two_shapes_are_refused(processor: GrootProcessor) -> None:
    pytest.importorskip("cv2")
    area = dataclasses.replace(processor, cropping=Cropping("area", crop=1.0))
    with pytest.raises(ObservationError, match="expected images of one shape"):
        area.prepare(observation(**{"observation/image": np.zeros((256, 512, 3), np.uint8)}))


def test_a_state_that_is_too_long_for_the_model(processor: GrootProcessor) -> None:
    with pytest.raises(CheckpointError, match="state: expected at most 6 numbers, got 8"):
        dataclasses.replace(processor, state_dim=6)
    with pytest.raises(CheckpointError, match="action: expected statistics of 7 numbers, got 3"):
        dataclasses.replace(processor, actions=Groups((Group("arm", 3, low=LOW, high=HIGH),)))


def test_an_example_is_valid(processor: GrootProcessor) -> None:
    inputs = processor.prepare(processor.example())
    assert not inputs.state.any(), "the middle of each range"
    assert processor.prepare(processor.example("open it")).tokens.shape == (3 + 4 + 2 + 2,)
