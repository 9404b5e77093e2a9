"""Shared by the scripts that run lerobot: small models with random weights, its pipelines, and the files they write.

Import this module first: it replaces what lerobot imports and its policies do not need. It imports nothing of vla_accel
on purpose, so that an error of ours cannot be on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
import transformers
from safetensors.torch import save_file


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty torchvision: lerobot's data loading imports it, its policies do not use it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)

        def anything(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock()

        module.__getattr__ = anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.meta_path.insert(0, _NoTorchvision())

# openpi's patched transformers has another name; lerobot looks the package up by its usual one.
_version = importlib.metadata.version
importlib.metadata.version = lambda name: transformers.__version__ if name == "transformers" else _version(name)

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402

CAMERA = 256
IMAGES = ("observation.images.image", "observation.images.image2")
TASKS = ("pick up the black bowl", "put the wine bottle on the rack", "open the drawer")
VISION = {"hidden_size": 144, "num_hidden_layers": 3, "intermediate_size": 272, "num_attention_heads": 2}
PREFIX = {"width": 96, "depth": 3, "mlp_dim": 208, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
EXPERT = {"width": 64, "depth": 3, "mlp_dim": 176, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
GEMMAS = (
    "PaliGemmaForConditionalGeneration", "PaliGemmaForConditionalGenerationWithPiGemma", "GemmaForCausalLM",
    "PiGemmaForCausalLM",
)  # fmt: skip
"""Classes of lerobot 0.4, and of later releases."""
WORDS = (
    "<pad>", "<eos>", "<bos>", "<unk>",
    *sorted({w for t in TASKS for w in t.split()} | {"Task", "State", "Action", *":,;-", "\n", *"0123456789"}),
)  # fmt: skip


def small_tokenizer(words: Sequence[str] = WORDS, *, opening: bool = True) -> Any:
    """Words, digits and signs as tokens; `opening`: with `<bos>` in front, as PaliGemma's and not SmolVLM2's."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    # Spaces are no tokens of their own here.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(" "), "removed"),
        pre_tokenizers.Split(Regex(r"\d|\n|[A-Za-z]+|[:,;|-]"), "isolated"),
    ])  # fmt: skip
    if opening:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@contextlib.contextmanager
def small(module: Any, *, vocab: int) -> Iterator[None]:
    """Let a module of lerobot build small models. Its sizes are constants; they are edited in the Hugging Face config
    that it passes to the constructor, which leaves lerobot's code as it is."""

    def small_class(make: Any) -> Any:
        def made(config: Any) -> Any:
            if hasattr(config, "vision_config"):
                for name, value in VISION.items():
                    setattr(config.vision_config, name, value)
                config.vision_config.projection_dim = PREFIX["width"]
                config.text_config.vocab_size = vocab
            else:
                config.vocab_size = vocab
            return make(config=config)

        return made

    def sizes(variant: str) -> Any:
        return module.GemmaConfig(**(PREFIX if variant == "gemma_2b" else EXPERT))

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(module, "get_gemma_config", sizes))
        for name in GEMMAS:
            if hasattr(module, name):
                patches.enter_context(mock.patch.object(module, name, small_class(getattr(module, name))))
        yield


def features(cameras: Mapping[str, tuple[int, int]], state: int = 8, action: int = 7) -> dict[str, Any]:
    """The features of a policy's config. `cameras`: height and width of each camera's images."""
    inputs = {k: PolicyFeature(FeatureType.VISUAL, (3, *size)) for k, size in cameras.items()}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (state,))
    return {"input_features": inputs, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (action,))}}


@torch.no_grad()
def randomise(policy: Any, generator: torch.Generator, *, offset_norms: str = "vision") -> None:
    """Draw every weight, none zero, so that activations stay of order one. Norms start at zero or one, which would hide
    a wrong formula. `offset_norms`: text in the names of the norms whose weights are factors, not factors minus one."""
    for name, parameter in policy.named_parameters():
        drawn, matrix = torch.randn(parameter.shape, generator=generator), parameter.ndim > 1
        if "norm.dense" in name:
            value = 0.5 * drawn / (1.0 if name.endswith("bias") else parameter.shape[1] ** 0.5)
        elif "norm" in name:
            value = 0.2 * drawn + (1.0 if offset_norms in name and name.endswith("weight") else 0.0)
        elif "modality_projection" in name:
            # SmolVLA multiplies image tokens by the square root of the width.
            value = drawn / parameter.numel() ** 0.5
        else:
            value = drawn / parameter[0].numel() ** 0.5 if matrix and "position_embedding" not in name else 0.2 * drawn
        parameter.copy_(value)


@torch.no_grad()
def sharpen(policy: Any, factor: float, *endings: str) -> None:
    """Scale projections of the language models, so that attention is not flat and what is attended to matters."""
    for name, parameter in policy.named_parameters():
        if "vision" not in name and name.endswith(endings):
            parameter *= factor


def statistics(rng: np.random.Generator, state: int = 8, action: int = 7) -> dict[str, Any]:
    """Unequal for every dimension; one state dimension has no range, as robots have it."""

    def of(count: int) -> dict[str, np.ndarray]:
        low, high = rng.uniform(-1.5, -0.5, count), rng.uniform(0.5, 1.5, count)
        table = {"mean": rng.uniform(-0.3, 0.3, count), "std": rng.uniform(0.4, 0.9, count), "min": low - 0.1,
                 "max": high + 0.1, "q01": low, "q99": high}  # fmt: skip
        return {name: value.astype(np.float32) for name, value in table.items()}

    table = {"observation.state": of(state), "action": of(action)}
    table["observation.state"]["q99"][3] = table["observation.state"]["q01"][3]
    return table


def model_inputs(
    generator: torch.Generator, batch: int, views: int, side: int, lengths: Sequence[int], vocab: int, **sizes: int
) -> dict[str, torch.Tensor]:
    """Inputs of a model alone, with padded prompts.

    Args:
        lengths: Of the prompts; the first `batch` are used.
        sizes: `state_dim`, and `horizon` and `action_dim` of the noise, where the model has them.
    """
    token_mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:batch, None]
    found = {
        "images": torch.rand(batch, views, 3, side, side, generator=generator) * 2 - 1,
        "tokens": torch.randint(3, vocab, (batch, max(lengths)), generator=generator) * token_mask,
        "token_mask": token_mask,
    }
    if sizes:
        found["state"] = torch.randn(batch, sizes["state_dim"], generator=generator)
        found["noise"] = torch.randn(batch, sizes["horizon"], sizes["action_dim"], generator=generator)
    return found


def processors_of(name: str, config: Any, stats: Any, tokenizer: Any, fast: Any = None) -> tuple[Any, Any]:
    """lerobot's pre- and postprocessor of a policy class. `fast`: π0-FAST's action tokenizer."""
    module = importlib.import_module(f"lerobot.policies.{name}.processor_{name}")
    tokenizer_processor = importlib.import_module("lerobot.processor.tokenizer_processor")
    make: Callable[..., tuple[Any, Any]] = getattr(module, f"make_{name}_pre_post_processors")
    with (
        mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda *a, **k: tokenizer),
        mock.patch.object(tokenizer_processor.AutoProcessor, "from_pretrained", lambda *a, **k: fast),
    ):
        return make(config, dataset_stats=stats)


@contextlib.contextmanager
def changed(config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """The config with other values."""
    with contextlib.ExitStack() as patches:
        for name, value in changes.items():
            patches.enter_context(mock.patch.object(config, name, value))
        yield


def chunk_of(
    policy: Any, preprocess: Any, images: Mapping[str, np.ndarray], state: np.ndarray, task: str,
    noise: np.ndarray | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """lerobot's chunk for one observation, before its postprocessor. `images`: uint8 (H, W, 3) by camera; `noise`:
    (horizon, action_dim)."""
    pixels = {key: torch.from_numpy(image).permute(2, 0, 1).float() / 255 for key, image in images.items()}
    batch = preprocess({**pixels, "observation.state": torch.from_numpy(state), "task": task})
    with contextlib.ExitStack() as patches:
        if noise is not None:
            drawn = torch.from_numpy(noise[None])
            patches.enter_context(mock.patch.object(policy.model, "sample_noise", lambda *a, **k: drawn.clone()))
        return policy.predict_action_chunk(batch, **options)


def blocky_images(rng: np.random.Generator) -> np.ndarray:
    """Images (tasks, 2, H, W, 3) uint8 whose colours resizing hardly changes: flat ones, then blocks of 16 pixels."""
    images = rng.integers(0, 256, (len(TASKS), 2, CAMERA, CAMERA, 3), dtype=np.uint8)
    images[0] = images[0, :, :1, :1]
    images[1:] = np.repeat(np.repeat(images[1:, :, ::16, ::16], 16, 2), 16, 3)
    return images


def write_robot(
    out: Path, policy: Any, processors: tuple[Any, Any], given: dict[str, np.ndarray], cameras: Sequence[str],
    seen: Callable[[int], int] = lambda index: 99,
) -> None:  # fmt: skip
    """Write `robot.npz`, whole observations and the actions of lerobot's pipelines, and `tasks.json`.

    Args:
        given: `images` (tasks, views, H, W, 3), `state` (tasks, n) and, where the model has it, `noise`.
        seen: How many cameras an observation has.
    """
    preprocess, postprocess = processors
    actions = []
    for i, task in enumerate(TASKS):
        images = dict(zip(cameras[: seen(i)], given["images"][i], strict=False))
        noise = given["noise"][i] if "noise" in given else None
        chunk = chunk_of(policy, preprocess, images, given["state"][i], task, noise)
        actions.append(postprocess(chunk)[0].detach().numpy())
    arrays: dict[str, Any] = {**given, "actions": np.stack(actions)}
    np.savez(out / "robot.npz", **arrays)
    (out / "tasks.json").write_text(json.dumps(TASKS))


def save_policy(policy: Any, processors: tuple[Any, Any], tokenizer: Any, folder: Path) -> None:
    """Save as lerobot does, and the tokenizer."""
    # The names say nothing true of the small size; a loader checks them against the weights.
    names = [n for n in ("paligemma_variant", "action_expert_variant") if hasattr(policy.config, n)]
    with changed(policy.config, dict.fromkeys(names)):
        policy.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    print(f"{folder}: {sorted(p.name for p in folder.iterdir())}")


def save_cases(path: Path, cases: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write tensors as `{case}.{name}`, with the versions of what computed them."""
    tensors = {f"{case}.{name}": value.contiguous() for case, table in cases.items() for name, value in table.items()}
    save_file(tensors, str(path), {n: importlib.metadata.version(n) for n in ("lerobot", "torch", "transformers")})


def write_variants(
    doc: str | None, write: Callable[[str, Path, int], None], variants: Sequence[str], default: Sequence[str] = ()
) -> None:
    """Run the command line of a script, whose docstring is `doc`, that writes a folder for each requested variant, by
    default for those of `default`, or for all."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--variants", nargs="+", choices=list(variants), default=list(default or variants))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for variant in args.variants:
        (args.out / variant).mkdir(parents=True, exist_ok=True)
        write(variant, args.out / variant, args.seed)
