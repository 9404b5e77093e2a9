"""The denoise loop in CUDA C++: plans the work, holds the buffers, launches the phases.

For Hopper, up to 64 suffix rows, with weights in BF16; `why_not` explains other cases. Each phase is a kernel
that fetches its weights while its predecessors still run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vla_accel.kernels import nvrtc
from vla_accel.kernels.chain import Chain, launch_cuda
from vla_accel.kernels.gpu import PORTABLE_CLUSTER, Gpu
from vla_accel.kernels.loop.arguments import Call, Model
from vla_accel.kernels.loop.packing import Packed, splits_well
from vla_accel.kernels.loop.schedule import KEYS, NOTHING_YET, RANKS, THREADS, Schedule
from vla_accel.kernels.loop.tables import ExpertSpec, StepTables
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.kernels.struct import address
from vla_accel.numeric import round_up

ARCHITECTURE = "sm_90a"
MOST_ROWS = 64
"""Suffix rows."""


def why_not(gpu: Gpu | None, spec: ExpertSpec, batch: int, precision: str) -> str | None:
    """Explain why the kernels do not run this loop; None if they do. `precision`: of the layers' weights."""
    attended = spec.heads * spec.head_dim
    if gpu is None:
        return "there is no GPU"
    if gpu.architecture != ARCHITECTURE:
        return f"it needs compute capability 9.0, {gpu.name} has {gpu.version}"
    if precision != "bf16":
        return f"it needs BF16 weights, got {precision.upper()}"
    if batch * spec.tokens > MOST_ROWS:
        return f"{batch} x {spec.tokens} suffix rows are more than {MOST_ROWS}"
    odd = (spec.width % 32, attended % 32, spec.mlp_dim % 32, spec.head_dim % 64)
    whole = all(splits_well(spec.width, k) for k in (attended, spec.mlp_dim, spec.width))
    if any(odd) or not whole or spec.width > 1024 or spec.head_dim > 256 or spec.action_dim > 64:
        return "its tiles do not fit these widths"
    return None


def planned(
    gpu: Gpu, spec: ExpertSpec, batch: int, prefix_tokens: int, device: torch.device
) -> tuple[Schedule, nvrtc.Module]:
    """Return the schedule and its loaded kernels. Plans again if the device does not hold the clusters at once."""

    def plan(**limits: Any) -> Schedule:
        return Schedule.of(spec, batch, prefix_tokens, gpu, **limits)

    def load(schedule: Schedule) -> nvrtc.Module:
        return nvrtc.load_module(schedule.source, schedule.shared, ARCHITECTURE, device)

    schedule = plan()
    module = load(schedule)
    apart = None
    if "attend" in schedule.blocks:
        needed, held = schedule.blocks["attend"] // RANKS, module.clusters_at_once("attend", THREADS, RANKS)
        if held < needed:
            apart = f"its {needed} clusters of {RANKS} blocks must run at once, the device holds {held}"
            schedule = plan(apart=apart)
            module = load(schedule)
    for kernel in ("attention", "grouped"):
        cluster = schedule.clusters.get(kernel, 0)
        if cluster > PORTABLE_CLUSTER and not module.clusters_at_once(kernel, THREADS, cluster):
            schedule = plan(apart=apart, largest_cluster=PORTABLE_CLUSTER)
            module = load(schedule)
    return schedule, module


Launch = Callable[..., None]


# Fields of `Call`: the inputs that they point to, and the bytes that their reads are aligned to.
_INPUTS = {
    "keys": ("keys", 16), "values": ("values", 16), "lengths": ("lengths", 4), "target": ("target", 4),
    "follow": ("weights", 4),
}  # fmt: skip


class StreamedLoop:
    """The loaded kernels and their buffers for a batch and a number of prefix tokens."""

    def __init__(
        self, gpu: Gpu, spec: ExpertSpec, packed: Packed, tables: StepTables, w_out: Tensor, b_out: Tensor,
        mix_bias: Tensor | None, batch: int, prefix_tokens: int,
    ) -> None:  # fmt: skip
        tokens, device = spec.tokens, w_out.device
        rows = batch * tokens
        self.spec, self.depth, self.chain = spec, spec.depth, Chain(gpu)
        self.steps, self.prefix_tokens = tables.steps, prefix_tokens
        schedule, self.module = planned(gpu, spec, batch, prefix_tokens, device)
        self.schedule = schedule

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        head = (spec.kv_heads, spec.head_dim)
        self.padded = round_up(prefix_tokens, KEYS)
        fused_attention = "attention" not in schedule.blocks
        self.values_t = None if fused_attention else zeros(spec.depth, batch, *head, self.padded)
        whole = round_up(rows, 16)  # what is multiplied lies in tiles of 16 rows
        self._suffix = zeros(2, rows, *head)
        # Kept alive here: the kernels see bare addresses.
        self._buffers = {
            "xf": zeros(rows, spec.width, dtype=torch.float32), "xb": zeros(whole, spec.width),
            "hidden": zeros(whole, spec.width), "context": zeros(whole, spec.heads * spec.head_dim),
            "active": zeros(whole, spec.mlp_dim), "q": zeros(rows, spec.heads, spec.head_dim),
            "ks": self._suffix[0], "vs": self._suffix[1], "vts": zeros(batch, *head, round_up(tokens, KEYS)),
        }  # fmt: skip
        cos, sin = rope_tables(prefix_tokens + tokens, spec.head_dim, device)
        self._constants = {
            "weights": packed.data, "in_scale": tables.input_scale, "in_shift": tables.input_shift,
            "in_gate": tables.input_gate, "post_scale": tables.post_scale, "post_shift": tables.post_shift,
            "post_gate": tables.post_gate, "final_scale": tables.final_scale, "final_shift": tables.final_shift,
            "b_in": tables.b_in, "w_in": tables.w_in, "w_out": w_out, "b_out": b_out.contiguous(),
            "mix_bias": mix_bias, "cos": cos, "sin": sin,
        }  # fmt: skip
        offsets = {n: getattr(packed, n) for n in ("layer_at", "layer_bytes", "o_at", "gate_up_at", "down_at")}
        self._model = Model(**{n: address(n, t) for n, t in self._constants.items()}, **offsets)
        self._eps = ctypes.c_float(spec.eps)
        self._euler = tables.times, tables.dts, tables.gains

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the loop: `actions` (B, H, A) float32 hold the noise and are integrated in place."""
        with self.chain:
            self.first_step(inputs, state_token, actions)
            self.other_steps(inputs, state_token, actions)

    @property
    def reads_by_layer(self) -> bool:
        """Whether each layer reads only the keys and values of its own layer, in the layout of the prefix."""
        return self.values_t is None

    def first_step(
        self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor,
        wait: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Enqueue the first step. `wait`: called with each layer before it is enqueued."""
        if "attend" in self.schedule.blocks:
            # It reads the suffix's keys and values until they are there; an interrupted run may have left some.
            self._suffix.view(torch.int32).fill_(NOTHING_YET)
        if self.values_t is not None:
            # Products want the keys along the contiguous axis. The padding beyond the prefix stays zero.
            self.values_t[..., : self.prefix_tokens].copy_(inputs["values"].permute(0, 1, 3, 4, 2))
        self._step(self._launcher(inputs, state_token, actions), 0, wait)

    def other_steps(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the other steps and the end."""
        launch = self._launcher(inputs, state_token, actions)
        for step in range(1, self.steps):
            self._step(launch, step)
        launch("between", self._eps, self.steps, *self._euler_step(self.steps - 1))

    def _launcher(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> Launch:
        """Return a function that launches a kernel by name with its arguments after the model and the call."""
        buffers = {n: address(n, t) for n, t in self._buffers.items()}
        call = Call(
            **{field: address(name, inputs[name], alignment) for field, (name, alignment) in _INPUTS.items()},
            values_t=address("values_t", self.values_t), state=address("state", state_token, 4),
            actions=address("actions", actions, 4), **buffers, prefix_tokens=self.prefix_tokens,
            padded_prefix_tokens=self.padded, steps=self.steps,
        )  # fmt: skip

        def launch(name: str, *rest: object, blocks: int | None = None) -> None:
            blocks = self.schedule.blocks[name] if blocks is None else blocks
            arguments = (self._model, call, *(ctypes.c_int(r) if isinstance(r, int) else r for r in rest))
            cluster = self.schedule.clusters.get(name, 1)
            launch_cuda(self.module, name, blocks, THREADS, arguments, cluster=cluster)

        return launch

    def _step(self, launch: Launch, step: int, wait: Callable[[int], None] | None = None) -> None:
        """One evaluation of the expert. The kernels read the prefix before they wait for their predecessor, so that
        the first one of a chain, and one after `wait`, must wait for everything on their stream."""
        queries = self.spec.heads * self.spec.head_dim // 16
        launch("between", self._eps, step, *self._euler_step(step - 1))
        if not self.spec.adaptive:
            launch("mix")
        for layer in range(self.depth):
            if wait is not None:
                wait(layer)
                self.chain.restart()
            fused = self.schedule.fused
            if fused is not None:
                launch(fused.kernel, fused.work, self._eps, step, layer)
            else:
                launch("qkv", self._eps, step, layer, blocks=queries if self.spec.crosses(layer) else None)
                launch("attention", layer)
            launch("output", step, layer)
            launch("gate_up", self._eps, step, layer)
            launch("down", step, layer)

    @property
    def kernels_a_step(self) -> int:
        """Launches of one evaluation of the expert."""
        attention = 2 if "attention" in self.schedule.blocks else 1
        return (3 + attention) * self.depth + (1 if self.spec.adaptive else 2)

    def _euler_step(self, step: int) -> list[ctypes.c_float]:
        """Return time, dt and gain of an evaluation; the first launch, which moves nothing, has those of step 0."""
        return [ctypes.c_float(values[max(step, 0)]) for values in self._euler]
