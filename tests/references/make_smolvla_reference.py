"""Write SmolVLA checkpoints with random weights, whole as lerobot saves them, and the answers lerobot's own code gives.

Run it with an interpreter that has lerobot installed (CONTRIBUTING names the packages)::

    python tests/references/make_smolvla_reference.py --out DIR --variants base libero

Variants: `base`, small and shaped as `lerobot/smolvla_base` (three cameras of any robot); `libero`, small and shaped as
`HuggingFaceVLA/smolvla_libero` (every layer crosses, an expert half as wide, all layers of the language model); `full`,
the published size. For each it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited,
  and a small ``tokenizer.json`` in place of SmolVLM2's.
- ``model.safetensors``: ``{case}.{images,tokens,token_mask,state,noise}`` as lerobot's model got them and
  ``{case}.steps{n}`` as it answered, float32 (B, horizon, 32), normalised; ``{case}.bf16_steps{n}``: as it answers in
  the dtypes that its published checkpoint loads in, BF16 but for the small projections and those of the prefix's keys
  and values.
- ``robot.npz``: whole observations (``images`` uint8 (N, views, H, W, 3), ``state`` (N, n), ``noise``) and ``actions``
  after lerobot's pre- and postprocessor; in the first the last camera is missing (`base`). ``tasks.json`` has the
  instructions.

All else is float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
from transformers.models.smolvlm import SmolVLMConfig

# isort: split
# After lerobot_frame, which replaces what lerobot imports and its policies do not need.
from lerobot.policies.smolvla import smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

VOCAB = 320
CAMERAS = ("observation.images.image", "observation.images.image2")
CAMERAS = ("observation.images.camera1", "observation.images.camera2", "observation.images.camera3")
SMALL = {
    "vision": {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 80, "num_attention_heads": 2,
               "image_size": 64, "patch_size": 8},
    "text": {"hidden_size": 96, "num_hidden_layers": 5, "intermediate_size": 88, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB},
}  # fmt: skip
FULL = {
    "vision": {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "num_attention_heads": 12,
               "image_size": 512, "patch_size": 16},
    "text": {"hidden_size": 960, "num_hidden_layers": 32, "intermediate_size": 2560, "num_attention_heads": 15,
             "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49_280},
}  # fmt: skip
# Sizes, cameras, state and action numbers, camera pixels (height, width), and what lerobot's config says.
VARIANTS: dict[str, tuple[dict[str, Any], tuple[str, ...], int, int, tuple[int, int], dict[str, Any]]] = {
    "base": (SMALL, CAMERAS, 6, 6, (48, 64), {"num_vlm_layers": 4, "chunk_size": 6}),
    "libero": (SMALL, frame.IMAGES, 8, 7, (64, 64), {
        "num_vlm_layers": 0, "self_attn_every_n_layers": 0, "expert_width_multiplier": 0.5, "num_expert_layers": 0,
        "chunk_size": 7,
    }),
    "full": (FULL, CAMERAS, 6, 6, (512, 512), {}),
}  # fmt: skip


def build(variant: str, cameras: Mapping[str, tuple[int, int]] | None = None) -> Any:
    """Build lerobot's policy. lerobot takes the sizes from the hub; they are passed in its place. `cameras`: height and
    width of each camera's images, instead of the variant's."""
    sizes, names, state, action, camera, changes = VARIANTS[variant]
    text = {"model_type": "llama", "rms_norm_eps": 1e-5, "pad_token_id": 0, **sizes["text"]}
    whole: dict[str, Any] = {"vision_config": sizes["vision"], "text_config": text, "pad_token_id": 0}
    vlm = SmolVLMConfig(**whole, scale_factor=4)
    processor = mock.Mock()
    processor.tokenizer.fake_image_token_id, processor.tokenizer.global_image_token_id = 1, 2
    side = sizes["vision"]["image_size"]
    config = SmolVLAConfig(
        **frame.features(cameras or dict.fromkeys(names, camera), state, action),
        resize_imgs_with_padding=(side, side), load_vlm_weights=False, device="cpu",
        **{"n_action_steps": changes.get("chunk_size", 50), **changes},
    )  # fmt: skip
    with (
        mock.patch.object(smolvlm_with_expert.AutoConfig, "from_pretrained", lambda name: vlm),
        mock.patch.object(smolvlm_with_expert.AutoProcessor, "from_pretrained", lambda name: processor),
    ):
        return SmolVLAPolicy(config).eval()


def statistics(rng: np.random.Generator, state: int, action: int) -> dict[str, Any]:
    """Mean and deviation; one state dimension has none."""
    table = frame.statistics(rng, state, action)
    table["observation.state"]["mean"][3] = table["observation.state"]["std"][3] = 0.0
    return {feature: {name: of[name] for name in ("mean", "std")} for feature, of in table.items()}


@torch.no_grad()
def answer(policy: Any, case: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """lerobot's actions (B, horizon, 32), float32."""
    images = list(case["images"].unbind(1))
    masks = [torch.ones(len(image), dtype=torch.bool) for image in images]
    with mock.patch.object(policy.config, "num_steps", steps):
        given = (case[n] for n in ("tokens", "token_mask", "state"))
        return policy.model.sample_actions(images, masks, *given, noise=case["noise"].clone()).float()


def to_bfloat16(policy: Any) -> None:
    """In place, the dtypes in which lerobot runs a published checkpoint: it makes the crossing layers' projections of
    keys and values, which are square, and the small ones itself, in float32."""
    for name, parameter in policy.model.vlm_with_expert.named_parameters():
        crossing = "lm_expert" in name and name.endswith(("k_proj.weight", "v_proj.weight"))
        if not (crossing and parameter.shape[0] == parameter.shape[1]):
            parameter.data = parameter.data.to(torch.bfloat16)


def write_variant(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    sizes, cameras, states, action, camera, _ = VARIANTS[variant]
    policy, tokenizer = build(variant), frame.small_tokenizer(opening=False)
    frame.randomise(policy, generator, offset_norms="")
    processors = frame.processors_of("smolvla", policy.config, statistics(rng, states, action), tokenizer)
    frame.save_policy(policy, processors, tokenizer, out / "checkpoint")
    config, views = policy.config, 2 if variant == "full" else len(cameras)
    steps = {"batch1": (10,) if variant == "full" else (1, 10), "batch3": (10,), "missing": (10,)}
    noise = {"horizon": config.chunk_size, "action_dim": config.max_action_dim}
    cases = {
        name: frame.model_inputs(
            generator, batch, seen, sizes["vision"]["image_size"], (9, 16, 5), sizes["text"]["vocab_size"],
            state_dim=config.max_state_dim, **noise,
        )
        for name, batch, seen in (("batch1", 1, views), ("batch3", 3, views), ("missing", 1, views - 1))
    }  # fmt: skip
    exact = {name: {f"steps{n}": answer(policy, cases[name], n) for n in steps[name]} for name in cases}
    if variant != "full":
        count = len(frame.TASKS)
        state = rng.uniform(-1, 1, (count, states)).astype(np.float32)
        state[:, 3] = 0.0  # what does not move in the data has no deviation to divide by
        given = {
            "images": rng.integers(0, 256, (count, views, *camera, 3), dtype=np.uint8), "state": state,
            "noise": rng.standard_normal((count, *noise.values())).astype(np.float32),
        }  # fmt: skip
        missing = int(variant == "base")
        frame.write_robot(out, policy, processors, given, cameras, lambda i: views - missing * (i == 0))
    to_bfloat16(policy)
    for name, case in cases.items():
        rounded = {f"bf16_steps{n}": answer(policy, case, n) for n in steps[name]}
        cases[name] = case | exact[name] | rounded
    frame.save_cases(out / "model.safetensors", cases)


if __name__ == "__main__":
    frame.write_variants(__doc__, write_variant, tuple(VARIANTS), ("base", "libero"))
