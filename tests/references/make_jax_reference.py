"""Write small openpi JAX checkpoints, as openpi's training saves them, and the answers openpi's JAX model gives.

Run it with an interpreter that has openpi installed (CONTRIBUTING names the packages)::

    python tests/references/make_jax_reference.py --out DIR

For pi0 and pi05 it builds openpi's ``Pi0`` (JAX, float32) at a small size with random parameters and writes
``DIR/{pi0,pi05}/``:

- ``params/``: the parameters, saved with orbax the way openpi's ``save_state`` saves them.
- ``cases.safetensors``: ``{case}.{images,image_mask,tokens,token_mask,state,noise}`` with images float32
  (B, V, 3, 224, 224) in [-1, 1], and ``{case}.steps{n}``, the actions (B, horizon, 32).

SigLIP's code is openpi's, at a small variant; the vocabulary is cut. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import openpi.models.gemma as openpi_gemma
import openpi.models.siglip as openpi_siglip
import orbax.checkpoint as ocp
from flax import nnx
from openpi.models.model import IMAGE_KEYS, Observation
from openpi.models.pi0_config import Pi0Config
from openpi.shared import array_typing
from safetensors.numpy import save_file

STEPS = (1, 10)
VOCAB, HORIZON, LENGTH = 320, 6, 24
PREFIX = {"width": 96, "depth": 3, "mlp_dim": 208, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
EXPERT = {"width": 64, "depth": 3, "mlp_dim": 176, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
SIGLIP = {"width": 144, "depth": 3, "mlp_dim": 272, "num_heads": 2, "patch_size": (14, 14)}


def build(family: str) -> Any:
    """openpi's model at the small size. Flax modules read their sizes again whenever they run, so openpi's constants
    are changed for good."""
    openpi_gemma.get_config = lambda variant: openpi_gemma.Config(**(PREFIX if variant == "gemma_2b" else EXPERT))
    openpi_gemma.PALIGEMMA_VOCAB_SIZE = VOCAB
    openpi_siglip.decode_variant = lambda variant: dict(SIGLIP)
    config = Pi0Config(
        dtype="float32", pi05=family == "pi05", action_horizon=HORIZON, max_token_len=LENGTH, action_dim=32
    )
    return config.create(jax.random.key(0))


def randomise(params: dict[str, Any], rng: np.random.Generator, path: str = "") -> dict[str, Any]:
    """Every parameter drawn, none zero, matrices scaled by their inputs so that activations stay of order one."""
    result: dict[str, Any] = {}
    for name, value in params.items():
        where = f"{path}/{name}"
        if isinstance(value, dict):
            result[name] = randomise(value, rng, where)
            continue
        drawn = rng.standard_normal(value.shape).astype(np.float32)
        axes = value.shape[1:] if "/layers/" in where or "encoderblock" in where else value.shape
        if name == "scale":
            drawn = 0.2 * drawn + (1.0 if "/img/" in where else 0.0)
        elif len(axes) < 2 or "pos_embedding" in where or name == "bias":
            drawn = 0.2 * drawn
        elif "Dense_0" in where and "norm" in where:
            drawn = 0.5 * drawn / axes[0] ** 0.5
        else:
            inputs = axes[0]
            if any(word in where for word in ("q_einsum", "kv_einsum", "gating")):
                inputs = axes[-2]
            elif "attn_vec" in where or "/out/" in where:
                inputs = axes[0] * axes[1]
            elif "input_embedding" in where:
                inputs = axes[1]
            elif "embedding" in where:
                inputs = int(np.prod(axes[:-1]))
            drawn = drawn / inputs**0.5
        result[name] = jnp.asarray(drawn)
    return result


def make_case(model: Any, batch: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    mask = np.ones((batch, 3), bool)
    for row, view in enumerate((2, 1)):
        if row < batch:
            mask[row, view] = False
    token_mask = np.arange(LENGTH)[None] < np.array([12, LENGTH, 5])[:batch, None]
    case = {
        "images": rng.uniform(-1, 1, (batch, 3, 3, 224, 224)).astype(np.float32),
        "image_mask": mask,
        "tokens": (rng.integers(1, VOCAB, (batch, LENGTH)) * token_mask).astype(np.int64),
        "token_mask": token_mask,
        "state": rng.standard_normal((batch, 32)).astype(np.float32),
        "noise": rng.standard_normal((batch, HORIZON, 32)).astype(np.float32),
    }
    observation = Observation(
        images={k: jnp.moveaxis(jnp.asarray(case["images"][:, v]), 1, -1) for v, k in enumerate(IMAGE_KEYS)},
        image_masks={k: jnp.asarray(mask[:, v]) for v, k in enumerate(IMAGE_KEYS)},
        state=jnp.asarray(case["state"]),
        tokenized_prompt=jnp.asarray(case["tokens"], jnp.int32),
        tokenized_prompt_mask=jnp.asarray(token_mask),
    )
    for steps in STEPS:
        noise = jnp.asarray(case["noise"])
        actions = model.sample_actions(jax.random.key(0), observation, noise=noise, num_steps=steps)
        case[f"steps{steps}"] = np.asarray(actions)
    return case


def write_family(family: str, out: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = build(family)
    graph, state = nnx.split(model)
    params = randomise(state.to_pure_dict(), rng)
    state.replace_by_pure_dict(params)
    model = nnx.merge(graph, state)
    arrays: dict[str, Any] = {}
    for batch in (1, 3):
        arrays |= {f"batch{batch}.{k}": v for k, v in make_case(model, batch, rng).items()}
    save_file(arrays, str(out / "cases.safetensors"))
    with array_typing.disable_typechecking(), ocp.PyTreeCheckpointer() as saver:
        saver.save((out / "params").resolve(), {"params": nnx.state(model)})
    rms = float(np.sqrt(np.square(arrays["batch3.steps10"]).mean()))
    print(f"{family}: actions' rms {rms:.2f}, {sorted(p.name for p in (out / 'params').iterdir())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    for family in ("pi0", "pi05"):
        (args.out / family).mkdir(parents=True, exist_ok=True)
        write_family(family, args.out / family, args.seed)


if __name__ == "__main__":
    main()
