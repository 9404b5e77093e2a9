"""Tables of image models, from the reports of the image benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tables.table import Row, filled, machine, machines, of, table


def _dtype(result: Row) -> str:
    return result["dtype"].upper()


def _sides(result: Row) -> dict[tuple[str, str], dict[str, Any]]:
    """By size and system: the rows of `encoder` and `decoder`, their sum `both` in ms, and the speed-up."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result["results"]:
        key = row["size"], row["system"]
        found.setdefault(key, {"size": key[0], "system": key[1]})[row["side"]] = row
    for row in found.values():
        if "encoder" in row and "decoder" in row:  # the time of one side alone would look like a success
            row["both"] = row["encoder"]["p50_ms"] + row["decoder"]["p50_ms"]
    for (size, _), row in found.items():
        eager = found.get((size, "eager"), {}).get("both")
        row["speedup"] = eager / row["both"] if eager and "both" in row else None
    return found


def autoencoders(result: Row) -> str:
    """Encoder and decoder of an autoencoder by size and system."""
    return table(
        "size = {size} | system = {system} | encoder ms = {encoder[p50_ms]:.2f} | "
        "decoder ms = {decoder[p50_ms]:.2f} | both ms = {both:.2f} | speed-up = {speedup:.1f}× | "
        "encoder cosine = {encoder[parity][cosine]:.6f} | decoder cosine = {decoder[parity][cosine]:.6f}",
        _sides(result).values(),
        f"Median ms of a call, systems alternating; eager in {_dtype(result)}; cosine with FP32 eager. "
        f"{machine(result)}; {result['vae']}, random weights.",
    )


def autoencoder_sizes(result: Row) -> str:
    """Both sides of an autoencoder, a row for each size."""
    sides, rows = _sides(result), []
    for size in dict.fromkeys(size for size, _ in sides):
        mine = {system: row for (other, system), row in sides.items() if other == size}
        ours = [row for row in result["results"] if row["size"] == size and row["system"] != "eager"]
        cosines = [row["parity"]["cosine"] for row in ours if row.get("parity", {}).get("cosine") is not None]
        rows.append({"size": size, **mine, "cosine": min(cosines, default=None)})
    systems = dict.fromkeys(row["system"] for row in result["results"])
    return table(
        {"size": "{size}", **of(systems, "{@[both]:.2f}, {@[speedup]:.1f}×"), "cosine": "{cosine:.6f}"},
        rows,
        f"Median ms of encoder and decoder together, systems alternating; eager in {_dtype(result)}; the lowest cosine "
        f"with FP32 eager of the other systems. {machine(result)}; {result['vae']}, random weights.",
    )


def unets(result: Row) -> str:
    """Stable Diffusion: one UNet call, and whole pictures."""
    titles = {
        "unet": "UNet, one guided call",
        "txt2img": f"txt2img, {result['steps']} steps",
        "img2img": f"img2img, {result['steps']} steps at strength 0.8",
    }
    return table(
        "what = {title} | system = {system} | median ms = {p50_ms:.1f} | speed-up = {speedup:.1f}× | "
        "over torch.compile = {over:.2f}× | cosine with eager FP32 = {parity[cosine]:.6f} | "
        f"cosine with eager {_dtype(result)} = {{parity_eager[cosine]:.6f}}",
        [
            {"title": title, **row, "over": row["speedup_over_compile"] or None}
            for part, title in titles.items()
            for row in result.get(part) or ()
        ],
        f"Median ms; all but eager-fp32 in {_dtype(result)}; over torch.compile: speed-up over its faster mode. "
        "One UNet call shows the error of a system. In an image of many steps the cosine with FP32 shows the effect of "
        f"the dtype, and the cosine with {_dtype(result)} that of the system. {machine(result)}; {result['size']}², "
        "random weights.",
    )


def qwen_images(result: Row) -> str:
    """Qwen-Image with a faster transformer, a faster autoencoder, or both."""
    return table(
        "Qwen-Image = {system} | median ms = {p50_ms:.0f} | speed-up = {speedup:.2f}× | saved ms = {saved_ms:.0f} | "
        "cosine with baseline = {parity[cosine]:.6f}",
        result["results"],
        f"{result['size']}², {result['steps']} steps, {result['layers']} transformer layers, {_dtype(result)}, without "
        f"the text encoder; median ms of a whole call. {machine(result)}, random weights.",
    )


def precisions(results: Sequence[Row]) -> str:
    """Models in BF16 or FP16 compared with FP32."""
    rows = [
        {
            **result,
            "kind": _dtype(result),
            "ratio": result["peak_ratio"] or None,
            "peak": filled("{before[peak_mib]:.0f} → {after[peak_mib]:.0f}", result) if result["peak_ratio"] else None,
            "kept": len(result["kept_fp32"]),
            "overflowed": ", ".join(result["overflow"]) or "none",
        }
        for result in sorted(results, key=lambda result: result["model"])
    ]
    return table(
        "model = {model} | dtype = {kind} | weights MiB = {before[weights_mib]:.0f} → {after[weights_mib]:.0f} | "
        "peak MiB = {peak} | peak ratio = {ratio:.2f} | "
        "median ms = {before[latency_ms]:.1f} → {after[latency_ms]:.1f} | speed-up = {speedup:.2f}× | "
        "cosine = {parity[cosine]:.6f} | kept in FP32 = {kept} | overflow = {overflowed}",
        rows,
        "FP32 → BF16 or FP16, both eager, without engines. "
        f"{machines((result['model'], result) for result in results)}; random weights.",
    )
