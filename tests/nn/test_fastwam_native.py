"""FastWAM's native programs: what they launch at the published width, compiled without a GPU, and in which order the
video and the first step of the actions run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.scripts import lines_of, needs_triton
from vla_accel.config import EngineSpec
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.fastwam.components import FastWamShape, components
from vla_accel.families.fastwam.native import FastWamStore, NativeActions, NativeReader
from vla_accel.families.fastwam.network import FastWam, FastWamConfig
from vla_accel.images.autoencoder import WanEncoderConfig
from vla_accel.nn.flow import Schedule
from vla_accel.nn.wan import WanConfig


@pytest.mark.slow
@needs_triton
def test_a_step_launches_eight_kernels_a_block() -> None:
    """Without the library's products: two steps of three blocks, each with its rows' moments, the velocity and the
    flow before it."""
    found = json.loads(*lines_of("compile_each", "fastwam", "--count"))
    assert found["denoise"] == 2 * (8 * 3 + 3) + 1 and found["kv_cache"] < 26


@pytest.mark.slow
@needs_triton
def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in lines_of("compile_each", "fastwam", cache=tmp_path)]
    assert {row["kernel"] for row in rows} >= {"_norm_heads", "_normed_attention", "_flow_step", "_pipelined_columns"}
    assert [row for row in rows if row["bytes"] <= 1000 or not row["fits"] or row["spilled"] > 128] == []


class Noted:
    """An `Overlap` that writes down what happens."""

    def __init__(self, given: dict[str, Any], late: dict[str, Any], depth: int) -> None:
        self.given, self.late, self.lines = given, late, []  # type: ignore[var-annotated]
        self.begun = SimpleNamespace(record=lambda: self.lines.append("begun"))
        self.layers = [SimpleNamespace(record=lambda i=i: self.lines.append(i)) for i in range(depth)]

    def consumer(self) -> Any:
        return torch.inference_mode()

    def wait(self, layer: int) -> None:
        self.lines.append(layer)
        for name in ("keys", "values"):
            self.late[name][layer] = self.given[name][layer]


def test_a_layer_of_the_first_step_reads_the_video_after_its_turn() -> None:
    """Keys and values are NaN until a layer has waited for them."""
    sizes: dict[str, Any] = {"mlp_dim": 48, "heads": 2, "head_dim": 12, "depth": 3, "text_dim": 16, "freq_dim": 8}
    vae = WanEncoderConfig(base=8, latent=4, blocks=1)
    video, action = WanConfig(width=40, **sizes), WanConfig(width=24, **sizes)
    config = FastWamConfig(vae, video, action, (2 * 2 * vae.scale, 4 * vae.scale), 32, action_horizon=5)
    model = bench_card(family_named("fastwam")).random(config, seed=0, device="cpu", dtype=torch.float32)
    shape = FastWamShape(1, Schedule.uniform(2), 2, config.image_size, config.context_rows(7))
    assert isinstance(model, FastWam)
    reading, denoising = components(model, shape, FastWamStore(model))[1:]
    with torch.inference_mode():
        reader, actions = (part.native(EngineSpec("native")) for part in (reading, denoising) if part.native)
        assert isinstance(reader, NativeReader) and isinstance(actions, NativeActions)
        given = {s.name: torch.randn(s.shape) for s in reading.inputs} | {"text_bias": torch.zeros(1, shape.rows)}
        given |= {s.name: s.empty(torch.device("cpu")) for s in reading.outputs}
        reader.video.overlap = recorded = Noted(given, given, 3)  # type: ignore[assignment]
        reader(given, given)
        assert recorded.lines == ["begun", 0, 1, 2]
        given["noise"] = torch.randn(denoising.inputs[0].shape)
        want, got = ({"actions": torch.empty_like(given["noise"])} for _ in range(2))
        actions(given, want)
        late = given | {name: torch.full_like(given[name], float("nan")) for name in ("keys", "values")}
        actions.overlap = noted = Noted(given, late, 3)  # type: ignore[assignment]
        actions(late, got)
    assert noted.lines == [0, 1, 2] and want["actions"].isfinite().all()
    assert torch.equal(got["actions"], want["actions"])
