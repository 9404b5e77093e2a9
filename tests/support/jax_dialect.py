"""openpi's JAX parameters: names and shapes at any size, written down from its Flax modules, and random values."""

from __future__ import annotations

import numpy as np

from vla_accel.families.pi0.network import Pi0Config


def jax_shapes(config: Pi0Config) -> dict[str, tuple[int, ...]]:
    """Name, joined by slashes, to shape."""
    v, p, e = config.vision, config.prefix, config.expert
    width, depth, heads, head = v.width, v.depth, v.heads, v.head_dim
    block = "PaliGemma/img/Transformer/encoderblock/"
    shapes: dict[str, tuple[int, ...]] = {
        "PaliGemma/img/embedding/kernel": (v.patch_size, v.patch_size, 3, width),
        "PaliGemma/img/embedding/bias": (width,),
        "PaliGemma/img/pos_embedding": (1, v.tokens, width),
        "PaliGemma/img/Transformer/encoder_norm/scale": (width,),
        "PaliGemma/img/Transformer/encoder_norm/bias": (width,),
        "PaliGemma/img/head/kernel": (width, p.width),
        "PaliGemma/img/head/bias": (p.width,),
        "PaliGemma/llm/embedder/input_embedding": (config.vocab_size, p.width),
        "PaliGemma/llm/final_norm/scale": (p.width,),
        block + "MlpBlock_0/Dense_0/kernel": (depth, width, v.mlp_dim),
        block + "MlpBlock_0/Dense_0/bias": (depth, v.mlp_dim),
        block + "MlpBlock_0/Dense_1/kernel": (depth, v.mlp_dim, width),
        block + "MlpBlock_0/Dense_1/bias": (depth, width),
        block + "MultiHeadDotProductAttention_0/out/kernel": (depth, heads, head, width),
        block + "MultiHeadDotProductAttention_0/out/bias": (depth, width),
    }
    for norm in ("LayerNorm_0", "LayerNorm_1"):
        shapes |= {f"{block}{norm}/scale": (depth, width), f"{block}{norm}/bias": (depth, width)}
    for name in ("query", "key", "value"):
        shapes[f"{block}MultiHeadDotProductAttention_0/{name}/kernel"] = (depth, width, heads, head)
        shapes[f"{block}MultiHeadDotProductAttention_0/{name}/bias"] = (depth, heads, head)
    for suffix, stack in (("", p), ("_1", e)):
        layers = "PaliGemma/llm/layers/"
        n, k, h, d, m = stack.heads, stack.kv_heads, stack.head_dim, stack.width, stack.mlp_dim
        shapes |= {
            f"{layers}attn/q_einsum{suffix}/w": (stack.depth, n, d, h),
            f"{layers}attn/kv_einsum{suffix}/w": (stack.depth, 2, k, d, h),
            f"{layers}attn/attn_vec_einsum{suffix}/w": (stack.depth, n, h, d),
            f"{layers}mlp{suffix}/gating_einsum": (stack.depth, 2, d, m),
            f"{layers}mlp{suffix}/linear": (stack.depth, m, d),
        }
        for norm in ("pre_attention_norm", "pre_ffw_norm"):
            if suffix and config.kind == "pi05":
                shapes[f"{layers}{norm}_1/Dense_0/kernel"] = (stack.depth, d, 3 * d)
                shapes[f"{layers}{norm}_1/Dense_0/bias"] = (stack.depth, 3 * d)
            else:
                shapes[f"{layers}{norm}{suffix}/scale"] = (stack.depth, d)
    if config.kind == "pi05":
        shapes["PaliGemma/llm/final_norm_1/Dense_0/kernel"] = (e.width, 3 * e.width)
        shapes["PaliGemma/llm/final_norm_1/Dense_0/bias"] = (3 * e.width,)
        projections = {"time_mlp_in": (e.width, e.width), "time_mlp_out": (e.width, e.width)}
    else:
        shapes["PaliGemma/llm/final_norm_1/scale"] = (e.width,)
        projections = {
            "state_proj": (config.action_dim, e.width),
            "action_time_mlp_in": (2 * e.width, e.width),
            "action_time_mlp_out": (e.width, e.width),
        }
    projections |= {"action_in_proj": (config.action_dim, e.width), "action_out_proj": (e.width, config.action_dim)}
    for name, shape in projections.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    return shapes


def jax_tree(config: Pi0Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 values of every parameter."""
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in sorted(jax_shapes(config).items())}
