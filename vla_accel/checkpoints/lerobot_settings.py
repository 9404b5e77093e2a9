"""Settings of lerobot's config.json, by policy class and release, and of the steps of its saved pipelines.

Sources: the configuration and processor classes of lerobot 0.3.3 to 0.6.1 and of its main branch (Hugging Face,
Apache-2.0).
"""

from __future__ import annotations

from dataclasses import replace

from vla_accel.checkpoints.settings import Setting, fixed, neutral, read, refuse

RELEASES = ("0.3.3", "0.4.0", "0.4.1", "0.4.2", "0.4.3", "0.4.4", "0.5.0", "0.5.1", "0.6.0", "0.6.1", "main")
"""Releases whose settings are known; "main" is lerobot's main branch as of `MAIN`."""
MAIN = "23 August 2026"
KNOWN = f"lerobot {RELEASES[0]} to {RELEASES[-2]} and main as of {MAIN}"


def releases(setting: Setting) -> tuple[str, ...]:
    """Return the releases that save a setting."""
    first, last = setting.since or RELEASES[0], setting.until or RELEASES[-1]
    return RELEASES[RELEASES.index(first) : RELEASES.index(last) + 1]


def _since(release: str, *settings: Setting) -> tuple[Setting, ...]:
    """Return the settings of a policy class that lerobot has since `release`."""
    later = RELEASES.index(release)
    return tuple(replace(s, since=RELEASES[max(later, RELEASES.index(s.since or RELEASES[0]))]) for s in settings)


# -- config.json --------------------------------------------------------------------------------------------------

_COPIED = "the saved steps have their own copy, which is used"
_UNSAVED = "the copy in the saved steps is used; 0.6.1 saves none and loads 6 and 0.5, so that others are refused"
_BASE = (
    read("type", "policy class"),
    read("input_features output_features", "names and sizes of cameras, state and action"),
    neutral("device use_amp", "where and in which precision lerobot ran"),
    neutral("push_to_hub repo_id private tags license", "upload to the hub"),
    neutral("pretrained_path", "checkpoint that training started from", "0.4.0"),
    read("use_peft", "an adapter is required next to the file", "0.4.3"),
    neutral("pretrained_revision", "revision that training started from", "0.6.0"),
)
_CHUNK = (
    fixed("n_obs_steps", "a policy that reads several observations is not supported", 1),
    read("chunk_size", "actions of a chunk"),
    read("n_action_steps", "actions of a chunk that lerobot executes, at most chunk_size; here the caller decides"),
)
_SCALING = read("normalization_mapping", "how statistics scale; the saved steps have their own copy, which is used")
_COMMON = (
    *_BASE,
    *_CHUNK,
    _SCALING,
    neutral(
        "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay scheduler_warmup_steps "
        "scheduler_decay_steps scheduler_decay_lr",
        "training",
    ),
    neutral("empty_cameras", "number of cameras without images, which the model masks"),
    neutral("rtc_config", "real-time chunking of lerobot's loop; use `rtc:` in the configuration", "0.4.2"),
)
_PERIODS = fixed("min_period", "embedding of the time", 4e-3), fixed("max_period", "embedding of the time", 4.0)

_RELATIVE = (
    read("use_relative_actions", "actions relative to the state; must agree with the saved steps", "0.5.1"),
    neutral("relative_exclude_joints action_feature_names", _COPIED, "0.5.1"),
)
_PALIGEMMA = (
    read("max_action_dim image_resolution paligemma_variant", "sizes, checked against the weights", "0.4.0"),
    read("tokenizer_max_length", "longest prompt, if the saved tokenizer step does not set it", "0.4.0"),
    neutral("dtype", "precision in which lerobot ran", "0.4.0"),
    neutral("gradient_checkpointing optimizer_grad_clip_norm", "training", "0.4.0"),
    neutral("compile_model compile_mode", "torch.compile", "0.4.0"),
)
_FLOW = (
    *_since("0.4.0", *_COMMON),
    *_PALIGEMMA,
    read("action_expert_variant", "size, checked against the weights", "0.4.0"),
    read("num_inference_steps", "denoising steps", "0.4.0"),
    neutral(
        "time_sampling_beta_alpha time_sampling_beta_beta time_sampling_scale time_sampling_offset", "training", "0.4.0"
    ),
    *_since("0.4.0", *_PERIODS),
    *_RELATIVE,
    neutral("freeze_vision_encoder train_expert_only", "training", "0.4.3"),
)
_HISTORY = (
    read("n_obs_steps", "observations that the policy reads, one a control step"),
    read("horizon", "actions that the network computes; those from n_obs_steps - 1 on are returned"),
    read("n_action_steps", "actions that lerobot executes; here the caller decides"),
)
_NOISE = (
    read(
        "noise_scheduler_type num_train_timesteps beta_schedule beta_start beta_end prediction_type clip_sample "
        "clip_sample_range",
        "the noise scheduler",
    ),
    read("num_inference_steps", "denoising steps; null: num_train_timesteps"),
)
_OLD_PI0 = "the π0 of lerobot 0.3 is another network, which later releases do not load either"
_INNER_LORA = "whether the weights have an adapter, which is merged into them"
_MEMORY = "the policy reads a history of frames, which this package does not run"
_PROMPT_STATE = "length to which lerobot before 0.5 pads the state in the prompt"

FIELDS: dict[str, tuple[Setting, ...]] = {
    "pi0": (
        *_FLOW,
        neutral("max_state_dim", "size that the weights show", "0.4.0"),
        refuse(
            "resize_imgs_with_padding adapt_to_pi_aloha use_delta_joint_actions_aloha proj_width num_steps use_cache "
            "attention_implementation train_state_proj",
            _OLD_PI0,
            until="0.3.3",
        ),
    ),
    "pi05": (
        *_FLOW,
        read("max_state_dim", _PROMPT_STATE, "0.4.0"),
        fixed("use_visual_memory", _MEMORY, False, since="main"),
        fixed("use_proprioceptive_memory", _MEMORY, False, since="main"),
        neutral(
            "memory_frames memory_stride memory_temporal_attention_every", "settings of a memory that is off", "main"
        ),
        read("rtc_training_max_delay", "longest delay of trained real-time chunking; 0: not trained for it", "main"),
    ),
    "pi0_fast": (
        *_since("0.4.3", *_COMMON, *_PALIGEMMA),
        *_RELATIVE,
        neutral("action_expert_variant", "the model has no action expert", "0.4.3"),
        read("max_state_dim", _PROMPT_STATE, "0.4.3"),
        read("text_tokenizer_name", "the tokenizer, if the saved tokenizer step names none", "0.4.3"),
        read("action_tokenizer_name fast_skip_tokens validate_action_token_prefix", "decoding of the actions", "0.4.3"),
        read("max_decoding_steps", "maximum number of generated tokens", "0.4.3"),
        fixed("temperature", "only greedy decoding is supported", 0.0, since="0.4.3"),
        neutral("max_action_tokens", "training", "0.4.3"),
        neutral("use_kv_cache", "speed", "0.4.3"),
    ),
    "smolvla": (
        *_COMMON,
        *_PERIODS,
        read("num_steps", "denoising steps"),
        read(
            "max_state_dim max_action_dim resize_imgs_with_padding num_expert_layers num_vlm_layers "
            "expert_width_multiplier",
            "sizes, checked against the weights",
        ),
        read("attention_mode self_attn_every_n_layers", "layers in which the actions attend to each other"),
        read("vlm_model_name", "the tokenizer, if the saved tokenizer step names none"),
        read("tokenizer_max_length", "longest prompt, if the saved tokenizer step does not set it"),
        fixed("adapt_to_pi_aloha", "π0's conversion of ALOHA's joints is not supported for SmolVLA", False),
        fixed("use_delta_joint_actions_aloha", "lerobot does not run it either", False),
        fixed("add_image_special_tokens", "tokens around the images are not supported", False),
        fixed("use_cache", "the model is run with cached keys and values", True),
        neutral("prefix_length pad_language_to", "padding, which the model masks"),
        neutral("optimizer_grad_clip_norm freeze_vision_encoder train_expert_only train_state_proj", "training"),
        neutral("load_vlm_weights", "weights that training started from"),
        neutral("compile_model compile_mode", "torch.compile", "0.4.4"),
    ),
    "groot": (
        *_since("0.4.0", *_BASE, *_CHUNK),
        neutral("normalization_mapping", "not read by lerobot; the saved steps have their own scaling", "0.4.0"),
        neutral("max_state_dim max_action_dim", "sizes that the weights show", "0.4.0"),
        neutral("base_model_path", "checkpoint that training started from", "0.4.0"),
        neutral("embodiment_tag", _COPIED, "0.4.0"),
        neutral("image_size", "not read since N1.7", "0.4.0"),
        read("tokenizer_assets_repo", "the tokenizer of GR00T N1.5", "0.4.0"),
        neutral(
            "tune_llm tune_visual tune_projector tune_diffusion_model lora_rank lora_alpha lora_dropout "
            "lora_full_model optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay warmup_ratio use_bf16 "
            "video_backend balance_dataset_weights balance_trajectory_weights dataset_paths output_dir save_steps "
            "max_steps batch_size dataloader_num_workers report_to resume",
            "training",
            "0.4.0",
        ),
        neutral("tune_vlln tune_top_llm_layers model_params_fp32", "training", "0.6.0"),
        read("num_inference_timesteps", "denoising steps", "0.6.0"),
        read("rtc_ramp_rate", "ramp of real-time chunking", "0.6.0"),
        neutral("use_flash_attention", "speed", "0.6.0"),
        neutral("use_relative_actions relative_exclude_joints action_decode_transform", _COPIED, "0.6.0"),
    ),
    "act": (
        *_BASE,
        *_CHUNK,
        _SCALING,
        read("vision_backbone", "the ResNet of the images"),
        fixed("replace_final_stride_with_dilation", "a dilated ResNet is not supported", False, 0),
        fixed("pre_norm", "norms before the residuals are not supported", False),
        read(
            "dim_model dim_feedforward n_encoder_layers n_decoder_layers latent_dim",
            "sizes, checked against the weights",
        ),
        read("n_heads feedforward_activation", "not visible in the weights"),
        read("temporal_ensemble_coeff", "temporal ensembling of `AsyncRunner`, the evaluation and lerobot's plugin"),
        neutral("use_vae n_vae_encoder_layers", "the action encoder is used in training only"),
        neutral(
            "pretrained_backbone_weights dropout kl_weight optimizer_lr optimizer_weight_decay optimizer_lr_backbone",
            "training",
        ),
    ),
    "diffusion": (
        *_BASE,
        _SCALING,
        *_HISTORY,
        read("vision_backbone use_group_norm use_separate_rgb_encoder_per_camera", "the encoders of the images"),
        read("crop_shape", "the centre of the images that the encoder sees"),
        read("resize_shape crop_ratio", "size of the resized images and part of it that the encoder sees", "0.4.4"),
        read(
            "spatial_softmax_num_keypoints down_dims kernel_size diffusion_step_embed_dim use_film_scale_modulation",
            "sizes, checked against the weights",
        ),
        read("n_groups", "groups of the norms, which no weight shows"),
        *_NOISE,
        neutral("crop_is_random drop_n_last_frames do_mask_loss_for_padding pretrained_backbone_weights", "training"),
        neutral(
            "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay scheduler_name scheduler_warmup_steps",
            "training",
        ),
        neutral("compile_model compile_mode", "torch.compile", "0.4.4"),
        neutral("gradient_checkpointing", "training", "0.6.0"),
    ),
    "multi_task_dit": _since(
        "0.5.1",
        *_BASE,
        _SCALING,
        *_HISTORY,
        read("objective", "diffusion, or a flow"),
        *_NOISE,
        read("num_integration_steps", "denoising steps of a flow"),
        read("integration_method", "of a flow; other steps than Euler's are not supported"),
        read("hidden_dim num_layers timestep_embed_dim", "sizes, checked against the weights"),
        read("num_heads rope_base", "what no weight shows"),
        read("use_rope use_positional_encoding", "positions of the actions"),
        read("vision_encoder_name text_encoder_name", "must be OpenAI's CLIP, whose sizes the weights show"),
        read("use_separate_rgb_encoder_per_camera", "the encoders of the images"),
        read("image_resize_shape image_crop_shape", "size of the resized images, and the centre that CLIP sees"),
        read("tokenizer_max_length", "longest prompt, where the saved tokenizer step does not say"),
        neutral("tokenizer_padding tokenizer_padding_side tokenizer_truncation", _COPIED),
        neutral(
            "sigma_min timestep_sampling_strategy timestep_sampling_s timestep_sampling_alpha timestep_sampling_beta "
            "dropout vision_encoder_lr_multiplier image_crop_is_random drop_n_last_frames do_mask_loss_for_padding "
            "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay scheduler_name scheduler_warmup_steps",
            "training",
        ),
    ),
    "vla_jepa": _since(
        "0.6.1",
        *_BASE,
        *_CHUNK,
        _SCALING,
        neutral("qwen_model_name jepa_encoder_name", "weights that training started from; the weights show sizes"),
        read("enable_world_model", "tokens of the prompt; the world model is used in training only"),
        read("prompt_template special_action_token embodied_action_token", "the prompt"),
        read(
            "num_action_tokens_per_timestep num_embodied_action_tokens_per_instruction num_video_frames "
            "jepa_tubelet_size",
            "tokens of the prompt",
        ),
        read("resize_images_to", "height and width of the images before Qwen's own resizing"),
        read("num_inference_timesteps", "denoising steps"),
        read(
            "action_dim state_dim action_hidden_size action_model_type action_num_layers action_num_heads "
            "action_attention_head_dim action_num_timestep_buckets",
            "sizes, checked against the weights",
        ),
        neutral("tokenizer_padding_side", "padding, which the model masks"),
        neutral("num_target_vision_tokens", "not read by lerobot"),
        neutral("action_max_seq_len", "number of positions of actions; the weights have it"),
        neutral("binarize_gripper_action pre_snap_gripper_action clip_normalized_actions", _COPIED),
        read("gripper_dim gripper_threshold", _UNSAVED),
        *_since("main", *_RELATIVE),
        neutral("gripper_joint_names", _COPIED, "main"),
        neutral("torch_dtype", "precision in which lerobot ran"),
        neutral(
            "freeze_qwen reinit_modules action_dropout action_noise_beta_alpha action_noise_beta_beta action_noise_s "
            "predictor_depth predictor_num_heads predictor_mlp_ratio predictor_dropout world_model_loss_weight "
            "repeated_diffusion_steps optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay "
            "optimizer_grad_clip_norm scheduler_warmup_steps scheduler_decay_steps scheduler_decay_lr",
            "training",
        ),
        neutral("world_model_num_views causal_world_model_context", "training", "main"),
    ),
    "fastwam": _since(
        "0.6.1",
        *_BASE,
        _SCALING,
        fixed("n_obs_steps", "a policy that reads several observations is not supported", 1),
        read("action_horizon", "actions of a chunk"),
        neutral("n_action_steps", "actions that lerobot executes; here the caller decides"),
        read("action_dim proprio_dim video_dit_config action_dit_config", "sizes, checked against the weights"),
        read("image_size", "height and width of the cameras' images in a row"),
        read("prompt_template tokenizer_max_len", "the prompt, and the rows of text that are attended to"),
        read("num_inference_steps sigma_shift action_scheduler", "denoising steps"),
        read("inference_seed", "noise that every call starts from"),
        fixed("rand_device", "noise of a GPU's generator is not the same on another GPU", "cpu"),
        fixed("tiled", "lerobot does not run it either", False),
        neutral("text_cfg_scale negative_prompt", "not read for actions by lerobot"),
        neutral("toggle_action_dimensions", _COPIED),
        neutral("context_len num_video_frames action_video_freq_ratio video_scheduler loss", "training"),
        neutral("use_gradient_checkpointing mot_checkpoint_mixed_attn freeze_video_expert", "training"),
        neutral("base_model_id model_id", "weights that training started from"),
        neutral("tokenizer_model_id text_encoder_model_id load_text_encoder", "here: checkpoint.wan and .tokenizer"),
        neutral("torch_dtype fp32_attention", "precision in which lerobot ran"),
        neutral("compile_action_infer", "how fast lerobot ran", "main"),
        neutral("optimizer_lr optimizer_weight_decay", "training"),
    ),
    "xvla": (
        *_since("0.4.4", *_BASE, *_CHUNK, _SCALING),
        *_since(
            "0.4.4",
            read("florence_config", "sizes of vision and text encoder, checked against the weights"),
            read("tokenizer_name tokenizer_max_length", "the prompt, if the saved tokenizer step does not set it"),
            fixed("tokenizer_padding_side", "padding on the left is not supported", "right"),
            fixed("pad_language_to", "padding is attended to, so that prompts have one length", "max_length"),
            read(
                "hidden_size depth mlp_ratio num_domains len_soft_prompts dim_time max_len_seq use_hetero_proj "
                "max_state_dim max_action_dim",
                "sizes, checked against the weights",
            ),
            read("num_heads", "not visible in the weights"),
            read("action_mode", "numbers of state and actions, and which of them are grippers"),
            read("num_denoising_steps", "denoising steps"),
            fixed("use_proprio", "a policy without a state is not supported", True),
            fixed("domain_feature_key", "here the domain is the saved step's or checkpoint.domain", None),
            read("resize_imgs_with_padding", "height and width that images are fitted into"),
            read("num_image_views empty_cameras", "views; missing ones are attended to"),
            neutral("dtype", "precision in which lerobot ran"),
            neutral(
                "freeze_vision_encoder freeze_language_encoder train_policy_transformer train_soft_prompts "
                "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay optimizer_grad_clip_norm "
                "optimizer_soft_prompt_lr_scale optimizer_soft_prompt_warmup_lr_scale scheduler_warmup_steps "
                "scheduler_decay_steps scheduler_decay_lr",
                "training",
            ),
        ),
    ),
    "molmoact2": _since(
        "0.6.1",
        *_BASE,
        *_CHUNK,
        _SCALING,
        read("checkpoint_path", "sizes and tokenizer of the model; its weights are in the folder"),
        neutral("checkpoint_revision checkpoint_force_download", "download of the model"),
        fixed("action_mode", "the expert computes the actions; main: the tokens that it sees", "continuous", "both"),
        fixed("inference_action_mode", "actions in tokens are not supported", None, "continuous"),
        neutral("discrete_action_tokenizer discrete_generation_max_steps", "actions in tokens"),
        neutral(
            "norm_tag setup_type control_mode image_keys normalize_language add_setup_tokens add_control_tokens "
            "normalize_gripper num_state_tokens max_sequence_length joint_signs joint_offsets dataset_feature_names",
            _COPIED,
        ),
        fixed("expected_max_action_dim", "lerobot accepts no other value", 32),
        fixed("mask_action_dim_padding", "columns of padding are masked", True),
        read("num_inference_steps", "denoising steps; null: those of the model"),
        fixed("per_episode_seed", "noise is drawn in each call, or passed by the caller", False),
        neutral("eval_seed", "noise of lerobot's evaluation"),
        neutral("rtc_config", "real-time chunking of lerobot's loop; use `rtc:` in the configuration"),
        fixed("enable_lora_vlm", _INNER_LORA, False, True, until="0.6.1"),
        fixed("train_mode_vlm", _INNER_LORA, "fft", "freeze", "lora", since="main"),
        neutral("enable_lora_action_expert", "the weights show which layers have an adapter", until="0.6.1"),
        read("lora_rank lora_alpha", "the scale of an adapter"),
        neutral("enable_inference_cuda_graph", "speed"),
        neutral("compile_model", "torch.compile", "main"),
        neutral("model_dtype", "precision in which lerobot ran", until="0.6.1"),
        neutral("dtype", "precision in which lerobot ran", "main"),
        neutral(
            "norm_stats_path", "statistics of norm_tag; the saved steps have their own copy, which is used", "main"
        ),
        neutral("llm_residual_dropout", "training", "main"),
        neutral("train_action_expert_only", "training", until="0.6.1"),
        neutral(
            "num_flow_timesteps flow_matching_cutoff flow_matching_time_offset flow_matching_time_scale "
            "flow_matching_beta_alpha flow_matching_beta_beta lora_dropout lora_bias "
            "enable_knowledge_insulation freeze_embedding gradient_checkpointing "
            "softmax_auxiliary_loss softmax_auxiliary_loss_scale discrete_loss_token_weighting optimizer_lr "
            "optimizer_vit_lr optimizer_connector_lr optimizer_action_expert_lr optimizer_betas optimizer_eps "
            "optimizer_weight_decay optimizer_grad_clip_norm scheduler_warmup_steps scheduler_decay_steps "
            "scheduler_decay_lr",
            "training",
        ),
    ),
    "evo1": _since(
        "0.6.1",
        *_BASE,
        *_CHUNK,
        _SCALING,
        read("image_resolution", "size of the images, checked against the weights"),
        read(
            "max_state_dim max_action_dim embed_dim hidden_dim state_hidden_dim num_layers vlm_num_layers",
            "sizes, checked against the weights",
        ),
        read("num_heads", "not visible in the weights"),
        read("max_views", "image slots of a prompt, used or not"),
        read("max_text_length", "longest prompt, with its image slots"),
        read("num_inference_timesteps", "denoising steps"),
        read("vlm_model_name", "the tokenizer, if the folder has none"),
        read("num_categories default_embodiment_id", "the embodiment whose projections are read"),
        read("postprocess_action_dim", "numbers of an action that the robot gets; null: those of the feature"),
        read(
            "binarize_gripper gripper_index gripper_threshold gripper_below_threshold_value "
            "gripper_above_threshold_value",
            "the gripper's command; the saved step's copy is not read by lerobot",
        ),
        fixed("action_head", "another action head is not supported", "flowmatching"),
        fixed("return_cls_only", "an action head that reads one token is not supported", False),
        fixed("task_field", "the instruction has the key task", "task"),
        fixed("embodiment_id_field", "observations cannot choose the embodiment; default_embodiment_id does", None),
        read("empty_cameras", "cameras that may be missing, those that lerobot adds itself included"),
        neutral("rtc_config", "real-time chunking of lerobot's loop; use `rtc:` in the configuration"),
        neutral("vlm_dtype use_flash_attn", "precision and kernels with which lerobot ran"),
        neutral(
            "training_stage apply_training_stage_defaults finetune_vlm finetune_language_model finetune_vision_model "
            "finetune_action_head dropout enable_gradient_checkpointing gradient_checkpointing_use_reentrant "
            "optimizer_lr optimizer_betas optimizer_eps optimizer_weight_decay optimizer_grad_clip_norm "
            "scheduler_warmup_steps",
            "training",
        ),
    ),
}
"""Settings of config.json by policy class, as `type` names it."""

# -- the saved pipelines ------------------------------------------------------------------------------------------

BEFORE, AFTER = "policy_preprocessor.json", "policy_postprocessor.json"
RENAME, NORMALIZE, TOKENIZE = "rename_observations_processor", "normalizer_processor", "tokenizer_processor"
UNNORMALIZE, RELATIVE, ABSOLUTE = "unnormalizer_processor", "relative_actions_processor", "absolute_actions_processor"
BATCH, DEVICE, ACTION_TOKENS = "to_batch_processor", "device_processor", "action_tokenizer_processor"
_PI0_LINE, _SMOLVLA_LINE = "pi0_new_line_processor", "smolvla_new_line_processor"
_PI05_STATE = "pi05_prepare_state_tokenizer_processor_step"
_FAST_STATE = "pi0_fast_prepare_state_tokenizer_processor_step"
PREPARE, CLIP = "vla_jepa_image_prep", "vla_jepa_clip_actions"
SNAP, BINARIZE = "vla_jepa_pre_snap_gripper", "vla_jepa_binarize_gripper"
TOGGLE = "fastwam_action_toggle_processor"
PAD_STATE, PAD_ACTION, CROP = "evo1_pad_state_processor", "evo1_pad_action_processor", "evo1_action_processor"
TO_LEVELS, TO_FLOAT, IMAGENET = "xvla_image_scale", "xvla_image_to_float", "xvla_imagenet_normalize"
DOMAIN, TO_AXIS_ANGLE = "xvla_add_domain_id", "xvla_rotation_6d_to_axis_angle"
STATE_FRAME, ACTION_FRAME = "molmoact2_state_frame_transform", "molmoact2_action_frame_transform"
CLAMP_STATE, CLAMP_ACTION, PACK = "molmoact2_clamp_normalized", "molmoact2_clamp_action", "molmoact2_pack_inputs"
ALIASES = {
    "delta_actions_processor": RELATIVE,
    "molmoact2_masked_normalizer": NORMALIZE,
    "molmoact2_masked_unnormalizer": UNNORMALIZE,
}
"""Names of lerobot 0.5.1 that later releases changed, and MolmoAct2's own, whose statistics may have masks."""
NEUTRAL = (BATCH, DEVICE, ACTION_TOKENS)
"""Steps that change no action: those that move data, and the one that tokenizes actions for training."""
ARTIFACTS = {TOKENIZE: "tokenizer_name", ACTION_TOKENS: "action_tokenizer_name"}
"""Steps that lerobot's main branch saves a folder of, and the setting that it replaces."""

_NORMALIZER = (
    read("features", "names that are normalized"),
    read("norm_map", "how statistics scale, by kind of feature"),
    read("eps", "added to a divisor, or used instead of it"),
    read("normalize_observation_keys", "names that are normalized, instead of all features"),
    fixed("stats", "statistics are read from the step's file", None),
)
_TASK_KEY = fixed("task_key", "the instruction has the key task", "task")
_ALL_IMAGES = fixed("image_keys", "the step applies to all images", None)

STEPS: dict[str, tuple[Setting, ...]] = {
    RENAME: (read("rename_map", "the robot's names of features"),),
    BATCH: (),
    DEVICE: (
        neutral("device", "where lerobot ran"),
        fixed("float_dtype", "lower precision is not supported", None, "float32", "float", "float64", "double"),
    ),
    NORMALIZE: _NORMALIZER,
    UNNORMALIZE: _NORMALIZER,
    TOKENIZE: (
        read("max_length", "longest prompt"),
        read("tokenizer_name", "the tokenizer"),
        _TASK_KEY,
        fixed("padding_side", "padding on the left is not supported", "right"),
        read("padding", "must be max_length for X-VLA, which attends to padding; other models mask it"),
        neutral("truncation", "a prompt that is too long is an error here"),
    ),
    _PI0_LINE: (),
    _SMOLVLA_LINE: (),
    _PI05_STATE: (
        read("max_state_dim", "must be config.json's"),
        _TASK_KEY,
        fixed("include_state_in_prompt", "it belongs to π0.5's memory", True, since="main"),
    ),
    _FAST_STATE: (read("max_state_dim", "must be config.json's"), _TASK_KEY),
    ACTION_TOKENS: (
        neutral(
            "action_tokenizer_name max_action_tokens fast_skip_tokens paligemma_tokenizer_name trust_remote_code "
            "allow_truncation",
            "tokens of actions for training",
        ),
    ),
    RELATIVE: (
        read("enabled", "whether actions are relative to the state", "0.5.1"),
        read("exclude_joints action_names", "actions that stay absolute, by their names", "0.5.1"),
    ),
    ABSOLUTE: (read("enabled", "whether the state is added to the actions", "0.5.1"),),
    PREPARE: (
        read("resize_to", "height and width of the images; must be config.json's resize_images_to"),
        neutral("expand_channels", "images have three channels here"),
    ),
    CLIP: (),
    SNAP: (read("gripper_dim threshold", "the gripper's action becomes 0 or 1 before it is scaled"),),
    BINARIZE: (read("gripper_dim threshold", "the gripper's action becomes -1 or 1"),),
    TOGGLE: (read("toggle_dimensions", "actions that become -1 or 1"),),
    TO_LEVELS: (_ALL_IMAGES,),
    TO_FLOAT: (_ALL_IMAGES, neutral("validate_range", "images are checked here")),
    IMAGENET: (_ALL_IMAGES,),
    DOMAIN: (read("domain_id", "the domain whose weights are used"),),
    TO_AXIS_ANGLE: (neutral("expected_action_dim", "not read by lerobot"),),
    STATE_FRAME: (read("joint_signs joint_offsets", "sign and zero of the state's first numbers"),),
    ACTION_FRAME: (read("joint_signs joint_offsets", "sign and zero of an action's first numbers"),),
    CLAMP_STATE: (read("normalization_masks", "must be the masks of the statistics", "main"),),
    CLAMP_ACTION: (),
    PACK: (
        read("checkpoint_path", "the tokenizer and the sizes of images"),
        neutral("checkpoint_revision checkpoint_force_download", "download of the model"),
        neutral("action_mode discrete_action_tokenizer", "actions in tokens"),
        read("image_keys allow_image_key_fallback", "order of the cameras, and whether one may be missing"),
        read("setup_type control_mode add_setup_tokens add_control_tokens normalize_language", "the prompt"),
        read("num_state_tokens", "tokens of a number of the state"),
        read("max_sequence_length", "longest prompt with its images; null: by their number"),
        read("chunk_size", "must be config.json's"),
        read("env_action_dim", "columns of an action that are not masked"),
        fixed("max_action_dim", "lerobot accepts no other value", 32),
    ),
    PAD_STATE: (neutral("max_state_dim", "follows from the weights"),),
    PAD_ACTION: (neutral("max_action_dim", "follows from the weights"),),
    CROP: (
        neutral(
            "action_dim binarize_gripper gripper_index gripper_threshold gripper_below_threshold_value "
            "gripper_above_threshold_value",
            "lerobot reads config.json instead",
        ),
    ),
}
"""Settings of every known step, by the step's name in lerobot's registry."""


Orders = tuple[tuple[str, ...], ...]
"""The steps of a pipeline: sequences of steps, of which each must precede the next."""
OPTIONAL = (
    RENAME, RELATIVE, ABSOLUTE, ACTION_TOKENS, PREPARE, CLIP, SNAP, BINARIZE, TOGGLE, TO_LEVELS, TO_FLOAT, IMAGENET,
    DOMAIN, TO_AXIS_ANGLE, CROP,
)  # fmt: skip
"""Steps that lerobot does not always save."""
_SCALED = (RENAME, RELATIVE, NORMALIZE)
PREPROCESSORS: dict[str, Orders] = {
    "pi0": ((_PI0_LINE, TOKENIZE), _SCALED),
    "pi05": ((*_SCALED, _PI05_STATE, TOKENIZE),),
    "pi0_fast": ((*_SCALED, _FAST_STATE, TOKENIZE), (ACTION_TOKENS,)),
    "smolvla": ((_SMOLVLA_LINE, TOKENIZE), _SCALED),
    "act": (_SCALED,),
    "diffusion": (_SCALED,),
    "multi_task_dit": ((RENAME, NORMALIZE), (TOKENIZE,)),
    "vla_jepa": ((RENAME, PREPARE, RELATIVE, NORMALIZE),),
    "fastwam": ((RENAME, NORMALIZE),),
    "evo1": ((RENAME, PAD_STATE, NORMALIZE), (PAD_ACTION,)),
    "xvla": ((RENAME, NORMALIZE), (TOKENIZE,), (TO_LEVELS, TO_FLOAT, IMAGENET, NORMALIZE), (DOMAIN,)),
    "molmoact2": ((RENAME, STATE_FRAME, NORMALIZE, CLAMP_STATE, PACK),),
}
POSTPROCESSOR: Orders = ((UNNORMALIZE, ABSOLUTE),)
POSTPROCESSORS: dict[str, Orders] = {
    "vla_jepa": ((CLIP, SNAP, UNNORMALIZE, ABSOLUTE, BINARIZE),),
    "fastwam": ((UNNORMALIZE, TOGGLE),),
    "evo1": ((UNNORMALIZE, CROP),),
    "xvla": ((UNNORMALIZE, TO_AXIS_ANGLE),),
    "molmoact2": ((CLAMP_ACTION, UNNORMALIZE, ACTION_FRAME),),
}
"""Of policy classes with other steps than `POSTPROCESSOR`."""
