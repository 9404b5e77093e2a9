"""A third model family, small and unlike π0: encoder → latents → head, a mask that both parts share, no prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.checkpoints.checkpoint import load_own, read_config
from vla_accel.component import Component, TensorSpec
from vla_accel.errors import ObservationError
from vla_accel.families.family import Family, Shape, Work
from vla_accel.nn.network import Network
from vla_accel.nn.store import NativeStore

REAL = 3
"""Of the four patches of a frame, what the mask leaves."""


@dataclass(frozen=True)
class ToyConfig:
    width: int = 8
    horizon: int = 3
    action_dim: int = 2


class Toy(Network):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.encoder, self.head = nn.Linear(12, width), nn.Linear(width + 2, config.action_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.weight.dtype

    def encode(self, frame: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.encoder(frame.flatten(2).to(self.dtype) / 255)) * mask[..., None].to(self.dtype)

    def act(self, noise: Tensor, latents: Tensor, mask: Tensor, joints: Tensor, steps: int) -> Tensor:
        mean = latents.sum(1) / mask.sum(1, keepdim=True).to(self.dtype)
        target = self.head(torch.cat((mean, joints.to(self.dtype)), 1)).float()[:, None]
        for step in range(steps):
            noise = noise + (target - noise) / (steps - step + 1)
        return noise


class Part(nn.Module):
    """A method of the network as a module."""

    def __init__(self, model: Toy, name: str, *more: Any) -> None:
        super().__init__()
        self.model, self.name, self.more = model, name, more

    def forward(self, *tensors: Tensor) -> Tensor:
        return getattr(self.model, self.name)(*tensors, *self.more)


@dataclass
class Program:
    """A part as the native engine runs it."""

    part: Part
    inputs: tuple[TensorSpec, ...]
    detail: str = "toy program"

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        (output,) = outputs.values()
        output.copy_(self.part(*(inputs[s.name] for s in self.inputs)))


class ToyTransforms:
    def observe(self, observation: Mapping[str, Any]) -> Any:
        if "frame" not in observation:
            raise ObservationError(f"observation: missing frame; got {', '.join(observation)}")
        raw = np.asarray(observation["joints"], np.float64)
        return _Prepared(np.asarray(observation["frame"], np.uint8).reshape(4, 4, 3), raw)

    def resized(self, seen: Any) -> Any:
        return seen

    def encode(self, seen: Any) -> Any:
        return seen

    def prepare(self, observation: Mapping[str, Any]) -> Any:
        return self.observe(observation)

    def unnormalize_actions(self, actions: np.ndarray, inputs: Any) -> np.ndarray:
        return actions.astype(np.float64) + inputs.raw_state

    def normalize_actions(self, actions: Any, inputs: Any, name: str = "prev_chunk") -> np.ndarray:
        return (np.asarray(actions, np.float64) - inputs.raw_state).astype(np.float32)

    def example(self, prompt: str | None = None) -> dict[str, Any]:
        return {"frame": np.full((4, 4, 3), 7, np.uint8), "joints": np.zeros(2)}


@dataclass(frozen=True)
class _Prepared:
    frame: np.ndarray
    raw_state: np.ndarray
    cameras: None = None


class ToyFamily(Family):
    name = "toy"
    parts = ("encoder", "head")
    sizes = {"toy": ToyConfig}  # noqa: RUF012

    def network(self, config: ToyConfig) -> Toy:
        return Toy.empty(config)

    def random(self, config: ToyConfig, *, seed: int, device: str, dtype: torch.dtype) -> Toy:
        model = Toy(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.5, generator=generator)
        return model.to(device).to_compute_dtype(dtype).requires_grad_(False).eval()

    def action_shape(self, config: ToyConfig) -> tuple[int, int]:
        return config.horizon, config.action_dim

    def store(self, model: Any, scales: Any) -> NativeStore[Toy]:
        return NativeStore(model, scales)

    def components(self, model: Any, shape: Shape, *, store: Any = None, scales: Any = None, rtc: Any = None) -> Any:
        b, c = shape.batch, model.config
        frame, mask = TensorSpec("frame", (b, 4, 4, 3), torch.uint8), TensorSpec("mask", (b, 4), torch.float32)
        latents = TensorSpec("latents", (b, 4, c.width), model.dtype)
        noise, actions = (TensorSpec(n, (b, c.horizon, c.action_dim), torch.float32) for n in ("noise", "actions"))
        joints = TensorSpec("joints", (b, 2), torch.float32)

        def part(name: str, module: Part, inputs: tuple[TensorSpec, ...], output: TensorSpec) -> Component:
            return Component(name, module, inputs, (output,), store and (lambda spec: Program(module, inputs)))

        return (
            part("encoder", Part(model, "encode"), (frame, mask), latents),
            part("head", Part(model, "act", shape.steps), (noise, latents, mask, joints), actions),
        )

    def shape(self, config: Any, inputs: Any, steps: int, specs: Any) -> Shape:
        return Shape(len(inputs), steps)

    def feed(self, config: Any, inputs: Any) -> Any:
        # The mask is shorter than its place: the rest is padding.
        mask = [np.ones(REAL, np.float32) for _ in inputs]
        joints = np.stack([i.raw_state for i in inputs]).astype(np.float32)
        return {"frame": [i.frame for i in inputs], "mask": mask, "joints": joints}

    def internals(self, config: Any, outputs: Mapping[str, Tensor], inputs: Any) -> dict[str, Tensor]:
        return {"latents": outputs["latents"][0, :REAL]}

    def work(self, config: ToyConfig, inputs: Any, steps: int, specs: Any) -> dict[str, Work]:
        return {"encoder": Work(2 * 4 * 12 * config.width), "head": Work(0.0, bytes=2.0 * steps)}

    def published(self, horizon: int | None = None) -> ToyConfig:
        return ToyConfig(horizon=horizon or 3)

    def stand_in(self, config: Any, views: int) -> ToyTransforms:
        return ToyTransforms()

    def random_observation(self, transforms: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"frame": rng.integers(0, 256, (4, 4, 3), dtype=np.uint8), "joints": rng.random(2)}

    def recognises(self, content: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return content.get("family") == "toy"

    def load(self, folder: Path, settings: Any, *, device: Any, dtype: torch.dtype | None) -> tuple[Toy, ToyTransforms]:
        return load_own(Toy.empty(read_config(folder, ToyConfig)), folder, device=device, dtype=dtype), ToyTransforms()


TOY = ToyFamily()
