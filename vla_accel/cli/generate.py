"""`vla-accel txt2img` and `img2img`: generate an image that stores its parameters."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel import machine
from vla_accel.cli.common import print_json, print_table, say, write_if
from vla_accel.cli.image_options import Dtype, ImageToImage, TextToImage
from vla_accel.config import EngineSpec
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.measure import parity
from vla_accel.images.parts import diffusers_call, make_scheduler, scheduler_class
from vla_accel.images.picture import load_image, save_png
from vla_accel.images.stable import Engines, Request, StableDiffusion
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on, shown


def main(options: TextToImage, words: list[str]) -> int:
    """Generate, save and report; return the exit status."""
    device = machine.resolve_device(options.device)
    dtype = DTYPES[dtype_on(device, options.dtype)]
    request, image = _request(options)
    engines = Engines.all(EngineSpec(engine=options.engine))
    if options.use_trt:
        engines = dataclasses.replace(engines, unet=EngineSpec(engine="tensorrt"))
    with going_on(f"loading {options.sd_dir}", say):
        pipeline = StableDiffusion.from_pretrained(
            options.sd_dir, engines, device=device, dtype=dtype, strict=options.strict
        )
    parts = pipeline.parts
    run = request.run(image is not None)
    steps = f"{run} steps" if run == request.steps else f"{run} of {request.steps} steps"
    say(f"denoising in {steps}")  # the first may take half a minute on a CPU
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
    times: dict[str, dict[str, float]] = report["components"]
    print_table(
        f"{options.out_img_path}: {settings['width']}x{settings['height']}, {steps}",
        ["component", "mean ms", "p50 ms", "share"],
        [[n, f"{v['mean_ms']:.1f}", f"{v['p50_ms']:.1f}", f"{v['share']:.0%}"] for n, v in times.items()],
    )
    print_json(report)
    return 0


def dtype_on(device: torch.device, requested: Dtype | None) -> Dtype:
    """Return the requested dtype, else fp16 on a GPU and fp32 on a CPU, where diffusers warns about fp16."""
    return requested or ("fp16" if device.type == "cuda" else "fp32")


def _request(options: TextToImage) -> tuple[Request, Tensor | None]:
    if options.scheduler is not None:
        scheduler_class(options.scheduler)  # before the model is loaded
    names = {field.name for field in dataclasses.fields(Request)} & set(vars(options))
    request = Request(negative_prompt=options.negative_prompts, **{name: vars(options)[name] for name in names})
    if not isinstance(options, ImageToImage):
        return request, None
    size = None if request.height is None or request.width is None else (request.height, request.width)
    return request, load_image(options.in_img_path, size, multiple=SCALE)


def _compare(
    options: TextToImage, parts: Any, request: Request, image: Tensor | None, pixels: np.ndarray
) -> dict[str, Any]:
    """Save the picture of diffusers' own pipeline for the same request; return its time and agreement."""
    began = time.perf_counter()
    with going_on("denoising in diffusers' own pipeline", say):
        reference = diffusers_call(parts, request, image)()
    seconds = time.perf_counter() - began
    path, settings = options.out_img_path.with_suffix(".pipeline.png"), dataclasses.asdict(request)
    save_png(path, (reference * 255).round().astype(np.uint8), {**settings, "engines": "diffusers"})
    agreement = parity(torch.from_numpy(pixels / 255.0), torch.from_numpy(reference))
    say(f"diffusers' own pipeline: {seconds:.1f} s; cosine of the images {agreement.cosine:.6f}")
    return {"seconds": seconds, "parity": agreement.as_dict()}
