"""Policies whose batches are the model's inputs already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from vla_accel.attachment.calls import Call, check_settings, enabled_rtc, guidance, refuse_arguments
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.family import family_named
from vla_accel.families.loading import Checkpoint
from vla_accel.nn.network import Network
from vla_accel.transforms.processing import Inputs


class PreparedTransforms:
    """Return each observation, an `Inputs`, and each chunk of actions as they are (`families.family.Transforms`).

    Attributes:
        action_dim: Numbers of the model's action.
    """

    def __init__(self, action_dim: int) -> None:
        self.action_dim = action_dim

    def observe(self, observation: Any) -> Inputs:
        return observation

    def resized(self, seen: Inputs) -> Inputs:
        return seen

    def encode(self, seen: Inputs) -> Inputs:
        return seen

    def prepare(self, observation: Any) -> Inputs:
        return observation

    def unnormalize_actions(self, actions: np.ndarray, inputs: Inputs) -> np.ndarray:
        return actions.astype(np.float64)

    def normalize_actions(self, actions: Any, inputs: Inputs, name: str = "prev_chunk") -> np.ndarray:
        """Pad actions (k, n) with zeros to the model's."""
        chunk = np.asarray(actions, np.float32)[:, : self.action_dim]
        return np.pad(chunk, ((0, 0), (0, self.action_dim - chunk.shape[1])))

    def example(self, prompt: str | None = None) -> Mapping[str, Any]:
        raise ConfigError("example: expected no warm-up of a policy whose observations are the model's inputs")


class PreparedReader(ABC):
    """A policy of lerobot whose processors make the model's inputs (`calls.Reader`).

    Attributes:
        known: The fields of `PolicyConfig.checkpoint` that the reader uses.
        variant: What the network depends on and only a batch says, such as its embodiment, with the name `title`; None
            until the first batch, with which all later ones must agree.
    """

    method, takes_noise = "predict_action_chunk", False
    known: tuple[str, ...] = ()
    title: str
    variant: Any = None

    def __init__(self, policy: Any, settings: PolicyConfig, family: str) -> None:
        self.owner, self._family = policy, family_named(family)
        requested = self._rtc(policy)
        check_settings(self._family, settings, self.known, chunking=requested is not None)
        network = self._network(None)
        if requested is not None:
            settings = replace(settings, rtc=guidance(requested, self._family, network.config.action_horizon))
        self.settings = settings
        self.checkpoint = self._checkpoint(network)

    @property
    def config(self) -> Any:
        """The network's sizes."""
        return self.checkpoint.model.config

    def call(
        self,
        batch: Mapping[str, Any],
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        **others: Any,
    ) -> Call:
        """Read a batch (`calls.Reader`)."""
        refuse_arguments(self.method, others)
        variant = self._variant(batch)
        if self.variant is None:
            self.variant = variant
            self.checkpoint = self._checkpoint(self._network(batch))
        if variant != self.variant:
            raise ConfigError(f"{self.title}: expected {self.variant} in every call, got {variant}")
        inputs: list[Any] = self._inputs(batch)
        chunk = None if prev_chunk_left_over is None else self._previous(prev_chunk_left_over)
        if chunk is not None and chunk.ndim == 3 and len(chunk) == 1:
            chunk = chunk.expand(len(inputs), -1, -1)
        return Call(inputs, None, chunk, inference_delay or 0)

    @abstractmethod
    def _network(self, batch: Mapping[str, Any] | None) -> Network:
        """Return the network for `variant` and batches like this one; None: for any."""

    @abstractmethod
    def _variant(self, batch: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _inputs(self, batch: Mapping[str, Any]) -> list[Inputs]: ...

    def _rtc(self, policy: Any) -> Any:
        return enabled_rtc(policy)

    def _previous(self, chunk: Tensor) -> Tensor | None:
        """Return the previous chunk that guides the call."""
        return None if self._rtc(self.owner) is None else chunk

    def _checkpoint(self, network: Any) -> Checkpoint:
        transforms = PreparedTransforms(network.config.action_dim)
        return Checkpoint(type(self.owner).__name__, self._family, network, transforms, settings=self.settings)


def one_number(numbers: Tensor, name: str) -> int:
    """Return the number that a batch has for every observation. Raises ConfigError for several."""
    found = set(numbers.flatten().tolist())
    if len(found) != 1:
        raise ConfigError(f"{name}: expected one number for the whole batch, got {sorted(found)}")
    return int(found.pop())


def one_length(prompts: list[np.ndarray], name: str) -> list[np.ndarray]:
    """Return prompts (n,) of a policy whose actions depend on the padding of a batch. Raises ConfigError if there is
    padding."""
    if len(lengths := {len(prompt) for prompt in prompts}) > 1:
        raise ConfigError(f"{name}: expected prompts of one length, whose actions no padding changes, got {lengths}")
    return prompts
