"""Qwen-Image in diffusers' own pipelines, with our autoencoder and a transformer that is not launched op by op.

The pipelines stay diffusers': `accelerate` exchanges what runs inside and returns what undoes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vla_accel.diffusion.config import VaeConfig
from vla_accel.diffusion.models import diffusers_module, filled, random_model
from vla_accel.diffusion.vae import AcceleratedVae, exchanged, plug_in
from vla_accel.engines.graph import recording
from vla_accel.errors import ConfigError, EngineError, unknown
from vla_accel.ledger import Ledger, LedgerEntry

Transformer = Literal["eager", "compile", "native"]
_KEPT_GRAPHS = 8
LAYERS = 60
"""Of the published transformer: 20 billion weights, 41 GB in BF16."""


def accelerate(
    pipeline: Any,
    vae: VaeConfig | Mapping[str, Any] | str | Path | None = None,
    transformer: Transformer = "eager",
    *,
    ledger: Ledger | None = None,
) -> Callable[[], None]:
    """Speed up a `QwenImagePipeline` or `QwenImageEditPipeline` in place; returns what undoes it.

    `vae`: the autoencoder's configuration, LightX2V's JSON or ours; None leaves it. `transformer`: "compile" is
    torch.compile with mode reduce-overhead, "native" one CUDA graph for each shape.
    """
    if transformer not in get_args(Transformer):
        raise ConfigError(unknown("transformer", transformer, get_args(Transformer)))
    ledger = ledger or Ledger()
    undo: list[Callable[[], None]] = []
    if vae is not None:
        undo.append(plug_in(pipeline.vae, AcceleratedVae(pipeline.vae, vae, ledger=ledger)))
    if transformer == "compile":
        undo.append(_compiled(pipeline.transformer, ledger))
    elif transformer == "native":
        undo.append(_graphed(pipeline.transformer, ledger))

    def undo_all() -> None:
        for restore in reversed(undo):
            restore()

    return undo_all


def random_qwen_image(*, tiny: bool, layers: int = LAYERS, dtype: torch.dtype, device: torch.device) -> Any:
    """A `QwenImagePipeline` of the published sizes (or tiny) with random weights, without its text encoder: call it
    with `prompt_embeds` of `pipeline.transformer.config.joint_attention_dim`."""
    package = diffusers_module()
    config: dict[str, Any] = {"num_layers": layers}
    if tiny:
        config |= {
            "in_channels": 16,
            "out_channels": 4,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "axes_dims_rope": (4, 6, 6),
        }
    return package.QwenImagePipeline(
        scheduler=package.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=random_model("tiny-qwen-vae" if tiny else "qwen-vae", dtype=dtype, device=device),
        text_encoder=None,
        tokenizer=None,
        transformer=filled(lambda: package.QwenImageTransformer2DModel(**config), dtype=dtype, device=device),
    )


@dataclass
class _Recorded:
    graph: Any
    inputs: dict[str, Tensor]
    output: Tensor


class GraphedForward:
    """A module's forward as one CUDA graph a shape, called with keywords; returns new tensors. On a CPU: the forward.

    The least recently used of several shapes is given up. Raises EngineError for a forward that cannot be recorded.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        self._recorded: OrderedDict[str, _Recorded] = OrderedDict()

    @torch.inference_mode()
    def __call__(self, **inputs: Any) -> Any:
        whole = inputs.pop("return_dict", True)
        tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
        rest = {k: v for k, v in inputs.items() if k not in tensors}
        if not all(t.is_cuda for t in tensors.values()):
            return self.forward(**inputs, return_dict=whole)
        key = repr([(k, tuple(t.shape), t.dtype) for k, t in tensors.items()]) + repr(rest)
        if key not in self._recorded:
            self._recorded[key] = self._record(tensors, rest)
            while len(self._recorded) > _KEPT_GRAPHS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(key)
        recorded = self._recorded[key]
        for name, value in tensors.items():
            recorded.inputs[name].copy_(value, non_blocking=True)
        recorded.graph.replay()
        sample = recorded.output.clone()
        if not whole:
            return (sample,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput

        return Transformer2DModelOutput(sample=sample)

    def _record(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> _Recorded:
        static = {k: v.clone() for k, v in tensors.items()}

        def run() -> Tensor:
            return self.forward(**static, **rest, return_dict=False)[0]

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, side):
                output = run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(f"transformer: cannot be recorded as a CUDA graph: {error}") from error
        return _Recorded(graph, static, output)


def _graphed(transformer: Any, ledger: Ledger) -> Callable[[], None]:
    graphed = GraphedForward(transformer)
    ledger.record(LedgerEntry("transformer", "native", "native", "", "CUDA graph of the module as it is"))
    return exchanged(transformer, forward=graphed)


def _compiled(transformer: Any, ledger: Ledger) -> Callable[[], None]:
    plain = transformer.forward
    compiled = torch.compile(plain, mode="reduce-overhead")

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # Its graphs own their outputs: the next call would overwrite what the scheduler still reads.
        torch.compiler.cudagraph_mark_step_begin()
        keywords["return_dict"] = False
        return (compiled(*inputs, **keywords)[0].clone(),)

    ledger.record(LedgerEntry("transformer", "compile", "compile", "", "torch.compile, reduce-overhead"))
    return exchanged(transformer, forward=forward)
