"""`vla-accel bench-unet`: Stable Diffusion, whole images and single UNet calls, several systems."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vla_accel.cli.common import PARITY_COLUMNS, finish, parity_cells, print_table, report, say, write_if
from vla_accel.cli.generate import dtype_on
from vla_accel.cli.image_options import BenchUnet
from vla_accel.config import EngineSpec
from vla_accel.errors import ConfigError, EngineError
from vla_accel.images.autoencoder import SCALE
from vla_accel.images.measure import Bench
from vla_accel.images.parts import diffusers_call, found_unet_file, load_parts
from vla_accel.images.picture import side_by_side
from vla_accel.images.stable import Engines, Request, StableDiffusion
from vla_accel.images.unet import TEXT_TOKENS
from vla_accel.machine import resolve_device
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on

COSINE = 0.9995
"""The smallest cosine of a UNet call that passes, against float32."""


def main(options: BenchUnet, words: list[str]) -> int:
    """Run the command; return the exit status."""
    if options.size % SCALE:
        raise ConfigError(f"size: expected a multiple of {SCALE}, got {options.size}")
    bench = _UnetBench(options)
    with torch.inference_mode():
        bench.measure("unet", "UNet, one call (guidance pair)", bench.unet_calls)
        for part, image in {"txt2img": None, **({"img2img": bench.input_image()} if options.img2img else {})}.items():
            title = f"{part}, {options.size}², {options.steps} steps"
            bench.measure(part, title, functools.partial(bench.pictures, image))
    return finish(bench.summary(), options.output)


class _UnetBench(Bench):
    def __init__(self, options: BenchUnet) -> None:
        super().__init__(resolve_device(options.device), say)
        self.began = time.perf_counter()
        dtype = dtype_on(self.device, options.dtype)
        self.options, self.dtype = replace(options, dtype=dtype), DTYPES[dtype]
        with going_on(f"loading {options.sd_dir}", say):
            self.parts, self.wide = (
                load_parts(options.sd_dir, device=self.device, dtype=dtype) for dtype in (self.dtype, torch.float32)
            )
        for name in ("unet", "vae", "text_encoder"):
            # The same rounded weights: agreement judges arithmetic, not the checkpoint's rounding.
            rounded = getattr(self.parts, name).state_dict()
            getattr(self.wide, name).load_state_dict({k: v.float() for k, v in rounded.items()}, strict=False)
        self._ours: dict[str, StableDiffusion] = {}
        self._compiled: dict[str, Any] = {}
        self._latents: dict[str, Tensor] = {}
        self._rows_of: dict[str, list[dict[str, Any]]] = {}

    def measure(self, part: str, title: str, run: Callable[[], list[dict[str, Any]]]) -> None:
        """Measure one part, print its table and write the report: a process that dies leaves the results so far."""
        self.errors[part] = "not finished"
        self._rows_of[part] = run()
        del self.errors[part]
        _print(title, self._rows_of[part])
        write_if(self.options.output, self.summary())

    def summary(self) -> dict[str, Any]:
        """Return the report on the results so far."""
        unets = self._rows_of.get("unet", [])
        passed = all((r["parity"]["cosine"] or 0.0) > COSINE for r in unets) and not self.errors
        content = {
            "model": self.options.sd_dir,
            "size": self.options.size,
            "steps": self.options.steps,
            "agreement_with": {
                "parity": "eager in float32, the same weights",
                "parity_eager": f"eager in {self.options.dtype}",
                "latents": "of the last step: eager in float32",
                "latents_eager": f"of the last step: eager in {self.options.dtype}",
            },
            "engines": [entry for ours in self._ours.values() for entry in ours.ledger.as_list()],
            "first_calls_s": {n: round(s, 2) for n, s in self.seconds.items()},
            **self._rows_of,
            "breakdown": {n: o.latency_report(self.options.steps)["components"] for n, o in self._ours.items()},
            "errors": self.errors,
        }
        return report("bench-unet", self.options, self.device, self.began, passed, content)

    def _first(self, task: str, runs: dict[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
        results = self.first_calls(task, runs, f"{task} {{}}")
        write_if(self.options.output, self.summary())
        return results

    def unet_calls(self) -> list[dict[str, Any]]:
        """Measure every system's UNet on one guidance pair."""
        side = self.options.size // SCALE
        config = self.parts.unet.config
        generator = torch.Generator(self.device).manual_seed(1)
        one = torch.randn(1, config.in_channels, side, side, generator=generator, device=self.device).to(self.dtype)
        shape = (2, TEXT_TOKENS, config.cross_attention_dim)
        states = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        sample, timestep = torch.cat((one, one)), torch.tensor(481, device=self.device)
        with going_on("unet: the systems, and the reference, eager in float32", say):
            runs = {n: self._unet(n, sample, timestep, states) for n in self.options.systems}
            want = self.wide.unet(sample.float(), timestep, states.float(), return_dict=False)[0]
        done = self._first("unet", runs)
        timings = self.timings({n: runs[n] for n in done}, self.options.unet_rounds)
        return self._rows(timings, {"parity": (done, want), "parity_eager": (done, done.get("eager"))})

    def _unet(self, name: str, sample: Tensor, timestep: Tensor, states: Tensor) -> Callable[[], Tensor]:
        if name == "eager-fp32":
            a, b = sample.float(), states.float()
            return lambda: self.wide.unet(a, timestep, b, return_dict=False)[0]
        if name in ("eager", "compile", "compile-graphs"):
            unet = self._compile(name)
            # Graphs of torch.compile own their output, which the next call overwrites.
            return lambda: unet(sample, timestep, states, return_dict=False)[0].clone()
        stage = self._our(name).unet_stage((self.options.size, self.options.size), guided=True)
        return lambda: stage(sample=sample, timestep=timestep, encoder_hidden_states=states)["noise"]

    def _compile(self, name: str) -> Any:
        if name == "eager":
            return self.parts.unet
        if name not in self._compiled:
            # Channels-last, as users of torch.compile set it; a copy, since eager keeps its layout.
            unet = copy.deepcopy(self.parts.unet).to(memory_format=torch.channels_last)
            mode = "reduce-overhead" if name == "compile-graphs" else None
            self._compiled[name] = torch.compile(unet, mode=mode, dynamic=False)
        return self._compiled[name]

    def input_image(self) -> Tensor:
        """A seeded picture to start from, (1, 3, H, W) in -1..1."""
        generator = torch.Generator().manual_seed(2)
        return torch.rand(1, 3, self.options.size, self.options.size, generator=generator) * 2 - 1

    def pictures(self, image: Tensor | None) -> list[dict[str, Any]]:
        """Measure every system's whole call."""
        runs = {n: self._picture(n, image) for n in self.options.systems}
        task = "txt2img" if image is None else "img2img"
        self._latents.clear()
        results = self._first(task, runs)
        runs = {n: runs[n] for n in results}
        if not results:
            reasons = [text for name, text in self.errors.items() if name.startswith(f"{task} ")]
            raise EngineError(f"{task}: no system generated an image: {'; '.join(reasons)}")
        memory = {n: self.peak_gib(run) for n, run in runs.items()}
        reference = results.get("eager-fp32", results[next(iter(results))])
        latents = {n: self._latents[n] for n in results}
        compared = {
            "parity": (results, reference),
            "parity_eager": (results, results.get("eager")),
            "latents": (latents, latents.get("eager-fp32")),
            "latents_eager": (latents, latents.get("eager")),
        }
        timings = self.timings(runs, self.options.rounds, warm_up=1)
        if self.options.picture is not None and image is None:
            last = results[list(results)[-1]]
            side_by_side(self.options.picture, [(r * 2 - 1).permute(2, 0, 1)[None] for r in (reference, last)])
        rows = self._rows(timings, compared)
        for row in rows:
            name = row["system"]
            row |= {"peak_gib": memory[name], "first_call_s": round(self.seconds[f"{task} {name}"], 2)}
        return rows

    def _picture(self, name: str, image: Tensor | None) -> Callable[[], Tensor]:
        size, steps, seed = self.options.size, self.options.steps, self.options.seed
        request = Request("a red bowl on a table", "blur", size, size, steps, seed=seed)
        if name in ("native", "tensorrt", "tensorrt_rtx"):
            ours = self._our(name)

            def generate() -> Tensor:
                made = ours.generate(request, image)
                self._latents.setdefault(name, made.latents.float().cpu())
                return torch.from_numpy(made.pixels / 255.0)

            return generate
        call = (
            diffusers_call(self.wide, request, image)
            if name == "eager-fp32"
            else diffusers_call(self.parts, request, image, unet=self._compile(name))
        )
        last: dict[str, Any] = {}

        def run() -> Tensor:
            # The first call is compared, the others are timed.
            if name in self._latents:
                return torch.from_numpy(call())
            with _Drawn(self.dtype):
                made = call(callback_on_step_end=lambda *values: last.update(values[-1]) or {})
            self._latents[name] = last["latents"].float().cpu()
            return torch.from_numpy(made)

        return run

    def _our(self, name: Any) -> StableDiffusion:
        if name not in self._ours:
            engines = replace(Engines.all(EngineSpec("native")), unet=EngineSpec(engine=name))
            file = found_unet_file(self.options.sd_dir, engines.unet)
            self._ours[name] = StableDiffusion(self.parts, engines, unet_file=file)
        return self._ours[name]

    def _rows(self, timings: Any, compared: dict[str, tuple[dict[str, Tensor], Tensor | None]]) -> list[dict[str, Any]]:
        """Return the rows of results; `compared`: name of an agreement to the results and their reference."""
        # The faster of torch.compile's two modes.
        compiled = min((timings[n]["p50_ms"] for n in ("compile", "compile-graphs") if n in timings), default=None)
        rows = self.rows(timings, compared, next(iter(timings), ""))
        for row in rows:
            row["speedup_over_compile"] = compiled / row["p50_ms"] if compiled else None
        return rows


class _Drawn(TorchFunctionMode):
    """In this block generators draw normal noise in one dtype, whatever dtype is requested."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.randn or kwargs.get("generator") is None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "dtype": self.dtype}).to(kwargs.get("dtype") or torch.get_default_dtype())


def _print(title: str, rows: list[dict[str, Any]]) -> None:
    def line(r: dict[str, Any]) -> list[str]:
        over = f"{r['speedup_over_compile']:.2f}x" if r["speedup_over_compile"] else ""
        same = r.get("parity_eager") or {"cosine": None}
        cosine = "-" if same["cosine"] is None else f"{same['cosine']:.6f}"
        return [r["system"], f"{r['p50_ms']:.2f}", f"{r['speedup']:.2f}x", over, *parity_cells(r["parity"]), cosine]

    columns = ["system", "median ms", "speed-up", "over compile", *PARITY_COLUMNS, "with eager"]
    print_table(f"{title}; agreement with float32", columns, [line(r) for r in rows])
