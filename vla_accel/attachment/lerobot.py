"""lerobot's policy objects: their config and weights through the readers of their folders, and their batches.

lerobot's processors run around a policy. They normalize and tokenize, so that the transforms here read pixels and pad,
and nothing else: states, actions and prompts arrive as the model's numbers.
"""

from __future__ import annotations

import inspect
import json
import logging
import operator
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_accel.attachment.calls import Call
from vla_accel.attachment.prepared import prompt_tokens
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.checkpoints.lerobot import is_lerobot_config, reads_prompt
from vla_accel.checkpoints.lerobot_statistics import ENVIRONMENT, STATE, Statistics
from vla_accel.config import PolicyConfig, RtcConfig
from vla_accel.errors import ConfigError, ObservationError, VlaAccelError
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
_TOKENIZERS = {"pi0_fast": "_paligemma_tokenizer", "vla_jepa": "model.qwen.processor.tokenizer"}
"""The policy's own tokenizer, where the readers need it: it encodes prompts within the policy, or decodes actions."""
_UNREAD = {
    "fastwam": ("prompt", "input_image", "video", "proprio", "context", "context_mask", "negative_prompt", "seed",
                "text_cfg_scale", "num_inference_steps", "sigma_shift", "rand_device", "tiled"),
}  # fmt: skip
"""Further entries of a batch that a policy would read."""
_TASKS = {"vla_jepa": "Execute the robot action."}
"""The instruction of a batch without one."""
_TOKENS, _MASK = "observation.language.tokens", "observation.language.attention_mask"
_BUFFER = "normalize_inputs.buffer_{}.{}"
"""Statistics among the weights, as lerobot 0.3 stored them; no pipeline has to be described then."""
_ROUNDING = 0.01
_log = logging.getLogger("vla_accel.attach")


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
            raise ObservationError(f"{_TOKENS}: expected at most {self.inner.max_token_len}, got {len(tokens)}")
        return replace(self.inner.encode(replace(seen, prompt=self._ordinary)), tokens=tokens)


class LerobotReader:
    """A policy of lerobot (`calls.Reader`).

    Raises:
        ConfigError: The policy is of no family of this package, or its images cannot be read.
        CheckpointError: A setting or a tensor is not known.
    """

    def __init__(self, policy: Any, settings: PolicyConfig, preprocessor: Any) -> None:
        self._policy = policy
        with tempfile.TemporaryDirectory() as folder:
            policy.config.save_pretrained(folder)
            path = Path(folder)
            content = json.loads((path / "config.json").read_text())
            if not is_lerobot_config(content):
                raise ConfigError(f"policy.config: expected a type and features, got {', '.join(content)}")
            self._kind: str = content["type"]
            table = _camera_statistics(policy, content, preprocessor)
            (path / "config.json").write_text(json.dumps(_normalized(content)))
            _write_tokenizers(policy, self._kind, path)
            if self._kind == "fastwam":
                unread = np.zeros((1, content["video_dit_config"]["text_dim"]), np.float32)
                write_prompts(path / FILE, content["prompt_template"], {"": unread})
            if self._kind == "pi0_fast":  # as lerobot decodes tokens that are no whole chunk
                settings = replace(settings, checkpoint=replace(settings.checkpoint, relaxed_actions=True))
            weights = ModuleWeights(policy, _buffers(table, content))
            family = _family_of(content, weights)
            if family.uniform_noise:
                raise ConfigError(
                    f"policy: expected one whose noise is normal, got {family.name}; save it and load its folder"
                )
            model: Any
            processor: Any
            try:
                model, processor = family.load(path, settings, weights)
            except VlaAccelError as error:
                name = type(policy).__name__
                raise type(error)(str(error).replace(f"{path}/", "").replace(str(path), name)) from error
        inputs = content["input_features"]
        cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL" and "empty_camera" not in key]
        if self._kind == "fastwam":
            cameras.sort()  # lerobot joins the images in this order
            encode = partial(_encode, policy.model)
            processor = replace(processor, prompts=replace(processor.prompts, rows={}, encoder=encode))
        self._cameras = dict(zip(processor.preset.images, cameras, strict=True))
        self._scales = _scales(table, content, cameras)
        self._states = [key for key in (STATE, ENVIRONMENT) if key in inputs]
        self._preset = processor.preset
        self._tokenized = reads_prompt(self._kind)
        if self._tokenized:
            # lerobot's π0-FAST puts a second <bos> behind the prompt.
            suffix = processor.tokenizer.encode("", add_bos=True) if self._kind == "pi0_fast" else ()
            processor = TokenTransforms(processor, suffix)
        name = type(policy).__name__
        self.checkpoint = Checkpoint(name, family, model, processor, settings=settings)
        self.settings = self._with_rtc(settings, family, model.config.action_horizon)
        owner, _, self.method = _METHODS.get(self._kind, "predict_action_chunk").rpartition(".")
        self.owner = policy.get_submodule(owner)
        self.takes_noise = self._kind in _TAKE_NOISE

    def _with_rtc(self, settings: PolicyConfig, family: Family[Any, Any, Any], horizon: int) -> PolicyConfig:
        requested = getattr(self._policy.config, "rtc_config", None)
        if requested is None or not requested.enabled:
            return settings
        return replace(settings, rtc=guidance(requested, family, horizon))

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
        if unknown := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"{self.method}: expected none of {', '.join(unknown)}")
        requested = getattr(self._policy.config, "rtc_config", None)
        guided = prev_chunk_left_over is not None and requested is not None and requested.enabled
        chunk = prev_chunk_left_over if guided else None
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
        prompts = self._prompts(batch, len(state))
        return [
            {**{key: views[row] for key, views in images.items()}, **self._split(state[row])}
            | ({} if prompts is None else {self._preset.prompt: prompts[row]})
            for row in range(len(state))
        ]

    def _split(self, state: np.ndarray) -> dict[str, np.ndarray]:
        if state.ndim == 1:
            return self._preset.split(state)
        (key,) = self._preset.state
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
            return prompt_tokens(batch[_TOKENS], batch[_MASK], _MASK)
        if not self.checkpoint.family.capabilities.prompt:
            return None
        tasks = batch.get("task", _TASKS.get(self._kind))
        return [tasks] * count if isinstance(tasks, str) else tasks


def pixels(images: Tensor, name: str, scale: Normaliser | None = None) -> np.ndarray:
    """Return uint8 (..., H, W, 3) of images (..., 3, H, W) in [0, 1] or, with a `scale`, normalized."""
    if images.shape[-3] != 3:
        raise ObservationError(f"{name}: expected shape (..., 3, height, width), got {tuple(images.shape)}")
    if images.dtype != torch.uint8:
        levels = images.float()
        if scale is not None:
            low, span = (
                torch.as_tensor(v, device=images.device).float()[:, None, None] for v in (scale.low, scale.span)
            )
            levels = ((levels + 1.0) / 2.0 if scale.kind == "quantile" else levels) * span + low
        levels = levels * 255.0
        lowest, highest = levels.aminmax()
        if not (float(lowest) >= -_ROUNDING and float(highest) <= 255.0 + _ROUNDING):
            raise ObservationError(
                f"{name}: expected values in [0, 1], got {float(lowest) / 255} to {float(highest) / 255}"
            )
        images = levels.round().to(torch.uint8)
    return images.movedim(-3, -1).contiguous().cpu().numpy()


def guidance(requested: Any, family: Family[Any, Any, Any], horizon: int) -> RtcConfig:
    """Return lerobot's settings of real-time chunking, an `RTCConfig`, as this package's, those that the family reads.

    An execution horizon beyond the chunk, such as lerobot's default of 10 for a chunk of 5, is the whole chunk, as in
    lerobot. Raises ConfigError for a family without real-time chunking, and for `debug`.
    """
    if requested.debug:
        raise ConfigError("policy.rtc_config.debug: expected false, got true; the engines record no debug data")
    if not family.chunking.settings:
        if not requested.enabled:
            return RtcConfig()
        raise ConfigError(
            f"policy.rtc_config: expected none for {family.name}, which has no real-time chunking, got {requested}"
        )
    settings: dict[str, Any] = {
        "schedule": requested.prefix_attention_schedule.value.lower(),
        "max_guidance_weight": requested.max_guidance_weight,
        "execution_horizon": min(requested.execution_horizon, horizon),
    }
    if unused := sorted(settings.keys() - set(family.chunking.settings)):
        _log.warning("%s: policy.rtc_config: %s are ignored", family.name, ", ".join(unused))
    return RtcConfig(**{name: value for name, value in settings.items() if name not in unused})


# -- the policy as a folder ---------------------------------------------------------------------------------------


def _family_of(content: Mapping[str, Any], weights: ModuleWeights) -> Family[Any, Any, Any]:
    families = [family_named(name) for name in FAMILIES]
    for family in families:
        if family.recognises(content, weights.shapes):
            if "weights" not in inspect.signature(family.load).parameters:
                raise ConfigError(f"policy: {family.name} cannot be attached: load its folder instead")
            return family
    raise ConfigError(f"policy: expected a policy of type {', '.join(FAMILIES)}, got {content['type']!r}")


def _normalized(content: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a policy whose states and actions are the model's own numbers."""
    modes = content.get("normalization_mapping") or {}
    return {**content, "normalization_mapping": {k: m if k == "VISUAL" else "IDENTITY" for k, m in modes.items()}}


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
    place = next(model.text_encoder.parameters()).device
    model.text_encoder.to(model.device)
    try:
        rows, _ = model.encode_prompt([text])
    finally:
        model.text_encoder.to(place)
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


def _buffers(table: Mapping[str, np.ndarray], content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Statistics of the cameras as buffers, and one of the state, of which the readers read the size alone."""
    size = (content["input_features"].get(STATE) or {"shape": (1,)})["shape"]
    found = {f"{STATE}.mean": np.zeros(size, np.float32), **table}
    names = {name: name.rpartition(".") for name in found}
    return {
        _BUFFER.format(key.replace(".", "_"), kind): torch.as_tensor(found[name])
        for name, (key, _, kind) in names.items()
    }


def _scales(
    table: Mapping[str, np.ndarray], content: Mapping[str, Any], cameras: Sequence[str]
) -> dict[str, Normaliser]:
    kinds = dict.fromkeys(cameras, "VISUAL")
    statistics = Statistics("preprocessor", table, {"VISUAL": _visual_mode(content)}, 1e-8, True, kinds)
    found = {key: statistics.camera(key) for key in cameras}
    return {key: scale for key, scale in found.items() if scale is not None}
