"""How GR00T is measured, and N1.7 against what: lerobot's own code (`lerobot` 0.6.1 from the package index, on Python
3.12; see CONTRIBUTING)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import BenchCard, Infer, libero, libero_observation
from vla_accel.families.groot.family import GROOT, GROOT_N15, GROOT_N16, GrootFamily
from vla_accel.families.groot.images import Cropping
from vla_accel.families.groot.modalities import Group, Groups
from vla_accel.families.groot.network import GrootConfig, groot_n15, groot_n16, groot_n17
from vla_accel.families.groot.releases import N15
from vla_accel.families.groot.transforms import GrootProcessor
from vla_accel.families.lerobot_bench import cached_model, importing
from vla_accel.families.qwen_bench import PieceTokenizer, qwen_ids, qwen_patches
from vla_accel.nn.random_weights import DrawnDit
from vla_accel.transforms.processing import Inputs
from vla_accel.transforms.robots import LIBERO

LEROBOT_MODES: dict[str, str | None] = {"lerobot-eager": None, "lerobot-compile": "default"}
"""Systems of lerobot, with the mode of torch.compile."""
_TEXT = 15
"""Tokens of an instruction such as the dummy's."""


class GrootBench(BenchCard[GrootConfig, Inputs]):
    """A release of GR00T."""

    drawn = DrawnDit
    sweep = (4, 2, 1)
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}

    family: GrootFamily

    def __init__(self, family: GrootFamily, size: Callable[..., GrootConfig], *baselines: str) -> None:
        self.family, self.sizes, self.baselines = family, {size.__name__: size}, baselines
        self._size = size

    def shallow(self, config: GrootConfig, depth: int) -> GrootConfig:
        """Change language and transformer; vision keeps its depth. The transformer keeps blocks of every source."""
        language = replace(config.language, depth=max(depth, len(config.vision.deepstack)))
        return replace(config, language=language, head=replace(config.head, depth=4 * depth))

    def published(self, horizon: int | None = None) -> GrootConfig:
        return self._size() if horizon is None else self._size(action_horizon=horizon)

    def dummy(self, config: GrootConfig, views: int) -> GrootProcessor:
        """Every row of a chunk is returned."""

        def groups(count: int) -> Groups:
            return Groups((Group("all", count, low=-np.ones(count), high=np.ones(count), clipped=False),))

        release, unit = self.family.release, config.vision.unit
        side = unit * round((224 if release is N15 else 256) / unit)
        return GrootProcessor(
            tokenizer=PieceTokenizer(config.language.vocab_size),
            state=groups(LIBERO.state_dim),
            actions=groups(LIBERO.action_dim),
            preset=libero(views),
            cropping=Cropping("bicubic", side, 1.0, (side, side), unit=unit, pixels=release.pixels),
            form=release.prompt,
            arrangement=config.arrangement,
            state_dim=config.state_dim,
            action_dim=config.action_dim,
            max_token_len=config.max_token_len,
            rows=config.action_horizon,
        )

    def random_observation(self, transforms: GrootProcessor, rng: np.random.Generator) -> dict[str, Any]:
        """An observation, with its whole history if the model reads one."""
        size, moments = transforms.cropping.target, range(transforms.history)
        *earlier, last = (libero_observation(transforms, size, rng) for _ in moments)
        kept = (*transforms.preset.images, *transforms.preset.state) if earlier else ()
        return {**last, **{key: np.stack([one[key] for one in (*earlier, last)]) for key in kept}}

    def internals(
        self, config: GrootConfig, outputs: Mapping[str, Tensor], inputs: Inputs
    ) -> dict[str, Tensor]:  # fmt: skip
        """`image_tokens` (I, W), of N1.7 `deepstack` (n, I, W), and keys and values of real tokens (n, tokens, heads,
        d)."""
        images = len(outputs["image_tokens"][0])
        real = {"text": len(inputs.tokens), "image": images, "all": images + len(inputs.tokens)}
        names = {f"{source}_{what}": source for source in config.head.sources for what in ("keys", "values")}
        cache = {name: outputs[name][:, 0, : real[source]] for name, source in names.items()}
        deepstack = {"deepstack": outputs["deepstack"][:, 0]} if config.vision.deepstack else {}
        return {"image_tokens": outputs["image_tokens"][0], **deepstack, **cache}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return cached_model(_Lerobot, horizon, device).sampler(LEROBOT_MODES[name], steps)


# -- lerobot ------------------------------------------------------------------------------------------------------


class _Lerobot:
    """lerobot's `GR00TN17` with random weights, as its policy runs it: FP32 weights under BF16 autocast. Images are
    normalized and split into patches on the device, which is less work than in lerobot's own processor."""

    def __init__(self, horizon: int, device: str) -> None:
        with importing("GR00T"):
            from lerobot.policies.groot.groot_n1_7 import GR00TN17, GR00TN17Config
        self.device = torch.device(device)
        with self.device:
            model = GR00TN17(GR00TN17Config(action_horizon=horizon), load_backbone_weights=False)
        self.model: Any = model.float().eval()

    def sampler(self, mode: str | None, steps: int) -> Infer:
        """Return `infer(observation)`, eager or through torch.compile in `mode`."""
        method = self.model.get_action
        call = method if mode is None else torch.compile(method, mode=mode)

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            views = np.stack([v for k, v in observation.items() if "image" in k])
            self.model.action_head.num_inference_timesteps = steps
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                found = call(self._inputs(views, observation["observation/state"]))
            return {"actions": found["action_pred"].float().cpu().numpy()}

        return infer

    def _inputs(self, views: np.ndarray, state: np.ndarray) -> dict[str, Tensor]:
        count, height, width = views.shape[:3]
        tokens = torch.tensor([qwen_ids(count, (height, width), range(1000, 1000 + _TEXT))], device=self.device)
        pixels = torch.from_numpy(views).to(self.device).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        padded = np.zeros((1, 1, self.model.config.max_state_dim), np.float32)
        padded[0, 0, : len(state)] = state
        return {
            "input_ids": tokens, "attention_mask": torch.ones_like(tokens),
            "pixel_values": qwen_patches(pixels),
            "image_grid_thw": torch.tensor([[1, height // 16, width // 16]] * count, device=self.device),
            "state": torch.from_numpy(padded).to(self.device),
            "embodiment_id": torch.full((1,), 2, device=self.device),
        }  # fmt: skip


CARDS = {
    "groot": GrootBench(GROOT, groot_n17, *LEROBOT_MODES),
    "groot_n16": GrootBench(GROOT_N16, groot_n16),
    "groot_n15": GrootBench(GROOT_N15, groot_n15),
}
