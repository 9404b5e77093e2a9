"""The settings of Isaac-GR00T's files (config.json, and the processor's keyword arguments and modalities), and of
lerobot's steps of GR00T.

Source: Isaac-GR00T's `Gr00tN1d7Config`, `Gr00tN1d7Processor` and `ModalityConfig` (NVIDIA, Apache-2.0), the config.json
that was published with GR00T N1.7, and lerobot 0.6.1's steps (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.checkpoints.settings import KnownSettings

CONFIG = KnownSettings.of(
    "model_type select_layer action_horizon num_inference_timesteps num_timestep_buckets attend_text_every_n_blocks "
    "rtc_ramp_rate max_state_dim max_action_dim hidden_size input_embedding_dim backbone_embedding_dim max_seq_len "
    "max_num_embodiments diffusion_model_cfg vl_self_attention_cfg use_vl_self_attention",
    # transformers' own
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path attn_implementation "
    "_attn_implementation return_dict problem_type id2label label2id "
    # the backbone's weights show what it is
    "model_name model_revision model_dtype load_bf16 use_flash_attention backbone_trainable_params_fp32 "
    # the processor has its own, which count
    "image_crop_size image_target_size shortest_image_edge crop_fraction random_rotation_angle color_jitter_params "
    "use_albumentations use_albumentations_transforms letter_box_transform extra_augmentation_config "
    "formalize_language apply_sincos_state_encoding use_percentiles use_mean_std use_relative_action exclude_state "
    # training
    "tune_llm tune_visual tune_top_llm_layers tune_projector tune_diffusion_model tune_vlln tune_linear attn_dropout "
    "state_dropout_prob state_gaussian_noise_std state_additive_noise_scale random_history_crop noise_beta_alpha "
    "noise_beta_beta noise_s soft_prompt_num_tokens tactile_state_keys tactile_input_shape tactile_embed_dim",
    use_alternate_vl_dit=(True,),
    add_pos_embed=(True,),
    use_vlln=(True,),
    state_history_length=(1,),
    reproject_vision=(False,),
    backbone_model_type=("qwen",),
    strict_action_padding_mask=(False,),
    use_future_tokens=(False,),
    use_soft_prompts=(False,),
    use_tactile=(False,),
)
_TRANSFORMER = (
    "num_layers num_attention_heads attention_head_dim output_dim",
    "dropout final_dropout cross_attention_dim num_embeds_ada_norm max_num_positional_embeddings compute_dtype "
    "upcast_attention",
)
_TRANSFORMERS = {
    "diffusion_model_cfg": KnownSettings.of(
        *_TRANSFORMER, interleave_self_attention=(True,), norm_type=("ada_norm",), positional_embeddings=(None,),
        attention_bias=(True,), activation_fn=("gelu-approximate",), norm_elementwise_affine=(False,),
        norm_eps=(1e-5,),
    ),
    "vl_self_attention_cfg": KnownSettings.of(
        *_TRANSFORMER, positional_embeddings=(None,), attention_bias=(True,), activation_fn=("gelu-approximate",),
        norm_eps=(1e-5,),
    ),
}  # fmt: skip

_PROCESSOR = KnownSettings.of(
    "modality_configs use_percentiles clip_outliers image_crop_size image_target_size shortest_image_edge "
    "crop_fraction use_albumentations letter_box_transform formalize_language apply_sincos_state_encoding "
    "use_relative_action exclude_state",
    # padding, which the model's own sizes decide; the backbone's tokenizer and loading
    "max_state_dim max_action_dim max_action_horizon model_name transformers_loading_kwargs "
    # stored by Isaac-GR00T, and not read
    "use_mean_std "
    # training
    "random_rotation_angle color_jitter_params extra_augmentation_config state_dropout_prob "
    # what `use_tactile` alone makes count
    "tactile_state_keys tactile_input_shape tactile_embed_dim",
    model_type=("qwen",),
    use_tactile=(False,),
)
_EMBEDDING = "sin_cos_embedding_keys mean_std_embedding_keys"
_MODALITIES = {
    "video": KnownSettings.of("delta_indices modality_keys"),
    # The robot sends no past states.
    "state": KnownSettings.of(f"modality_keys exclude_state {_EMBEDDING}", delta_indices=([], [0])),
    "action": KnownSettings.of(
        "delta_indices modality_keys action_configs mean_std_embedding_keys", "sin_cos_embedding_keys"
    ),
    "language": KnownSettings.of("", "delta_indices modality_keys"),
}


PACK, ENCODE, DECODE = "groot_n1_7_pack_inputs_v1", "groot_n1_7_vlm_encode_v1", "groot_n1_7_action_decode_v1"
UNPACK = "groot_action_unpack_unnormalize_v2"
"""lerobot's steps of GR00T N1.7."""
_STEPS = {
    PACK: KnownSettings.of(
        "action_horizon valid_action_horizon video_horizon formalize_language embodiment_tag embodiment_mapping "
        "clip_outliers use_percentiles video_modality_keys raw_stats modality_config",
        "max_state_dim max_action_dim state_dropout_prob",
        state_horizon=(1,), normalize_min_max=(True,), language_key=("task",),
    ),
    ENCODE: KnownSettings.of(
        "image_crop_size image_target_size shortest_image_edge crop_fraction use_albumentations letter_box_transform",
        "model_name device",
    ),
    # Its statistics and groups are those of the first step.
    DECODE: KnownSettings.of(
        "env_action_dim use_relative_action", "raw_stats modality_config use_percentiles",
        action_decode_transform=("libero",),
    ),
    UNPACK: KnownSettings.of(
        "env_action_dim libero_gripper_action", normalize_min_max=(True,), clip_normalized_action=(True,),
        libero_gripper_binarize=(True,),
    ),
}  # fmt: skip


def refused_in_step(name: str, config: Mapping[str, Any]) -> list[str]:
    """Return the settings of one of lerobot's steps that are refused, each as "name value"."""
    return _STEPS[name].refused(config) if name in _STEPS else []


def refused_in_config(content: Mapping[str, Any]) -> list[str]:
    """Return the settings of Isaac-GR00T's config.json that are refused, each as "name value"."""
    found = CONFIG.refused(content)
    for part, known in _TRANSFORMERS.items():
        if isinstance(content.get(part), Mapping):
            found += known.refused(content[part], f"{part}.")
    return found


def refused_in_processor(settings: Mapping[str, Any]) -> list[str]:
    """Return the keyword arguments of Isaac-GR00T's processor that are refused, each as "name value"."""
    return _PROCESSOR.refused(settings)


def refused_in_modality(modality: Mapping[str, Any]) -> list[str]:
    """Return the settings of one embodiment's modalities that are refused, each as "name value"."""
    found = KnownSettings.of(" ".join(_MODALITIES)).refused(modality)
    for kind, known in _MODALITIES.items():
        if isinstance(modality.get(kind), Mapping):
            found += known.refused(modality[kind], f"{kind}.")
    return found
