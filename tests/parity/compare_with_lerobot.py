"""SmolVLA and GR00T N1.7 at the published size, and π0-FAST, compared with answers of lerobot's own code.

With lerobot's interpreter, then with this package's, on the CPU (12 GB of memory, 9 of disk; a quarter of an hour)::

    python tests/references/make_smolvla_reference.py --out DIR/smolvla --variants full
    python tests/references/make_groot_reference.py --out DIR/groot --full
    python tests/references/make_pi0_fast_reference.py --out DIR/pi0_fast
    python -m tests.parity.compare_with_lerobot DIR/smolvla/full DIR/groot --output lerobot_parity_cpu.json

π0-FAST is compared at a small size (`DIR/pi0_fast/apart`), its tokens' actions as lerobot makes them of any tokens.
Batch 1 and 3, a camera less, padded prompts, on weights of lerobot's that ours reads from the file. In float32 actions
must agree to 1e-4. With weights in bfloat16 ours must be about as near to lerobot's float32 as lerobot's code is with
such weights: SmolVLA's dtypes are those that its checkpoint loads in, GR00T's those of Isaac-GR00T. lerobot's policy
itself runs GR00T with float32 weights under autocast, which is printed next to it, without a bound. Not π0-FAST: one
token that another rounding decides changes all behind it. The exit status is 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.support.agreement import ACTIONS_ATOL, rms
from tests.support.whole_calls import pi0_actions, pi0_fast_tokens, smolvla_actions
from vla_accel.config import CheckpointSpec, PolicyConfig
from vla_accel.families.bench import bench_card
from vla_accel.families.groot.network import Groot, overlap_weights
from vla_accel.families.loading import Checkpoint, family_of, load
from vla_accel.families.pi0.network import Pi0
from vla_accel.families.pi0_fast.family import PI0_FAST
from vla_accel.families.pi0_fast.network import Pi0Fast
from vla_accel.families.pi0_fast.transforms import FastProcessor
from vla_accel.families.smolvla.network import SmolVla
from vla_accel.files import write_json
from vla_accel.machine import hardware, software
from vla_accel.nn.flow import Schedule
from vla_accel.nn.network import Network
from vla_accel.nn.qwen_language import Arrangement

BF16_RATIO = 1.5
"""Ours to lerobot's float32, relative to lerobot's own bfloat16 to it: as near, within the spread of two roundings."""
BOS = 2
TITLES = {
    "batch1": "batch 1", "batch3": "batch 3", "missing": "a camera less", "missing camera": "a camera less",
    "padded": "prompts of three lengths", "rtc": "a previous chunk",
}  # fmt: skip


def case_of(tensors: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """What a case was given, by name; one with a previous chunk is the first one otherwise."""
    name = "batch1" if case == "rtc" else case
    return {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}


def ask_pi0(model: Pi0, tensors: Mapping[str, Tensor], case: str, steps: int) -> Tensor:
    """Actions (B, horizon, 32), normalised."""
    given = case_of(tensors, case)
    names = ("images", "image_mask", "tokens", "token_mask", "state", "noise")
    return pi0_actions(model, *(given[n] for n in names), num_steps=steps)


def ask_smolvla(model: SmolVla, tensors: Mapping[str, Tensor], case: str, steps: int) -> Tensor:
    """Actions (B, horizon, 32), normalised."""
    given = case_of(tensors, case)
    return smolvla_actions(
        model, *(given[n] for n in ("images", "tokens", "token_mask", "state", "noise")), num_steps=steps
    )


def stored_tokens(tokens: Tensor, lengths: Tensor, arrangement: Arrangement) -> Tensor:
    """Text tokens (B, L) in the order of `Layout.text_rows`: the last first where the text precedes the images."""
    if not arrangement.text_first:
        return tokens
    rows = [torch.cat((row[:n].flip(0), row[n:])) for row, n in zip(tokens, lengths.tolist(), strict=True)]
    return torch.stack(rows)


@torch.no_grad()
def ask_groot(model: Groot, tensors: Mapping[str, Tensor], case: str, steps: int) -> Tensor:
    """Actions (B, horizon, action_dim), normalised."""
    given, config = case_of(tensors, case), model.config
    pixels, lengths = given["pixels"], given["lengths"]
    layout = model.layout(pixels.shape[1], config.vision.grid(*pixels.shape[3:]), given["tokens"].shape[1])
    chunk: tuple[Tensor, ...] = ()
    if case == "rtc":  # five rows of a previous chunk, of which two are decided
        target = torch.zeros(1, config.action_horizon, config.action_dim)
        target[:, :5] = tensors["rtc.previous"]
        chunk = (target, overlap_weights(5, 2, config.action_horizon, 6.0, None)[None])
    # One part after the other, where the weights are not there yet: all in float32 would take 12 GB.
    crossing = [f"head.layers.{i}.kv_proj" for source in config.head.sources for i in config.head.blocks(source)]
    with model.present("vision"):
        seen = model.vision.views(pixels)
    with model.present("embed", "language", "head.vl_norm", "head.vl_layers", *crossing):
        tokens = stored_tokens(given["tokens"], lengths, config.arrangement)
        lengths = lengths if config.head.text_every else lengths + layout.images
        cache = model.read(layout, *seen, tokens, lengths)
    with model.present("head"):
        schedule = Schedule.uniform(steps)
        constants, noise, state = model.constants(schedule), given["noise"], given["state"]
        return model.integrate(noise, constants, state, cache, lengths, *chunk, schedule=schedule)


def write_pi0_fast(model: Pi0Fast, tensors: Mapping[str, Tensor], case: str, steps: int) -> Tensor:
    """Tokens (B, steps) int64. lerobot puts <bos> behind the padding, where it counts as if there were none."""
    given = case_of(tensors, case)
    count = given["token_mask"].sum(1, keepdim=True)
    tokens = torch.nn.functional.pad(given["tokens"], (0, 1)).scatter(1, count, BOS)
    mask = torch.arange(tokens.shape[1]) < count + 1
    return pi0_fast_tokens(model, given["images"], tokens, mask, steps)


def ask_pi0_fast(
    processor: FastProcessor, model: Pi0Fast, tensors: Mapping[str, Tensor], case: str, steps: int
) -> Tensor:
    """Actions (B, horizon, action_dim), normalised."""
    return torch.from_numpy(PI0_FAST.normalised(processor, write_pi0_fast(model, tensors, case, steps).numpy()))


def answers(weights: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Checkpoint, dict[str, Tensor]]:
    """A checkpoint of lerobot's, and our answer in `dtype` to each of the cases that have one of its in float32."""
    settings = PolicyConfig(checkpoint=CheckpointSpec(relaxed_actions=family_of(weights) is PI0_FAST))
    checkpoint = load(weights, settings, device="cpu", dtype=dtype, whole=False)
    model = checkpoint.model
    ask: Any = ask_groot
    if not isinstance(model, Groot):
        model = model.whole()
        ask = ask_pi0 if isinstance(model, Pi0) else ask_smolvla
    if isinstance(model, Pi0Fast):
        ask = functools.partial(ask_pi0_fast, checkpoint.processor)
    found = {}
    for key in [k for k in tensors if ".steps" in k]:
        case, _, steps = key.partition(".steps")
        found[key] = ask(model, tensors, case, int(steps)).float()
        print(f"{checkpoint.family.name} {dtype} {key}", file=sys.stderr, flush=True)
    return checkpoint, found


def compare(folder: Path) -> tuple[str, dict[str, Any]]:
    """A family's name, and what a folder of lerobot's is beside ours."""
    weights = next(p for p in (folder / "checkpoint", folder / "isaac") if p.is_dir())
    with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        versions, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    checkpoint, exact = answers(weights, tensors, torch.float32)
    theirs_in = {
        kind: {k: tensors[name] for k in exact if (name := k.replace(".steps", f".{kind}_steps")) in tensors}
        for kind in ("bf16", "autocast")
    }
    _, rounded = answers(weights, tensors, torch.bfloat16) if theirs_in["bf16"] else (None, {})
    rows = []
    for key, ours in exact.items():
        case, _, steps = key.partition(".steps")
        theirs, given = tensors[key], case_of(tensors, case)
        row = {
            "case": TITLES[case], "batch": len(theirs),
            "views": next(given[n].shape[1] for n in ("images", "pixels") if n in given), "steps": int(steps),
            "actions_rms": rms(theirs), "float32_max": float((ours.double() - theirs).abs().max()),
        }  # fmt: skip
        if key in theirs_in["bf16"]:
            low = theirs_in["bf16"][key]
            row |= {
                "bfloat16_rms_to_float32": rms(rounded[key] - theirs),
                "lerobot_bfloat16_rms_to_float32": rms(low - theirs),
                "bfloat16_rms_to_lerobot_bfloat16": rms(rounded[key] - low),
            }
        if key in theirs_in["autocast"]:
            row["lerobot_autocast_rms_to_float32"] = rms(theirs_in["autocast"][key] - theirs)
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    family, parameters = checkpoint.family, count(checkpoint.model)
    size = (
        "published" if parameters == count(family.network_class.empty(bench_card(family).published(None))) else "small"
    )
    return family.name, {"versions": versions, "parameters": parameters, "size": size, "cases": rows}


def count(model: Network) -> int:
    """Its weights."""
    return sum(p.numel() for p in model.parameters())


def agrees(row: Mapping[str, Any]) -> bool:
    """Whether a case keeps both bounds."""
    near = row.get("bfloat16_rms_to_float32", 0.0) <= BF16_RATIO * row.get("lerobot_bfloat16_rms_to_float32", 0.0)
    return row["float32_max"] <= ACTIONS_ATOL and near


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="what the scripts wrote")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    models = dict(compare(folder) for folder in args.folders)
    report = {
        "schema": "vla_accel.lerobot_parity/1", "hardware": hardware(torch.device("cpu")), "software": software(),
        "models": models,
    }  # fmt: skip
    write_json(args.output, report)
    return int(not all(agrees(row) for m in models.values() for row in m["cases"]))


if __name__ == "__main__":
    sys.exit(main())
