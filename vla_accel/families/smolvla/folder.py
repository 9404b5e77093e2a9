"""SmolVLA's checkpoint folders: lerobot's, and this package's own. To the same thing: the model, and the transforms
around it. Knows nothing of engines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from vla_accel.checkpoints.checkpoint import fitted_own, is_own, read_config
from vla_accel.checkpoints.lerobot import Processors, longest_prompt, read_processors, read_settings
from vla_accel.checkpoints.lora import Lora, fold
from vla_accel.checkpoints.weights import SafetensorsWeights, read_json
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError
from vla_accel.families.overrides import adapter_of, processor_of, resized, robot_of
from vla_accel.families.smolvla.checkpoint import DEAD, load_weights, pieces, read_sizes
from vla_accel.families.smolvla.network import SmolVla, SmolVlaConfig
from vla_accel.transforms.normalisation import Normaliser, load_statistics
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import load_preset
from vla_accel.transforms.tokenizer import Tokenizer, load_line_tokenizer

TOKENIZER_HUB = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"


def load_folder(
    folder: Path, settings: PolicyConfig, *, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[SmolVla, Processor]:
    """The model and the robot's transforms; see `vla_accel.checkpoints.loading.load`."""
    lora, described = adapter_of(folder, settings)
    path = described / "config.json"
    content = read_json(path)
    if is_own(content):
        return _ours(folder, settings, lora, device=device, dtype=dtype)
    weights = SafetensorsWeights(folder)
    told = read_processors(described, read_settings(path, ("smolvla",)), "corner", weights)
    longest = longest_prompt(told, content, path)
    config = resized(read_sizes(weights.shapes, content, longest, path), settings)
    told = dataclasses.replace(told, preset=robot_of(told.preset, settings))
    hub = told.tokenizer.get("tokenizer_name") or content.get("vlm_model_name") or TOKENIZER_HUB
    tokenizer = load_line_tokenizer(described, settings.checkpoint.tokenizer, hub)
    processor = _processor(config, told, tokenizer, settings)
    model = load_weights(weights, config, str(folder), device=device, dtype=dtype)
    return model if lora is None else _adapted(model, lora), processor


def _adapted(model: SmolVla, lora: Lora) -> SmolVla:
    return fold(model, lora, lambda name: pieces(name, model.config), DEAD)


def _ours(
    folder: Path, settings: PolicyConfig, lora: Lora | None, *, device: str | torch.device, dtype: torch.dtype | None
) -> tuple[SmolVla, Processor]:
    config = resized(read_config(folder, SmolVlaConfig), settings)
    statistics = load_statistics(folder / "norm_stats.json")
    preset = dataclasses.replace(load_preset(settings.preset or "libero"), resize="corner")
    state, actions = (Normaliser.of(statistics[name], "mean_std", name) for name in ("state", "actions"))
    tokenizer = load_line_tokenizer(folder, settings.checkpoint.tokenizer, TOKENIZER_HUB)
    processor = _processor(config, Processors(preset, state, actions, {}), tokenizer, settings)
    model = fitted_own(SmolVla.empty(config), folder).bound_for(torch.device(device), dtype)
    return (model if lora is None else _adapted(model, lora)).whole(), processor


def _processor(config: SmolVlaConfig, told: Processors, tokenizer: Tokenizer, settings: PolicyConfig) -> Processor:
    for what, needed, there in (
        ("state", told.preset.state_dim, config.state_dim), ("action", told.preset.action_dim, config.action_dim),
    ):  # fmt: skip
        if needed > there:
            raise ConfigError(f"preset: {needed} {what} dimensions do not fit a model of {there}")
    return processor_of(
        Processor, config, told.preset, (told.state, told.actions), tokenizer, settings, discrete_state=False,
        padded_state=config.state_dim, prompt_form="line", pixels=told.pixels,
    )  # fmt: skip
