"""How MolmoAct2 is measured, and against what: lerobot's own code (`lerobot` 0.6.1 from the package index, on Python
3.12; see CONTRIBUTING)."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import (
    DenoisingBench,
    DummyTokenizer,
    Infer,
    dummy_processor,
    libero_observation,
)
from vla_accel.families.lerobot_bench import cached_model, importing
from vla_accel.families.molmoact2.family import MOLMOACT2
from vla_accel.families.molmoact2.network import MolmoAct2, MolmoAct2Config, molmoact2
from vla_accel.families.molmoact2.transforms import MolmoProcessor, MolmoPrompt
from vla_accel.fp8 import Scales
from vla_accel.nn.calibration import PrefixMeasuring, measured_scales
from vla_accel.nn.molmo_vision import MolmoVision
from vla_accel.nn.random_weights import SHARP, Drawn
from vla_accel.transforms.processing import Inputs

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-graph": True}
"""Systems of lerobot, and whether it captures the denoise loop in a CUDA graph."""
_PIECES = re.compile(r"<[^<> ]+>|\n|\d| (?=\d)|[<>.?,]|[^\s<>.?,\d]+")
"""As many pieces as Qwen's tokenizer makes of the parts of a prompt that are always the same."""
_ENDS = ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight", "cross_out.weight")
_LOOKS = {"patch_embedding.weight": 3.0, "pooling.down_proj.weight": 6.0, "cross_out.weight": 30.0}
"""Factors on what an image adds to positions and markers, and on what actions attend to: the mean of many random values
is small, and would leave their noise alone."""


class DrawnMolmo(Drawn):
    """Weights of a `MolmoAct2`."""

    def _normal(self, name: str) -> tuple[float, float]:
        part = name.split(".")[0]
        if ".dense." in name:
            return (0.3, 0.1) if name.endswith("bias") else (0.0, 0.2 / math.sqrt(self.shapes[name][1]))
        if name.endswith("bias"):
            return 0.0, 0.02
        if "norm" in name:
            # Of heads: the deviation of the attention's logits is their product.
            return (math.sqrt(SHARP) if "_norm" in name and part == "prefix" else 1.0), 0.1
        if name in ("embed.weight", "vision.position_embedding"):
            return 0.0, 0.5
        gain = (
            1.0 / math.sqrt(2 * getattr(self.config, part).depth)
            if ".layers." in name and name.endswith(_ENDS)
            else 1.0
        )
        gain *= next((factor for end, factor in _LOOKS.items() if name.endswith(end)), 1.0)
        return 0.0, gain / math.sqrt(self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        return 0  # heads are normed


@dataclass(frozen=True)
class MarkedTokenizer(DummyTokenizer):
    """Replaces MolmoAct2's tokenizer: a token for each word and each special token, and those of an image's ends."""

    ends: tuple[int, int]

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        known = dict(zip(("<im_start>", "<im_end>"), self.ends, strict=True))
        least = min(self.vocab_size, *self.ends)
        return [known.get(piece, zlib.crc32(piece.encode()) % least) for piece in _PIECES.findall(text)]


class MolmoMeasuring(PrefixMeasuring[MolmoAct2]):
    """Vision, of which blocks `levels` are read, and prefix."""

    def image_tokens(self, inputs: Sequence[Sequence[Tensor]]) -> Generator[None, None, list[Tensor]]:
        model, vision, found = self.model, self.model.vision, dict[int, list[Tensor]]()
        assert isinstance(vision, MolmoVision)
        for index, rows in enumerate(self.vision(inputs)):
            if index in model.config.vision.levels:
                found[index] = rows
            yield
        with model.present("pooling", "embed"):
            kind = model.pooling.q_proj.weight.dtype
            levels = [{level: rows[i].to(kind) for level, rows in found.items()} for i in range(len(inputs))]
            return [model.project(vision.squares(one)).flatten(0, 1)[None] for one in levels]


class MolmoAct2Bench(DenoisingBench[MolmoAct2Config]):
    """MolmoAct2."""

    family, drawn = MOLMOACT2, DrawnMolmo
    sizes: ClassVar = {"molmoact2": molmoact2}
    quantised = ("native_fp8", "native_fp8_vision", "native_fp8_denoise")
    baselines = tuple(LEROBOT_MODES)

    def published(self, horizon: int | None = None) -> MolmoAct2Config:
        return molmoact2() if horizon is None else molmoact2(action_horizon=horizon)

    def dummy(self, config: MolmoAct2Config, views: int) -> MolmoProcessor:
        prompt = MolmoPrompt(
            0, "<im_start><im_end>", "<setup_start>one arm<setup_end>", "<control_start>delta pose<control_end>"
        )
        processor = dummy_processor(config, views, MolmoProcessor, discrete_state=True, prompt=prompt)
        marks = config.markers.start, config.markers.end
        object.__setattr__(processor, "tokenizer", MarkedTokenizer(config.vocab_size, marks))
        return processor

    def random_observation(self, transforms: MolmoProcessor, rng: np.random.Generator) -> dict[str, Any]:
        side = transforms.image_size
        return libero_observation(transforms, (side, side), rng)

    def calibrate(self, model: Any, inputs: Sequence[Inputs], source: str) -> Scales:
        return measured_scales(MolmoMeasuring(model), [(i.images, i.tokens, i.state) for i in inputs], source)

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return cached_model(_Lerobot, horizon, device).sampler(graph=LEROBOT_MODES[name], steps=steps)


# -- lerobot ------------------------------------------------------------------------------------------------------


class _Lerobot:
    """lerobot's copy of the authors' model with random weights, as its policy runs it in BF16. Images are split into
    patches on the device, which is less work than in its own processor."""

    def __init__(self, horizon: int, device: str) -> None:
        with importing("MolmoAct2"):
            from lerobot.policies.molmoact2.molmoact2_hf_model.configuration_molmoact2 import (
                MolmoAct2Config as Published,
            )
            from lerobot.policies.molmoact2.molmoact2_hf_model.modeling_molmoact2 import (
                MolmoAct2ForConditionalGeneration,
            )
        self.device, self.ours = torch.device(device), molmoact2(action_horizon=horizon)
        config = Published(**published_sizes(self.ours))
        config._attn_implementation = "sdpa"
        with self.device:
            self.model: Any = MolmoAct2ForConditionalGeneration(config).bfloat16().eval().model
        self.transforms = MolmoAct2Bench().dummy(self.ours, 2)

    def sampler(self, *, graph: bool, steps: int) -> Infer:
        """Return `infer(observation)`, with the denoise loop in a CUDA graph or without."""
        config = self.ours
        count, patch = config.vision.tokens, config.vision.patch_size
        inside, places = config.vision.inside(), config.vision.places()
        pooled = torch.full((inside.numel(),), -1)
        pooled[places] = torch.arange(count)

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            inputs = self.transforms.prepare(observation)
            images = torch.from_numpy(np.stack(inputs.images)).to(self.device).float() / 127.5 - 1.0
            views, side = len(images), config.vision.side
            pixels = (
                images.unflatten(2, (side, patch)).unflatten(1, (side, patch)).transpose(2, 3).flatten(3).flatten(1, 2)
            )
            ids = torch.cat((torch.tensor(config.frame() * views), torch.from_numpy(inputs.tokens)))
            ids = ids[config.order(views, len(inputs.tokens))].to(self.device)[None]
            is_image = config.is_image(views, ids.shape[1])
            if self.model.action_cuda_graph_manager is None:
                from lerobot.policies.molmoact2.molmoact2_hf_model.inference import ActionCudaGraphManager

                self.model.action_cuda_graph_manager = ActionCudaGraphManager(self.model)
            self.model.action_cuda_graph_manager.set_enabled(graph)
            squares = config.vision.squares
            actions = self.model.generate_actions_from_inputs(
                input_ids=ids, pixel_values=pixels,
                image_token_pooling=pooled.view(-1, 4).repeat(views, 1).to(self.device),
                image_grids=torch.tensor([[squares, squares, 0, 0]] * views, device=self.device),
                image_num_crops=torch.ones(views, dtype=torch.int64, device=self.device),
                token_type_ids=is_image[None].to(self.device), num_steps=steps,
                action_dim_is_pad=(torch.arange(config.action_dim) >= config.real_actions)[None].to(self.device),
            )  # fmt: skip
            return {"actions": actions.float().cpu().numpy()[0]}

        return infer


def published_sizes(config: MolmoAct2Config) -> dict[str, Any]:
    """Sizes as the authors' config.json names them."""
    vision, text, expert, marks = config.vision, config.prefix, config.expert, config.markers
    sdpa = {"attn_implementation": "sdpa"}
    layers = vision.depth + 2
    return {
        "vit_config": {
            "hidden_size": vision.width, "intermediate_size": vision.mlp_dim, "num_hidden_layers": layers,
            "num_attention_heads": vision.heads, "num_key_value_heads": vision.heads, "head_dim": vision.head_dim,
            "image_default_input_size": [vision.image_size] * 2, "image_patch_size": vision.patch_size,
            "image_num_pos": vision.tokens, **sdpa,
        },
        "adapter_config": {
            "vit_layers": [level - layers for level in vision.levels], "pooling_attention_mask": vision.masked,
            "hidden_size": vision.pool_width, "num_attention_heads": vision.pool_heads,
            "num_key_value_heads": vision.pool_heads, "head_dim": vision.pool_width // vision.pool_heads,
            "intermediate_size": vision.hidden, "text_hidden_size": text.width, **sdpa,
        },
        "text_config": {
            "hidden_size": text.width, "num_attention_heads": text.heads, "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim, "vocab_size": config.vocab_size - 128, "additional_vocab_size": 128,
            "qkv_bias": False, "num_hidden_layers": text.depth, "intermediate_size": text.mlp_dim,
            "rope_theta": text.theta, "use_qk_norm": True, "qk_norm_type": "qwen3", **sdpa,
        },
        "action_expert_config": {
            "hidden_size": expert.width, "num_layers": expert.depth, "num_heads": expert.heads,
            "ffn_multiple_of": expert.mlp_dim, "timestep_embed_dim": expert.time_dim,
        },
        "image_start_token_id": marks.start, "image_end_token_id": marks.end, "image_patch_id": marks.patch,
        "max_action_horizon": config.action_horizon, "max_action_dim": config.action_dim, "action_mode": "both",
        "flow_matching_num_steps": config.num_steps,
    }  # fmt: skip


CARDS = {"molmoact2": MolmoAct2Bench()}
