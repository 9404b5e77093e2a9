"""The settings that lerobot saves in a policy's config.json, by policy class and release, and what becomes of each.

A setting is read, must have one of a few values, changes no action, or is refused. Sources: the configuration classes
of lerobot 0.3.3 to 0.6.1 and of its main branch (Hugging Face, Apache-2.0). `lerobot_steps` has the same tables for the
steps of the saved pipelines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vla_accel.errors import CheckpointError

RELEASES = ("0.3.3", "0.4.0", "0.4.1", "0.4.2", "0.4.3", "0.4.4", "0.5.0", "0.5.1", "0.6.0", "0.6.1", "main")
"""Releases whose settings are known; "main" is lerobot's main branch as of `MAIN`."""
MAIN = "23 August 2026"
KNOWN = f"lerobot {RELEASES[0]} to {RELEASES[-2]} and main as of {MAIN}"

Use = Literal["read", "fixed", "neutral", "refused"]


@dataclass(frozen=True)
class Setting:
    """Settings of the same kind.

    Attributes:
        names: Their names.
        use: "read": this package honours it. "fixed": one of `values` is required. "neutral": no action depends on it.
            "refused": any value but null and false is an error.
        reason: What it does in lerobot, or why it may be ignored; in error messages, too.
        since: First release that saves it.
        until: Last release that saves it.
        values: What a fixed setting may be.
    """

    names: tuple[str, ...]
    use: Use
    reason: str
    since: str = RELEASES[0]
    until: str = RELEASES[-1]
    values: tuple[object, ...] = ()

    @property
    def releases(self) -> tuple[str, ...]:
        return RELEASES[RELEASES.index(self.since) : RELEASES.index(self.until) + 1]

    def why_not(self, name: str, value: object) -> str | None:
        """Why a checkpoint with this value of a fixed setting is refused; None if it is accepted."""
        if self.use == "fixed" and not any(value is v or (value == v and type(value) is not bool) for v in self.values):
            expected = " or ".join(map(shown, self.values))
            return f"{name}: expected {expected}, got {shown(value):.60}: {self.reason}"
        return None


def is_unset(value: object) -> bool:
    """Whether a value switches its setting off: null, false, zero or empty."""
    return value in (None, False, "", [], {})


def shown(value: object) -> str:
    """A value as JSON has it."""
    return json.dumps(value, ensure_ascii=False)


def refused(content: Mapping[str, Any], settings: Sequence[Setting]) -> Iterator[str]:
    """Yield the reason for each setting of `content` that is refused. Settings that no release saves are refused
    together, unless they are null, false, zero or empty."""
    table = {name: setting for setting in settings for name in setting.names}
    others: dict[str | None, list[str]] = {}
    for name, value in content.items():
        setting = table.get(name)
        if setting is not None and (reason := setting.why_not(name, value)):
            yield reason
        elif (setting is None or setting.use == "refused") and not is_unset(value):
            others.setdefault(setting and setting.reason, []).append(f"{name} {value!r:.60}")
    unknown = others.pop(None, [])
    for reason, names in others.items():
        yield f"expected no settings {', '.join(names)}: {reason}"
    if unknown:
        yield (
            f"expected settings of {KNOWN}, got {', '.join(unknown)}: another version may compute something else with "
            "it; if it changes no action, remove it from the file"
        )


def check(content: Mapping[str, Any], settings: Sequence[Setting], where: object) -> None:
    """Raise CheckpointError, which begins with `where`, for the settings of a file that are refused."""
    if found := [*refused(content, settings)]:
        raise CheckpointError(f"{where}: {'; '.join(found)}")


def read(names: str, reason: str, since: str = RELEASES[0], until: str = RELEASES[-1]) -> Setting:
    return Setting(tuple(names.split()), "read", reason, since, until)


def neutral(names: str, reason: str, since: str = RELEASES[0], until: str = RELEASES[-1]) -> Setting:
    return Setting(tuple(names.split()), "neutral", reason, since, until)


def fixed(names: str, reason: str, *values: object, since: str = RELEASES[0], until: str = RELEASES[-1]) -> Setting:
    return Setting(tuple(names.split()), "fixed", reason, since, until, values)


# -- config.json --------------------------------------------------------------------------------------------------

_COMMON = (
    read("type", "policy class"),
    read("input_features output_features", "names and sizes of cameras, state and action"),
    fixed("n_obs_steps", "a policy that reads several observations is not supported", 1),
    neutral("device use_amp", "where and in which precision lerobot ran"),
    neutral("push_to_hub repo_id private tags license", "upload to the hub"),
)
_SINCE_04 = (neutral("pretrained_path", "checkpoint that training started from", "0.4.0"),)
_SINCE_043 = (read("use_peft", "an adapter is required next to the file", "0.4.3"),)
_SINCE_06 = (neutral("pretrained_revision", "revision that training started from", "0.6.0"),)
_BASE = (*_COMMON, *_SINCE_04, *_SINCE_043, *_SINCE_06)
_CHUNK = (
    read("chunk_size", "actions of a chunk"),
    neutral("n_action_steps", "actions of a chunk that lerobot executes; here the caller decides"),
)
_SCALING = read("normalization_mapping", "how statistics scale; the saved steps have their own copy, which counts")
_OPTIMIZER = neutral(
    "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay scheduler_warmup_steps scheduler_decay_steps "
    "scheduler_decay_lr",
    "training",
)
_EMPTY_CAMERAS = neutral("empty_cameras", "number of cameras without images, which the model masks")
_RTC = neutral("rtc_config", "real-time chunking of lerobot's loop; here it is `rtc:` of the configuration", "0.4.2")
_PERIODS = fixed("min_period", "embedding of the time", 4e-3), fixed("max_period", "embedding of the time", 4.0)


def _since(release: str, *settings: Setting) -> tuple[Setting, ...]:
    """The settings of a policy class that lerobot has since `release`."""
    later = RELEASES.index(release)
    return tuple(
        Setting(s.names, s.use, s.reason, RELEASES[max(later, RELEASES.index(s.since))], s.until, s.values)
        for s in settings
    )


_COPIED = "the saved steps have their own copy, which counts"
_RELATIVE = (
    read("use_relative_actions", "actions relative to the state; must agree with the saved steps", "0.5.1"),
    neutral("relative_exclude_joints action_feature_names", _COPIED, "0.5.1"),
)
_PALIGEMMA = (
    read("max_action_dim image_resolution paligemma_variant", "sizes, checked against the weights", "0.4.0"),
    read("tokenizer_max_length", "longest prompt, where the saved tokenizer step does not say", "0.4.0"),
    neutral("dtype", "precision in which lerobot ran", "0.4.0"),
    neutral("gradient_checkpointing optimizer_grad_clip_norm", "training", "0.4.0"),
    neutral("compile_model compile_mode", "torch.compile", "0.4.0"),
)
_FLOW = (
    read("action_expert_variant", "size, checked against the weights", "0.4.0"),
    read("num_inference_steps", "denoising steps", "0.4.0"),
    neutral(
        "time_sampling_beta_alpha time_sampling_beta_beta time_sampling_scale time_sampling_offset", "training", "0.4.0"
    ),
    *_since("0.4.0", *_PERIODS),
)
_FINE_TUNING = neutral("freeze_vision_encoder train_expert_only", "training", "0.4.3")

_OLD_PI0 = "the π0 of lerobot 0.3 is another network, which later releases do not load either"
_PI0 = (
    *_since("0.4.0", *_BASE, *_CHUNK, _SCALING, _OPTIMIZER, _EMPTY_CAMERAS, _RTC),
    *_PALIGEMMA,
    *_FLOW,
    *_RELATIVE,
    neutral("max_state_dim", "size that the weights show", "0.4.0"),
    _FINE_TUNING,
    Setting(
        (
            "resize_imgs_with_padding", "adapt_to_pi_aloha", "use_delta_joint_actions_aloha", "proj_width", "num_steps",
            "use_cache", "attention_implementation", "train_state_proj",
        ),
        "refused", _OLD_PI0, until="0.3.3",
    ),
)  # fmt: skip

_MEMORY = "the policy reads a history of frames, which this package does not run"
_PI05 = (
    *_since("0.4.0", *_BASE, *_CHUNK, _SCALING, _OPTIMIZER, _EMPTY_CAMERAS, _RTC),
    *_PALIGEMMA,
    *_FLOW,
    *_RELATIVE,
    read("max_state_dim", "numbers that lerobot before 0.5 fills the state in the prompt up to", "0.4.0"),
    _FINE_TUNING,
    fixed("use_visual_memory", _MEMORY, False, since="main"),
    fixed("use_proprioceptive_memory", _MEMORY, False, since="main"),
    neutral("memory_frames memory_stride memory_temporal_attention_every", "settings of a memory that is off", "main"),
    read("rtc_training_max_delay", "longest delay of trained real-time chunking; 0: not trained for it", "main"),
)

_PI0_FAST = (
    *_since("0.4.3", *_BASE, *_CHUNK, _SCALING, _OPTIMIZER, _EMPTY_CAMERAS, _RTC, *_PALIGEMMA),
    *_RELATIVE,
    neutral("action_expert_variant", "the model has no action expert", "0.4.3"),
    read("max_state_dim", "numbers that lerobot before 0.5 fills the state in the prompt up to", "0.4.3"),
    read("text_tokenizer_name", "the tokenizer, where the saved tokenizer step does not name it", "0.4.3"),
    read("action_tokenizer_name fast_skip_tokens validate_action_token_prefix", "decoding of the actions", "0.4.3"),
    read("max_decoding_steps", "most tokens that are written", "0.4.3"),
    fixed("temperature", "only greedy decoding is supported", 0.0, since="0.4.3"),
    neutral("max_action_tokens", "training", "0.4.3"),
    neutral("use_kv_cache", "speed", "0.4.3"),
)

_SMOLVLA = (
    *_BASE,
    *_CHUNK,
    _SCALING,
    _OPTIMIZER,
    _EMPTY_CAMERAS,
    _RTC,
    *_PERIODS,
    read("num_steps", "denoising steps"),
    read(
        "max_state_dim max_action_dim resize_imgs_with_padding num_expert_layers num_vlm_layers "
        "expert_width_multiplier",
        "sizes, checked against the weights",
    ),
    read("attention_mode self_attn_every_n_layers", "layers in which the actions attend to each other"),
    read("vlm_model_name", "the tokenizer, where the saved tokenizer step does not name it"),
    read("tokenizer_max_length", "longest prompt, where the saved tokenizer step does not say"),
    fixed("adapt_to_pi_aloha", "π0's conversion of ALOHA's joints is not supported for SmolVLA", False),
    fixed("use_delta_joint_actions_aloha", "lerobot does not run it either", False),
    fixed("add_image_special_tokens", "tokens around the images are not supported", False),
    fixed("use_cache", "the model is run with cached keys and values", True),
    neutral("prefix_length pad_language_to", "padding, which the model masks"),
    neutral("optimizer_grad_clip_norm freeze_vision_encoder train_expert_only train_state_proj", "training"),
    neutral("load_vlm_weights", "where training took its first weights from"),
    neutral("compile_model compile_mode", "torch.compile", "0.4.4"),
)

_N15 = "it belongs to GR00T N1.5, another network"
_GROOT = (
    *_since("0.4.0", *_BASE, *_CHUNK),
    neutral("normalization_mapping", "not read by lerobot; the saved steps have their own scaling", "0.4.0"),
    neutral("max_state_dim max_action_dim", "sizes that the weights show", "0.4.0"),
    neutral("base_model_path", "checkpoint that training started from", "0.4.0"),
    neutral("embodiment_tag", _COPIED, "0.4.0"),
    neutral("image_size", "not read since N1.7", "0.4.0"),
    Setting(("tokenizer_assets_repo",), "refused", _N15, "0.4.0"),
    neutral(
        "tune_llm tune_visual tune_projector tune_diffusion_model lora_rank lora_alpha lora_dropout lora_full_model "
        "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay warmup_ratio use_bf16 video_backend "
        "balance_dataset_weights balance_trajectory_weights dataset_paths output_dir save_steps max_steps batch_size "
        "dataloader_num_workers report_to resume",
        "training",
        "0.4.0",
    ),
    neutral("tune_vlln tune_top_llm_layers model_params_fp32", "training", "0.6.0"),
    read("num_inference_timesteps", "denoising steps", "0.6.0"),
    read("rtc_ramp_rate", "ramp of real-time chunking", "0.6.0"),
    neutral("use_flash_attention", "speed", "0.6.0"),
    neutral("use_relative_actions relative_exclude_joints action_decode_transform", _COPIED, "0.6.0"),
)

FIELDS: dict[str, tuple[Setting, ...]] = {
    "pi0": _PI0,
    "pi05": _PI05,
    "pi0_fast": _PI0_FAST,
    "smolvla": _SMOLVLA,
    "groot": _GROOT,
}
"""Settings of config.json by policy class, as `type` names it."""
