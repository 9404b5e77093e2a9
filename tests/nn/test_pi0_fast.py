"""π0-FAST against its mathematics written down a second time: no cache, no batch, no padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.tiny_pi0_fast import BOS, STOP, expected_tokens, tiny_config, tiny_model
from tests.support.whole_calls import pi0_fast_tokens
from vla_accel.errors import ConfigError
from vla_accel.families.pi0_fast.network import Pi0Fast, pi0_fast


def given(model: Pi0Fast, lengths: tuple[int, ...], views: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """images, tokens and token_mask of a batch with prompts of these lengths, each with <bos> at its end."""
    generator, side, longest = torch.Generator().manual_seed(7), model.config.vision.image_size, max(lengths)
    images = torch.rand(len(lengths), views, 3, side, side, generator=generator).double() * 2 - 1
    tokens = torch.randint(3, model.config.vocab_size, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    for row, length in enumerate(lengths):
        tokens[row, length - 1] = BOS
    # Any token stands in the padding.
    return images, tokens, mask


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lengths", [(6,), (4, 7, 5)])
def test_tokens_are_those_without_a_cache(tied: bool, lengths: tuple[int, ...]) -> None:
    config = tiny_config(tied=tied, stop_token=None)
    model = tiny_model(config).double()
    images, tokens, mask = given(model, lengths)
    found = pi0_fast_tokens(model, images, tokens, mask, 9)
    for row, length in enumerate(lengths):
        expected = expected_tokens(model.state_dict(), config, images[row], tokens[row, :length].tolist(), 9)
        assert found[row].tolist() == expected
    assert len(set(found.flatten().tolist())) > 2, "tokens that are all the same would show nothing"


def test_it_stops_when_every_row_has_the_stop_token() -> None:
    free = tiny_model(tiny_config(stop_token=None)).double()
    images, tokens, mask = given(free, (4, 7, 5))
    endless = pi0_fast_tokens(free, images, tokens, mask, 10)
    # A token of the first row that the others have too, or get later, or never.
    for stop in endless.unique().tolist():
        model = tiny_model(tiny_config(stop_token=stop)).double()
        found = pi0_fast_tokens(model, images, tokens, mask, 10)
        ends = [row.tolist().index(stop) for row in endless if stop in row]
        kept = max(ends) + 1 if len(ends) == len(endless) else 10
        assert torch.equal(found[:, :kept], endless[:, :kept])
        assert not found[:, kept:].any()


def test_sizes() -> None:
    """As `paligemma-3b` has them, without a head of its own."""
    with torch.device("meta"):
        model = Pi0Fast(pi0_fast())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.923e9, rel=1e-3)
    assert model.head_name == "embed" and not [n for n, _ in model.named_parameters() if n.startswith("head")]
    with pytest.raises(ConfigError, match="stop_token: expected a token below 384, got 384"):
        tiny_config(stop_token=384)
    assert 0 <= STOP < 384
