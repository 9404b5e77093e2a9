"""Groups of tensors that the ops of a suffix take together. B sequences of T tokens, of which the last H are actions of
A numbers; W: the width of the rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vla_accel.kernels.activation import Activation


@dataclass(frozen=True)
class Heads:
    """Queries (B, T, heads, d), keys and values (B, T, kv_heads, d), contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotary embeddings: `cos`, `sin` (positions, d / 2) float32; `starts` (B,) int32: the first positions."""

    cos: Tensor
    sin: Tensor
    starts: Tensor


@dataclass(frozen=True)
class ActionOutput:
    """The last norm, x / rms(x) * (1 + scale) + shift, and the projection to a velocity.

    `scale` (W,) float32, or None, where only the first step runs; `shift` (W,) float32 or None; `weight` (A, W), `bias`
    (A,) float32.
    """

    scale: Tensor | None
    shift: Tensor | None
    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True)
class ActionInput:
    """The projection of actions to rows: activation(actions · weight + bias).

    `weight` (A, W) float32; `bias` (W,) float32, or (2, W): the second row for actions that are pinned.
    """

    weight: Tensor
    bias: Tensor
    activation: Activation


@dataclass(frozen=True)
class Guidance:
    """What pulls a flow towards `target` (B, H, A), float32, by `weights` (B, H), float32. Weights of zero change no
    bit. `pinned`: actions whose weight is not zero stay as they are instead."""

    target: Tensor
    weights: Tensor
    pinned: bool = False


@dataclass(frozen=True)
class EulerStep:
    """A step of size `dt` from the flow's time `time`, guided by `gain`. `first`: there is no velocity yet; `last`: no
    evaluation follows."""

    dt: float
    time: float
    gain: float
    first: bool
    last: bool
