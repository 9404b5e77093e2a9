"""How OpenVLA-OFT is measured, and against what: the authors' own code (openvla-oft, MIT; see CONTRIBUTING)."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError, DependencyError
from vla_accel.families.bench import BenchCard, DummyTokenizer, Infer, dummy_transforms, libero_observation
from vla_accel.families.lerobot_bench import cached_model
from vla_accel.families.openvla_oft.family import OPENVLA_OFT
from vla_accel.families.openvla_oft.network import OpenVlaOft, OpenVlaOftConfig, openvla_oft
from vla_accel.families.openvla_oft.transforms import BOS, EMPTY, OftProcessor
from vla_accel.fp8 import Scales
from vla_accel.kernels import reference
from vla_accel.nn.calibration import Measuring, measured_scales
from vla_accel.nn.random_weights import BRANCH_ENDS, Drawn
from vla_accel.transforms.processing import Inputs

_PACKAGES = ("prismatic", "prismatic.models", "prismatic.training", "prismatic.vla")
"""Packages of openvla-oft whose `__init__` imports its training code, and with it TensorFlow."""
_TEXT = 26
"""Tokens of a prompt such as the dummy's, without the first and the last."""


class DrawnOft(Drawn):
    """Weights of an OpenVLA-OFT."""

    def _normal(self, name: str) -> tuple[float, float]:
        part = name.partition(".")[0]
        if name.endswith("bias"):
            return 0.0, 0.02
        if "norm" in name or "layer_scale" in name:
            return 1.0, 0.1
        if "position" in name or name.endswith("_tokens") or name.endswith("_token"):
            return 0.0, 0.5
        if part == "embed":
            return 0.0, 1.0
        ends = name.endswith(BRANCH_ENDS) and ".layers." in name
        gain = 1.0 / math.sqrt(2 * getattr(self.config, part).depth) if ends else 1.0
        return 0.0, gain / math.sqrt(self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        if not name.endswith("qkv_proj.weight"):
            return 0
        block = getattr(self.config, name.partition(".")[0]).block
        return (block.heads + block.kv_heads) * block.head_dim


class OftMeasuring(Measuring[OpenVlaOft]):
    """The language model, whose products FP8 and INT8 quantize."""

    def products(self) -> list[str]:
        names = OPENVLA_OFT.capabilities.quantised["decode"]["native"].names
        return [f"language.layers.{index}.{name}" for index in range(self.blocks()) for name in names]

    def blocks(self) -> int:
        return self.model.config.language.depth

    def run(self, inputs: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        model, config = self.model, self.model.config
        parts = ["dino", "siglip", "projector", "embed", *(["state"] if config.state_dim else [])]
        rows, ropes = [], []
        with model.present(*parts):
            for images, tokens, state in inputs:
                layout = config.layout(len(images), len(tokens))
                image_tokens = model.embed_images(images[None])
                x = model.rows(layout, image_tokens, tokens[None], state[None] if config.state_dim else None)
                lengths = tokens.new_full((1,), layout.rows)
                rows.append(x)
                ropes.append(reference.rope_tables(layout.positions(lengths), config.language.head_dim, x.dtype))
        for index in range(config.language.depth):
            states = [(x, rope, None) for x, rope in zip(rows, ropes, strict=True)]
            rows = self.through(f"language.layers.{index}", config.language.block, states)
            yield


class OftBench(BenchCard[OpenVlaOftConfig, Inputs]):
    """OpenVLA-OFT for LIBERO, with images of the model's size."""

    family, drawn = OPENVLA_OFT, DrawnOft
    sizes: ClassVar = {"openvla_oft": openvla_oft}
    sweep, own_steps = (1,), False
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}
    baselines = ("oft-eager",)

    def shallow(self, config: OpenVlaOftConfig, depth: int) -> OpenVlaOftConfig:
        """Change the language model; vision keeps its depth."""
        return replace(config, language=replace(config.language, depth=depth))

    def published(self, horizon: int | None = None) -> OpenVlaOftConfig:
        return openvla_oft() if horizon is None else openvla_oft(action_horizon=horizon)

    def dummy(self, config: OpenVlaOftConfig, views: int) -> OftProcessor:
        fields = {"side": config.dino.image_size, "state_dim": config.state_dim, "gripper": None}
        return dummy_transforms(OftProcessor, config, views, DummyTokenizer(config.language.vocab_size), **fields)

    def random_observation(self, transforms: OftProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, (transforms.side, transforms.side), rng)

    def internals(self, config: OpenVlaOftConfig, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W)."""
        return {"image_tokens": outputs["image_tokens"][0]}

    def calibrate(self, model: Any, inputs: Sequence[Inputs], source: str) -> Scales:
        rows = [(np.stack(i.images), i.tokens, i.state) for i in inputs]
        return measured_scales(OftMeasuring(model), rows, source)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        if horizon != (own := self.published().action_horizon):
            raise ConfigError(f"horizon: expected {own}, the chunk of openvla-oft's code for LIBERO, got {horizon}")
        return cached_model(_OpenVlaOft, self.published(), device).infer


# -- openvla-oft --------------------------------------------------------------------------------------------------


class _OpenVlaOft:
    """openvla-oft's model with random weights in BF16, called as its evaluation in LIBERO does. TensorFlow's center
    crop, which that evaluation runs before, is left out, and so is the tokenizer, which cannot be bundled."""

    def __init__(self, config: OpenVlaOftConfig, device: str) -> None:
        with _importing():
            from prismatic.extern.hf.configuration_prismatic import OpenVLAConfig
            from prismatic.extern.hf.modeling_prismatic import OpenVLAForActionPrediction
            from prismatic.extern.hf.processing_prismatic import PrismaticImageProcessor
            from prismatic.models.action_heads import L1RegressionActionHead
            from prismatic.models.projectors import ProprioProjector
            from transformers.models.llama.modeling_llama import LlamaConfig, LlamaModel
        if not _sees_later_tokens(LlamaModel, LlamaConfig):
            raise DependencyError(
                "openvla-oft: expected the authors' transformers-openvla-oft, in which tokens attend to later ones, "
                "got another transformers"
            )
        width, towers = config.language.width, (config.dino, config.siglip)
        bounds = {"q01": [-1.0] * config.action_dim, "q99": [1.0] * config.action_dim}
        settings = OpenVLAConfig(
            norm_stats={"libero": {"action": bounds}}, vision_backbone_id="dinosiglip-vit-so-224px",
            llm_backbone_id="llama2-7b-pure", image_resize_strategy="resize-naive", text_config=_llama(config),
        )  # fmt: skip
        self.device = torch.device(device)
        with self.device:
            try:
                self.model: Any = OpenVLAForActionPrediction._from_config(settings, torch_dtype=torch.bfloat16).eval()
            except NotImplementedError as error:  # of timm's version
                raise DependencyError(f"openvla-oft: {error}") from error
            self.parts: dict[str, Any] = {
                "action_head": L1RegressionActionHead(width, config.hidden, config.action_dim).bfloat16().eval(),
                "proprio_projector": ProprioProjector(width, config.state_dim).bfloat16().eval(),
            }
        self.pixels = PrismaticImageProcessor(
            use_fused_vision_backbone=True, image_resize_strategy="resize-naive",
            input_sizes=[(3, tower.image_size, tower.image_size) for tower in towers],
            interpolations=["bicubic"] * 2,
            means=[tower.mean for tower in towers], stds=[tower.deviation for tower in towers],
        )  # fmt: skip
        self.tokens = torch.tensor([[BOS, *range(1000, 1000 + _TEXT), EMPTY]])

    @torch.inference_mode()
    def infer(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the actions (8, 7) of an observation with one or more images."""
        from PIL import Image

        images = [Image.fromarray(value) for key, value in observation.items() if "image" in key]
        self.model.vision_backbone.set_num_images_in_input(len(images))
        pixels = [self.pixels.preprocess(i, return_tensors="pt")["pixel_values"] for i in images]
        tokens = self.tokens.to(self.device)
        actions, _ = self.model.predict_action(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), unnorm_key="libero",
            pixel_values=torch.cat([p.to(self.device, torch.bfloat16) for p in pixels], 1),
            proprio=np.asarray(observation["observation/state"], np.float32).clip(-1, 1), **self.parts,
        )  # fmt: skip
        return {"actions": actions}


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Within this context, modules of openvla-oft import without its training code, and an import that fails is a
    DependencyError."""
    try:
        found = importlib.util.find_spec("prismatic")
        if found is None or found.submodule_search_locations is None:
            raise ImportError("no package 'prismatic'")
        (root,) = found.submodule_search_locations
        bare = {name: ModuleType(name) for name in _PACKAGES}
        for name, module in bare.items():
            module.__path__ = [str(Path(root, *name.split(".")[1:]))]
        # openvla-oft selects the robot by the command line, and prints it.
        with patch.object(sys, "argv", ["libero"]), contextlib.redirect_stdout(sys.stderr):
            sys.modules.update(bare)
            try:
                yield
            finally:
                for name in bare:
                    del sys.modules[name]
    except ImportError as error:
        raise DependencyError(f"openvla-oft is not installed: see CONTRIBUTING ({error})") from error


def _sees_later_tokens(model_class: Any, config_class: Any) -> bool:
    """Whether the first token of a Llama attends to the second."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = config_class(vocab_size=2, num_hidden_layers=1, **sizes)
    with torch.random.fork_rng([]), torch.inference_mode():
        torch.manual_seed(0)
        model = model_class._from_config(config, attn_implementation="sdpa").eval()
        (one, other), _ = model(torch.tensor([[0, 0], [0, 1]]), return_dict=False)[0].unbind(1)
    return not torch.allclose(one, other)


def _llama(config: OpenVlaOftConfig) -> dict[str, Any]:
    """The language model's sizes as transformers names them."""
    t = config.language
    return {
        "vocab_size": t.vocab_size, "hidden_size": t.width, "intermediate_size": t.mlp_dim,
        "num_hidden_layers": t.depth, "num_attention_heads": t.heads, "num_key_value_heads": t.kv_heads,
        "rms_norm_eps": t.eps, "pad_token_id": 32_000,
    }  # fmt: skip


CARDS = {"openvla_oft": OftBench()}
