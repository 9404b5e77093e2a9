"""π0-FAST's checkpoint folders, lerobot's: to the model, and the transforms around it. Knows nothing of engines.

openpi keeps this model in JAX alone, which is not read here. lerobot decodes `n_action_steps` actions of a chunk of
`chunk_size`; the tokens are of the whole chunk, and so are the actions here: the two are the same where it is as long.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from vla_accel.checkpoints.lerobot import longest_prompt, member, read_processors, read_settings
from vla_accel.checkpoints.lerobot_images import prompt_state_dim
from vla_accel.checkpoints.lora import fold
from vla_accel.checkpoints.weights import SafetensorsWeights
from vla_accel.config import PolicyConfig
from vla_accel.families.overrides import adapter_of, processor_of, resized, robot_of
from vla_accel.families.pi0_fast.checkpoint import load_weights, pieces, read_sizes, reads_head
from vla_accel.families.pi0_fast.network import Pi0Fast
from vla_accel.families.pi0_fast.transforms import Detokeniser, FastProcessor, load_fast
from vla_accel.transforms.tokenizer import PALIGEMMA_HUB, load_tokenizer


def load_folder(
    folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[Pi0Fast, FastProcessor]:
    """The model and the robot's transforms; see `vla_accel.checkpoints.loading.load`."""
    lora, described = adapter_of(folder, settings)
    path, given = described / "config.json", settings.checkpoint
    content, weights = read_settings(path, ("pi0_fast",)), SafetensorsWeights(folder)
    told = read_processors(described, content, "bilinear", weights)
    config = resized(read_sizes(weights, content, longest_prompt(told, content, path), path), settings)
    if lora is not None and reads_head(lora.changes):
        config = dataclasses.replace(config, tied=False)
    preset = robot_of(told.preset, settings)
    hub = told.tokenizer.get("tokenizer_name") or content.get("text_tokenizer_name")
    tokenizer = load_tokenizer(described, given.tokenizer, elsewhere=True, hub=hub or PALIGEMMA_HUB)
    fast = load_fast(described, given.action_tokenizer, member(content, "action_tokenizer_name", str, path))
    detokeniser = Detokeniser.of(
        fast, tokenizer, member(content, "fast_skip_tokens", int, path), config.action_horizon,
        config.action_dim, opened=bool(content.get("validate_action_token_prefix", True)),
        relaxed=given.relaxed_actions,
    )  # fmt: skip
    config = dataclasses.replace(config, stop_token=detokeniser.stop)
    processor = processor_of(
        FastProcessor, config, preset, (told.state, told.actions), tokenizer, settings, discrete_state=True,
        prompt_form="fast", prompt_state_dim=prompt_state_dim(content, path), pixels=told.pixels,
        detokeniser=detokeniser,
    )  # fmt: skip
    model = load_weights(weights, config, str(folder), device=device, dtype=dtype)
    return model if lora is None else fold(model, lora, lambda name: pieces(name, config)), processor
