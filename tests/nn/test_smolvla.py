"""SmolVLA's network against its formulas written down a second time, and the savings that must be exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.agreement import rms
from tests.support.tiny_smolvla import VOCABULARY, expected_actions, libero_config, tiny_config, tiny_model
from tests.support.whole_calls import smolvla_actions
from vla_accel.errors import ConfigError
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig, smolvla
from vla_accel.nn.flow import Schedule
from vla_accel.nn.random_weights import random_model

CONFIGS = {"base": tiny_config(), "libero": libero_config(), "self": tiny_config(self_every=1)}


def make_inputs(config: SmolVlaConfig, batch: int, lengths: list[int], seed: int = 1) -> dict[str, Tensor]:
    generator, most = torch.Generator().manual_seed(seed), max(lengths)
    side = config.vision.image_size
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    return {
        "images": torch.rand(batch, 2, 3, side, side, generator=generator) * 2 - 1,
        "tokens": torch.randint(1, VOCABULARY, (batch, most), generator=generator) * mask,
        "token_mask": mask,
        "state": torch.randn(batch, config.state_dim, generator=generator),
        "noise": torch.randn(batch, config.action_horizon, config.action_dim, generator=generator),
    }


@pytest.mark.parametrize("name", list(CONFIGS))
def test_sample_actions(name: str) -> None:
    """A batch of prompts of three lengths; each row as if it were alone."""
    config = CONFIGS[name]
    model = tiny_model(config)
    inputs = make_inputs(config, 3, [4, 7, 2])
    with torch.no_grad():
        ours = smolvla_actions(model, **inputs, num_steps=3)
    for row in range(3):
        real = inputs["tokens"][row][inputs["token_mask"][row]]
        expected = expected_actions(
            model.state_dict(), config, inputs["images"][row], real, inputs["state"][row], inputs["noise"][row], 3
        )
        torch.testing.assert_close(ours[row].double(), expected, rtol=0, atol=2e-4)


def test_bf16_is_as_near_as_its_rounding() -> None:
    """Rounded weights in float32 are what BF16 may lose at least."""
    config = tiny_config()
    inputs = make_inputs(config, 1, [5])
    exact = smolvla_actions(tiny_model(config), **inputs, num_steps=4)
    low = tiny_model(config).to_compute_dtype(torch.bfloat16)
    kinds = {n: p.dtype for n, p in low.named_parameters()}
    wide = {n for n, d in kinds.items() if d == torch.float32}
    assert {n.split(".")[0] for n in wide} == {
        "state_proj", "action_in_proj", "action_out_proj", "action_time_mlp_in", "action_time_mlp_out", "expert",
    }  # fmt: skip
    assert {n.split(".")[-2] for n in wide if n.startswith("expert")} == {"key_proj", "value_proj"}
    ours = smolvla_actions(low, **inputs, num_steps=4)
    assert 0 < rms(ours - exact) < 0.1 * rms(exact)


def test_random_weights_keep_activations_of_order_one() -> None:
    config = tiny_config()
    model = random_model(SmolVla, config, seed=3)
    inputs = make_inputs(config, 1, [5])
    tokens = model.embed_images(inputs["images"])
    assert 0.3 < rms(tokens) < 3 and 0.3 < rms(model.embed_tokens(inputs["tokens"])) < 3
    assert 0.1 < rms(smolvla_actions(model, **inputs, num_steps=2)) < 10
    again = random_model(SmolVla, config, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_published_size() -> None:
    """450,046,176 parameters (`lerobot/smolvla_base`), the head and the norm that nothing reads included."""
    with torch.device("meta"):
        model = SmolVla(smolvla())
    dead = 49_280 * 960 + 960
    assert sum(p.numel() for p in model.parameters()) + dead == 450_046_176
    assert smolvla().image_tokens == 64 and smolvla().prefix_tokens(2, 20) == 149


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_times_are_rounded_once(steps: int) -> None:
    times = SmolVla.times(Schedule.uniform(steps))
    assert times.tolist() == torch.tensor([1 - k / steps for k in range(steps)]).tolist()


def test_sizes_that_cannot_be() -> None:
    config = tiny_config()
    with pytest.raises(ConfigError, match=r"prefix\.depth 3 and expert\.depth 2 must be equal"):
        tiny_config(expert=type(config.expert)(width=36, depth=2, mlp_dim=20, heads=4, kv_heads=2))
    with pytest.raises(ConfigError, match="shuffle 3 must divide"):
        tiny_config(shuffle=3)
