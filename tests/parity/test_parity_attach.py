"""Policy objects of lerobot 0.4.4, 0.5.1, 0.6.1 and main, and openpi's model, on this package's engines.

Needs an interpreter with each release (tests/parity/test_parity_lerobot_releases.py names the options),
`--lerobot-main-python` and `--openpi-python`. Both answers come from one process,
`references/attach_lerobot_policies.py` or `references/attach_openpi_model.py`, in float32 on the CPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.conftest import Make
from tests.parity.test_parity_lerobot_releases import RELEASES

pytestmark = pytest.mark.parity

RESIZED = ("pi0", "pi05", "smolvla", "pi0_fast", "vla_jepa", "groot_n15", "molmoact2 resized")
"""Policies that resize images: lerobot to fractions of a grey level, this package to whole levels."""
TOLERANCES = {True: 5e-3, False: 1e-4}
"""Largest difference in standard deviations of lerobot's actions, of `RESIZED` and of others."""
EVERYWHERE = ("pi0", "pi05", "smolvla", "pi0_fast", "act", "act min_max", "diffusion ddpm", "diffusion ddim")
POLICIES = {
    "0.4.4": (*EVERYWHERE, "xvla", "xvla joint"),
    "0.5.1": (*EVERYWHERE, "xvla", "xvla joint", "groot_n15"),
    "0.6.1": (
        *EVERYWHERE, "vla_jepa", "fastwam", "groot", "xvla", "xvla joint", "molmoact2", "molmoact2 resized", "evo1",
        "evo1 bare",
    ),
    "main": (
        *EVERYWHERE, "vla_jepa", "vla_jepa relative", "fastwam", "groot", "xvla", "xvla joint", "molmoact2",
        "molmoact2 resized", "molmoact2 robot", "evo1", "evo1 bare",
    ),
    "main with peft": ("molmoact2 adapted",),
}  # fmt: skip
PYTHONS = {**RELEASES, **dict.fromkeys(("main", "main with peft"), "lerobot-main")}
CASES = [pytest.param(release, name, id=f"{release}-{name}") for release, names in POLICIES.items() for name in names]


@pytest.mark.parametrize(("release", "name"), CASES)
def test_an_attached_policy_answers_as_lerobot(made: Make, release: str, name: str) -> None:
    folder = made(PYTHONS[release], "attach_lerobot_policies", "--policies", *POLICIES[release])
    found = json.loads((folder / "attached.json").read_text())
    if release in RELEASES and found["lerobot"] != release:
        pytest.skip(f"NOT COMPARED WITH LEROBOT {release}: --{PYTHONS[release]}-python has lerobot {found['lerobot']}")
    row: dict[str, Any] = found["policies"][name]
    assert row.pop("reason") is None and row.pop("restored")
    if (moved := row.pop("moved", None)) is not None:
        assert moved > 1.0, "the previous chunk hardly changes lerobot's actions"
    print(f"lerobot {release} {name}: {row}")
    assert {"difference", "1", "3"} <= row.keys() and max(row.values()) <= TOLERANCES[name in RESIZED], row


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_openpis_model_answers_as_before(made: Make, name: str) -> None:
    row = json.loads((made("openpi", "attach_openpi_model") / "attached.json").read_text())[name]
    assert row.pop("reason") is None and row.pop("restored")
    assert row.keys() == {"difference", "1", "3"} and max(row.values()) <= TOLERANCES[False], row
