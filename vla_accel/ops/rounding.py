"""Whole multiples."""

from __future__ import annotations


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple
