"""How FastWAM is measured, and against what: lerobot's own code (`lerobot` 0.6.1 and `diffusers` from the package
index, on Python 3.12; see CONTRIBUTING)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import PROMPT, BenchCard, Infer, libero, libero_observation
from vla_accel.families.fastwam.family import FASTWAM
from vla_accel.families.fastwam.network import FastWamConfig, fastwam
from vla_accel.families.fastwam.text import Prompts
from vla_accel.families.fastwam.transforms import FastWamInputs, FastWamProcessor
from vla_accel.families.lerobot_bench import cached_model, importing
from vla_accel.nn.random_weights import Drawn
from vla_accel.nn.wan import WanConfig
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-compile": True}
"""Systems of lerobot, with whether prefill and step are compiled."""
_ENDS = ("out_proj.weight", "text_out.weight", "fc2.weight")
_LOOKS = {"out_proj": 6.0, "text_out": 3.0}
"""Factors on what the actions attend to: the mean of many random values is small, and would leave their noise alone."""
_TOKENS = 40


class DrawnWam(Drawn):
    """Weights of a `FastWam`."""

    def _normal(self, name: str) -> tuple[float, float]:
        config: Any = self.config
        if ("norm" in name and name.endswith(("weight", "gamma"))) or name == "latent_std":
            return 1.0, 0.1
        if name.endswith("bias") or name == "latent_mean":
            return 0.0, 0.02
        if name.endswith("modulation"):
            return 0.0, 0.2
        gain = 0.2 if "time_out" in name else 1.0
        if name.startswith("vae.") and name.endswith("conv2.weight"):
            gain = 0.3
        elif name.endswith(_ENDS):
            # A gate multiplies two of the three branches of a block.
            gain = 1.0 / (3 * config.video.depth) ** 0.5 if "text" in name else 1.0
            gain *= _LOOKS.get(name.rsplit(".", 2)[-2], 1.0) if name.startswith("action.") else 1.0
        return 0.0, gain / self.shapes[name][1:].numel() ** 0.5

    def _query_key_rows(self, name: str) -> int:
        return 0  # its queries and keys are normed


def _rows(prompt: str, width: int, most: int) -> np.ndarray:
    """Rows of a prompt, normal numbers: as many as LIBERO's longer instructions have in lerobot's template."""
    shape = min(_TOKENS, most), width
    return np.random.default_rng(zlib.crc32(prompt.encode())).standard_normal(shape).astype(np.float32)


class FastWamBench(BenchCard[FastWamConfig, FastWamInputs]):
    """FastWAM."""

    family, drawn = FASTWAM, DrawnWam
    sizes: ClassVar = {"fastwam": fastwam}
    sweep = (10, 4, 3)
    quantised = ("native_fp8",)
    baselines = tuple(LEROBOT_MODES)
    bound_by_reading = ("kv_cache",)

    def shallow(self, config: FastWamConfig, depth: int) -> FastWamConfig:
        """Change both transformers; the image encoder keeps its depth."""
        return replace(config, video=replace(config.video, depth=depth), action=replace(config.action, depth=depth))

    def published(self, horizon: int | None = None) -> FastWamConfig:
        return fastwam() if horizon is None else fastwam(action_horizon=horizon)

    def dummy(self, config: FastWamConfig, views: int) -> FastWamProcessor:
        width = config.video.text_dim
        prompts = Prompts("{task}", {}, width, config.text_rows, lambda prompt: _rows(prompt, width, config.text_rows))
        return FastWamProcessor(
            state=Normaliser.identity(LIBERO.state_dim), actions=Normaliser.identity(LIBERO.action_dim),
            action_dim=config.action_dim, max_token_len=config.max_token_len, preset=libero(views), config=config,
            prompts=prompts,
        )  # fmt: skip

    def random_observation(self, transforms: FastWamProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, transforms.image_shape, rng, transforms.ordinary_prompt())

    def internals(
        self, config: FastWamConfig, outputs: Mapping[str, Tensor], inputs: FastWamInputs
    ) -> dict[str, Tensor]:
        """`image_tokens` (I, W), and keys and values (depth, S, heads, d) of video and text."""
        kept = {name: outputs[name][:, 0] for name in ("keys", "values", "text_keys", "text_values")}
        return {"image_tokens": outputs["image_tokens"][0], **kept}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return cached_model(_Lerobot, fastwam(action_horizon=horizon), device).sampler(LEROBOT_MODES[name], steps)


# -- lerobot ------------------------------------------------------------------------------------------------------


class _Lerobot:
    """lerobot's `FastWAMPolicy` with random weights in BF16. Its prompt is encoded in advance."""

    def __init__(self, ours: FastWamConfig, device: str) -> None:
        with importing("FastWAM"):
            from diffusers import AutoencoderKLWan
            from lerobot.configs.types import FeatureType, PolicyFeature
            from lerobot.policies.fastwam import modeling_fastwam
            from lerobot.policies.fastwam.configuration_fastwam import (
                FastWAMConfig,
                default_action_dit_config,
                default_video_dit_config,
            )
            from lerobot.policies.fastwam.wan.adapters import WanVideoVAE38
        self.device = torch.device(device)
        # On a CPU lerobot has no autocast, which its BF16 needs.
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        (height, width), horizon = ours.image_size, ours.action_horizon
        dits = {
            f"{name}_dit_config": {**defaults(ours.action_dim), **_sizes(getattr(ours, name))}
            for name, defaults in (("video", default_video_dit_config), ("action", default_action_dit_config))
        }
        features = {
            f"observation.images.{i}": PolicyFeature(FeatureType.VISUAL, (3, height, width // 2)) for i in range(2)
        }
        features["observation.state"] = PolicyFeature(FeatureType.STATE, (ours.state_dim,))
        config = FastWAMConfig(
            device=device, base_model_id=None, load_text_encoder=False, input_features=features,
            image_size=ours.image_size, action_horizon=horizon, n_action_steps=horizon,
            torch_dtype=str(dtype).removeprefix("torch."), **dits,
        )  # fmt: skip

        def vae(torch_dtype: Any, device: Any) -> Any:
            from vla_accel.images.models import CONFIGS

            with torch.device(device):
                made = AutoencoderKLWan(**CONFIGS["wan22-vae"][1])
            return WanVideoVAE38(torch_dtype, device, pretrained=made)

        replaced: dict[str, Any] = {"load_pretrained_wan_vae": vae, "build_wan_tokenizer": lambda **_: None}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # in float32 its weights would take 24 GB while they are drawn
        try:
            with patch.multiple(modeling_fastwam, **replaced), self.device:
                self.policy: Any = modeling_fastwam.FastWAMPolicy(config).eval()
        finally:
            torch.set_default_dtype(before)
        rows = _rows(PROMPT, ours.video.text_dim, ours.text_rows)
        self.context = torch.zeros(1, ours.text_rows, ours.video.text_dim, device=self.device)
        self.context[0, : len(rows)] = torch.from_numpy(rows)
        self.mask = torch.ones(1, ours.text_rows, dtype=torch.bool, device=self.device)

    def sampler(self, compiled: bool, steps: int) -> Infer:
        """Return `infer(observation)`, eager or as lerobot's `compile_action_infer`, which came after 0.6.1."""
        model = self.policy.model
        prefill, step = model.mot.prefill_video_cache, model._predict_action_noise_with_cache
        if compiled:
            prefill, step = _graphs(prefill, step)

        @torch.no_grad()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            with (
                patch.object(self.policy.config, "num_inference_steps", steps),
                patch.object(model.mot, "prefill_video_cache", prefill),
                patch.object(model, "_predict_action_noise_with_cache", step),
            ):
                return chunk(observation)

        def chunk(observation: Mapping[str, Any]) -> dict[str, Any]:
            views = [v for k, v in observation.items() if "image" in k]
            # As in lerobot's own server: bytes are copied, and converted to floats on the device.
            pixels = [torch.from_numpy(v).to(self.device).permute(2, 0, 1)[None].float() / 255 for v in views]
            state = torch.from_numpy(np.asarray(observation["observation/state"], np.float32)).to(self.device)
            batch = {f"observation.images.{i}": image for i, image in enumerate(pixels)}
            batch |= {"observation.state": state[None], "context": self.context, "context_mask": self.mask}
            return {"actions": self.policy.predict_action_chunk(batch).float().cpu().numpy()[0]}

        return infer


def _graphs(prefill: Any, step: Any) -> tuple[Any, Any]:
    """Both in CUDA graphs of torch.compile."""
    graphed = [torch.compile(function, mode="reduce-overhead") for function in (prefill, step)]

    def filled(**named: Any) -> list[dict[str, Tensor]]:
        torch.compiler.cudagraph_mark_step_begin()
        # The graph of the step would overwrite the outputs of this one.
        return [{name: part.clone() for name, part in layer.items()} for layer in graphed[0](**named)]

    def stepped(**named: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return graphed[1](**named)

    return filled, stepped


def _sizes(stack: WanConfig) -> dict[str, int]:
    """A stack's sizes as lerobot names them."""
    return {
        "hidden_dim": stack.width, "ffn_dim": stack.mlp_dim, "num_heads": stack.heads,
        "attn_head_dim": stack.head_dim, "num_layers": stack.depth, "text_dim": stack.text_dim,
    }  # fmt: skip


CARDS = {"fastwam": FastWamBench()}
