"""The toy as a family: its transforms, its components and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.toy_family.network import Toy, ToyConfig
from vla_accel.checkpoints.checkpoint import fitted_own, read_config
from vla_accel.component import Component, TensorSpec
from vla_accel.config import EngineSpec, PolicyConfig
from vla_accel.errors import ObservationError
from vla_accel.families.family import Family, Rows, Shape
from vla_accel.nn.flow import Schedule
from vla_accel.nn.store import NativeStore

REAL = 3
"""Rows of a frame that the mask keeps, of four."""


@dataclass(frozen=True)
class ToyInputs:
    """A prepared observation."""

    frame: np.ndarray
    raw_state: np.ndarray
    cameras: None = None


class ToyTransforms:
    """Actions are relative to the joints."""

    def observe(self, observation: Mapping[str, Any]) -> ToyInputs:
        if "frame" not in observation:
            raise ObservationError(f"observation: missing frame; got {', '.join(observation)}")
        frame = np.asarray(observation["frame"], np.uint8).reshape(4, 4, 3)
        return ToyInputs(frame, np.asarray(observation["joints"], np.float64))

    def resized(self, seen: ToyInputs) -> ToyInputs:
        return seen

    def encode(self, seen: ToyInputs) -> ToyInputs:
        return seen

    def prepare(self, observation: Mapping[str, Any]) -> ToyInputs:
        return self.observe(observation)

    def unnormalize_actions(self, actions: np.ndarray, inputs: ToyInputs) -> np.ndarray:
        return actions.astype(np.float64) + inputs.raw_state

    def normalize_actions(self, actions: Any, inputs: ToyInputs, name: str = "prev_chunk") -> np.ndarray:
        return (np.asarray(actions, np.float64) - inputs.raw_state).astype(np.float32)

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        return {"frame": np.full((4, 4, 3), 7, np.uint8), "joints": np.zeros(2)}


class Part(nn.Module):
    """A method of the network as a module."""

    def __init__(self, model: Toy, name: str, *more: Any) -> None:
        super().__init__()
        self.model, self.name, self.more = model, name, more

    def forward(self, *tensors: Tensor) -> Tensor:
        return getattr(self.model, self.name)(*tensors, *self.more)


@dataclass
class Program:
    """A component for the native engine: writes static buffers."""

    part: Part
    inputs: tuple[TensorSpec, ...]
    detail: str = "toy program"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (output,) = outputs.values()
        output.copy_(self.part(*(inputs[s.name] for s in self.inputs)))


class ToyFamily(Family[ToyConfig, ToyInputs, Shape]):
    """The toy."""

    name = "toy"
    parts = ("encoder", "head")
    network_class, store_class = Toy, NativeStore

    def components(
        self, model: Toy, shape: Shape, *, store: Any = None, scales: Any = None, rtc: Any = None
    ) -> Sequence[Component]:
        b, c = shape.batch, model.config
        frame, mask = TensorSpec("frame", (b, 4, 4, 3), torch.uint8), TensorSpec("mask", (b, 4), torch.float32)
        latents = TensorSpec("latents", (b, 4, c.width), model.dtype)
        chunk = (b, c.action_horizon, c.action_dim)
        noise, actions = (TensorSpec(n, chunk, torch.float32) for n in ("noise", "actions"))
        joints = TensorSpec("joints", (b, 2), torch.float32)

        def component(name: str, part: Part, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> Component:
            return Component(name, part, inputs, (output,), store and (lambda spec: Program(part, inputs)))

        return (
            component("encoder", Part(model, "encode"), (frame, mask), latents),
            component("head", Part(model, "act", shape.steps), (noise, latents, mask, joints), actions),
        )

    def shape(
        self, config: ToyConfig, inputs: Sequence[ToyInputs], schedule: Schedule, specs: Mapping[str, EngineSpec]
    ) -> Shape:
        return Shape(len(inputs), schedule)

    def feed(self, config: ToyConfig, inputs: Sequence[ToyInputs]) -> Mapping[str, Rows]:
        # The mask is shorter than its buffer: the rest is zero.
        mask = [np.ones(REAL, np.float32) for _ in inputs]
        joints = np.stack([i.raw_state for i in inputs]).astype(np.float32)
        return {"frame": [i.frame for i in inputs], "mask": mask, "joints": joints}

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return content.get("family") == self.name

    @staticmethod
    def load(folder: Path, settings: PolicyConfig) -> tuple[Toy, ToyTransforms]:
        model = fitted_own(Toy.empty(read_config(folder, ToyConfig)), folder)
        return model.placed(torch.device("cpu"), None).whole(), ToyTransforms()


TOY = ToyFamily()
