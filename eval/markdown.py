"""Pieces of Markdown that the tables share. Knows no result."""

from __future__ import annotations

from typing import Any


def rows(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def machine(result: dict[str, Any]) -> str:
    """Hardware and torch of a report."""
    hardware = result["hardware"]
    place = hardware.get("gpu") or f"{hardware['cpu']}, {hardware['threads']} thread{'s' * (hardware['threads'] > 1)}"
    return f"{place}, torch {result['software']['torch']}"
