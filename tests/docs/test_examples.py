"""Every example of the pages in Python or YAML: it runs on the bundled checkpoint and made-up robots, or it loads."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.support.gpus import ORIN
from tests.support.pages import PAGES, ROOT, blocks
from vla_accel import OptimizedPolicy
from vla_accel.config import load_config
from vla_accel.errors import ConfigError
from vla_accel.transforms.robots import preset_from

OTHERS = ("vla_eval.md", "ros.md")
"""Pages whose examples are for other programs; tests/plugins runs them there."""
ATTACHED = ("lerobot.md", "from_openpi.md")
"""Pages whose Python needs another project's policy; tests/policy/test_attach.py attaches one."""
WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page.name not in ("README.md", *OTHERS, *ATTACHED)]
YAML = [(page, text) for page in PAGES if page.name not in OTHERS for text in blocks(page, "yaml")]
SERVER = "ws://gpu-box:8000"
"""Stands in the examples for a server of one's own."""


class Robot:
    """A robot that sees grey pictures and is on for a few control periods."""

    def __init__(self, policy: OptimizedPolicy) -> None:
        self.example, self.acted = policy.processor.example(), []

    def is_on(self) -> bool:
        return len(self.acted) < 4

    def observe(self) -> dict[str, Any]:
        return dict(self.example)

    def act(self, action: np.ndarray) -> None:
        assert action.shape == (7,) and np.isfinite(action).all()
        self.acted.append(action)


@pytest.fixture(scope="module")
def policy() -> OptimizedPolicy:
    return OptimizedPolicy.from_pretrained("demo", device="cpu", num_steps=1)


@pytest.fixture
def names(policy: OptimizedPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted, but for SERVER and the pipeline of diffusers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "vae_config.json").write_text('{"vae_type": "native"}')
    robot = Robot(policy)
    return {
        "observation": robot.observe(),
        "observations": [robot.observe(), robot.observe()],
        "policy": policy,
        "robot": robot,
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: p.name)
def test_examples_run_in_order(page: Path, names: dict[str, Any], policy: OptimizedPolicy) -> None:
    """The examples of a page share their names, as in a session of Python."""
    examples = blocks(page, "python")
    with contextlib.ExitStack() as stack:
        if any(SERVER in text for text in examples):
            pytest.importorskip("websockets")
            pytest.importorskip("msgpack")
            from vla_accel.server import ServerConfig, background

            address = stack.enter_context(background(policy, ServerConfig(port=0, api_key="a secret"))).address
            examples = [text.replace(SERVER, address) for text in examples]
        if any("(pipeline" in text for text in examples):
            pytest.importorskip("diffusers")
            from vla_accel.images.qwen import random_qwen_image

            names["pipeline"] = random_qwen_image(tiny=True, layers=1, dtype=torch.float32, device=torch.device("cpu"))
        for text in examples:
            exec(compile(text, page.name, "exec"), names)


def test_the_first_example_is_what_it_says(names: dict[str, Any]) -> None:
    (first,) = blocks(ROOT / "README.md", "python")
    exec(first, names)
    assert names["result"]["actions"].shape == (10, 7)
    assert "denoise_ms" in names["result"]["policy_timing"]
    assert [e["component"] for e in names["result"]["engines"]][:3] == ["vision", "kv_cache", "denoise"]


def test_the_gpu_that_a_page_makes_is_that_of_the_tests() -> None:
    (text,) = blocks(ROOT / "docs" / "adding" / "gpu.md", "python")
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["orin"] == ORIN


@pytest.mark.parametrize(("page", "text"), YAML, ids=[p.name for p, _ in YAML])
def test_configurations_and_presets_load(page: Path, text: str) -> None:
    content = yaml.safe_load(text)
    try:
        load_config(content)
    except ConfigError:
        preset_from(content)
