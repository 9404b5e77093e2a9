"""`vla-accel bench-vae`: encoder and decoder of an autoencoder, several systems in turns, with agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_accel.cli.asked.images import BenchVae
from vla_accel.cli.common import PARITY_COLUMNS, finish, parity_cells, print_table, report, say
from vla_accel.errors import ConfigError
from vla_accel.images.autoencoder import AUTOENCODERS, SCALE, split_autoencoder
from vla_accel.images.measure import Bench, parity
from vla_accel.images.models import CONFIGS, load_model
from vla_accel.images.vae import AcceleratedVae
from vla_accel.images.vae_component import PROFILES, Size, parse_size, size_key, static_sizes
from vla_accel.ledger import Ledger
from vla_accel.machine import resolve_device
from vla_accel.numeric import DTYPES
from vla_accel.progress import going_on

MSE, COSINE = 1e-3, 0.9995
"""The largest error and smallest cosine that pass, against float32: what the guide promises."""


def main(options: BenchVae, words: list[str]) -> int:
    """Run the command; the exit status."""
    device, dtype = resolve_device(options.device), DTYPES[options.dtype]
    if not options.engine_path and (library := next((s for s in options.systems if s.startswith("tensorrt")), None)):
        raise ConfigError(f"engine-path: expected --engine-path FOLDER for {library}, got none")
    _check(options)
    began = time.perf_counter()
    with going_on(f"loading {options.vae}", say):
        vae = load_model(options.vae, kinds=AUTOENCODERS, dtype=dtype, device=device)
        reference = load_model(options.vae, kinds=AUTOENCODERS, dtype=torch.float32, device=device)
    # The same rounded weights, so that agreement judges arithmetic and not the checkpoint's rounding.
    reference.load_state_dict({k: v.float() for k, v in vae.state_dict().items()})
    bench = _Bench(options, vae, reference, device, dtype)
    rows = [bench.size(size) for size in _sizes(options.sizes).values()]
    results = [r for size_rows in rows for r in size_rows]
    _print(results)
    picture = bench.picture() if options.picture else None
    passed = all(r["passed"] for r in results) and not bench.bench.errors
    content = {
        "vae": options.vae,
        "agreement_with": "eager in float32 with the same weights",
        "engines": bench.ledger.as_list(),
        "results": results,
        "picture": picture,
        "errors": bench.bench.errors,
    }
    return finish(report("bench-vae", options, device, began, passed, content), options.output)


def _check(options: BenchVae) -> None:
    """Raise ConfigError for options that would have no effect."""
    if not any(name.startswith("tensorrt") for name in options.systems):
        for name, given in (("engine-path", options.engine_path), ("multi-profile", options.multi_profile)):
            if given:
                raise ConfigError(f"{name}: expected tensorrt or tensorrt_rtx among --systems, got {options.systems}")
    if options.compile_sizes != BenchVae.compile_sizes and not {*_COMPILED} & {*options.systems}:
        raise ConfigError(
            f"compile-sizes: expected one of {', '.join(_COMPILED)} among --systems, got {', '.join(options.systems)}"
        )
    if options.picture is not None and _to_compare(options) is None:
        raise ConfigError(
            f"picture: expected an accelerated system to compare with eager, got {', '.join(options.systems)}"
        )


_COMPILED = ("compile", "inductor", "native-measured")
"""Systems that compile anew at each size."""


def _to_compare(options: BenchVae) -> str | None:
    """The first accelerated system."""
    return next((name for name in options.systems if name not in ("eager", "compile")), None)


class _Bench:
    def __init__(self, options: BenchVae, vae: Any, reference: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.options, self.vae, self.reference, self.device, self.dtype = options, vae, reference, device, dtype
        self.ledger, self.bench = Ledger(), Bench(device, say)
        self.frames = split_autoencoder(vae)[0].frames
        self._accelerated: dict[str, AcceleratedVae] = {}

    def size(self, size: Size) -> list[dict[str, Any]]:
        """Both sides at one size, every system."""
        generator = torch.Generator(self.device).manual_seed(1)
        frames = (1,) if self.frames else ()
        image = torch.rand(1, 3, *frames, *size, generator=generator, device=self.device) * 2 - 1
        channels = self.vae.config.z_dim if self.frames else self.vae.config.latent_channels
        small = (size[0] // SCALE, size[1] // SCALE)
        latents = torch.randn(1, channels, *frames, *small, generator=generator, device=self.device)
        image, latents = image.to(self.dtype), latents.to(self.dtype)
        rows: list[dict[str, Any]] = []
        with torch.inference_mode():
            with going_on(f"{size_key(size)}: the systems, and the reference, eager in float32", say):
                references = self._diffusers(self.reference, image.float(), latents.float())
                want = {side: run().float() for side, run in references.items()}
                all_of_them = size in map(parse_size, self.options.compile_sizes)
                late = () if all_of_them else _COMPILED
                taken = [name for name in self.options.systems if name not in late]
                if out := [name for name in self.options.systems if name in late]:
                    say(f"{size_key(size)}: without {', '.join(out)}, which --compile-sizes leaves out at this size")
                systems = {name: self._system(name, image, latents) for name in taken}
            for side in ("encoder", "decoder"):
                runs = {name: system[side] for name, system in systems.items()}
                key = f"{{}} {side} {size_key(size)}"
                done = self.bench.first_calls(f"{size_key(size)} {side}", runs, key)
                timings = self.bench.timings({name: runs[name] for name in done}, self.options.rounds)
                base = timings.get("eager")
                for name, timing in timings.items():
                    agreement = parity(done[name], want[side])
                    row = {
                        "size": f"{size[1]}x{size[0]}",
                        "key": size_key(size),
                        "side": side,
                        "system": name,
                        **timing,
                        "speedup": base["p50_ms"] / timing["p50_ms"] if base else None,
                        "first_call_s": round(self.bench.seconds[key.format(name)], 2),
                        "parity": agreement.as_dict(),
                        "passed": agreement.passes(MSE, COSINE),
                    }
                    rows.append(row)
        if self.device.type == "cuda":
            torch.compiler.reset()
        return rows

    def _system(self, name: str, image: Tensor, latents: Tensor) -> dict[str, Callable[[], Tensor]]:
        if name == "eager":
            return self._diffusers(self.vae, image, latents)
        if name == "compile":
            # Every size compiles anew: a kernel for many sizes would be slower than the one that is to be beaten.
            encode, decode = (torch.compile(f, dynamic=False) for f in (self.vae._encode, self.vae._decode))
            return {"encoder": lambda: encode(image), "decoder": lambda: decode(latents).sample}
        if name == "inductor":
            encoder, decoder = (h.to(memory_format=torch.channels_last) for h in split_autoencoder(self.vae))  # pyright: ignore[reportCallIssue]
            compiled = torch.compile(encoder, dynamic=False), torch.compile(decoder, dynamic=False)
            return {"encoder": lambda: compiled[0](image), "decoder": lambda: compiled[1](latents)}
        accelerated = self._accelerated.get(name) or AcceleratedVae(self.vae, self._config(name), ledger=self.ledger)
        self._accelerated[name] = accelerated
        return {"encoder": lambda: accelerated.encode(image), "decoder": lambda: accelerated.decode(latents)}

    def _config(self, name: str) -> dict[str, Any]:
        if name == "native-measured":
            return {"vae_type": "native", "inductor": "measure"}
        if name == "native-fp16":
            return {"vae_type": "native", "precision": "fp16"}
        files = {"trt_engine_path": self.options.engine_path or "", "multi_profile": self.options.multi_profile}
        return {"vae_type": name, **({"trt_vae_config": files} if name.startswith("tensorrt") else {})}

    def _diffusers(self, vae: Any, image: Tensor, latents: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "encoder": lambda: vae.encode(image).latent_dist.parameters,
            "decoder": lambda: vae.decode(latents).sample,
        }

    @torch.inference_mode()
    def picture(self) -> dict[str, Any]:
        """Write the picture of the first size; what is on it, and how far its two decodings are apart."""
        from vla_accel.images.picture import AMPLIFIED, compared, scene

        assert self.options.picture is not None
        size = next(iter(_sizes(self.options.sizes).values()))
        other = _to_compare(self.options)
        assert other is not None
        drawn = scene(size).to(self.device, self.dtype)
        image = drawn[:, :, None] if self.frames else drawn
        latents = self.vae.encode(image).latent_dist.mode()
        eager, theirs = self.vae.decode(latents).sample, self._system(other, image, latents)["decoder"]()
        exact = self.reference.decode(latents.float()).sample
        dtype = self.options.dtype
        pair = {f"eager {dtype}": eager, f"{other} {dtype}": theirs}
        random = self.options.vae in CONFIGS
        # Random weights decode to faint noise: shown over the whole range, both alike.
        spread = float(eager.float().flatten()[::101].abs().quantile(0.99)) if random else 1.0
        content = {
            "vae": self.options.vae,
            "size": f"{size[1]}x{size[0]}",
            "systems": list(pair),
            "magnified": AMPLIFIED,
            "random_weights": random,
            "parity": parity(theirs, eager).as_dict(),
            "parity_fp32": {one: parity(image, exact).as_dict() for one, image in pair.items()},
        }
        compared(self.options.picture, image, pair, content, contrast=1 / spread)
        return content


def _sizes(texts: tuple[str, ...]) -> dict[str, Size]:
    found: dict[str, Size] = {}
    for text in texts:
        if text == "static":
            found |= static_sizes()
        elif text == "profiles":
            found |= {size_key(s): s for s in PROFILES}
        else:
            size = parse_size(text)
            found[size_key(size)] = size
    return found


def _print(results: list[dict[str, Any]]) -> None:
    lines: list[list[str]] = []
    totals: dict[tuple[str, str], float] = {}
    for r in results:
        totals[r["size"], r["system"]] = totals.get((r["size"], r["system"]), 0.0) + r["p50_ms"]
    for r in results:
        p, both = r["parity"], totals[r["size"], r["system"]]
        eager = totals.get((r["size"], "eager"))
        lines.append(
            [r["size"], r["side"], r["system"], f"{r['p50_ms']:.2f}", f"{r['speedup']:.2f}x" if r["speedup"] else "",
             f"{both:.2f}", f"{eager / both:.2f}x" if eager else "", *parity_cells(p)]
        )  # fmt: skip
    print_table(
        "Autoencoder: median ms of a call; both: encoder + decoder; agreement with float32",
        ["size", "side", "system", "ms", "speed-up", "both ms", "both", *PARITY_COLUMNS],
        lines,
    )
