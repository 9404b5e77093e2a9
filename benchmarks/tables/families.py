"""The table of model families in docs/models.md, from what each family declares."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.table import MODELS, table
from vla_accel.families.family import FAMILIES, Family, family_named

_PARTS = {"kv_cache": "prefix"}


def families(_: object) -> str:
    """A row for each family."""
    return table(
        "model = {model} | `bench --model` = `{name}` | FP8 and INT8, weights only = {weights} | "
        "with activations = {activations} | real-time chunking = {rtc} | LoRA = {lora}",
        [_row(family_named(name)) for name in FAMILIES],
        "FP8 and INT8: the components that can run with quantized weights and BF16 activations (weights only), or with "
        "both quantized (with activations). Quantized activations need calibrated scales; quantized weights do not.",
    )


def _row(family: Family[Any, Any, Any]) -> dict[str, str | None]:
    capabilities = family.capabilities
    products = {part: by_engine.get("native") for part, by_engine in capabilities.quantised.items()}

    def parts(activations: bool) -> str | None:
        found = [part for part, one in products.items() if one and one.activations is activations]
        return ", ".join(_PARTS.get(part, part) for part in found) or None

    return {
        "model": MODELS[family.name],
        "name": family.name,
        "weights": parts(False),
        "activations": parts(True),
        "rtc": "yes" if family.chunking.inputs else None,
        "lora": "yes" if capabilities.lora else None,
    }
