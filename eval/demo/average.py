"""The averaged weights of a policy in training, and acting with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eval.demo.collectors import Seen
from eval.demo.objective import remember
from vla_accel.engines.graph import recording
from vla_accel.nn.flow import FlowNetwork, Schedule

SCHEDULE = Schedule.uniform(4)
"""Of denoising, when the policy acts in training."""


class Averaged:
    """Exponential moving average of a policy's weights, float32, and a copy of them that acts: on a GPU in BF16, in one
    graph for up to `rows` observations."""

    def __init__(self, policy: FlowNetwork, decay: float, rows: int, prompt: int) -> None:
        self.decay, self.step = decay, 0
        device, config = policy.device, policy.config
        self.shadow = [p.detach().clone() for p in policy.parameters()]
        self.names = [name for name, _ in policy.named_parameters()]
        self.actor = type(policy)(config).to(device).requires_grad_(False).eval()
        if device.type == "cuda":
            self.actor.to_compute_dtype(torch.bfloat16)
        self.sync()
        size, state_dim = config.vision.image_size, getattr(config, "state_dim", 0)
        self.images = torch.zeros(rows, 2, size, size, 3, dtype=torch.uint8, device=device)
        self.tokens = torch.zeros(rows, prompt, dtype=torch.int64, device=device)
        self.states = torch.zeros(rows, state_dim, device=device)
        self.noise = torch.zeros(rows, config.action_horizon, config.action_dim, device=device)
        self.chunks = torch.zeros_like(self.noise)
        # Made here: a graph takes nothing from the host.
        self.times = policy.times(SCHEDULE).to(device)
        self.graph = self._captured() if device.type == "cuda" else None

    @torch.no_grad()
    def update(self, policy: FlowNetwork) -> None:
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in policy.parameters()], 1 - decay)

    @torch.no_grad()
    def sync(self) -> None:
        """Let the actor have the average."""
        for parameter, average in zip(self.actor.parameters(), self.shadow, strict=True):
            parameter.copy_(average)

    def state(self) -> dict[str, Tensor]:
        """The average by canonical names, float32."""
        return dict(zip(self.names, self.shadow, strict=True))

    @torch.no_grad()
    def act(self, seen: Sequence[Seen]) -> np.ndarray:
        """Chunks float32 (N, H, A) for N observations."""
        for buffer, rows in zip((self.images, self.tokens, self.states), zip(*seen, strict=True), strict=True):
            buffer[: len(seen)].copy_(torch.from_numpy(np.stack(rows)))
        self.noise.normal_()
        if self.graph is None:
            self._compute(len(seen))
        else:
            self.graph.replay()
        return self.chunks[: len(seen)].cpu().numpy()

    def _compute(self, count: int) -> None:
        pixels = self.images[:count].float() / 127.5 - 1
        keys, values, _ = remember(self.actor, pixels, self.tokens[:count], self.states[:count])
        rows = self.actor.conditioning(self.times)
        made = self.actor.integrate(self.noise[:count], *rows, keys, values, schedule=SCHEDULE)
        self.chunks[:count].copy_(made.clamp(-1, 1))

    @torch.no_grad()
    def _captured(self) -> torch.cuda.CUDAGraph | None:
        stream, rows = torch.cuda.Stream(), len(self.images)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._compute(rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, stream):
                self._compute(rows)
        except RuntimeError as error:
            print(f"acting runs without a graph, which is slower: {error}", file=sys.stderr, flush=True)
            return None
        return graph
