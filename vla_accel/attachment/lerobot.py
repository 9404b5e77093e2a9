"""lerobot's policy objects: their config and weights through the readers of their folders, and their batches.

lerobot's processors run around a policy. They normalize and tokenize, so that the transforms here read pixels and pad,
and nothing else: states, actions and prompts arrive as the model's numbers.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_accel.attachment.batches import MASK, TOKENS, pixels, prompt_tokens
from vla_accel.attachment.calls import Call, check_settings, enabled_rtc, guidance, refuse_arguments, saved_config
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.checkpoints.lerobot import is_lerobot_config, reads_prompt
from vla_accel.checkpoints.lerobot_settings import (
    AFTER,
    BEFORE,
    NORMALIZE,
    OPTIONAL,
    POSTPROCESSOR,
    POSTPROCESSORS,
    PREPROCESSORS,
    UNNORMALIZE,
)
from vla_accel.checkpoints.lerobot_statistics import ENVIRONMENT, STATE, Statistics, step_statistics
from vla_accel.config import PolicyConfig
from vla_accel.errors import ConfigError, ObservationError
from vla_accel.families.family import FAMILIES, Family, family_named
from vla_accel.families.fastwam.text import FILE, write_prompts
from vla_accel.families.loading import Checkpoint
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Inputs
from vla_accel.transforms.tokenizer import SmallTokenizer

_METHODS = {"smolvla": "_get_action_chunk", "diffusion": "diffusion.generate_actions"}
"""The method that computes a chunk, where it is not `predict_action_chunk`: other methods call it directly, or it gets
a history that `predict_action_chunk` keeps."""
_TAKE_NOISE = ("pi0", "pi05", "smolvla")
"""Policies whose method has an argument with all the noise of a call."""
_TOKENIZERS = {
    "pi0_fast": "_paligemma_tokenizer", "vla_jepa": "model.qwen.processor.tokenizer",
    "evo1": "model.embedder.tokenizer",
}  # fmt: skip
"""The policy's own tokenizer, where the readers need it: it encodes prompts within the policy, or decodes actions."""
_UNREAD = {
    "fastwam": ("prompt", "input_image", "video", "proprio", "context", "context_mask", "negative_prompt", "seed",
                "text_cfg_scale", "num_inference_steps", "sigma_shift", "rand_device", "tiled"),
    "evo1": ("state_mask", "embodiment_id"),
}  # fmt: skip
"""Further entries of a batch that a policy would read."""
_TASKS = {"vla_jepa": "Execute the robot action."}
"""The instruction of a batch without one."""
_KNOWN = {"fastwam": ("wan",), "pi0_fast": ("relaxed_actions",)}
"""The fields of `PolicyConfig.checkpoint` that are used."""
_REFUSED = ("multi_task_dit",)
"""Types of policies that run from their folders only."""
_PLAIN = {"use_relative_actions": False, "binarize_gripper": False}
"""Settings of what happens around a policy, to actions that it has returned."""
_SCALED = (NORMALIZE, UNNORMALIZE)


class TokenTransforms:
    """A family's transforms for observations whose prompt is tokens, an integer array (L,).

    Attributes:
        inner: The transforms; they tokenize an ordinary prompt, whose tokens are not used.
        suffix: Tokens after each prompt that lerobot's model adds itself.
    """

    def __init__(self, inner: Any, suffix: Sequence[int]) -> None:
        self.inner, self.suffix = inner, np.asarray(suffix, np.int64)
        self._ordinary = inner.ordinary_prompt()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def token_counts(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the fewest and the most tokens of a prompt with other states, each number of one to three digits."""
        margin = 2 * self.inner.preset.state_dim if self.inner.discrete_state else 0
        count = len(tokens) + len(self.suffix)
        return max(1, count - margin), count + margin

    def encode(self, seen: Any) -> Inputs:
        """Normalize the state and take the tokens as they are. Raises ObservationError if there are too many."""
        tokens = np.concatenate((seen.prompt, self.suffix))
        if len(tokens) > self.inner.max_token_len:
            raise ObservationError(f"{TOKENS}: expected at most {self.inner.max_token_len}, got {len(tokens)}")
        return replace(self.inner.encode(replace(seen, prompt=self._ordinary)), tokens=tokens)


class LerobotReader:
    """A policy of lerobot (`calls.Reader`).

    Raises:
        ConfigError: The policy is of no family of this package, or its images cannot be read.
        CheckpointError: A setting or a tensor is not known.
    """

    def __init__(self, policy: Any, settings: PolicyConfig, preprocessor: Any) -> None:
        self._policy = policy
        weights = ModuleWeights(policy)
        with saved_config(policy) as path:
            content = json.loads((path / "config.json").read_text())
            if not is_lerobot_config(content):
                raise ConfigError(f"policy.config: expected a type and features, got {', '.join(content)}")
            self._kind: str = content["type"]
            if self._kind in _REFUSED:
                raise ConfigError(f"policy: attach does not support {self._kind}: load its folder instead")
            family, requested = _family_of(content, weights), enabled_rtc(policy)
            check_settings(family, settings, _KNOWN.get(self._kind, ()), chunking=requested is not None)
            content |= {name: value for name, value in _PLAIN.items() if name in content}
            if self._kind == "evo1":  # whose actions have the network's columns
                content["postprocess_action_dim"] = content["max_action_dim"]
            (path / "config.json").write_text(json.dumps(content))
            statistics = _write_pipelines(path, content, _camera_statistics(policy, content, preprocessor))
            _write_tokenizers(policy, self._kind, path)
            if self._kind == "fastwam":
                unread = np.zeros((1, content["video_dit_config"]["text_dim"]), np.float32)
                write_prompts(path / FILE, content["prompt_template"], {"": unread})
            if self._kind == "pi0_fast":  # as lerobot decodes tokens that are no whole chunk
                settings = replace(settings, checkpoint=replace(settings.checkpoint, relaxed_actions=True))
            model: Any
            processor: Any
            model, processor = family.load(path, settings, weights)
        inputs = content["input_features"]
        cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL" and "empty_camera" not in key]
        if self._kind == "fastwam":
            cameras.sort()  # lerobot joins the images in this order
            encode = partial(_encode, policy.model)
            processor = replace(processor, prompts=replace(processor.prompts, rows={}, encoder=encode))
        self._cameras = dict(zip(processor.preset.images, cameras, strict=True))
        self._scales = {key: scale for key in cameras if (scale := statistics.camera(key)) is not None}
        self._states = [key for key in (STATE, ENVIRONMENT) if key in inputs]
        self._tokenized = reads_prompt(self._kind)
        self._processor, self._first = processor, True
        name = type(policy).__name__
        self.checkpoint = Checkpoint(name, family, model, self._transforms(), settings=settings)
        if requested is not None:
            settings = replace(settings, rtc=guidance(requested, family, model.config.action_horizon))
        self.settings = settings
        owner, _, self.method = _METHODS.get(self._kind, "predict_action_chunk").rpartition(".")
        self.owner = policy.get_submodule(owner)
        self.takes_noise = self._kind in _TAKE_NOISE

    def _transforms(self) -> Any:
        if not self._tokenized:
            return self._processor
        # lerobot's π0-FAST puts a second <bos> behind the prompt.
        suffix = self._processor.tokenizer.encode("", add_bos=True) if self._kind == "pi0_fast" else ()
        return TokenTransforms(self._processor, suffix)

    def _fit_state(self, size: int) -> None:
        """Make the transforms those of a state of `size` numbers. The features of a policy that was trained from a base
        are the base's, and only a batch shows the robot's state."""
        preset = self._processor.preset
        if self._first and len(self._states) == 1 and size != preset.state_dim:
            preset = replace(preset, state_dim=size)
            self._processor = replace(self._processor, preset=preset, state=Normaliser.identity(size))
            self.checkpoint = replace(self.checkpoint, processor=self._transforms())
        self._first = False

    def call(
        self,
        batch: Mapping[str, Any],
        noise: Tensor | None = None,
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        **others: Any,
    ) -> Call:
        """Read a batch (`calls.Reader`)."""
        refuse_arguments(self.method, others)
        chunk = None if enabled_rtc(self._policy) is None else prev_chunk_left_over
        return Call(self._observations(batch), noise, chunk, inference_delay or 0)

    def _observations(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        masks = [key for key in batch if key.endswith("_padding_mask") and key.startswith("observation.images.")]
        if unread := [*masks, *(key for key in _UNREAD.get(self._kind, ()) if batch.get(key) is not None)]:
            raise ConfigError(f"batch: expected images, state and prompt, got {', '.join(unread)}")
        images = {key: pixels(value, name, self._scales.get(name)) for key, name, value in self._images(batch)}
        parts = [batch[key].float().cpu().numpy() for key in self._states]
        state = np.concatenate(parts, axis=-1)
        history = getattr(self.checkpoint.processor, "history", 1) > 1
        if state.ndim == 3 and not history:
            state = state[:, -1]
        self._fit_state(state.shape[-1])
        prompts = self._prompts(batch, len(state))
        return [
            {**{key: views[row] for key, views in images.items()}, **self._split(state[row])}
            | ({} if prompts is None else {self._processor.preset.prompt: prompts[row]})
            for row in range(len(state))
        ]

    def _split(self, state: np.ndarray) -> dict[str, np.ndarray]:
        if state.ndim == 1:
            return self._processor.preset.split(state)
        (key,) = self._processor.preset.state
        return {key: state}

    def _images(self, batch: Mapping[str, Any]) -> list[tuple[str, str, Tensor]]:
        """Key here, lerobot's name and images of each camera that the batch has."""
        stacked = batch.get("observation.images")
        if self._kind == "diffusion" and stacked is not None:  # (B, history, cameras, 3, H, W)
            views = stacked.unbind(2)
            return [(key, name, view) for (key, name), view in zip(self._cameras.items(), views, strict=True)]
        return [(key, name, batch[name]) for key, name in self._cameras.items() if name in batch]

    def _prompts(self, batch: Mapping[str, Any], count: int) -> Sequence[Any] | None:
        if self._tokenized:
            return prompt_tokens(batch[TOKENS], batch[MASK], MASK)
        if not self.checkpoint.family.capabilities.prompt:
            return None
        tasks = batch.get("task", _TASKS.get(self._kind))
        return [tasks] * count if isinstance(tasks, str) else tasks


# -- the policy as a folder ---------------------------------------------------------------------------------------


def _family_of(content: Mapping[str, Any], weights: ModuleWeights) -> Family[Any, Any, Any]:
    families = [family_named(name) for name in FAMILIES]
    for family in families:
        if family.recognises(content, weights.shapes):
            return family
    raise ConfigError(f"policy: expected a policy of type {', '.join(FAMILIES)}, got {content['type']!r}")


def _write_pipelines(folder: Path, content: Mapping[str, Any], table: Mapping[str, np.ndarray]) -> Statistics:
    """Write the pipelines of a policy whose batches are normalized and tokenized, and return their statistics.

    They scale the cameras, by `table`, and nothing else.
    """
    kind, step = content["type"], {"features": content["input_features"], "norm_map": {"VISUAL": _visual_mode(content)}}
    file = "cameras.safetensors" if table else None
    if file is not None:
        save_file({name: torch.as_tensor(value) for name, value in table.items()}, str(folder / file))
    for name, orders in ((BEFORE, PREPROCESSORS[kind]), (AFTER, POSTPROCESSORS.get(kind, POSTPROCESSOR))):
        steps = [
            {"registry_name": step_name, **({"config": step, "state_file": file} if step_name in _SCALED else {})}
            for step_name in dict.fromkeys(itertools.chain(*orders))
            if step_name not in OPTIONAL
        ]
        (folder / name).write_text(json.dumps({"steps": steps}))
    return step_statistics(folder, NORMALIZE, step, file)


def _write_tokenizers(policy: Any, kind: str, folder: Path) -> None:
    """Write what a folder's reader needs; prompts of other policies arrive as tokens, and any tokenizer will do."""
    if kind not in _TOKENIZERS:
        SmallTokenizer((), 0, 0).save(folder / "tokenizer.json")
        return
    operator.attrgetter(_TOKENIZERS[kind])(policy).save_pretrained(folder)
    if kind == "pi0_fast":
        fast, names = policy.action_tokenizer, ("scale", "min_token", "time_horizon", "action_dim")
        fast.bpe_tokenizer.save_pretrained(folder / "fast")
        numbers = {name: getattr(fast, name, None) for name in names}
        (folder / "fast" / "processor_config.json").write_text(json.dumps(numbers))


@torch.no_grad()
def _encode(model: Any, text: str) -> np.ndarray:
    """Return the rows of a prompt from FastWAM's own text encoder, which goes to the model's device for it."""
    device = next(model.text_encoder.parameters()).device
    model.text_encoder.to(model.device)
    try:
        rows, _ = model.encode_prompt([text])
    finally:
        model.text_encoder.to(device)
    _, mask = model.tokenizer([text], return_mask=True, add_special_tokens=True)
    return rows[0, : int(mask.sum())].float().cpu().numpy()


def _visual_mode(content: Mapping[str, Any]) -> str:
    return (content.get("normalization_mapping") or {}).get("VISUAL", "IDENTITY")


def _camera_statistics(policy: Any, content: Mapping[str, Any], preprocessor: Any) -> dict[str, np.ndarray]:
    """Return the statistics of the cameras, such as "observation.images.top.mean"; none if images are as they are."""
    if _visual_mode(content) == "IDENTITY":
        return {}
    path = getattr(policy.config, "pretrained_path", None)
    if preprocessor is None and path is not None:
        from lerobot.processor import PolicyProcessorPipeline  # pyright: ignore[reportMissingImports]

        preprocessor = PolicyProcessorPipeline.from_pretrained(str(path), config_filename="policy_preprocessor.json")
    if preprocessor is None:
        raise ConfigError(
            f"preprocessor: expected lerobot's, because {content['type']} gets images that it normalizes by statistics "
            f"({_visual_mode(content)}), got none: attach(policy, preprocessor=preprocessor)"
        )
    steps = [step for step in preprocessor.steps if type(step).__name__ == "NormalizerProcessorStep"]
    table = {name: value.float().cpu().numpy() for step in steps for name, value in step.state_dict().items()}
    cameras = [key for key, f in content["input_features"].items() if f["type"] == "VISUAL"]
    return {name: value for name, value in table.items() if name.rpartition(".")[0] in cameras}
