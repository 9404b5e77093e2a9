"""Settings of Isaac-GR00T's config.json, processor and modalities, and of lerobot's steps of GR00T.

Sources: Isaac-GR00T's configurations, processors and `ModalityConfig` of N1.7, N1.6 and N1.5 (NVIDIA, Apache-2.0), the
published config.json files, and the steps of lerobot 0.5.1 and 0.6.1 (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.checkpoints.lerobot_settings import KNOWN as LEROBOT
from vla_accel.checkpoints.lerobot_settings import STEPS
from vla_accel.checkpoints.settings import Setting, check, fixed, neutral, read
from vla_accel.errors import CheckpointError
from vla_accel.families.groot.releases import N15, Release


def _only(names: str, *values: object) -> Setting:
    """Settings of networks and processors that no published GR00T has, with the supported values; null is accepted."""
    return fixed(names, "not supported", None, *values)


_IMAGES = "image_crop_size image_target_size shortest_image_edge crop_fraction use_albumentations letter_box_transform"
_TACTILE = neutral("tactile_state_keys tactile_input_shape tactile_embed_dim", "count with use_tactile only")
_TRANSFORMERS_OWN = neutral(
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path attn_implementation "
    "_attn_implementation return_dict problem_type id2label label2id",
    "transformers' own",
)
_TRAINING = neutral(
    "tune_llm tune_visual tune_top_llm_layers tune_projector tune_diffusion_model tune_vlln tune_linear attn_dropout "
    "state_dropout_prob state_gaussian_noise_std state_additive_noise_scale random_history_crop noise_beta_alpha "
    "noise_beta_beta noise_s soft_prompt_num_tokens freeze_decode_layer expand_batch detection_coeff "
    "load_pretrained_det_decode_layer_path",
    "training",
)
CONFIG = (
    read(
        "model_type select_layer action_horizon num_inference_timesteps num_timestep_buckets "
        "attend_text_every_n_blocks use_alternate_vl_dit rtc_ramp_rate max_state_dim max_action_dim hidden_size "
        "input_embedding_dim backbone_embedding_dim max_seq_len max_num_embodiments diffusion_model_cfg "
        "vl_self_attention_cfg use_vl_self_attention"
    ),
    _TRANSFORMERS_OWN,
    neutral(
        "model_name model_revision model_dtype load_bf16 use_flash_attention backbone_trainable_params_fp32",
        "the weights show the backbone",
    ),
    neutral(
        f"{_IMAGES} random_rotation_angle color_jitter_params use_albumentations_transforms extra_augmentation_config "
        "formalize_language apply_sincos_state_encoding use_percentiles use_mean_std use_relative_action exclude_state",
        "the processor has its own copy, which counts",
    ),
    _TRAINING,
    _TACTILE,
    _only("add_pos_embed use_vlln", True),
    _only("state_history_length", 1),
    _only("reproject_vision strict_action_padding_mask use_future_tokens use_soft_prompts use_tactile", False),
    neutral("eagle_collator collator_overwrite_image_inputs", "not read by Isaac-GR00T"),
)
_N15 = (
    read("model_type action_horizon action_dim backbone_cfg action_head_cfg"),
    _TRANSFORMERS_OWN,
    neutral("hidden_size compute_dtype model_dtype", "shown by the weights"),
)
_N15_BACKBONE = (
    read("select_layer"),
    _TRAINING,
    neutral("eagle_path use_flash_attention load_bf16", "the weights show the backbone"),
    _only("project_to_dim"),
    _only("reproject_vision", False),
)
_N15_HEAD = (
    read(
        "action_horizon num_inference_timesteps num_timestep_buckets action_dim max_state_dim max_action_dim "
        "hidden_size input_embedding_dim backbone_embedding_dim max_seq_len max_num_embodiments "
        "num_target_vision_tokens diffusion_model_cfg vl_self_attention_cfg select_layer"
    ),
    _TRAINING,
    neutral("model_dtype", "shown by the weights"),
    _only("add_pos_embed use_vlln", True),
)
_TRANSFORMER = (
    read("num_layers num_attention_heads attention_head_dim output_dim"),
    neutral(
        "dropout final_dropout cross_attention_dim num_embeds_ada_norm max_num_positional_embeddings compute_dtype "
        "upcast_attention",
        "training, or shown by the weights",
    ),
    _only("positional_embeddings"),
    _only("attention_bias", True),
    _only("activation_fn", "gelu-approximate"),
    _only("norm_eps", 1e-5),
)
_TRANSFORMERS = {
    "diffusion_model_cfg": (
        *_TRANSFORMER,
        _only("interleave_self_attention", True),
        _only("norm_type", "ada_norm"),
        _only("norm_elementwise_affine", False),
    ),
    "vl_self_attention_cfg": _TRANSFORMER,
}
_PROCESSOR = (
    read(
        f"modality_configs use_percentiles clip_outliers {_IMAGES} formalize_language apply_sincos_state_encoding "
        "use_relative_action exclude_state"
    ),
    neutral("max_state_dim max_action_dim max_action_horizon", "the model's sizes decide the padding"),
    neutral("model_name transformers_loading_kwargs", "the backbone's tokenizer and loading"),
    neutral("use_mean_std", "not read by Isaac-GR00T"),
    neutral("random_rotation_angle color_jitter_params extra_augmentation_config state_dropout_prob", "training"),
    _TACTILE,
    _only("use_tactile", False),
)
_EMBEDDING = "sin_cos_embedding_keys mean_std_embedding_keys"
_MODALITIES = {
    "video": (read("delta_indices modality_keys"),),
    # The robot sends no past states.
    "state": (read(f"modality_keys exclude_state {_EMBEDDING}"), _only("delta_indices", [], [0])),
    "action": (
        read("delta_indices modality_keys action_configs mean_std_embedding_keys"),
        neutral("sin_cos_embedding_keys", "Isaac-GR00T encodes the angles of states only"),
    ),
    "language": (neutral("delta_indices modality_keys", "there is one instruction"),),
}

PACK, ENCODE, DECODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1", "groot_n1_7_action_decode_v1"
UNPACK = "groot_action_unpack_unnormalize_v2"
"""lerobot's steps of GR00T N1.7."""
N15_PACK, N15_UNPACK = "groot_pack_inputs_v3", "groot_action_unpack_unnormalize_v1"
N15_ENCODE, N15_COLLATE = "groot_eagle_encode_v3", "groot_eagle_collate_v3"
"""lerobot's steps of GR00T N1.5."""
_STEPS = {
    PACK: (
        read(
            "action_horizon valid_action_horizon video_horizon formalize_language embodiment_tag embodiment_mapping "
            "clip_outliers use_percentiles video_modality_keys raw_stats modality_config"
        ),
        neutral("max_state_dim max_action_dim state_dropout_prob", "training, or shown by the weights"),
        _only("state_horizon", 1),
        _only("normalize_min_max", True),
        _only("language_key", "task"),
    ),
    ENCODE: (read(_IMAGES), neutral("model_name device", "shown by the weights")),
    DECODE: (
        read("env_action_dim use_relative_action"),
        neutral("raw_stats modality_config use_percentiles", f"{PACK} has a copy, which counts"),
        _only("action_decode_transform", "libero"),
    ),
    UNPACK: (
        read("env_action_dim libero_gripper_action"),
        _only("normalize_min_max clip_normalized_action libero_gripper_binarize", True),
    ),
    N15_PACK: (
        read("action_horizon embodiment_tag embodiment_mapping"),
        neutral("max_state_dim max_action_dim", "shown by the weights"),
        _only("state_horizon", 1),
        _only("normalize_min_max", True),
        _only("language_key", "task"),
        _only("formalize_language", False),
    ),
    N15_ENCODE: (read("tokenizer_assets_repo"),),
    N15_COLLATE: (neutral("tokenizer_assets_repo", f"{N15_ENCODE} has a copy, which counts"),),
    N15_UNPACK: (read("env_action_dim"), _only("normalize_min_max", True)),
}


def check_step(name: str, config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for refused settings of one of lerobot's steps."""
    check(config, STEPS.get(name) or _STEPS.get(name, ()), f"{where}: {name}", LEROBOT)


def check_config(content: Mapping[str, Any], where: str, release: Release) -> None:
    """Raise CheckpointError for refused settings of Isaac-GR00T's config.json of N1.7 or N1.6, or of a part of it."""
    known = (*CONFIG, _only("backbone_model_type", release.backbone))
    check(content, _N15_HEAD if release is N15 else known, where, release.title)
    for part, settings in _TRANSFORMERS.items():
        if isinstance(content.get(part), Mapping):
            check(content[part], settings, where, release.title, f"{part}.")


def flat_config(content: Mapping[str, Any], where: str, release: Release) -> Mapping[str, Any]:
    """Return the settings of Isaac-GR00T's config.json in one level: N1.5 keeps those of backbone and head apart."""
    if release is not N15 or not content:
        return content
    check(content, _N15, where, release.title)
    backbone, head = (content.get(part) for part in ("backbone_cfg", "action_head_cfg"))
    if not isinstance(backbone, Mapping) or not isinstance(head, Mapping):
        raise CheckpointError(f"{where}: expected backbone_cfg and action_head_cfg, found {sorted(content)}")
    check(backbone, _N15_BACKBONE, where, release.title, "backbone_cfg.")
    sizes = {"action_horizon": content.get("action_horizon"), "max_action_dim": content.get("action_dim")}
    head = {**head, **{name: size for name, size in sizes.items() if size is not None}}
    return {**head, "select_layer": backbone.get("select_layer")}


def check_processor(settings: Mapping[str, Any], where: object, release: Release) -> None:
    """Raise CheckpointError for refused keyword arguments of Isaac-GR00T's processor."""
    check(settings, (*_PROCESSOR, _only("model_type", release.backbone)), where, release.title)


def check_modality(modality: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError for refused settings of one embodiment's modalities."""
    check(modality, (read(" ".join(_MODALITIES)),), where, "Isaac-GR00T")
    for kind, settings in _MODALITIES.items():
        if isinstance(modality.get(kind), Mapping):
            check(modality[kind], settings, where, "Isaac-GR00T", f"{kind}.")
