"""Tables of image models, from what the image benchmarks store."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import machine, machines, rows


def autoencoders(result: dict[str, Any]) -> str:
    """An autoencoder's systems, a row each size and system: both sides, together against eager, agreement."""
    sides, both = _sides(result)
    body = []
    for (size, system), found in sides.items():
        body.append([
            size,
            system,
            *(f"{found[s]['p50_ms']:.2f}" if s in found else "-" for s in ("encoder", "decoder")),
            *[*_both(both, size, system).split(", "), "-"][:2],
            *(_cosine(found.get(s)) for s in ("encoder", "decoder")),
        ])  # fmt: skip
    header = ["size", "system", "encoder ms", "decoder ms", "both ms", "speed-up", "encoder cosine", "decoder cosine"]
    text = f"Median ms of a call in turns; eager in {_dtype(result)}; cosine with FP32 eager."
    return rows(header, body) + f"\n{text} {machine(result)}; {result['vae']}, random weights.\n"


def autoencoder_sizes(result: dict[str, Any]) -> str:
    """An autoencoder at many sizes, a row each: encoder and decoder together, by system, and the worst agreement."""
    sides, both = _sides(result)
    systems = list(dict.fromkeys(system for _, system in sides))
    body = []
    for size in dict.fromkeys(size for size, _ in sides):
        ours = [r for (z, s), found in sides.items() if z == size and s != "eager" for r in found.values()]
        worst = min((_cosine(r) for r in ours), default="-")
        body.append([size, *(_both(both, size, s) for s in systems), worst])
    text = f"Median ms of encoder and decoder together, in turns; eager in {_dtype(result)}; the worst cosine with FP32"
    header = ["size", *systems, "cosine"]
    return rows(header, body) + f"\n{text} eager but eager's own. {machine(result)}; {result['vae']}, random weights.\n"


_Sides = dict[tuple[str, str], dict[str, dict[str, Any]]]


def _sides(result: dict[str, Any]) -> tuple[_Sides, dict[tuple[str, str], float]]:
    """By size and system: the rows of both sides, and their sum in ms."""
    sides: _Sides = {}
    for r in result["results"]:
        sides.setdefault((r["size"], r["system"]), {})[r["side"]] = r
    # A side that failed would make the sum of the other look like a success.
    return sides, {k: sum(r["p50_ms"] for r in s.values()) for k, s in sides.items() if len(s) == 2}


def _both(both: dict[tuple[str, str], float], size: str, system: str) -> str:
    if (size, system) not in both:
        return "-"
    eager = both.get((size, "eager"))
    return f"{both[size, system]:.2f}" + (f", {eager / both[size, system]:.1f}×" if eager else "")


def unets(result: dict[str, Any]) -> str:
    """Stable Diffusion's systems: one guided UNet call, and whole pictures; agreement with two references."""
    titles = {
        "unet": "UNet, one guided call",
        "txt2img": f"txt2img, {result['steps']} steps",
        "img2img": f"img2img, {result['steps']} steps at strength 0.8",
    }
    body = []
    for part, title in titles.items():
        for r in result.get(part) or []:
            over = r["speedup_over_compile"]
            body.append([
                title,
                r["system"],
                f"{r['p50_ms']:.1f}",
                f"{r['speedup']:.1f}×",
                f"{over:.2f}×" if over else "-",
                _cosine(r),
                _cosine(r, "parity_eager"),
            ])  # fmt: skip
    dtype = _dtype(result)
    cosines = ["cosine with eager FP32", f"cosine with eager {dtype}"]
    text = (
        f"Median ms; all but eager-fp32 in {dtype}; over torch.compile: over the faster of its modes. One UNet call "
        "shows a system's error; a picture of many steps, what the dtype made of it (with FP32) and what the system "
        f"added (with {dtype})."
    )
    header = ["what", "system", "median ms", "speed-up", "over torch.compile", *cosines]
    return rows(header, body) + f"\n{text} {machine(result)}; {result['size']}², random weights.\n"


def qwen_images(result: dict[str, Any]) -> str:
    """Qwen-Image end to end: the parts made faster one by one, and together."""
    body = [
        [r["system"], f"{r['p50_ms']:.0f}", f"{r['speedup']:.2f}×", f"{r['saved_ms']:.0f}", _cosine(r)]
        for r in result["results"]
    ]
    text = (
        f"{result['size']}², {result['steps']} steps, {result['layers']} transformer layers, {_dtype(result)}, without "
        "the text encoder; median ms of a whole call"
    )
    header = ["Qwen-Image", "median ms", "speed-up", "saved ms", "cosine with baseline"]
    return rows(header, body) + f"\n{text}. {machine(result)}, random weights.\n"


def precisions(results: list[dict[str, Any]]) -> str:
    """Several `vla-accel precision` reports, a row each: memory, latency and agreement, FP32 and BF16 or FP16."""
    body = []
    for r in sorted(results, key=lambda r: r["model"]):
        full, reduced = r["before"], r["after"]
        peak = f"{full['peak_mib']:.0f} → {reduced['peak_mib']:.0f}" if r["peak_ratio"] else "-"
        body.append([
            r["model"],
            _dtype(r),
            f"{full['weights_mib']:.0f} → {reduced['weights_mib']:.0f}",
            peak,
            f"{r['peak_ratio']:.2f}" if r["peak_ratio"] else "-",
            f"{full['latency_ms']:.1f} → {reduced['latency_ms']:.1f}",
            f"{r['speedup']:.2f}×",
            _cosine(r),
            str(len(r["kept_fp32"])),
            ", ".join(r["overflow"]) or "none",
        ])  # fmt: skip
    memory = ["weights MiB", "peak MiB", "peak ratio"]
    header = ["model", "dtype", *memory, "median ms", "speed-up", "cosine", "kept in FP32", "overflow"]
    where = machines((r["model"], r) for r in results)
    return rows(header, body) + f"\nFP32 → BF16 or FP16, eager both, without engines. {where}; random weights.\n"


def _cosine(row: dict[str, Any] | None, name: str = "parity") -> str:
    value = (row or {}).get(name, {}).get("cosine")
    return "-" if value is None else f"{value:.6f}"


def _dtype(result: dict[str, Any]) -> str:
    return result["dtype"].upper()
