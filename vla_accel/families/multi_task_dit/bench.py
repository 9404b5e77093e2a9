"""How Multi-task DiT is measured, and against what: lerobot's own code (`lerobot` 0.5.1 to 0.6.1, with torchvision,
transformers and diffusers)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.errors import ConfigError
from vla_accel.families.bench import PROMPT, BenchCard, DummyTokenizer, Infer, libero
from vla_accel.families.diffusion_policy.bench import random_moments
from vla_accel.families.lerobot_bench import features, importing, moments_of, without_hub
from vla_accel.families.multi_task_dit.family import MULTI_TASK_DIT
from vla_accel.families.multi_task_dit.network import MultiTaskDitConfig
from vla_accel.families.multi_task_dit.transforms import TaskInputs, TaskProcessor
from vla_accel.nn.random_weights import BRANCH_ENDS, Drawn
from vla_accel.numeric import matmul_precision
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.robots import LIBERO

LEROBOT_MODES: dict[str, bool] = {"lerobot-eager": False, "lerobot-compile": True}
"""Systems of lerobot, with whether its transformer is compiled (torch.compile, max-autotune)."""
_TOKENS = 20


def multi_task_dit(**changes: Any) -> MultiTaskDitConfig:
    """The size of lerobot's recipe for LIBERO, 386 M parameters, with 100 DDPM steps."""
    sizes: dict[str, Any] = {"width": 768, "depth": 8, "heads": 12, "action_horizon": 48, "resize": (256, 256)}
    return MultiTaskDitConfig(**(sizes | changes))


def flow(**changes: Any) -> MultiTaskDitConfig:
    """The same with a flow of 100 steps."""
    return multi_task_dit(scheduler=None, **changes)


class EndedTokenizer(DummyTokenizer):
    """Ends every prompt in the token after its words."""

    def finish(self, ids: list[int]) -> list[int]:
        return [*ids, self.vocab_size]


class DrawnMultiTaskDit(Drawn):
    """Weights of a Multi-task DiT, whose queries and keys are sharp enough that positions matter."""

    def _normal(self, name: str) -> tuple[float, float]:
        if name.endswith("bias"):
            return 0.0, 0.02
        if "norm" in name:
            return 1.0, 0.1
        if any(part in name for part in ("position", "class_token", "embed.weight")):
            return 0.0, 0.5
        gain = 0.2 if "modulation" in name else 1.0
        if name.endswith(BRANCH_ENDS):
            gain = 1.0 / math.sqrt(2 * self.config.depth)
        return 0.0, gain / math.sqrt(self.shapes[name][1:].numel())

    def _query_key_rows(self, name: str) -> int:
        return self.shapes[name][0] // 3 * 2 if name.endswith("qkv_proj.weight") else 0


class MultiTaskDitBench(BenchCard[MultiTaskDitConfig, TaskInputs]):
    """Multi-task DiT with two cameras, as for LIBERO."""

    family, drawn = MULTI_TASK_DIT, DrawnMultiTaskDit
    sizes: ClassVar = {"multi_task_dit": multi_task_dit, "multi_task_dit_flow": flow}
    sweep = (100, 10)
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}
    baselines = tuple(LEROBOT_MODES)

    def sweep_of(self, config: MultiTaskDitConfig) -> tuple[int, ...]:
        return (config.num_steps,)

    def published(self, horizon: int | None = None) -> MultiTaskDitConfig:
        return multi_task_dit() if horizon is None else multi_task_dit(action_horizon=horizon)

    def dummy(self, config: MultiTaskDitConfig, views: int) -> TaskProcessor:
        if views != len(config.cameras):
            raise ConfigError(f"views: expected {len(config.cameras)}, the cameras of the network, got {views}")
        pixels = [Normaliser("mean_std", np.array(c.mean), np.array(c.deviation)) for c in config.cameras]
        last = config.text.vocab_size - 1
        return TaskProcessor(
            preset=libero(views), state=Normaliser.identity(config.state_dim), last_token=last,
            actions=Normaliser.identity(config.action_dim), action_dim=config.action_dim,
            frame_shapes=(config.frame,) * views, cameras=tuple(pixels), history=config.history,
            first=config.history - 1, tokenizer=EndedTokenizer(last), max_token_len=config.max_token_len,
        )  # fmt: skip

    def random_observation(self, transforms: TaskProcessor, rng: np.random.Generator) -> dict[str, Any]:
        """An observation with its whole history."""
        return {**random_moments(transforms, rng), transforms.preset.prompt: PROMPT}

    def internals(
        self, config: MultiTaskDitConfig, outputs: Mapping[str, Tensor], inputs: TaskInputs
    ) -> dict[str, Tensor]:
        """`features` (V, n) and `text` (W,)."""
        return {name: outputs[name][0] for name in ("features", "text")}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        config = self.published(horizon)
        with matmul_precision():
            policy = _policy(config, steps, device)
        if LEROBOT_MODES[name]:
            policy.noise_predictor = torch.compile(policy.noise_predictor, mode="max-autotune")
        scales = torch.tensor([(c.mean, c.deviation) for c in config.cameras], device=device)[..., None, None]
        ids = torch.full((1, config.max_token_len), config.text.vocab_size - 1, device=device)
        ids[0, :_TOKENS] = torch.arange(1000, 1000 + _TOKENS, device=device)
        mask = (torch.arange(config.max_token_len, device=device) <= _TOKENS).long()[None]

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            batch = {
                **moments_of(observation, scales), "observation.language.tokens": ids,
                "observation.language.attention_mask": mask,
            }  # fmt: skip
            return {"actions": policy._generate_actions(batch).float().cpu().numpy()[0]}

        return infer


def _policy(config: MultiTaskDitConfig, steps: int, device: str) -> Any:
    """Return lerobot's policy with random weights, in float32, as it is trained and run."""
    with importing("Multi-task DiT", "lerobot==0.6.1 torchvision transformers diffusers"):
        from lerobot.policies.multi_task_dit import modeling_multi_task_dit as theirs
        from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig
        from transformers import CLIPTextConfig, CLIPTextModel, CLIPVisionConfig, CLIPVisionModel
    settings = MultiTaskDiTConfig(
        **features([config.frame] * len(config.cameras), LIBERO.state_dim, config.action_dim),
        n_obs_steps=config.history, horizon=config.action_horizon, n_action_steps=24, hidden_dim=config.width,
        num_layers=config.depth, num_heads=config.heads, image_resize_shape=config.resize,
        image_crop_shape=config.crop, num_inference_steps=steps, device=device,
    )  # fmt: skip
    vision, text = CLIPVisionConfig(patch_size=config.vision.patch_size), CLIPTextConfig()
    parts = {"CLIPVisionModel": lambda _: CLIPVisionModel(vision), "CLIPTextModel": lambda _: CLIPTextModel(text)}
    with without_hub(theirs, parts), torch.device(device):
        return theirs.MultiTaskDiTPolicy(settings).eval().to(device)


CARDS = {"multi_task_dit": MultiTaskDitBench()}
