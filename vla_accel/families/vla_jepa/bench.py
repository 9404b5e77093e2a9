"""How VLA-JEPA is measured, and against what: lerobot's own code (`lerobot` 0.6.1 from the package index, on Python
3.12; see CONTRIBUTING)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import BenchCard, Infer, dummy_transforms, libero_observation
from vla_accel.families.lerobot_bench import cached_model, features, importing, without_hub
from vla_accel.families.qwen_bench import IMAGE, QueryTokenizer, qwen_ids, qwen_patches
from vla_accel.families.vla_jepa.family import VLA_JEPA
from vla_accel.families.vla_jepa.network import VlaJepaConfig, vla_jepa
from vla_accel.families.vla_jepa.transforms import VlaJepaProcessor
from vla_accel.nn.random_weights import DrawnDit
from vla_accel.transforms.processing import Inputs
from vla_accel.transforms.robots import LIBERO

LEROBOT_MODES: dict[str, str | None] = {"lerobot-eager": None, "lerobot-compile": "default"}
"""Systems of lerobot, with the mode of torch.compile."""
_EMBODIED = "<|embodied_action|>"
_ACTIONS = "".join(f"<|action_{index}|>" * 8 for index in range(3))
_TEMPLATE = (
    "Your task is {instruction}. Infer the temporal dynamics from frames {actions} and produce the corresponding "
    "policy actions {e_actions}."
)
_TEXT = 40
"""Words of the prompt with an instruction such as the dummy's."""


class VlaJepaBench(BenchCard[VlaJepaConfig, Inputs]):
    """VLA-JEPA."""

    family, drawn = VLA_JEPA, DrawnDit
    sizes: ClassVar = {"vla_jepa": vla_jepa}
    sweep = (4, 2, 1)
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}
    baselines = tuple(LEROBOT_MODES)

    def shallow(self, config: VlaJepaConfig, depth: int) -> VlaJepaConfig:
        """Change language and transformer; vision keeps its depth. The transformer keeps blocks of both kinds."""
        language = replace(config.language, depth=max(depth, len(config.vision.deepstack)))
        return replace(config, language=language, head=replace(config.head, depth=2 * depth))

    def published(self, horizon: int | None = None) -> VlaJepaConfig:
        return vla_jepa() if horizon is None else vla_jepa(action_horizon=horizon)

    def dummy(self, config: VlaJepaConfig, views: int) -> VlaJepaProcessor:
        tokenizer = QueryTokenizer(config.language.vocab_size, _EMBODIED)
        template = _TEMPLATE.replace("{actions}", _ACTIONS).replace("{e_actions}", _EMBODIED * config.condition)
        fields = {"config": config, "template": template, "condition": 0, "clipped": False}
        return dummy_transforms(VlaJepaProcessor, config, views, tokenizer, **fields)

    def random_observation(self, transforms: VlaJepaProcessor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, transforms.image_shape, rng)

    def internals(self, config: VlaJepaConfig, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), `deepstack` (n, I, W), and keys and values (n, condition, heads, d)."""
        kept = {name: outputs[name][:, 0] for name in ("deepstack", "all_keys", "all_values")}
        return {"image_tokens": outputs["image_tokens"][0], **kept}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return cached_model(_Lerobot, horizon, device).sampler(LEROBOT_MODES[name], steps)


# -- lerobot ------------------------------------------------------------------------------------------------------


class _Lerobot:
    """lerobot's `VLAJEPAModel` with random weights, as its policy runs it: Qwen in BF16 and the action head in float32.
    Images are normalized and split into patches on the device, which is less work than in Qwen's own processor."""

    def __init__(self, horizon: int, device: str) -> None:
        with importing("VLA-JEPA"):
            from lerobot.policies.vla_jepa import qwen_interface
            from lerobot.policies.vla_jepa.configuration_vla_jepa import VLAJEPAConfig
            from lerobot.policies.vla_jepa.modeling_vla_jepa import VLAJEPAModel
            from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
        self.device, ours = torch.device(device), vla_jepa()
        config = VLAJEPAConfig(
            **features([(256, 256)] * 2, None, LIBERO.action_dim),
            chunk_size=horizon, n_action_steps=horizon, enable_world_model=False, device=device,
            resize_images_to=ours.resize,
        )  # fmt: skip
        qwen = Qwen3VLConfig(**_sizes(ours))
        with self.device:
            vlm = Qwen3VLForConditionalGeneration(qwen).bfloat16()
        parts = {"Qwen3VLForConditionalGeneration": vlm, "AutoProcessor": _Processor()}
        with without_hub(qwen_interface, parts), self.device:
            self.model: Any = VLAJEPAModel(config).eval()
        self.model.qwen.build_inputs = self._inputs

    def sampler(self, mode: str | None, steps: int) -> Infer:
        """Return `infer(observation)`, eager or through torch.compile in `mode`."""
        method = self.model.predict_action
        call = method if mode is None else torch.compile(method, mode=mode)

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            self.model.action_model.num_inference_timesteps = steps
            views = np.stack([v for k, v in observation.items() if "image" in k])
            # As in lerobot's own server: bytes are copied, and converted to floats on the device.
            pixels = torch.from_numpy(views).to(self.device).permute(0, 3, 1, 2).float() / 255
            state = torch.from_numpy(np.asarray(observation["observation/state"], np.float32)).to(self.device)
            return {"actions": call([list(pixels)], ["task"], state[None, None]).float().cpu().numpy()[0]}

        return infer

    def _inputs(self, *, images: Any, **prompts: Any) -> dict[str, Tensor]:
        """Replaces `Qwen3VLInterface.build_inputs`, which needs the processor of the hub."""
        del prompts
        size = vla_jepa().image_size((256, 256))
        views = torch.nn.functional.interpolate(torch.stack(images[0]), size=size, mode="bicubic", antialias=True)
        text = [*range(1000, 1000 + _TEXT), *[self.model.action_token_ids[0]] * 24]
        text += [self.model.embodied_action_token_id] * vla_jepa().condition
        tokens = torch.tensor([qwen_ids(len(views), size, text)], device=self.device)
        grid = torch.tensor([[1, size[0] // 16, size[1] // 16]] * len(views), device=self.device)
        return {
            "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == IMAGE).int(), "pixel_values": qwen_patches(views * 2.0 - 1.0),
            "image_grid_thw": grid,
        }  # fmt: skip


class _Processor:
    """Replaces Qwen's processor, whose tokenizer cannot be bundled: it only numbers the added tokens."""

    def __init__(self) -> None:
        self.tokenizer, self.known = self, {}

    def get_vocab(self) -> dict[str, int]:
        return self.known

    def add_tokens(self, tokens: list[str], **_: Any) -> None:
        self.known |= {token: 151_669 + len(self.known) + index for index, token in enumerate(tokens)}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.known[token]

    def __len__(self) -> int:
        return 151_669 + len(self.known)


def _sizes(ours: VlaJepaConfig) -> dict[str, Any]:
    """Qwen3-VL's sizes as transformers names them."""
    v, t = ours.vision, ours.language
    vision = {
        "depth": v.depth, "hidden_size": v.width, "intermediate_size": v.mlp_dim, "num_heads": v.heads,
        "patch_size": v.patch_size, "temporal_patch_size": v.frames, "spatial_merge_size": v.merge,
        "out_hidden_size": v.out_width, "num_position_embeddings": v.positions,
        "deepstack_visual_indexes": list(v.deepstack),
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": t.theta, "mrope_section": list(t.sections), "mrope_interleaved": True}
    text = {
        "vocab_size": t.vocab_size, "hidden_size": t.width, "intermediate_size": t.mlp_dim,
        "num_hidden_layers": t.depth, "num_attention_heads": t.heads, "num_key_value_heads": t.kv_heads,
        "head_dim": t.head_dim, "rms_norm_eps": t.eps, "rope_parameters": rope,
    }  # fmt: skip
    return {"vision_config": vision, "text_config": text, "tie_word_embeddings": True}


CARDS = {"vla_jepa": VlaJepaBench()}
