"""How OpenVLA-OFT is measured. openvla-oft is no package: there is no code of others to compare with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from vla_accel.families.bench import BenchCard, DummyTokenizer, dummy_transforms, libero_observation
from vla_accel.families.openvla_oft.family import OPENVLA_OFT
from vla_accel.families.openvla_oft.network import OpenVlaOft, OpenVlaOftConfig, openvla_oft
from vla_accel.families.openvla_oft.transforms import OftProcessor
from vla_accel.fp8 import Scales
from vla_accel.kernels import reference
from vla_accel.nn.calibration import Measuring, measured_scales
from vla_accel.nn.random_weights import BRANCH_ENDS, Drawn
from vla_accel.transforms.processing import Inputs


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


CARDS = {"openvla_oft": OftBench()}
