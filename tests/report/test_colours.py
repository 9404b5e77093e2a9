"""Colours of pictures, seen by people of every colour vision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vla_accel.report.colours import OTHER, PARTS, SPARE, colours_of

# Linear RGB as it is seen without one kind of cone: G. M. Machado et al., IEEE Trans. Vis. Comput. Graph. 15 (2009)
# 1291, table 1, severity 1.
SEEN = {
    "all cones": np.eye(3),
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no medium": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TOLD_APART = 15.0
"""Distance in CIELAB; about 2.3 can just be noticed where two colours touch."""


def lab(colour: str, eyes: str) -> np.ndarray:
    """CIELAB (D65) of a colour as eyes of some kind see it."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(SEEN[eyes]) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1.0, 1.089]
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest(colours: tuple[str, ...], eyes: str) -> float:
    """The smallest distance of two of these colours."""
    return min(float(np.linalg.norm(lab(a, eyes) - lab(b, eyes))) for a, b in itertools.combinations(colours, 2))


@pytest.mark.parametrize("eyes", SEEN)
def test_all_parts_can_be_told_apart(eyes: str) -> None:
    assert nearest((*PARTS.values(), *SPARE), eyes) > TOLD_APART


def test_each_name_has_a_colour_of_its_own() -> None:
    names = ["vision", "backbone", "denoise", OTHER, "action_head", "decode"]
    found = colours_of(names)
    assert list(found) == names and len(set(found.values())) == len(names)
    assert found["vision"] == PARTS["vision"] and found[OTHER] == PARTS[OTHER]
