"""openvla-oft's code as a baseline, with dummy packages in place of openvla-oft and transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vla_accel.errors import ConfigError, DependencyError
from vla_accel.families.bench import bench_card
from vla_accel.families.family import family_named
from vla_accel.families.lerobot_bench import cached_model

CARD = bench_card(family_named("openvla_oft"))
MODULES = {
    "__init__": "raise RuntimeError('imports TensorFlow')",
    "models/__init__": "raise RuntimeError('imports TensorFlow')",
    "extern/__init__": "",
    "extern/hf/__init__": "",
    "extern/hf/configuration_prismatic": "OpenVLAConfig = dict",
    "extern/hf/processing_prismatic": """
        import numpy as np, torch
        class PrismaticImageProcessor:
            def __init__(self, means, **settings):
                assert means[0] == (0.484375, 0.455078125, 0.40625)
            def preprocess(self, image, return_tensors):
                pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
                return {"pixel_values": torch.cat((pixels, pixels), 1)}
        """,
    "extern/hf/modeling_prismatic": """
        import sys, torch
        print("Using LIBERO constants" if "libero" in sys.argv else "another robot")
        class OpenVLAForActionPrediction(torch.nn.Module):
            @classmethod
            def _from_config(cls, config, torch_dtype):
                made = cls()
                made.vision_backbone = torch.nn.Module()
                made.vision_backbone.set_num_images_in_input = lambda count: setattr(made, "images", count)
                return made
            def predict_action(self, input_ids, pixel_values, proprio, action_head, **rest):
                assert pixel_values.dtype == torch.bfloat16 and pixel_values.shape[1] == 6 * self.images
                assert abs(proprio).max() <= 1 and action_head.weight.dtype == torch.bfloat16
                return torch.full((8, 7), float(input_ids.shape[1])).numpy(), None
        """,
    "models/action_heads": """
        import torch
        def L1RegressionActionHead(width, hidden, actions):
            return torch.nn.Linear(1, 1)
        """,
    "models/projectors": """
        import torch
        def ProprioProjector(width, state):
            return torch.nn.Linear(1, 1)
        """,
}


class Llama(torch.nn.Module):
    """Attends to every token, or, if `causal`, to earlier ones."""

    causal = False

    @classmethod
    def _from_config(cls, config: Any, attn_implementation: str) -> Llama:
        return cls()

    def forward(self, tokens: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        found = tokens.float().cumsum(1) if self.causal else tokens.float().sum(1, keepdim=True).expand(tokens.shape)
        return (found[..., None],)


@pytest.fixture
def openvla_oft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Llama]]:
    for name, text in MODULES.items():
        path = tmp_path / "prismatic" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    llama = type("LlamaModel", (Llama,), {})
    fork = SimpleNamespace(LlamaModel=llama, LlamaConfig=dict)
    monkeypatch.setitem(sys.modules, "transformers.models.llama.modeling_llama", fork)
    cached_model.cache_clear()
    yield llama
    cached_model.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "prismatic"]:
        del sys.modules[name]


@pytest.mark.parametrize("views", [1, 2])
def test_it_is_called_as_in_its_evaluation(
    views: int, openvla_oft: type[Llama], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL")
    infer = CARD.baseline("oft-eager", horizon=8, steps=1, device="cpu")
    transforms = CARD.dummy(CARD.published(), views)
    observation = CARD.random_observation(transforms, np.random.default_rng(0))
    tokens = len(transforms.prepare(observation).tokens)
    observation["observation/state"] = np.full(8, 3.0)
    np.testing.assert_array_equal(infer(observation)["actions"], np.full((8, 7), tokens))
    said = capsys.readouterr()
    assert said.out == "" and "LIBERO" in said.err, "stdout is for the report"
    assert "prismatic" not in sys.modules, "a package without its __init__ must not stay"


def test_transformers_with_a_causal_mask_is_refused(openvla_oft: type[Llama]) -> None:
    openvla_oft.causal = True
    with pytest.raises(DependencyError, match=r"expected .*transformers-openvla-oft"):
        CARD.baseline("oft-eager", horizon=8, steps=1, device="cpu")


def test_it_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="openvla-oft is not installed"):
        CARD.baseline("oft-eager", horizon=8, steps=1, device="cpu")


def test_its_chunk_has_one_length() -> None:
    with pytest.raises(ConfigError, match=r"horizon: expected 8, .* got 5"):
        CARD.baseline("oft-eager", horizon=5, steps=1, device="cpu")
