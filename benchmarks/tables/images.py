"""Tables of image models, from the reports of the image benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.tables.table import Cell, Row, Table, columns, filled, machine, machines, of

COSINE = "{parity[cosine]:.6f}"


def _dtype(result: Row) -> str:
    return result["dtype"].upper()


# -- autoencoders -------------------------------------------------------------------------------------------------


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


autoencoders = Table(
    "size = {size} | system = {system} | encoder ms = {encoder[p50_ms]:.2f} | "
    "decoder ms = {decoder[p50_ms]:.2f} | both ms = {both:.2f} | speed-up = {speedup:.1f}× | "
    "encoder cosine = {encoder[parity][cosine]:.6f} | decoder cosine = {decoder[parity][cosine]:.6f}",
    lambda result: _sides(result).values(),
    lambda result: (
        f"Median ms of a call, in turns; eager in {_dtype(result)}; cosine with FP32 eager. {machine(result)}; "
        f"{result['vae']}, random weights."
    ),
)


def _sizes(result: Row) -> Iterator[dict[str, Any]]:
    """A row for each size: each system's row, and the lowest cosine of a system other than eager."""
    sides = _sides(result)
    for size in dict.fromkeys(size for size, _ in sides):
        mine = {system: row for (other, system), row in sides.items() if other == size}
        ours = [row for row in result["results"] if row["size"] == size and row["system"] != "eager"]
        cosines = [row["parity"]["cosine"] for row in ours if row.get("parity", {}).get("cosine") is not None]
        yield {"size": size, **mine, "cosine": min(cosines, default=None)}


def _size_columns(result: Row) -> dict[str, Cell]:
    systems = dict.fromkeys(row["system"] for row in result["results"])
    return {"size": "{size}", **of(systems, "{@[both]:.2f}, {@[speedup]:.1f}×"), "cosine": "{cosine:.6f}"}


autoencoder_sizes = Table(
    _size_columns,
    _sizes,
    lambda result: (
        f"Median ms of encoder and decoder together, in turns; eager in {_dtype(result)}; the lowest cosine with FP32 "
        f"eager of the other systems. {machine(result)}; {result['vae']}, random weights."
    ),
)

# -- Stable Diffusion and Qwen-Image ------------------------------------------------------------------------------


def _unets(result: Row) -> Iterator[dict[str, Any]]:
    titles = {
        "unet": "UNet, one guided call",
        "txt2img": f"txt2img, {result['steps']} steps",
        "img2img": f"img2img, {result['steps']} steps at strength 0.8",
    }
    for part, title in titles.items():
        for row in result.get(part) or ():
            yield {"title": title, **row, "speedup_over_compile": row["speedup_over_compile"] or None}


unets = Table(
    lambda result: {
        **columns(
            "what = {title} | system = {system} | median ms = {p50_ms:.1f} | speed-up = {speedup:.1f}× | "
            "over torch.compile = {speedup_over_compile:.2f}×"
        ),
        "cosine with eager FP32": COSINE,
        f"cosine with eager {_dtype(result)}": "{parity_eager[cosine]:.6f}",
    },
    _unets,
    lambda result: (
        f"Median ms; all but eager-fp32 in {_dtype(result)}; over torch.compile: over the faster of its modes. One "
        "UNet call shows the error of a system. In a picture of many steps the cosine with FP32 shows the effect of "
        f"the dtype, and the cosine with {_dtype(result)} that of the system. {machine(result)}; {result['size']}², "
        "random weights."
    ),
)

qwen_images = Table(
    {
        **columns(
            "Qwen-Image = {system} | median ms = {p50_ms:.0f} | speed-up = {speedup:.2f}× | saved ms = {saved_ms:.0f}"
        ),
        "cosine with baseline": COSINE,
    },
    lambda result: result["results"],
    lambda result: (
        f"{result['size']}², {result['steps']} steps, {result['layers']} transformer layers, {_dtype(result)}, without "
        f"the text encoder; median ms of a whole call. {machine(result)}, random weights."
    ),
)

PEAK = "{before[peak_mib]:.0f} → {after[peak_mib]:.0f}"
precisions = Table(
    {
        **columns(
            "model = {model} | dtype = {kind} | "
            "weights MiB = {before[weights_mib]:.0f} → {after[weights_mib]:.0f} | peak MiB = {peak} | "
            "peak ratio = {ratio:.2f} | median ms = {before[latency_ms]:.1f} → {after[latency_ms]:.1f} | "
            "speed-up = {speedup:.2f}×"
        ),
        "cosine": COSINE,
        "kept in FP32": "{kept}",
        "overflow": "{overflowed}",
    },
    lambda results: [
        {
            **result,
            "kind": _dtype(result),
            "ratio": result["peak_ratio"] or None,
            "peak": filled(PEAK, result) if result["peak_ratio"] else None,
            "kept": len(result["kept_fp32"]),
            "overflowed": ", ".join(result["overflow"]) or "none",
        }
        for result in sorted(results, key=lambda result: result["model"])
    ],
    lambda results: (
        "FP32 → BF16 or FP16, both eager, without engines. "
        f"{machines((result['model'], result) for result in results)}; random weights."
    ),
)
