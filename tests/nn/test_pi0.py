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
from vla_accel.families.pi0.network import SIZES, Kind, Pi0, Pi0Config, pi0, pi05, suffix_attention
from vla_accel.nn import flow
from vla_accel.nn.flow import euler_times, sinusoidal_embedding
from vla_accel.nn.paligemma import prefix_positions

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


def prefix_of(model: Pi0, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of every token, masked ones too, and the mask (B, S)."""
    per_view = model.config.vision.tokens
    mask = torch.cat((inputs["image_mask"].repeat_interleave(per_view, 1), inputs["token_mask"]), 1)
    keys, values = model.prefix_cache(model.embed_images(inputs["images"]), inputs["tokens"], mask)
    return keys, values, mask


def close(ours: Tensor, theirs: Tensor, atol: float = ATOL) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


# -- against the reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", list(IMAGE_MASKS))
def test_prefix_masks_and_positions(masks: str) -> None:
    config = tiny_config("pi05")
    inputs = make_inputs(config, 3, masks)
    pads = [reference.prefix_pad(config, sample) for sample in rows(inputs)]
    real = torch.tensor(pads)
    positions, allowed = prefix_positions(torch.zeros(3, real.shape[1], 2), real)
    assert allowed is not None
    assert positions.tolist() == [reference.positions_of(pad) for pad in pads]
    for i, pad in enumerate(pads):
        theirs = torch.tensor(reference.allowed(pad, [0] * len(pad)))
        assert torch.equal(allowed[i][real[i]], theirs[real[i]])
        # No real token looks at padding, and padding looks at itself alone (nothing at all would be NaN).
        assert torch.equal(allowed[i][~real[i]], torch.eye(len(pad), dtype=torch.bool)[~real[i]])


def test_an_unmasked_prefix_counts_up_and_needs_no_mask() -> None:
    positions, allowed = prefix_positions(torch.zeros(2, 7, 3), None)
    assert allowed is None and positions.tolist() == [list(range(7))] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_suffix_mask(kind: Kind) -> None:
    tokens = tiny_config(kind).suffix_tokens
    theirs = torch.tensor(reference.allowed([True] * tokens, reference.suffix_blocks(kind, 5)))
    ours = suffix_attention(kind, tokens, torch.device("cpu"))
    assert tokens == len(theirs) == (6 if kind == "pi0" else 5)
    assert torch.equal(torch.ones(tokens, tokens, dtype=torch.bool) if ours is None else ours, theirs)


def test_image_tokens(model: Pi0) -> None:
    images = make_inputs(model.config, 2, "full")["images"]
    ours = model.embed_images(images).unflatten(1, (3, -1))
    weights = model.state_dict()
    for b in range(2):
        for v in range(3):
            close(ours[b, v], reference.view_tokens(weights, model.config, images[b, v]))


@pytest.mark.parametrize("masks", list(IMAGE_MASKS))
def test_keys_and_values(model: Pi0, masks: str) -> None:
    inputs = make_inputs(model.config, 3, masks)
    keys, values, mask = prefix_of(model, inputs)
    weights = model.state_dict()
    for b, sample in enumerate(rows(inputs)):
        theirs = reference.prefix_cache(weights, model.config, sample)
        for layer, (k, v) in enumerate(theirs):
            close(keys[layer, b][mask[b]], k[mask[b]])
            close(values[layer, b][mask[b]], v[mask[b]])


@pytest.mark.parametrize("masks", list(IMAGE_MASKS))
def test_one_velocity(model: Pi0, masks: str) -> None:
    config = model.config
    inputs = make_inputs(config, 3, masks)
    keys, values, mask = prefix_of(model, inputs)
    embedding, modulations = model.conditioning(torch.tensor([0.37], dtype=torch.float64))
    row = None if modulations is None else modulations[0]
    ours = model.velocity(inputs["noise"], embedding[0], row, inputs["state"], keys, values, mask)
    weights = model.state_dict()
    for b, sample in enumerate(rows(inputs)):
        cache = reference.prefix_cache(weights, config, sample)
        close(ours[b], reference.velocity(weights, config, sample, sample.noise, 0.37, cache))


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


# -- savings are exact --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_masked_view_changes_nothing(model: Pi0, where: int) -> None:
    inputs = make_inputs(model.config, 2, "full")
    base = pi0_actions(model, **inputs, num_steps=3)
    extra = torch.randn(2, 1, *inputs["images"].shape[2:], dtype=torch.float64)
    images, seen = inputs["images"], inputs["image_mask"]
    unseen = torch.zeros(2, 1, dtype=torch.bool)
    inputs["images"] = torch.cat((images[:, :where], extra, images[:, where:]), 1)
    inputs["image_mask"] = torch.cat((seen[:, :where], unseen, seen[:, where:]), 1)
    close(pi0_actions(model, **inputs, num_steps=3), base, atol=1e-12)
    # The same view, seen, does change the actions: the mask is what hides it.
    inputs["image_mask"][:, where] = True
    assert (pi0_actions(model, **inputs, num_steps=3) - base).abs().max() > 1e-3


def test_padding_changes_nothing(model: Pi0) -> None:
    inputs = make_inputs(model.config, 2, "full")
    base = pi0_actions(model, **inputs, num_steps=3)
    inputs["tokens"] = torch.cat((inputs["tokens"], torch.randint(0, model.config.vocab_size, (2, 4))), 1)
    inputs["token_mask"] = torch.cat((inputs["token_mask"], torch.zeros(2, 4, dtype=torch.bool)), 1)
    close(pi0_actions(model, **inputs, num_steps=3), base, atol=1e-12)
    inputs["token_mask"][:] = True
    assert (pi0_actions(model, **inputs, num_steps=3) - base).abs().max() > 1e-3


def test_a_ragged_batch_equals_its_rows_alone(model: Pi0) -> None:
    inputs = make_inputs(model.config, 3, "ragged")
    together = pi0_actions(model, **inputs, num_steps=3)
    for b in range(3):
        alone = pi0_actions(model, **{k: v[b : b + 1] for k, v in inputs.items()}, num_steps=3)
        close(together[b : b + 1], alone, atol=1e-12)


def test_masked_views_and_padding_are_not_computed(model: Pi0, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    embed_images, prefix_cache = model.embed_images, model.prefix_cache

    def images(pixels: Tensor) -> Tensor:
        seen.append(tuple(pixels.shape[:2]))
        return embed_images(pixels)

    def cache(image_tokens: Tensor, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen.append(tuple(tokens.shape))
        assert mask is None
        return prefix_cache(image_tokens, tokens, mask)

    monkeypatch.setattr(model, "embed_images", images)
    monkeypatch.setattr(model, "prefix_cache", cache)
    pi0_actions(model, **make_inputs(model.config, 2, "dropped"), num_steps=1)
    assert seen == [(2, 2), (2, 4)]


def test_conditioning_of_all_steps_at_once_equals_each_alone(model: Pi0) -> None:
    times = euler_times(4, torch.float64)
    embeddings, modulations = model.conditioning(times)
    for step in range(4):
        embedding, modulation = model.conditioning(times[step : step + 1])
        close(embeddings[step], embedding[0], atol=1e-14)
        close(embeddings[step], reference.time_embedding(float(times[step]), model.config.expert.width), atol=1e-12)
        assert (modulation is None) == (modulations is None) == (model.config.kind == "pi0")
        if modulations is not None and modulation is not None:
            assert modulation.shape == (1, 2 * model.config.expert.depth + 1, 3 * model.config.expert.width)
            close(modulations[step], modulation[0], atol=1e-14)


def test_the_state_of_pi0_does_not_see_the_actions() -> None:
    """Changing the actions leaves the state token's output as it is, to the bit; changing the state moves both."""
    model = random_model(tiny_config("pi0")).double()
    inputs = make_inputs(model.config, 1, "full")
    keys, values, _ = prefix_of(model, inputs)
    embedding, _ = model.conditioning(torch.tensor([0.5], dtype=torch.float64))
    outputs: list[Any] = []
    model.expert.norm.register_forward_hook(lambda _, __, out: outputs.append(out))
    noise, state = inputs["noise"], inputs["state"]
    for x, s in ((noise, state), (noise + 1, state), (noise, state + 1)):
        model.velocity(x, embedding[0], None, s, keys, values)
    base, other_actions, other_state = outputs
    assert torch.equal(base[:, 0], other_actions[:, 0])
    assert not torch.allclose(base[:, 1:], other_actions[:, 1:])
    assert not torch.allclose(base[:, 1:], other_state[:, 1:])


def test_the_state_matters_to_pi0_only() -> None:
    for kind in KINDS:
        model = random_model(tiny_config(kind)).double()
        inputs = make_inputs(model.config, 1, "full")
        base = pi0_actions(model, **inputs, num_steps=2)
        changed = pi0_actions(model, **{**inputs, "state": inputs["state"] + 1}, num_steps=2)
        assert torch.equal(base, changed) == (kind == "pi05")


# -- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 20, 50])
def test_euler_times_are_openpis_loop_in_float32(steps: int) -> None:
    dt, time, expected = torch.tensor(-1.0 / steps), torch.tensor(1.0), []
    while time >= -dt / 2:
        expected.append(time.clone())
        time = time + dt
    times = euler_times(steps)
    assert times.dtype == torch.float32 and times[0] == 1.0
    assert torch.equal(times, torch.stack(expected)) and len(times) == steps


@pytest.mark.parametrize("steps", [0, -1])
def test_euler_times_refuse_less_than_one_step(steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_steps: expected at least 1, got {steps}"):
        euler_times(steps)


def test_time_embedding_is_formed_in_float64() -> None:
    times = euler_times(10)
    ours = sinusoidal_embedding(times, 64)
    assert ours.dtype == torch.float32
    exact = torch.stack([reference.time_embedding(float(t), 64) for t in times])
    assert torch.equal(ours, exact.float())


# -- sizes and dtypes ---------------------------------------------------------------------------------------------


def count_by_hand(config: Pi0Config) -> int:
    """Parameters from the architecture's sizes."""
    v, p, e = config.vision, config.prefix, config.expert
    vision = v.width * 3 * v.patch_size**2 + v.width + v.tokens * v.width + 2 * v.width
    vision += v.depth * (
        4 * v.width * (v.width + 1) + v.mlp_dim * (v.width + 1) + v.width * (v.mlp_dim + 1) + 4 * v.width
    )
    heads = (2 * p.heads + 2 * p.kv_heads) * p.head_dim
    prefix = p.depth * (p.width * heads + 3 * p.width * p.mlp_dim + 2 * p.width)
    norm = 3 * e.width * (e.width + 1) if config.kind == "pi05" else e.width
    expert = e.depth * (e.width * heads + 3 * e.width * e.mlp_dim + 2 * norm) + norm
    actions = e.width * (config.action_dim + 1) + config.action_dim * (e.width + 1)
    if config.kind == "pi05":
        extra = 2 * e.width * (e.width + 1)
    else:
        extra = e.width * (config.action_dim + 1) + e.width * (2 * e.width + 1) + e.width * (e.width + 1)
    return vision + p.width * (v.width + 1) + config.vocab_size * p.width + prefix + expert + actions + extra


@pytest.mark.parametrize(
    ("name", "low", "high"), [("pi0", 3.2e9, 3.6e9), ("pi05", 3.2e9, 3.6e9), ("pi05_demo", 1.1e7, 1.3e7)]
)
def test_preset_sizes(name: str, low: float, high: float) -> None:
    config = SIZES[name]()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Pi0(config).parameters())
    print(f"{name}: {parameters:,} parameters")
    assert parameters == count_by_hand(config)
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


# -- bad sizes ----------------------------------------------------------------------------------------------------


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
