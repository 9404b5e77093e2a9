"""The denoise loop in one launch: which loops and GPUs it is for, its constants, its buffers and its launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from vla_accel.errors import EngineError
from vla_accel.kernels import nvrtc
from vla_accel.kernels.activation import Activation
from vla_accel.kernels.gemm.weights import Linear
from vla_accel.kernels.gpu import Gpu
from vla_accel.kernels.loop.tables import ExpertSpec, StepTables
from vla_accel.kernels.persistent.arguments import Call, Model
from vla_accel.kernels.persistent.plan import CHUNK, HOP_STRIDE, HOPS, MOST_ROWS, THREADS, Plan
from vla_accel.kernels.rows.rows import rope_tables
from vla_accel.kernels.struct import address
from vla_accel.numeric import round_up

Layer = Iterable[Linear]
"""The products of a layer: q/k/v, output, gate and up, down."""


def why_not(gpu: Gpu | None, spec: ExpertSpec, batch: int, precision: str) -> str | None:
    """Explain why the kernel does not run this loop; None if it does. `precision`: of the layers' weights."""
    if gpu is None:
        return "there is no GPU"
    if not gpu.bf16:
        return f"it needs compute capability 8.0, {gpu.name} has {gpu.version}"
    if precision != "bf16":
        return f"it needs BF16 weights, got {precision.upper()}"
    if batch * spec.tokens > MOST_ROWS:
        return f"{batch} x {spec.tokens} suffix rows are more than {MOST_ROWS}"
    if spec.causal or spec.self_every != 1 or spec.activation is not Activation.GEGLU:
        return "it needs GEGLU, and layers that all attend to the whole suffix"
    odd = (spec.width % 32, spec.mlp_dim % 32, spec.head_dim % 64)
    if any(odd) or spec.head_dim > 256 or spec.width != spec.model_width:
        return "its tiles do not fit these widths"
    plan = Plan(spec, batch, 1, False, gpu)
    if plan.stages < plan.least_stages:
        shared = f"{gpu.shared_per_block} bytes of shared memory"
        return f"its ring needs {plan.least_stages} stages, {shared} hold {plan.stages}"
    return None


def why_not_resident(plan: Plan, module: nvrtc.Module) -> str | None:
    """Explain that the device does not run all blocks at once; None if it does."""
    held = module.blocks_at_once("denoise", THREADS)
    return None if held >= plan.blocks else f"its {plan.blocks} blocks must run at once, the device holds {held}"


class PersistentLoop:
    """The loaded kernel, and its buffers for a number of prefix tokens. Used like `LayerLoop`.

    Raises:
        NotResident: if the device does not run all blocks at once.
    """

    reads_by_layer = False

    def __init__(
        self, plan: Plan, layers: Sequence[Layer], tables: StepTables, output: tuple[Tensor, Tensor],
        mix: Linear | None, prefix_tokens: int,
    ) -> None:  # fmt: skip
        """`output`: weight (A, W) and bias (A,) of the velocity, float32."""
        spec, device = plan.spec, output[0].device
        self.plan, self.prefix_tokens, self.steps = plan, prefix_tokens, plan.steps
        # Compiled for the device itself: with portable kernels the plan's GPU has another architecture.
        architecture = (Gpu.of(device) or plan.gpu).architecture
        self.module = nvrtc.load_module(plan.source, {"denoise": plan.shared}, architecture, device)
        reason = why_not_resident(plan, self.module)
        if reason is not None:
            raise NotResident(reason)
        products = [product for layer in layers for product in layer] + ([] if mix is None else [mix])
        self.buffers = buffers(plan, prefix_tokens, device)
        self.constants = constants(plan, products, tables, output, mix, prefix_tokens)
        self.weights = [product.weight for product in products]  # Kept alive: the kernel sees bare addresses.
        self._model = Model(**{n: address(n, t) for n, t in self.constants.items()}, eps=spec.eps)

    def run(self, inputs: Mapping[str, Tensor], state_token: Tensor | None, actions: Tensor) -> None:
        """Enqueue the loop: `actions` (B, H, A) float32 hold the noise and are integrated in place."""
        call = Call(
            **{n: address(n, inputs[n], 16 if n in ("keys", "values") else 4)
               for n in ("keys", "values", "lengths", "target")},
            follow=address("weights", inputs["weights"], 4), state=address("state", state_token, 8),
            actions=address("actions", actions, 4), prefix_tokens=self.prefix_tokens,
            **{n: address(n, t) for n, t in self.buffers.items()},
        )  # fmt: skip
        self.module.launch("denoise", self.plan.blocks, THREADS, (self._model, call), cooperative=True)


class NotResident(EngineError):
    """A kernel whose blocks wait for each other does not fit on the device at once."""


def buffers(plan: Plan, prefix_tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Allocate the buffers that blocks exchange. The padding of a product's input stays zero."""
    spec, rows, items = plan.spec, plan.rows, plan.items(prefix_tokens)

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def operand(columns: int) -> Tensor:
        return zeros(round_up(columns, CHUNK) // 32, rows, 32)

    return {
        "x": operand(spec.width), "embedded": operand(spec.width),
        "context": operand(spec.heads * spec.head_dim), "active": operand(spec.mlp_dim),
        "q": zeros(rows, spec.heads, spec.head_dim), "k": zeros(rows, spec.kv_heads, spec.head_dim),
        "v": zeros(rows, spec.kv_heads, spec.head_dim),
        "squares": zeros(spec.width // 8, MOST_ROWS, dtype=torch.float32),
        "parts": zeros(items, spec.tokens, spec.head_dim, dtype=torch.float32),
        "statistics": zeros(items, MOST_ROWS, 2, dtype=torch.float32),
        "arrivals": zeros(HOPS, HOP_STRIDE, dtype=torch.int32),
    }  # fmt: skip


def constants(
    plan: Plan, products: Sequence[Linear], tables: StepTables, output: tuple[Tensor, Tensor], mix: Linear | None,
    prefix_tokens: int,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Return the tensors of `Model`."""
    (w_out, b_out), spec, steps = output, plan.spec, tables.steps
    device = w_out.device
    out_shift = b_out.double().expand(steps, -1)
    if tables.final_shift is not None:
        # A row for t = 0 may follow those of the steps; no velocity needs it.
        out_shift = out_shift + tables.final_shift[:steps].double() @ w_out.double().T
    addresses = [address("weight", product.weight) for product in products]
    cos, sin = rope_tables(prefix_tokens + spec.tokens, spec.head_dim, device)
    schedule = torch.tensor([tables.dts, tables.times, tables.gains], dtype=torch.float32)
    return {
        "weights": torch.tensor(addresses, dtype=torch.int64, device=device),
        "in_scale": tables.input_scale, "in_shift": tables.input_shift, "in_gate": tables.input_gate,
        "post_scale": tables.post_scale, "post_shift": tables.post_shift, "post_gate": tables.post_gate,
        "final_scale": tables.final_scale, "out_shift": out_shift.float().contiguous(),
        "w_out": w_out.contiguous(), "w_in": tables.w_in, "b_in": tables.b_in,
        "mix_bias": None if mix is None or mix.bias is None else mix.bias.float().contiguous(),
        "cos": cos, "sin": sin, "schedule": schedule.to(device),
    }  # fmt: skip
