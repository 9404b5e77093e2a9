"""The network against numbers that lerobot's own code left (tests/references/make_groot_reference.py --kept), and what
follows from its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.references.groot_weights import draw
from tests.support.groot_folders import CONFIG, REFERENCE, SPECIAL, tensors
from tests.support.in_memory import MemoryWeights
from vla_accel.errors import ConfigError
from vla_accel.families.groot.checkpoint import infer_config, load_groot
from vla_accel.families.groot.head import HeadConfig
from vla_accel.families.groot.network import Groot, GrootConfig, groot_n17, overlap_weights
from vla_accel.nn.flow import Schedule
from vla_accel.nn.qwen_language import QwenConfig, axes_of_frequencies
from vla_accel.nn.qwen_vision import QwenVisionConfig


@pytest.fixture(scope="module")
def model() -> Groot:
    weights = MemoryWeights(tensors())
    model = load_groot(weights, infer_config(weights.shapes, CONFIG, "small"), 2, "small")
    return model.placed(torch.device("cpu"), torch.float32).whole()


def drawn(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(draw(name, *shape))


def answer(
    model: Groot, case: str, batch: int, views: int, lengths: tuple[int, ...], grid: tuple[int, int], steps: int,
    previous: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """What the script gave lerobot's model, through ours. `previous`: target and weights."""
    size, longest = model.config.language.vocab_size, max(lengths)
    tokens = len(SPECIAL) + (drawn(f"{case}.tokens", batch, longest).abs() * 1e4).long() % (size - len(SPECIAL))
    for view in range(views):
        tokens[:, 3 + 2 * view : 5 + 2 * view] = torch.tensor(
            [SPECIAL.index(f"<|vision_{w}|>") for w in ("start", "end")]
        )
    pixels = drawn(f"{case}.pixels", batch, views, 3, 32 * grid[0], 32 * grid[1]).clamp(-1, 1)
    real = None if len(set(lengths)) == 1 else torch.tensor(lengths)
    with torch.no_grad():
        cache = model.read(model.layout(views, grid, longest), *model.vision.views(pixels), tokens, real)
        noise = drawn(f"{case}.noise", batch, model.config.action_horizon, 132)
        state = drawn(f"{case}.state", batch, 132)
        schedule = Schedule.uniform(steps)
        constants = model.constants(schedule)
        return model.integrate(noise, constants, state, cache, real, *(previous or ()), schedule=schedule)


Case = tuple[int, int, tuple[int, ...], tuple[int, int]]
CASES: dict[str, Case] = {
    "batch1": (1, 2, (15,), (2, 3)),
    "batch3": (3, 2, (14, 14, 14), (2, 2)),
    "missing camera": (1, 1, (11,), (3, 2)),
    "padded": (3, 2, (15, 11, 13), (2, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [4, 2])
def test_actions_are_lerobots(model: Groot, case: str, steps: int) -> None:
    found = answer(model, case, *CASES[case], steps)
    kept = torch.tensor(REFERENCE["answers"][f"{case}.steps{steps}"])
    torch.testing.assert_close(found[..., ::3, :4], kept, rtol=0, atol=2e-5)


def test_a_previous_chunk_is_followed_as_lerobot_does(model: Groot) -> None:
    target = torch.zeros(1, 8, 132)
    target[:, :5] = drawn("rtc.previous", 1, 5, 132).clamp(-1, 1)
    weights = overlap_weights(5, 2, 8, 6.0, None)[None]
    found = answer(model, "batch1", *CASES["batch1"], 4, (target, weights))
    torch.testing.assert_close(found[..., ::3, :4], torch.tensor(REFERENCE["answers"]["rtc.steps4"]), rtol=0, atol=2e-5)
    assert torch.equal(found[:, :2], target[:, :2]), "what will be executed anyway stays, bit for bit"
    plain = answer(model, "batch1", *CASES["batch1"], 4)
    zero = answer(model, "batch1", *CASES["batch1"], 4, (target, torch.zeros(1, 8)))
    assert torch.equal(plain, zero) and not torch.equal(plain, found)


def test_weights_of_a_previous_chunk() -> None:
    weights = overlap_weights(5, 2, 8, 6.0, None)
    assert weights[:2].tolist() == [1, 1] and weights[5:].tolist() == [0, 0, 0]
    assert 1 > weights[2] > weights[3] > weights[4] > 0
    assert overlap_weights(5, 9, 8, 6.0, 3).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert overlap_weights(1, 0, 2, 6.0, None)[0] > 0


def test_a_row_is_what_it_would_be_alone(model: Groot) -> None:
    """lerobot lets padding leak into the vision-language attention; here it is not attended to."""
    case = CASES["padded"]
    rows = answer(model, "padded", *case, 2)
    with torch.no_grad():
        tokens = torch.full((1, 20), 9)
        pixels = drawn("padded.pixels", 3, 2, 3, 64, 96)[:1].clamp(-1, 1)
        images = model.vision.views(pixels)
        alone = model.read(model.layout(2, (2, 3), 12), *images, tokens[:, :12])
        padded = model.read(model.layout(2, (2, 3), 20), *images, tokens, torch.tensor([12]))
    torch.testing.assert_close(padded["text"][0][:, :, :12], alone["text"][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded["image"][1], alone["image"][1], rtol=1e-5, atol=1e-5)
    assert torch.isfinite(rows).all()


def test_a_time_is_its_bucket_from_noise_to_actions(model: Groot) -> None:
    """Equal steps as Isaac-GR00T rounds them; 1 - 0.9, just below 0.1 in binary, is bucket 100."""
    assert model.head.times(Schedule.uniform(3)) == [0, 333, 666]
    assert model.head.times(Schedule((1.0, 0.9, 0.43, 0.0005, 0.0))) == [0, 100, 570, 999]


def test_training_reaches_every_weight(model: Groot) -> None:
    config = model.config
    trained = Groot(config)
    trained.load_state_dict(model.state_dict())
    pixels, tokens = drawn("train", 1, 2, 3, 64, 64), torch.full((1, 12), 9)
    cache = trained.read(trained.layout(2, (2, 2), 12), *trained.vision.views(pixels), tokens)
    noise, state, schedule = drawn("n", 1, 8, 132), drawn("s", 1, 132), Schedule.uniform(4)
    actions = trained.integrate(noise, trained.head.constants(schedule), state, cache, schedule=schedule)
    actions.square().sum().backward()
    untouched = {n for n, p in trained.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert not untouched


def test_the_published_size() -> None:
    with torch.device("meta"):
        model = Groot(groot_n17())
    sizes = {
        part: sum(p.numel() for p in getattr(model, part).parameters()) for part in ("vision", "language", "embed")
    }
    assert {k: round(v / 1e6) for k, v in sizes.items()} == {"vision": 407, "language": 805, "embed": 311}
    head = sum(p.numel() for p in model.head.parameters())
    # 201 + 1092 of attention and transformer, and 12 for one embodiment; 32 of them have 327.
    assert round(head / 1e6) == 1305


def test_frequencies_take_turns() -> None:
    axes = axes_of_frequencies((24, 20, 20)).tolist()
    assert axes[:6] == [0, 1, 2, 0, 1, 2] and axes[57:] == [0, 1, 2, 0, 0, 0, 0]
    assert [axes.count(i) for i in range(3)] == [24, 20, 20]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadConfig(head_dim=32), "head.width: expected 32 heads of 32, got 1536"),
        (lambda: QwenConfig(sections=(32, 32)), "language.sections: expected three that add up to 64"),
        (lambda: QwenConfig(kv_heads=3), "language.heads 16 is not a multiple of kv_heads 3"),
        (lambda: QwenVisionConfig(positions=50), "vision.positions: expected a square number, got 50"),
        (lambda: QwenVisionConfig(deepstack=(24,)), "vision.deepstack: expected blocks of 24"),
        (lambda: GrootConfig(action_horizon=2000), "action_horizon: expected at most 1024, got 2000"),
        (lambda: GrootConfig(head=HeadConfig(vl_width=1024)), "must be equal"),
        (lambda: QwenVisionConfig().grid(250, 256), "image: expected multiples of 32 pixels a side, got 250 x 256"),
    ],
)
def test_sizes_that_cannot_be(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
