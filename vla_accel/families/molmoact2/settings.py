"""Settings of config.json and processor_config.json of MolmoAct2's own layout, as lerobot 0.6.1's copy of the model's
code (Allen Institute for AI, Apache-2.0) reads them."""

from __future__ import annotations

from vla_accel.checkpoints.settings import Setting, fixed, neutral, read

KNOWN = "MolmoAct2 as lerobot 0.6.1 has it"
_THINK = "MolmoAct2-Think, which predicts a depth map before it acts, is not supported"
_TRAINING = neutral("attention_dropout residual_dropout initializer_range", "training")
_SPEED = neutral("attn_implementation model_type", "speed; all ways of attention are the same")

MODEL: tuple[Setting, ...] = (
    fixed("model_type", "another model", "molmoact2"),
    neutral(
        "architectures auto_map dtype torch_dtype transformers_version initializer_range", "the project's own code"
    ),
    read("vit_config adapter_config text_config action_expert_config", "sizes"),
    fixed("add_action_expert", "a model without the expert of actions writes them as tokens", True),
    fixed("enable_depth_reasoning", _THINK, False),
    fixed("action_expert_depth_gate action_expert_depth_gate_per_layer", _THINK, False),
    neutral("action_expert_depth_gate_init_bias depth_mode num_depth_codes num_depth_tokens", "the depth map"),
    neutral(
        "depth_output_token_id depth_start_token_id depth_end_token_id depth_token_start_id", "tokens of a depth map"
    ),
    read("image_start_token_id image_patch_id image_col_id image_end_token_id", "tokens of an image"),
    neutral("image_high_res_id image_low_res_id low_res_image_start_token_id", "tokens of images in several parts"),
    neutral("frame_start_token_id frame_end_token_id use_frame_special_tokens", "tokens of videos"),
    read("max_action_dim max_action_horizon flow_matching_num_steps mask_action_dim_padding", "the flow of actions"),
    neutral(
        "flow_matching_cutoff flow_matching_time_offset flow_matching_time_scale flow_matching_beta_alpha "
        "flow_matching_beta_beta",
        "training",
    ),
    fixed("action_mode", "a model without a flow's actions is not supported", "continuous", "both"),
    fixed("state_format", "the state is in the prompt", "discrete"),
    read("eos_token_id", "a token that the expert does not see"),
    read("num_state_tokens add_setup_tokens add_control_tokens norm_stats_filename n_obs_steps", "the robot"),
    neutral(
        "action_output_token_id action_start_token_id action_end_token_id action_token_start_id num_action_tokens "
        "state_start_token_id state_end_token_id state_token_start_id bos_token_id pad_token_id",
        "tokens that the tokenizer knows by name",
    ),
    neutral("tie_word_embeddings use_cache", "the model writes no tokens"),
)
VISION: tuple[Setting, ...] = (
    read("hidden_size intermediate_size num_hidden_layers num_attention_heads layer_norm_eps", "sizes"),
    read("image_default_input_size image_patch_size image_num_pos", "sizes"),
    read("num_key_value_heads head_dim", "must be those of num_attention_heads"),
    fixed("hidden_act", "the tower has tanh-GELU", "gelu_pytorch_tanh"),
    neutral("float32_attention", "precision"),
    _TRAINING,
    _SPEED,
)
ADAPTER: tuple[Setting, ...] = (
    read("vit_layers pooling_attention_mask hidden_size num_attention_heads intermediate_size", "sizes"),
    read("num_key_value_heads head_dim text_hidden_size", "must be those of the other sizes"),
    fixed("hidden_act", "the projector has SwiGLU", "silu"),
    neutral("float32_attention", "precision"),
    neutral("image_feature_dropout", "training"),
    _TRAINING,
    _SPEED,
)
TEXT: tuple[Setting, ...] = (
    read("hidden_size num_attention_heads num_key_value_heads head_dim num_hidden_layers intermediate_size", "sizes"),
    read("vocab_size additional_vocab_size layer_norm_eps rope_theta rope_parameters", "sizes"),
    fixed("qkv_bias", "the language model is Qwen3's", False),
    fixed("use_qk_norm", "the language model is Qwen3's", True),
    fixed("qk_norm_type", "the language model is Qwen3's", "qwen3"),
    fixed("norm_after", "the language model is Qwen3's", False),
    fixed("rope_scaling", "the language model is Qwen3's", None),
    fixed("rope_scaling_layers", "the language model is Qwen3's", None),
    fixed("hidden_act", "the language model is Qwen3's", "silu"),
    neutral("embedding_dropout", "training"),
    neutral("max_position_embeddings tie_word_embeddings use_cache", "the model writes no tokens"),
    _TRAINING,
    _SPEED,
)
EXPERT: tuple[Setting, ...] = (
    read("hidden_size num_layers num_heads mlp_ratio ffn_multiple_of timestep_embed_dim", "sizes"),
    fixed("context_layer_norm", "the expert norms what it reads", True),
    fixed("qk_norm", "the expert norms its heads", True),
    fixed("qk_norm_eps", "the expert norms its heads", 1e-6),
    fixed("rope", "the expert rotates its heads", True),
    fixed("causal_attn", "actions see each other", False),
    neutral("dropout attn_dropout", "training"),
    _SPEED,
)
IMAGES: tuple[Setting, ...] = (
    fixed("crop_mode", "an image in several parts is not supported", "resize"),
    fixed("resample", "images are resized by four neighbours", 2),
    fixed("image_mean", "pixels lie in [-1, 1]", [0.5, 0.5, 0.5]),
    fixed("image_std", "pixels lie in [-1, 1]", [0.5, 0.5, 0.5]),
    fixed("pooling_size", "tokens are squares of four patches", [2, 2]),
    read("patch_size size", "must be those of the model"),
    neutral("do_convert_rgb", "images have three channels here"),
    neutral("max_crops overlap_margins", "an image in several parts"),
    neutral("auto_map image_processor_type processor_class", "the project's own code"),
)
PROCESSOR: tuple[Setting, ...] = (
    read("image_processor", "how images are resized"),
    read("image_use_col_tokens use_single_crop_col_tokens", "a token after each row of an image"),
    neutral("use_single_crop_start_token", "images in several parts"),
    neutral("video_processor video_use_col_tokens use_frame_special_tokens time_mode", "videos"),
    neutral("auto_map processor_class chat_template", "the project's own code"),
)
