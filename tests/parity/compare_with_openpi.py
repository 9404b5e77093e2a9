"""openpi's own PyTorch model and ours on one device, at full size: weights saved by its model, loaded by ours.

    PYTHONPATH=SITE python -m tests.parity.compare_with_openpi --size full --device cuda --folder DIR

SITE holds openpi (rlinf-openpi 0.1.1), its patched transformers (rlinf-transformer-openpi 4.53.2), tokenizers 0.21.4
and huggingface_hub 0.36.2; jax is not needed: what openpi's model code imports of its JAX half, sizes and nothing
else, is put in its place here. DIR needs room for one float32 checkpoint (14 GB at full size).

For π0 and π0.5: random weights, `save_model`; batch 1 and 3, masked views, padded prompts, 10 steps. float32 actions
must agree to 1e-4. In bfloat16 ours must be about as near to openpi's float32 as openpi's own bfloat16 is. Ends with
one JSON line; the exit status is 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # openpi compiles sample_actions with no argument against it

import torch

from tests.support.agreement import rms
from tests.support.whole_calls import pi0_actions

FP32_ATOL = 1e-4
# Ours to openpi's float32, compared with openpi's own bfloat16 to it: as near, within the spread of two roundings.
BF16_RATIO = 1.5


def without_jax() -> None:
    """The parts of openpi's JAX half that its PyTorch code imports, where jax (of openpi's version) is missing."""

    class Config(types.SimpleNamespace):
        pass

    gemma: Any = types.ModuleType("openpi.models.gemma")
    gemma.Config = Config
    gemma.get_config = None  # set by the reference script
    config: Any = types.ModuleType("openpi.models.pi0_config")
    defaults = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "action_dim": 32}
    config.Pi0Config = lambda **given: types.SimpleNamespace(**defaults, **given)
    model: Any = types.ModuleType("openpi.models.model")
    model.IMAGE_KEYS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")

    class Observation(types.SimpleNamespace):
        @classmethod
        def from_dict(cls, data: dict[str, Any]) -> Observation:
            def pixels(image: torch.Tensor) -> torch.Tensor:
                return image.to(torch.float32).permute(0, 3, 1, 2) / 255.0 * 2.0 - 1.0

            return cls(
                images={k: pixels(v) for k, v in data["image"].items()},
                image_masks=data["image_mask"],
                state=data["state"],
                tokenized_prompt=data["tokenized_prompt"],
                tokenized_prompt_mask=data["tokenized_prompt_mask"],
                token_ar_mask=None,
                token_loss_mask=None,
            )

    model.Observation = Observation
    image_tools = types.ModuleType("openpi.shared.image_tools")  # only for images that are not 224 pixels
    shared: Any = types.ModuleType("openpi.shared")
    shared.image_tools, shared.__path__ = image_tools, []
    models: Any = types.ModuleType("openpi.models")
    models.gemma, models.pi0_config, models.model, models.__path__ = gemma, config, model, []
    for module in (gemma, config, model, image_tools, shared, models):
        sys.modules[module.__name__] = module


@torch.no_grad()
def randomise(model: Any, reference: Any, generator: torch.Generator) -> None:
    """As the reference script does; at the published depths, what each layer adds is made smaller, so that the
    residual streams stay of order one, as a trained model's do relative to their norms."""
    reference.randomise(model, generator)
    depth = {"vision": len(model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.layers)}
    depth["language"] = len(model.paligemma_with_expert.paligemma.model.language_model.layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")):
            layers = depth["vision"] if "vision_tower" in name else depth["language"]
            if "action_out_proj" not in name:
                parameter.mul_(min(1.0, (3 / layers) ** 0.5))


def compare(family: str, sizes: Any, reference: Any, device: str, folder: Path, seed: int) -> dict[str, Any]:
    from safetensors.torch import save_model

    from vla_accel.checkpoints.weights import SafetensorsWeights
    from vla_accel.families.pi0.checkpoint import Stated, infer_config, load_weights

    started = time.perf_counter()
    with torch.device(device):
        theirs = reference.build(family, sizes)
        randomise(theirs, reference, torch.Generator(device).manual_seed(seed))
    theirs = theirs.to(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_model(theirs, str(path))

    draw = torch.Generator().manual_seed(seed)
    cases = {b: {k: v.to(device) for k, v in reference.make_inputs(b, sizes, draw).items()} for b in (1, 3)}

    def ask(model: Any) -> dict[int, torch.Tensor]:
        return {
            b: model.sample_actions(device, reference.observe(c), noise=c["noise"].clone(), num_steps=10).float()
            for b, c in cases.items()
        }

    with torch.no_grad():
        expected = ask(theirs)
        theirs.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")
        theirs_bf16 = ask(theirs)
    del theirs
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()

    weights = SafetensorsWeights(path)
    stated = Stated(action_horizon=sizes.action_horizon, max_token_len=sizes.max_token_len)
    config = infer_config(weights.shapes, "", stated, str(path))
    found: dict[str, Any] = {"parameters": 0, "load_seconds": {}}
    answers: dict[str, dict[int, torch.Tensor]] = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        clock = time.perf_counter()
        ours = load_weights(weights, config, str(path)).placed(torch.device(device), dtype).whole()
        found["load_seconds"][name] = round(time.perf_counter() - clock, 1)
        found["parameters"] = sum(p.numel() for p in ours.parameters())
        answers[name] = {
            b: pi0_actions(
                ours,
                c["images_uint8"].permute(0, 1, 4, 2, 3).float() / 255 * 2 - 1,
                *(c[n] for n in ("image_mask", "tokens", "token_mask", "state", "noise")),
                num_steps=10,
            ).float()
            for b, c in cases.items()
        }
        del ours
    path.unlink()
    for b in cases:
        found[f"batch{b}"] = {
            "actions_rms": rms(expected[b]),
            "float32_max": float((answers["float32"][b] - expected[b]).abs().max()),
            "bfloat16_rms_to_float32": rms(answers["bfloat16"][b] - expected[b]),
            "openpi_bfloat16_rms_to_float32": rms(theirs_bf16[b] - expected[b]),
            "bfloat16_rms_to_openpi_bfloat16": rms(answers["bfloat16"][b] - theirs_bf16[b]),
        }
        assert bool(expected[b].isfinite().all())
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=("wide", "deep", "full"), default="full")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint; it is removed again")
    parser.add_argument("--family", choices=("pi0", "pi05", "both"), default="both")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    without_jax()
    from tests.references import make_openpi_reference as reference

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    sizes = reference.SIZES[args.size]
    families = ("pi0", "pi05") if args.family == "both" else (args.family,)
    result: dict[str, Any] = {"schema": "vla_accel.openpi_parity/1", "size": args.size, "device": args.device}
    if args.device.startswith("cuda"):
        result["gpu"] = torch.cuda.get_device_name()
    broken = []
    for family in families:
        found = compare(family, sizes, reference, args.device, args.folder, args.seed)
        print(json.dumps({family: found}, indent=1), flush=True)
        result[family] = found
        for b in (1, 3):
            row = found[f"batch{b}"]
            if not row["float32_max"] <= FP32_ATOL:
                broken.append(f"{family} batch {b} float32: {row['float32_max']:.1e}")
            if not row["bfloat16_rms_to_float32"] <= BF16_RATIO * row["openpi_bfloat16_rms_to_float32"]:
                broken.append(f"{family} batch {b} bfloat16: {row['bfloat16_rms_to_float32']:.1e}")
    result["broken"] = broken
    print(json.dumps(result))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
