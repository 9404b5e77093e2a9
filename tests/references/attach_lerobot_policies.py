"""Attach lerobot's own policies to this package's engines, and write how far both answers differ.

Run it with an interpreter that has lerobot 0.4.4, 0.5.1, 0.6.1 or main and this package's requirements::

    python tests/references/attach_lerobot_policies.py --out DIR [--policies smolvla pi05 ...]

It writes ``DIR/attached.json``: lerobot's version and, for each policy, `reason` (null: attached), `difference` of the
first answer, whether `detach` restored the policy's own answers (`restored`), and the largest difference of later
answers in standard deviations of lerobot's: of batches of one and three (`1`, `3`), of `missing`, without the last
camera, and of `rtc`, with a previous chunk; next to `moved`, how far that chunk moves lerobot's own answer.

Weights are random; everything is float32 on the CPU. Unlike the other scripts it runs this package as well: both
answers come from one policy object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

import whole_torchvision  # noqa: F401

# isort: split
import lerobot_frame as frame
import numpy as np
import torch

# isort: split
import vla_accel

CAMERAS = {"observation.images.front": (96, 132), "observation.images.wrist": (250, 150)}
Batch = dict[str, Any]


@dataclass
class Case:
    """A policy, its batches by number of rows, what `attach` gets with it, whether it has real-time chunking, and a
    batch of one row without a camera."""

    policy: Any
    batch: Callable[[int], Batch]
    preprocessor: Any = None
    guided: bool = False
    config: Any = None
    missing: Callable[[], Batch] | None = None


def without(batch: Batch, camera: str) -> Batch:
    return {name: value for name, value in batch.items() if name != camera}


def draws(seed: int, count: int, sizes: Mapping[Any, tuple[int, int]], state: int) -> Batch:
    """Images in [0, 1] that are bytes divided by 255, and a state."""
    generator = torch.Generator().manual_seed(seed)
    found: Batch = {
        key: torch.randint(0, 256, (count, 3, *size), generator=generator).float() / 255 for key, size in sizes.items()
    }
    found["observation.state"] = torch.randn(count, state, generator=generator)
    return found


def prompted(state: int) -> Callable[[int], Batch]:
    """Batches with prompts of several lengths."""

    def batch(count: int) -> Batch:
        found, generator = draws(count, count, CAMERAS, state), torch.Generator().manual_seed(count)
        mask = torch.arange(20)[None] < torch.tensor([20, 17, 6])[:count, None]
        tokens = torch.randint(4, 30, (count, 20), generator=generator) * mask
        return {**found, "observation.language.tokens": tokens, "observation.language.attention_mask": mask}

    return batch


def prompted_case(policy: Any, state: int, *, guided: bool = False) -> Case:
    batch = prompted(state)
    return Case(policy, batch, guided=guided, missing=lambda: without(batch(1), list(CAMERAS)[-1]))


def flow(name: str) -> Case:
    module = importlib.import_module("make_lerobot_reference")
    policy = module.build(name, CAMERAS)
    frame.randomise(policy, torch.Generator().manual_seed(1))
    unnamed(policy)
    return prompted_case(policy, 8, guided=True)


def unnamed(policy: Any) -> None:
    """The small sizes are no variant of lerobot's."""
    policy.config.paligemma_variant = policy.config.action_expert_variant = None


def smolvla() -> Case:
    module = importlib.import_module("make_smolvla_reference")
    policy = module.build("base", CAMERAS)
    frame.randomise(policy, torch.Generator().manual_seed(1), offset_norms="")
    return prompted_case(policy, 6, guided=True)


def pi0_fast() -> Case:
    module = importlib.import_module("make_pi0_fast_reference")
    folders = importlib.import_module("make_lerobot_release_folders")
    with tempfile.TemporaryDirectory() as folder:
        actions = module.fast_tokenizer(np.random.default_rng(0), Path(folder))
    policy = module.build(module.text_tokenizer(module.VOCAB - 1), actions, CAMERAS)
    module.randomise(policy, False, torch.Generator().manual_seed(3))
    folders.write_only_actions(policy)
    unnamed(policy)
    return prompted_case(policy, 8)


def act(variant: str = "environment") -> Case:
    module = importlib.import_module("make_act_reference")
    config, table = module.config_of(variant), module.statistics(variant, np.random.default_rng(0))
    statistics = {k: {n: torch.as_tensor(v) for n, v in its.items()} for k, its in table.items()}
    policy = module.modeling_act.ACTPolicy(config).eval()
    module.randomise(policy, torch.Generator().manual_seed(1))
    before, _ = frame.processors_of("act", config, statistics, None)

    def batch(count: int) -> Batch:
        found = draws(count, count, module.CAMERAS, module.STATE)
        if variant == "environment":
            found["observation.environment_state"] = torch.randn(count, module.ENVIRONMENT)
        return before(found)

    return Case(policy, batch, before)


def diffusion(variant: str) -> Case:
    module = importlib.import_module("make_diffusion_policy_folders")
    processors = importlib.import_module("lerobot.policies.diffusion.processor_diffusion")
    policy = module.build(variant)
    module.randomise(policy)
    before, _ = processors.make_diffusion_pre_post_processors(policy.config, policy.statistics)
    sizes = {key: feature.shape[1:] for key, feature in policy.config.image_features.items()}
    return Case(policy, lambda count: before(draws(count, count, sizes, module.STATE_DIM)), before)


def vla_jepa(variant: str) -> Case:
    module = importlib.import_module("make_vla_jepa_reference")
    policy, _ = module.build(variant)
    # lerobot runs its language model in bfloat16, on the CPU as well.
    mock.patch.object(module.modeling_vla_jepa, module.AUTOCAST, lambda *a, **k: contextlib.nullcontext()).start()
    before, _ = frame.processors_of("vla_jepa", policy.config, frame.statistics(np.random.default_rng(0)), None)
    return whole(policy, before, module.CAMERAS[variant], 8, module.TASKS)


def fastwam() -> Case:
    module = importlib.import_module("make_fastwam_reference")
    policy, _ = module.build("resized")
    wan = Path(tempfile.mkdtemp())
    policy.model.vae.vae.save_pretrained(wan / "vae")
    height, width = module.CAMERAS["resized"]
    sizes = dict.fromkeys(("observation.images.wrist", "observation.images.front"), (height, width))
    return Case(
        policy,
        lambda count: {**draws(count, count, sizes, 8), "task": list(module.TASKS)[:count]},
        config={"checkpoint": {"wan": str(wan)}},
    )


def groot() -> Case:
    module = importlib.import_module("make_groot_reference")
    tokenizer = module.small_tokenizer()
    processor = module.small_processor(tokenizer)
    # Until the end: the preprocessor asks for the processor in its first call.
    mock.patch.object(module.groot_n1_7, "_cosmos_reason2_qwen3_vl_config", module.small_backbone).start()
    mock.patch.object(module.processor_groot, "_build_n1_7_processor", lambda name: processor).start()
    with tempfile.TemporaryDirectory() as folder:
        module.write_isaac(module.build(False).bfloat16(), Path(folder), tokenizer)
        config = module.config_of(Path(folder))
        policy = module.GrootPolicy(config).eval()
        before, _ = module.processor_groot.make_groot_pre_post_processors(config)
    config.use_relative_actions = False

    def batch(count: int) -> Batch:
        sizes = dict.fromkeys(("observation.images.image", "observation.images.image2"), (120, 160))
        return before({**draws(count, count, sizes, 8), "task": [module.TASKS[0]] * count})

    return Case(policy.float(), batch, guided=True)


def whole(
    policy: Any, before: Any, sizes: Mapping[str, tuple[int, int]], state: int, tasks: Sequence[str], **others: Any
) -> Case:  # fmt: skip
    """A case whose batches lerobot's preprocessor makes. `others`: more fields; `missing`: the camera left out."""

    def observation(count: int) -> Batch:
        images = {f"observation.images.{name}": size for name, size in sizes.items()}
        return {**draws(count, count, images, state), "task": list(tasks)[:count]}

    camera = others.pop("missing", None)
    if camera is not None:
        others["missing"] = lambda: before(without(observation(1), f"observation.images.{camera}"))
    return Case(policy, lambda count: before(observation(count)), **others)


def groot_n15() -> Case:
    module = importlib.import_module("make_groot_n15_reference")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = module.write_tokenizer(Path(folder))
    slot = tokenizer.convert_tokens_to_ids(module.SPECIAL[-1])
    policy, before, _ = module.policy_of(module.build(slot + 1, slot), tokenizer)
    sizes = {"wrist": (120, 160), "front": (120, 160)}
    return whole(policy, before, sizes, module.STATE, [module.TASKS[0]] * 3, missing="front")


def xvla(variant: str) -> Case:
    module = importlib.import_module("make_xvla_reference")
    policy = module.build(variant)
    before, _ = frame.processors_of("xvla", policy.config, None, module.tokenizer())
    for step in before.steps:
        if type(step).__name__ == "XVLAAddDomainIdProcessorStep":
            step.domain_id = module.DOMAINS.get(variant, 0)
    sizes, state = module.CAMERAS.get(variant, module.SQUARE), module.STATES.get(variant, 20)
    return whole(policy, before, sizes, state, module.TASKS, missing="front")


def molmoact2(variant: str) -> Case:
    module = importlib.import_module("make_molmoact2_reference")
    folder = Path(tempfile.mkdtemp())
    module.published(variant, folder)
    policy, (before, _) = module.build(variant, folder)
    if variant in ("robot", "adapted"):
        policy = module.loaded(policy, Path(tempfile.mkdtemp()))
    sizes = module.SIZES.get(variant, dict.fromkeys(module.CAMERAS, (70, 70)))
    tasks = module.TASKS if module.MAIN else [module.TASKS[0]] * 3
    missing = None if variant == "robot" else "wrist"
    return whole(policy, before, sizes, 8, tasks, guided=True, missing=missing)


def evo1(variant: str) -> Case:
    module = importlib.import_module("make_evo1_reference")
    policy, _ = module.build(variant)
    policy.config.empty_cameras = 2  # the empty one and another
    before, _ = module.processor_evo1.make_evo1_pre_post_processors(policy.config, module.statistics(0))
    return whole(policy, before, module.CAMERAS[variant], 8, module.TASKS, guided=True, missing="front")


POLICIES: dict[str, Callable[[], Case]] = {
    "pi0": lambda: flow("pi0"),
    "pi05": lambda: flow("pi05"),
    "smolvla": smolvla,
    "pi0_fast": pi0_fast,
    "act": act,
    "act min_max": lambda: act("min_max"),
    "diffusion ddpm": lambda: diffusion("ddpm"),
    "diffusion ddim": lambda: diffusion("episode"),
    "vla_jepa": lambda: vla_jepa("resized"),
    "vla_jepa relative": lambda: vla_jepa("relative"),
    "fastwam": fastwam,
    "groot": groot,
    "groot_n15": groot_n15,
    "xvla": lambda: xvla("plain"),
    "xvla joint": lambda: xvla("joint"),
    "molmoact2": lambda: molmoact2("plain"),
    "molmoact2 resized": lambda: molmoact2("resized"),
    "molmoact2 robot": lambda: molmoact2("robot"),
    "molmoact2 adapted": lambda: molmoact2("adapted"),
    "evo1": lambda: evo1("resized"),
    "evo1 bare": lambda: evo1("bare"),
}


def answer(case: Case, batch: Batch, **others: Any) -> torch.Tensor:
    """The actions of three control steps, or the chunk of a call with more arguments, from one seed."""
    torch.manual_seed(7)
    case.policy.reset()
    if others:
        return case.policy.predict_action_chunk(dict(batch), **others)
    return torch.stack([case.policy.select_action(dict(batch)) for _ in range(3)])


def guide(policy: Any) -> None:
    """Real-time chunking as lerobot's rollouts set it."""
    if hasattr(policy, "init_rtc_processor"):
        configuration = importlib.import_module("lerobot.policies.rtc.configuration_rtc")
        policy.config.rtc_config = configuration.RTCConfig(enabled=True, execution_horizon=4)
        policy.init_rtc_processor()


def compare(case: Case) -> dict[str, Any]:
    def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours - theirs).abs().max() / theirs.std())

    calls: dict[str, tuple[Batch, dict[str, Any]]] = {"1": (case.batch(1), {}), "3": (case.batch(3), {})}
    if case.missing is not None:
        calls["missing"] = case.missing(), {}
    theirs = {name: answer(case, batch, **others) for name, (batch, others) in calls.items()}
    attached = vla_accel.attach(case.policy, case.config, preprocessor=case.preprocessor)
    answer(case, calls["1"][0])
    found: dict[str, Any] = {"reason": attached.reason, "difference": attached.difference}
    found |= {name: relative(answer(case, *call[:1], **call[1]), theirs[name]) for name, call in calls.items()}
    found["reason"] = attached.reason
    attached.detach()
    found["restored"] = all(torch.equal(answer(case, b, **o), theirs[name]) for name, (b, o) in calls.items())
    if case.guided:
        guide(case.policy)
        batch = calls["1"][0]
        plain = answer(case, batch, inference_delay=None)
        others = {"inference_delay": 1, "prev_chunk_left_over": plain[0, 1:] + 0.5 * (plain[0, 1:] != 0)}
        moved = answer(case, batch, **others)
        attached = vla_accel.attach(case.policy)
        answer(case, batch, inference_delay=None)
        found |= {"rtc": relative(answer(case, batch, **others), moved), "moved": relative(moved, plain)}
        found["reason"] = attached.reason
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "groot_n15" in args.policies:  # replaces packages that lerobot looks for when its GR00T is first imported
        importlib.import_module("make_groot_n15_reference")
    found: dict[str, Any] = {}
    for name in args.policies:
        torch.manual_seed(0)
        found[name] = compare(POLICIES[name]())
        print(name, found[name], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"lerobot": importlib.metadata.version("lerobot"), "policies": found}
    (args.out / "attached.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
