"""Activations: their references, and their codes in kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vla_accel.kernels import reference
from vla_accel.kernels.activation import MACROS, Activation

X = torch.linspace(-4, 4, 24).view(3, 8)


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        (Activation.NONE, X),
        (Activation.GELU, F.gelu(X, approximate="tanh")),
        (Activation.SILU, X / (1 + torch.exp(-X))),
        (Activation.RELU, X.clamp(min=0)),
        (Activation.GELU_ERF, X * torch.distributions.Normal(0.0, 1.0).cdf(X)),
        (Activation.QUICK_GELU, X / (1 + torch.exp(-1.702 * X))),
        (Activation.GEGLU, F.gelu(X[:, :4], approximate="tanh") * X[:, 4:]),
        (Activation.SWIGLU, F.silu(X[:, :4]) * X[:, 4:]),
    ],
)
def test_an_activation_computes_what_its_name_says(activation: Activation, want: torch.Tensor) -> None:
    torch.testing.assert_close(reference.activate(X, activation), want)


def test_gated_activations_name_the_activation_of_their_gate() -> None:
    gates = {activation: activation.gate for activation in Activation if activation.gated}
    assert gates == {Activation.GEGLU: Activation.GELU, Activation.SWIGLU: Activation.SILU}


def test_every_activation_has_a_code_of_its_own_in_cuda() -> None:
    assert sorted(MACROS.values()) == list(range(len(Activation)))
    assert MACROS["ACTIVATION_SWIGLU"] == Activation.SWIGLU.code


def test_an_activation_is_written_as_its_name() -> None:
    assert f"{Activation.GEGLU}" == str(Activation.GEGLU) == "geglu" and Activation("geglu") is Activation.GEGLU
