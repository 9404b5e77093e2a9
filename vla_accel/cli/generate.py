"""`vla-accel txt2img` and `img2img`: progress, the picture with its parameters, the latency JSON."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel import machine
from vla_accel.cli.asked.images import Dtype, ImageToImage, TextToImage
from vla_accel.cli.common import print_json, print_table, say, write_if
from vla_accel.config import EngineSpec
from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.measure import parity
from vla_accel.images.models import diffusers_module
from vla_accel.images.parts import make_scheduler, scheduler_class
from vla_accel.images.picture import load_image, save_png
from vla_accel.images.stable import Engines, Request, StableDiffusion
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on, shown


def main(options: TextToImage, words: list[str]) -> int:
    """Generate, save, report; the exit status."""
    device = machine.resolve_device(options.device)
    dtype = DTYPES[dtype_on(device, options.dtype)]
    request, image = _request(options)
    if options.out_img_path.suffix.lower() != ".png":
        raise ConfigError(f"out-img-path: expected a .png, got {options.out_img_path.name}")
    with going_on(f"loading {options.sd_dir}", say):
        pipeline = StableDiffusion.from_pretrained(
            options.sd_dir, _engines(options), device=device, dtype=dtype, strict=options.strict
        )
    parts = pipeline.parts
    run = request.run(image is not None)
    steps = f"{run} steps" if run == request.steps else f"{run} of {request.steps} steps"
    say(f"denoising in {steps}")  # of which the first may take half a minute on a CPU
    for call in range(options.calls):
        if call == 1:
            pipeline.latency.clear()
        with shown("denoising") as advance:
            result = pipeline.generate(request, image, on_step=lambda done, total: advance(1, total))
    settings: dict[str, Any] = {
        **dataclasses.asdict(request),
        "height": result.pixels.shape[0],
        "width": result.pixels.shape[1],
        "model": options.sd_dir,
        "dtype": str(dtype).removeprefix("torch."),
        "scheduler": type(make_scheduler(parts.scheduler, request.scheduler)).__name__,
        "engines": {e["component"]: e["used"] for e in pipeline.ledger.as_list() if e["component"] != "call"},
        "software": machine.software(),
    }
    save_png(options.out_img_path, result.pixels, settings)
    report = pipeline.latency_report(run)
    report["image"] = options.out_img_path.name
    if options.use_pipeline:
        report["pipeline"] = _compare(options, parts, request, image, result.pixels)
    write_if(options.latency_json, report)
    parts_ms: dict[str, dict[str, float]] = report["components"]
    print_table(
        f"{options.out_img_path}: {settings['width']}x{settings['height']}, {steps}",
        ["component", "mean ms", "p50 ms", "share"],
        [[n, f"{v['mean_ms']:.1f}", f"{v['p50_ms']:.1f}", f"{v['share']:.0%}"] for n, v in parts_ms.items()],
    )
    print_json(report)
    return 0


def dtype_on(device: torch.device, asked: Dtype | None) -> Dtype:
    """What was asked for; else fp16 on a GPU and fp32 on a CPU, where diffusers warns of fp16."""
    return asked or ("fp16" if device.type == "cuda" else "fp32")


def _request(options: TextToImage) -> tuple[Request, Tensor | None]:
    if options.scheduler is not None:
        scheduler_class(options.scheduler)  # before the model is loaded
    if (options.height is None) != (options.width is None):
        raise ConfigError("size: expected both --height and --width, or neither")
    request = Request(
        options.prompt, options.negative_prompts, options.height, options.width, options.steps, options.guidance,
        seed=options.seed, scheduler=options.scheduler,
    )  # fmt: skip
    if not isinstance(options, ImageToImage):
        return request, None
    size = None if request.height is None or request.width is None else (request.height, request.width)
    image = load_image(options.in_img_path, size, multiple=SCALE)
    return dataclasses.replace(request, strength=options.strength), image


def _engines(options: TextToImage) -> Engines:
    engines = Engines.all(EngineSpec(engine=options.engine))
    return dataclasses.replace(engines, unet=EngineSpec(engine="tensorrt")) if options.use_trt else engines


def _compare(
    options: TextToImage, parts: Any, request: Request, image: Tensor | None, pixels: np.ndarray
) -> dict[str, Any]:
    """diffusers' own pipeline on the same seed and scheduler: saves its picture; time and agreement."""
    parts.scheduler = make_scheduler(parts.scheduler, request.scheduler)
    parts.set_progress_bar_config(disable=True)
    common: dict[str, Any] = {
        "negative_prompt": request.negative_prompt,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
        "generator": torch.Generator("cpu").manual_seed(request.seed),
        "output_type": "np",
    }
    began = time.perf_counter()
    with going_on("denoising in diffusers' own pipeline", say):
        if image is None:
            height, width = pixels.shape[:2]
            made = parts(request.prompt, height=height, width=width, **common)
        else:
            other = diffusers_module().StableDiffusionImg2ImgPipeline(**parts.components, requires_safety_checker=False)
            other.set_progress_bar_config(disable=True)
            made = other(request.prompt, image=image / 2 + 0.5, strength=request.strength, **common)
    seconds = time.perf_counter() - began
    reference = made.images[0]
    save_png(
        options.out_img_path.with_suffix(".pipeline.png"),
        (reference * 255).round().astype(np.uint8),
        {**dataclasses.asdict(request), "engines": "diffusers"},
    )
    agreement = parity(torch.from_numpy(pixels / 255.0), torch.from_numpy(reference))
    say(f"diffusers' own pipeline: {seconds:.1f} s; cosine of the pictures {agreement.cosine:.6f}")
    return {"seconds": seconds, "parity": agreement.as_dict()}
