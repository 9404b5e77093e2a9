"""`vla-accel bench-qwen`: Qwen-Image end to end: baseline, faster transformer, faster autoencoder, both; in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_accel.cli.common import PARITY_COLUMNS, finish, parity_cells, print_table, report, say
from vla_accel.cli.image_options import BenchQwen
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images.config import load_vae_config
from vla_accel.images.measure import Bench
from vla_accel.images.models import diffusers_module
from vla_accel.images.qwen import LAYERS, Transformer, accelerate, random_qwen_image
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on

COSINE = 0.999
"""Smallest cosine with the baseline's image that passes."""
TINY_LAYERS = 2
MULTIPLE = 16
"""Pixels per patch of the transformer in each direction: 8 for a latent, 2 latents a patch."""


def main(options: BenchQwen, words: list[str]) -> int:
    """Run the command; return the exit status."""
    if options.size % MULTIPLE:
        raise ConfigError(f"size: expected a multiple of {MULTIPLE}, got {options.size}")
    device, dtype = resolve_device(options.device), DTYPES[options.dtype]
    vae = load_vae_config({"vae_type": options.vae} if not options.vae.endswith(".json") else options.vae)
    if device.type == "cpu" and not options.tiny and options.layers is None:
        raise ConfigError("device: expected a GPU for Qwen-Image's 20 billion weights, --layers N or --tiny, got cpu")
    began, layers = time.perf_counter(), options.layers or (TINY_LAYERS if options.tiny else LAYERS)
    with going_on(f"creating Qwen-Image with {layers} layers", say):
        pipeline = random_qwen_image(tiny=options.tiny, layers=layers, dtype=dtype, device=device)
    if options.edit:
        parts = dict(pipeline.components)
        pipeline = diffusers_module().QwenImageEditPipeline(**parts, processor=None)
    pipeline.set_progress_bar_config(disable=True)
    ledger = Ledger()
    variants: dict[str, tuple[Any, Transformer]] = {"baseline": (None, "eager"), "VAE only": (vae, "eager")}
    for way in options.transformer:
        variants |= {f"transformer only ({way})": (None, way), f"both ({way})": (vae, way)}
    run = _call(options, pipeline, dtype, device)
    systems = {n: _switched(pipeline, *how, ledger, run) for n, how in variants.items()}
    bench = Bench(device, say)
    images = bench.first_calls("Qwen-Image", systems)
    if "baseline" in bench.errors:
        raise EngineError(f"bench-qwen: the baseline failed: {bench.errors['baseline']}")
    systems = {n: systems[n] for n in images}
    memory = {n: bench.peak_gib(system) for n, system in systems.items()}
    timings = bench.timings(systems, options.rounds, warm_up=1)
    rows = bench.rows(timings, {"parity": (images, images["baseline"])}, "baseline")
    for row in rows:
        row |= {"saved_ms": rows[0]["p50_ms"] - row["p50_ms"], "peak_gib": memory[row["system"]]}
    passed = all((r["parity"]["cosine"] or 0.0) > COSINE for r in rows) and not bench.errors
    content = {name: getattr(options, name) for name in ("size", "steps", "tiny", "edit")}
    content |= {"layers": layers, "engines": ledger.as_list(), "results": rows, "errors": bench.errors}
    name = "Qwen-Image Edit" if options.edit else "Qwen-Image"
    print_table(
        f"{name}, {options.size}², {options.steps} steps, {layers} layers; agreement with the baseline",
        ["system", "median ms", "speed-up", "saved ms", "peak GiB", *PARITY_COLUMNS],
        [
            [r["system"], f"{r['p50_ms']:.1f}", f"{r['speedup']:.2f}x", f"{r['saved_ms']:.1f}",
             "-" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}", *parity_cells(r["parity"])]
            for r in rows
        ],
    )  # fmt: skip
    return finish(report("bench-qwen", options, device, began, passed, content), options.output)


def _call(options: BenchQwen, pipeline: Any, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    width = pipeline.transformer.config.joint_attention_dim
    embeds = torch.randn(1, options.tokens, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    mask = torch.ones(1, options.tokens, dtype=torch.int64, device=device)
    extra: dict[str, Any] = {"height": options.size, "width": options.size}
    if options.edit:
        from PIL import Image

        noise = torch.rand(options.size, options.size, 3, generator=torch.Generator().manual_seed(2))
        extra |= {"image": Image.fromarray((noise * 255).byte().numpy())}

    def run() -> Tensor:
        made = pipeline(
            prompt_embeds=embeds,
            prompt_embeds_mask=mask,
            true_cfg_scale=1.0,
            num_inference_steps=options.steps,
            generator=torch.Generator("cpu").manual_seed(0),
            output_type="pt",
            **extra,
        )
        return made.images[0]

    return run


def _switched(
    pipeline: Any, vae: Any, transformer: Transformer, ledger: Ledger, run: Callable[[], Tensor]
) -> Callable[[], Tensor]:
    """A variant whose forwards are in the pipeline during its calls only, so that all variants share the weights."""
    state: dict[str, Any] = {}
    parts = {"vae": ("encode", "decode"), "transformer": ("forward",)}

    def system() -> Tensor:
        if not state:
            accelerate(pipeline, vae, transformer, ledger=ledger)
        else:
            for part, own in state.items():
                getattr(pipeline, part).__dict__.update(own)
        try:
            return run()
        finally:
            for part, names in parts.items():
                own = getattr(pipeline, part).__dict__
                state[part] = {n: own.pop(n) for n in names if n in own}

    return system
