"""`vla-accel precision MODEL`: compare a model in float32 with BF16 or FP16."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vla_accel import machine
from vla_accel.cli.common import PARITY_COLUMNS, parity_cells, print_json, print_table, say, write_if
from vla_accel.cli.image_options import Precision
from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import AUTOENCODERS, SCALE
from vla_accel.images.measure import parity
from vla_accel.images.models import diffusers_module, filled, load_model
from vla_accel.images.unet import UNET
from vla_accel.measure.reduced_precision import (
    Cost,
    ModuleRange,
    cost,
    dtype_counts,
    inference,
    kept_by,
    overflowing,
    ranges,
    reduce_precision,
)
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on, in_lines

TEXT_ENCODERS = {"qwen-text-encoder": 28, "tiny-qwen-text-encoder": 2}
"""Name to number of layers of Qwen-Image's text encoder, Qwen2.5-VL's language model of 7 billion weights."""


def main(options: Precision, words: list[str]) -> int:
    """Run the command; return the exit status."""
    device, dtype = machine.resolve_device(options.device), DTYPES[options.dtype]
    with going_on(f"loading {options.model}", say):
        wide, call = _model(options, device)
    kept_by(wide, options.keep_fp32)  # refuses an unknown name before the first run
    reference, found, before = _measured(options, "float32", wide, call(wide, torch.float32), device)
    keep = (*options.keep_fp32, *(overflowing(found, dtype) if options.auto_fp32 else ()))
    reduced = copy.deepcopy(wide)
    del wide
    kept = reduce_precision(reduced, options.dtype, keep)
    result, seen, after = _measured(options, options.dtype, reduced, call(reduced, dtype), device)
    agreement = parity(result, reference)
    names = dict.fromkeys((*overflowing(found, dtype), *overflowing(seen, dtype)))
    overflow = [n for n in names if not any(n == k or n.startswith(f"{k}.") for k in kept)]
    summary: dict[str, Any] = {
        "command": "precision",
        "model": options.model,
        "dtype": options.dtype,
        "hardware": machine.hardware(device),
        "software": machine.software(),
        "kept_fp32": kept,
        "parameters": dtype_counts(reduced),
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
        "speedup": before.latency_ms / after.latency_ms,
        "weights_ratio": after.weights_mib / before.weights_mib,
        "peak_ratio": after.peak_mib / before.peak_mib if after.peak_mib and before.peak_mib else None,
        "parity": agreement.as_dict(),
        "overflow": overflow,
        "close": [r.name for r in found if r.state(dtype) == "close"],
    }
    _print(options, found, {r.name: r for r in seen}, summary)
    write_if(options.output, {**summary, "modules": [dataclasses.asdict(r) for r in seen]})
    print_json(summary)
    return 1 if overflow else 0


def _measured(
    options: Precision, dtype: str, model: nn.Module, run: Callable[[], Tensor], device: torch.device
) -> tuple[Tensor, list[ModuleRange], Cost]:
    """Return a call's result, its modules' ranges and its cost, with progress."""
    say(f"{options.model} in {dtype}, timed calls: {options.calls}")
    advance = in_lines(f"{options.model} in {dtype}")

    def counted() -> Tensor:
        result = run()
        advance(1, options.calls + 4)  # two before the timed ones, and two to warm up
        return result

    with inference():
        return counted(), ranges(model, counted), cost(model, counted, device, options.calls)


def _model(options: Precision, device: torch.device) -> tuple[nn.Module, Callable[..., Callable[[], Tensor]]]:
    """Return the model in float32, and `call`: `call(model, dtype)()` runs it on an example and returns one tensor."""
    text = options.model in TEXT_ENCODERS
    unread, expected = ("size", "an image model") if text else ("tokens", "a text encoder")
    if getattr(options, unread) != getattr(Precision, unread):
        raise ConfigError(f"{unread}: expected {expected} with it, got {options.model}")
    if not text and options.size < SCALE:
        raise ConfigError(f"size: expected at least {SCALE}, got {options.size}")
    if text:
        model = text_encoder(options.model, device)
        ids = torch.randint(0, model.config.vocab_size, (1, options.tokens), device=device)
        return model, lambda m, _: lambda: m(input_ids=ids).last_hidden_state.float()
    model = load_model(
        options.model, kinds=(UNET, *AUTOENCODERS), dtype=torch.float32, device=device, also=TEXT_ENCODERS
    )
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    kind, side = type(model).__name__, options.size
    if kind == UNET:
        sample = draw(2, model.config.in_channels, side // SCALE, side // SCALE)
        states, timestep = draw(2, 77, model.config.cross_attention_dim), torch.tensor(481, device=device)
        return model, lambda m, d: lambda: m(sample.to(d), timestep, states.to(d), return_dict=False)[0].float()
    frames = () if kind == "AutoencoderKL" else (1,)
    image = draw(1, 3, *frames, side, side).clamp(-1, 1)
    # An image to latents and back, to run both halves.
    return model, lambda m, d: lambda: m.decode(m.encode(image.to(d)).latent_dist.mode()).sample.float()


def text_encoder(name: str, device: torch.device) -> Any:
    """Make Qwen2.5-VL's language model with random weights, in float32."""
    diffusers_module()
    import transformers

    names = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    sizes = (200, 64, 96, 4, 2) if name.startswith("tiny-") else (152064, 3584, 18944, 28, 4)
    values: dict[str, Any] = dict(zip(names, sizes, strict=True))
    config = transformers.Qwen2Config(num_hidden_layers=TEXT_ENCODERS[name], **values)
    return filled(lambda: transformers.Qwen2Model(config), dtype=torch.float32, device=device)


def _print(options: Precision, found: list[Any], seen: dict[str, Any], summary: dict[str, Any]) -> None:
    dtype = DTYPES[options.dtype]
    largest = sorted(found, key=lambda r: (r.state(dtype) == "ok", -r.largest))[: options.modules]
    print_table(
        f"{options.model}: modules with the largest values (limit of {options.dtype}: {torch.finfo(dtype).max:.3g})",
        ["module", "kind", "weights", "outputs", "largest, fp32", f"largest, {options.dtype}", "state"],
        [
            [r.name, r.kind, s.weights, s.outputs, f"{r.largest:.3g}", f"{s.largest:.3g}", r.state(dtype)]
            for r in largest
            if (s := seen.get(r.name))
        ],
    )
    peak = f"{summary['peak_ratio']:.2f}" if summary["peak_ratio"] else "-"
    print_table(
        "Cost and agreement",
        ["", "weights MiB", "peak MiB", "median ms", *PARITY_COLUMNS],
        [
            ["fp32", *_cells(summary["before"])],
            [options.dtype, *_cells(summary["after"]), *parity_cells(summary["parity"])],
            ["ratio", f"{summary['weights_ratio']:.2f}", peak, f"{summary['speedup']:.2f}x as fast"],
        ],
    )


def _cells(cost: dict[str, Any]) -> tuple[str, str, str]:
    peak = "-" if cost["peak_mib"] is None else f"{cost['peak_mib']:.0f}"
    return f"{cost['weights_mib']:.0f}", peak, f"{cost['latency_ms']:.2f}"
