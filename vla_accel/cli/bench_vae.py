"""`vla-accel bench-vae`: encoder and decoder of an autoencoder, several systems in turns, with agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_accel.cli.common import PARITY_COLUMNS, finish, parity_cells, print_table, report, say
from vla_accel.cli.image_options import BenchVae
from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import AUTOENCODERS, split_autoencoder
from vla_accel.images.measure import Bench, parity
from vla_accel.images.models import CONFIGS, load_model
from vla_accel.images.picture import AMPLIFIED, compared, scene
from vla_accel.images.vae import AcceleratedVae
from vla_accel.images.vae_component import (
    PROFILES,
    Size,
    parse_size,
    size_key,
    size_text,
    static_sizes,
    vae_component,
)
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on

MSE, COSINE = 1e-3, 0.9995
"""The largest error and the smallest cosine that pass, against float32."""
_COMPILED = ("compile", "inductor", "native-measured")
"""Systems that compile for each size."""
_CONFIGS = {
    "native-measured": {"vae_type": "native", "inductor": "measure"},
    "native-fp16": {"vae_type": "native", "precision": "fp16"},
}


def main(options: BenchVae, words: list[str]) -> int:
    """Run the command; return the exit status."""
    accelerated = next((name for name in options.systems if name not in ("eager", "compile")), None)
    _check(options, accelerated)
    began = time.perf_counter()
    sizes = _sizes(options.sizes)
    bench = _VaeBench(options)
    results = [row for size in sizes for row in bench.size(size)]
    _print(results)
    content = {
        "vae": options.vae,
        "agreement_with": "eager in float32 with the same weights",
        "engines": bench.ledger.as_list(),
        "results": results,
        "picture": bench.picture(sizes[0], accelerated) if options.picture and accelerated else None,
        "errors": bench.errors,
    }
    passed = all(r["passed"] for r in results) and not bench.errors
    return finish(report("bench-vae", options, bench.device, began, passed, content), options.output)


def _check(options: BenchVae, accelerated: str | None) -> None:
    """Raise ConfigError for options that would have no effect."""
    library = next((s for s in options.systems if s.startswith("tensorrt")), None)
    if library and not options.engine_path:
        raise ConfigError(f"engine-path: expected --engine-path FOLDER for {library}, got none")
    compiled = {*_COMPILED} & {*options.systems} or options.compile_sizes == BenchVae.compile_sizes
    for name, fine, expected in (
        ("engine-path", library or not options.engine_path, "tensorrt or tensorrt_rtx"),
        ("multi-profile", library or not options.multi_profile, "tensorrt or tensorrt_rtx"),
        ("compile-sizes", compiled, f"one of {', '.join(_COMPILED)}"),
        ("picture", accelerated or options.picture is None, "an accelerated system"),
    ):
        if not fine:
            raise ConfigError(f"{name}: expected {expected} among --systems, got {', '.join(options.systems)}")


def _sizes(texts: tuple[str, ...]) -> list[Size]:
    groups = {"static": [*static_sizes().values()], "profiles": [*PROFILES]}
    return list(dict.fromkeys(size for text in texts for size in groups.get(text) or [parse_size(text)]))


class _VaeBench(Bench):
    def __init__(self, options: BenchVae) -> None:
        super().__init__(resolve_device(options.device), say)
        self.options, self.dtype = options, DTYPES[options.dtype]
        with going_on(f"loading {options.vae}", say):
            self.vae, self.reference = (
                load_model(options.vae, kinds=AUTOENCODERS, dtype=dtype, device=self.device)
                for dtype in (self.dtype, torch.float32)
            )
        # The same rounded weights, so that agreement judges arithmetic and not the checkpoint's rounding.
        self.reference.load_state_dict({k: v.float() for k, v in self.vae.state_dict().items()})
        self.ledger = Ledger()
        self.half = split_autoencoder(self.vae)[1]
        for size in _sizes(options.sizes):
            vae_component(self.half, "decoder", size)  # refuses a size before another one is measured
        self._accelerated: dict[str, AcceleratedVae] = {}

    @torch.inference_mode()
    def size(self, size: Size) -> list[dict[str, Any]]:
        """Measure every system on both sides at one size."""
        key, frames = size_key(size), (1,) if self.half.frames else ()
        generator = torch.Generator(self.device).manual_seed(1)
        image = torch.rand(1, 3, *frames, *size, generator=generator, device=self.device) * 2 - 1
        shape = (1, self.half.channels[0], *frames, size[0] // self.half.scale, size[1] // self.half.scale)
        latents = torch.randn(shape, generator=generator, device=self.device)
        image, latents = image.to(self.dtype), latents.to(self.dtype)
        late = () if size in map(parse_size, self.options.compile_sizes) else _COMPILED
        with going_on(f"{key}: the systems, and the reference, eager in float32", say):
            references = _diffusers(self.reference, image.float(), latents.float())
            want = {side: run().float() for side, run in references.items()}
            if out := [name for name in self.options.systems if name in late]:
                say(f"{key}: without {', '.join(out)}, which --compile-sizes leaves out at this size")
            systems = {n: self._system(n, image, latents) for n in self.options.systems if n not in late}
        rows: list[dict[str, Any]] = []
        for side in ("encoder", "decoder"):
            runs, name_of = {name: system[side] for name, system in systems.items()}, f"{{}} {side} {key}"
            done = self.first_calls(f"{key} {side}", runs, name_of)
            timings = self.timings({name: runs[name] for name in done}, self.options.rounds)
            for row in self.rows(timings, {"parity": (done, want[side])}, "eager"):
                name = row["system"]
                first_s, passed = self.seconds[name_of.format(name)], parity(done[name], want[side]).passes(MSE, COSINE)
                here = {"size": size_text(size), "key": key, "side": side}
                rows.append({**here, **row, "first_call_s": round(first_s, 2), "passed": passed})
        if self.device.type == "cuda":
            torch.compiler.reset()
        return rows

    def _system(self, name: str, image: Tensor, latents: Tensor) -> dict[str, Callable[[], Tensor]]:
        if name == "eager":
            return _diffusers(self.vae, image, latents)
        if name == "compile":
            # Compiled for this size alone, as a kernel for several sizes would be slower.
            encode, decode = (torch.compile(f, dynamic=False) for f in (self.vae._encode, self.vae._decode))
            return {"encoder": lambda: encode(image), "decoder": lambda: decode(latents).sample}
        if name == "inductor":
            halves = (h.to(memory_format=torch.channels_last) for h in split_autoencoder(self.vae))  # pyright: ignore[reportCallIssue]
            encoder, decoder = (torch.compile(half, dynamic=False) for half in halves)
            return {"encoder": lambda: encoder(image), "decoder": lambda: decoder(latents)}
        if name not in self._accelerated:
            config: dict[str, Any] = _CONFIGS.get(name) or {"vae_type": name}
            if name.startswith("tensorrt"):
                files = {"trt_engine_path": self.options.engine_path, "multi_profile": self.options.multi_profile}
                config = {**config, "trt_vae_config": files}
            self._accelerated[name] = AcceleratedVae(self.vae, config, ledger=self.ledger)
        fast = self._accelerated[name]
        return {"encoder": lambda: fast.encode(image), "decoder": lambda: fast.decode(latents)}

    @torch.inference_mode()
    def picture(self, size: Size, other: str) -> dict[str, Any]:
        """Write the picture that compares `other` with eager; return its content and their agreement."""
        assert self.options.picture is not None
        drawn = scene(size).to(self.device, self.dtype)
        image = drawn[:, :, None] if self.half.frames else drawn
        latents = self.vae.encode(image).latent_dist.mode()
        eager, theirs = self.vae.decode(latents).sample, self._system(other, image, latents)["decoder"]()
        exact = self.reference.decode(latents.float()).sample
        pair = {f"{name} {self.options.dtype}": made for name, made in (("eager", eager), (other, theirs))}
        random = self.options.vae in CONFIGS
        # Random weights decode to faint noise: both are shown over its whole range.
        spread = float(eager.float().flatten()[::101].abs().quantile(0.99)) if random else 1.0
        content = {
            "vae": self.options.vae,
            "size": size_text(size),
            "systems": list(pair),
            "magnified": AMPLIFIED,
            "random_weights": random,
            "parity": parity(theirs, eager).as_dict(),
            "parity_fp32": {name: parity(made, exact).as_dict() for name, made in pair.items()},
        }
        compared(self.options.picture, image, pair, content, contrast=1 / spread)
        return content


def _diffusers(vae: Any, image: Tensor, latents: Tensor) -> dict[str, Callable[[], Tensor]]:
    return {
        "encoder": lambda: vae.encode(image).latent_dist.parameters,
        "decoder": lambda: vae.decode(latents).sample,
    }


def _print(results: list[dict[str, Any]]) -> None:
    totals: dict[tuple[str, str], float] = {}
    for r in results:
        totals[r["size"], r["system"]] = totals.get((r["size"], r["system"]), 0.0) + r["p50_ms"]
    lines: list[list[str]] = []
    for r in results:
        both, eager = totals[r["size"], r["system"]], totals.get((r["size"], "eager"))
        alone = [f"{r['p50_ms']:.2f}", f"{r['speedup']:.2f}x" if r["speedup"] else ""]
        sums = [f"{both:.2f}", f"{eager / both:.2f}x" if eager else ""]
        lines.append([r["size"], r["side"], r["system"], *alone, *sums, *parity_cells(r["parity"])])
    print_table(
        "Autoencoder: median ms of a call; both: encoder + decoder; agreement with float32",
        ["size", "side", "system", "ms", "speed-up", "both ms", "both", *PARITY_COLUMNS],
        lines,
    )
