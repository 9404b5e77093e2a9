"""π0 and π0.5 against the slow reference in float64; what is dropped must not matter; published sizes; dtypes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import reference_pi0 as reference
from tests.support.agreement import assert_as_near
from tests.support.openpi_dialect import openpi_names
from tests.support.tiny import random_model, random_state, tiny_config
from tests.support.whole_calls import pi0_actions
from vla_accel.errors import ConfigError
from vla_accel.families.pi0.network import SIZES, Kind, Pi0, Pi0Config, pi0, pi05
from vla_accel.nn import flow
from vla_accel.nn.flow import euler_times, sinusoidal_embedding

KINDS: tuple[Kind, ...] = ("pi0", "pi05")
ATOL = 1e-10
# Masks by name: views (batch, 3) and prompt columns (batch, 6). "ragged" differs from row to row.
IMAGE_MASKS = {
    "full": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "dropped": [[1, 0, 1], [1, 0, 1], [1, 0, 1]],
    "ragged": [[0, 1, 1], [1, 0, 1], [1, 1, 0]],
}
TOKEN_MASKS = {
    "full": [[1] * 6] * 3,
    "dropped": [[1] * 4 + [0] * 2] * 3,
    "ragged": [[1] * 3 + [0] * 3, [1] * 6, [1] * 5 + [0]],
}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Pi0:
    return random_model(tiny_config(request.param)).double()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_inputs(config: Pi0Config, batch: int, masks: str, seed: int = 1) -> dict[str, Tensor]:
    """Arguments of `pi0_actions`; what is masked is as random as what is not."""
    generator = torch.Generator().manual_seed(seed)
    size = config.vision.image_size
    draw = {"generator": generator, "dtype": torch.float64}
    return {
        "images": torch.rand(batch, 3, 3, size, size, **draw) * 2 - 1,
        "image_mask": torch.tensor(IMAGE_MASKS[masks][:batch], dtype=torch.bool),
        "tokens": torch.randint(0, config.vocab_size, (batch, 6), generator=generator),
        "token_mask": torch.tensor(TOKEN_MASKS[masks][:batch], dtype=torch.bool),
        "state": torch.randn(batch, config.action_dim, **draw),
        "noise": torch.randn(batch, config.action_horizon, config.action_dim, **draw),
    }


def rows(inputs: dict[str, Tensor]) -> list[reference.Sample]:
    return [reference.Sample(**{k: v[i] for k, v in inputs.items()}) for i in range(len(inputs["noise"]))]


def close(ours: Tensor, theirs: Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("masks", list(IMAGE_MASKS))
@pytest.mark.parametrize(("batch", "steps"), [(1, 10), (1, 1), (3, 3)])
def test_sample_actions(model: Pi0, batch: int, steps: int, masks: str) -> None:
    inputs = make_inputs(model.config, batch, masks)
    ours = pi0_actions(model, **inputs, num_steps=steps)
    weights = model.state_dict()
    for b, sample in enumerate(rows(inputs)):
        close(ours[b], reference.sample_actions(weights, model.config, sample, steps))


def test_float32_is_near_float64(model: Pi0, monkeypatch: pytest.MonkeyPatch) -> None:
    # The times are openpi's float32 sums on both sides: the embedding turns their last bit into 1e-4.
    monkeypatch.setattr(flow, "euler_times", lambda steps, dtype: euler_times(steps).to(dtype))
    inputs = make_inputs(model.config, 3, "ragged")
    exact = pi0_actions(model, **inputs, num_steps=10)
    floats = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    ours = pi0_actions(model.float(), **floats, num_steps=10)
    assert ours.dtype == torch.float32
    close(ours.double(), exact, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 20, 50])
def test_euler_times_are_openpis_loop_in_float32(steps: int) -> None:
    dt, time, expected = torch.tensor(-1.0 / steps), torch.tensor(1.0), []
    while time >= -dt / 2:
        expected.append(time.clone())
        time = time + dt
    times = euler_times(steps)
    with pytest.raises(ConfigError, match="num_steps: expected at least 1, got 0"):
        euler_times(0)
    assert times.dtype == torch.float32 and times[0] == 1.0
    assert torch.equal(times, torch.stack(expected)) and len(times) == steps


def test_time_embedding_is_formed_in_float64() -> None:
    times = euler_times(10)
    ours = sinusoidal_embedding(times, 64)
    assert ours.dtype == torch.float32
    exact = torch.stack([reference.time_embedding(float(t), 64) for t in times])
    assert torch.equal(ours, exact.float())


@pytest.mark.parametrize(
    ("name", "low", "high"), [("pi0", 3.2e9, 3.6e9), ("pi05", 3.2e9, 3.6e9), ("pi05_demo", 1.1e7, 1.3e7)]
)
def test_preset_sizes(name: str, low: float, high: float) -> None:
    config = SIZES[name]()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Pi0(config).parameters())
    assert low < parameters < high


def test_presets_have_the_published_shapes() -> None:
    for config, length in ((pi0(), 48), (pi05(), 200)):
        assert (config.action_dim, config.action_horizon, config.max_token_len) == (32, 50, length)
        assert (config.vision.tokens, config.vision.head_dim, config.vocab_size) == (256, 72, 257_152)
        assert (config.prefix.heads, config.prefix.kv_heads, config.prefix.head_dim) == (8, 1, 256)
        assert (config.prefix.width, config.prefix.mlp_dim, config.expert.width, config.expert.mlp_dim) == (
            2048,
            16384,
            1024,
            4096,
        )
    assert pi05().discrete_state_input and not pi0().discrete_state_input
    assert pi05(action_horizon=10).action_horizon == 10


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_keeps_wide_what_openpi_keeps_wide(kind: Kind) -> None:
    config = tiny_config(kind)
    weights = random_state(config)
    model = random_model(config).to_compute_dtype(torch.bfloat16)
    wide = re.compile(
        r"patch_embedding\.(weight|bias)$|position_embedding\.weight$|input_layernorm|post_attention_layernorm|model\.norm"
    )
    kept = 0
    for name, parameter in model.named_parameters():
        theirs = {not n.startswith("paligemma_with_expert.") or bool(wide.search(n)) for n in openpi_names(name)}
        assert len(theirs) == 1, name
        expected = torch.float32 if theirs.pop() else torch.bfloat16
        kept += expected == torch.float32
        assert parameter.dtype == expected, name
        assert torch.equal(parameter, weights[name].to(expected)), f"{name} was rounded"
    assert 0 < kept < len(weights)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_actions_are_near_float32(kind: Kind) -> None:
    model = random_model(tiny_config(kind))
    inputs: dict[str, Any] = make_inputs(model.config, 2, "ragged")
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = pi0_actions(model, **inputs, num_steps=5)
    narrow = copy.deepcopy(model).to_compute_dtype(torch.bfloat16)
    rounded = pi0_actions(narrow, **inputs, num_steps=5)
    assert rounded.dtype == torch.float32
    # In float32 with these weights, nothing but the weights is rounded.
    weights = pi0_actions(narrow.float(), **inputs, num_steps=5)
    assert_as_near(rounded, weights, exact, 4.0)


def test_impossible_sizes_are_refused() -> None:
    good = tiny_config("pi05")
    with pytest.raises(ConfigError, match=r"prefix\.depth 3 and expert\.depth 18 must be equal"):
        tiny_config("pi05", expert=pi05().expert)
    with pytest.raises(ConfigError, match="'pi06'"):
        tiny_config("pi06")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a multiple of kv_heads 3"):
        type(good.prefix)(width=8, depth=1, mlp_dim=8, heads=4, kv_heads=3)
    with pytest.raises(ConfigError, match="must be even"):
        type(good.prefix)(width=8, depth=1, mlp_dim=8, head_dim=5)
    for heads in (5, 0):  # a width below a head's, read off a folder, makes 0
        with pytest.raises(ConfigError, match=f"not a multiple of heads {heads}"):
            type(good.vision)(width=12, heads=heads)
    with pytest.raises(ConfigError, match="not a multiple of patch_size 13"):
        type(good.vision)(patch_size=13)


def test_pi0_without_a_state_is_refused() -> None:
    model = random_model(tiny_config("pi0")).double()
    inputs: dict[str, Any] = make_inputs(model.config, 1, "full")
    with pytest.raises(ConfigError, match="π0 needs the state"):
        pi0_actions(model, **{**inputs, "state": None}, num_steps=1)


def test_a_model_moved_by_hand_says_where_it_is() -> None:
    model = random_model(tiny_config("pi05")).placed(torch.device("cpu"), torch.float32)
    assert model.device == torch.device("cpu")
    # No second device is needed: what was said of an earlier one may not outlive a move.
    model._device = torch.device("cuda:1")
    assert model.to("cpu").device == torch.device("cpu")
