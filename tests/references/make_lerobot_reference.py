"""Write small lerobot checkpoints, whole as lerobot saves them, and the answers lerobot's own code gives.

Run it with an interpreter that has lerobot installed (CONTRIBUTING names the packages)::

    python tests/references/make_lerobot_reference.py --out DIR

For pi0 and pi05 it builds lerobot's policy at a small size with random weights and writes ``DIR/{pi0,pi05}/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited,
  and a small ``tokenizer.json`` in place of PaliGemma's, which is not free to ship.
- ``model.safetensors``: ``{case}.{images,image_mask,tokens,token_mask,state,noise}`` as lerobot's model got them and
  ``{case}.steps{n}`` as it answered, float32 (B, horizon, 32), normalised.
- ``robot.npz``: whole observations (``images`` uint8 (N, views, H, W, 3), ``state`` (N, 8), ``noise``) and
  ``actions`` (N, horizon, 7) after lerobot's pre- and postprocessor; ``tasks.json`` has the instructions.

Everything is float32 on the CPU. This file imports nothing of vla_accel on purpose. It does not cover bfloat16,
training, or the rotation that lerobot's LIBERO environment applies.
"""

from __future__ import annotations

import argparse
import contextlib
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

# openpi's patched transformers is published under a name of its own; lerobot asks for the package by its usual one.
_version = importlib.metadata.version
importlib.metadata.version = lambda name: transformers.__version__ if name == "transformers" else _version(name)

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.pi0 import modeling_pi0  # noqa: E402
from lerobot.policies.pi0.configuration_pi0 import PI0Config  # noqa: E402
from lerobot.policies.pi0.processor_pi0 import make_pi0_pre_post_processors  # noqa: E402
from lerobot.policies.pi05 import modeling_pi05  # noqa: E402
from lerobot.policies.pi05.configuration_pi05 import PI05Config  # noqa: E402
from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors  # noqa: E402
from lerobot.processor import tokenizer_processor  # noqa: E402

STEPS = (1, 10)
VOCAB, HORIZON, CAMERA = 320, 6, 256
VISION = {"hidden_size": 144, "num_hidden_layers": 3, "intermediate_size": 272, "num_attention_heads": 2}
PREFIX = {"width": 96, "depth": 3, "mlp_dim": 208, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
EXPERT = {"width": 64, "depth": 3, "mlp_dim": 176, "num_heads": 8, "num_kv_heads": 1, "head_dim": 32}
TASKS = ("pick up the black bowl", "put the wine bottle on the rack", "open the drawer")
IMAGES = ("observation.images.image", "observation.images.image2", "observation.images.empty_camera_0")
SQUARE: Mapping[str, tuple[int, int]] = dict.fromkeys(IMAGES, (CAMERA, CAMERA))


WORDS = (
    "<pad>", "<eos>", "<bos>", "<unk>",
    *sorted({w for t in TASKS for w in t.split()} | {"Task", "State", "Action", *":,;-", "\n", *"0123456789"}),
)  # fmt: skip


def small_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """Words, digits and signs as tokens, `<bos>` in front, as PaliGemma's puts it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    # Spaces are no tokens of their own here.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" "), "removed"),
            pre_tokenizers.Split(Regex(r"\d|\n|[A-Za-z]+|[:,;|-]"), "isolated"),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


PALIGEMMA = ("PaliGemmaForConditionalGeneration", "PaliGemmaForConditionalGenerationWithPiGemma")
GEMMA = ("GemmaForCausalLM", "PiGemmaForCausalLM")
"""Classes of lerobot 0.4, and of later releases."""


@contextlib.contextmanager
def small(module: Any, *, vocab: int = VOCAB) -> Iterator[None]:
    """Models that a module of lerobot builds have the small size. lerobot's sizes are constants; they are edited in the
    Hugging Face config that it passes to the constructor, which leaves lerobot's code as it is."""

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
        for name in (*PALIGEMMA, *GEMMA):
            if hasattr(module, name):
                patches.enter_context(mock.patch.object(module, name, small_class(getattr(module, name))))
        yield


def build(family: str, cameras: Mapping[str, tuple[int, int]] = SQUARE) -> Any:
    """Build lerobot's policy at the small size. Args: `cameras`: height and width of each camera's images."""
    module = modeling_pi05 if family == "pi05" else modeling_pi0
    config_class = PI05Config if family == "pi05" else PI0Config
    features = {k: PolicyFeature(FeatureType.VISUAL, (3, *size)) for k, size in cameras.items()}
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    config = config_class(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        tokenizer_max_length=160 if family == "pi05" else 24,
        device="cpu",
    )
    policy_class = modeling_pi05.PI05Policy if family == "pi05" else modeling_pi0.PI0Policy
    with small(module):
        return policy_class(config).eval()


@torch.no_grad()
def randomise(policy: Any, generator: torch.Generator) -> None:
    """Every weight set, none zero: adaRMS and RMSNorm start at zero, which would hide a wrong formula."""
    for name, parameter in policy.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")) and "vision" not in name:
            value = 0.2 * drawn
        elif "layer_norm" in name or "post_layernorm" in name:
            value = 0.2 * drawn + (1.0 if name.endswith("weight") else 0.0)
        elif "norm.dense" in name:
            value = 0.5 * drawn / (1.0 if name.endswith("bias") else parameter.shape[1] ** 0.5)
        else:
            matrix = parameter.ndim > 1 and "position_embedding" not in name
            value = drawn / parameter[0].numel() ** 0.5 if matrix else 0.2 * drawn
        parameter.copy_(value)


def statistics(rng: np.random.Generator) -> dict[str, Any]:
    """Unequal for every dimension; one state dimension is constant, as robots have it."""

    def of(count: int) -> dict[str, np.ndarray]:
        low = rng.uniform(-1.5, -0.5, count).astype(np.float32)
        high = rng.uniform(0.5, 1.5, count).astype(np.float32)
        mean = rng.uniform(-0.3, 0.3, count).astype(np.float32)
        std = rng.uniform(0.4, 0.9, count).astype(np.float32)
        return {"mean": mean, "std": std, "min": low - 0.1, "max": high + 0.1, "q01": low, "q99": high}

    table = {"observation.state": of(8), "action": of(7)}
    table["observation.state"]["q99"][3] = table["observation.state"]["q01"][3]
    return table


def model_case(policy: Any, family: str, batch: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The model alone: a masked third view, then a masked second view, then none; padded prompts."""
    length = 24
    mask = torch.ones(batch, 3, dtype=torch.bool)
    for row, view in enumerate((2, 1)):
        if row < batch:
            mask[row, view] = False
    lengths = torch.tensor([12, length, 5])[:batch]
    token_mask = torch.arange(length)[None] < lengths[:, None]
    case = {
        "images": torch.rand(batch, 3, 3, 224, 224, generator=generator) * 2 - 1,
        "image_mask": mask,
        "tokens": torch.randint(1, VOCAB, (batch, length), generator=generator) * token_mask,
        "token_mask": token_mask,
        "state": torch.randn(batch, 32, generator=generator),
        "noise": torch.randn(batch, HORIZON, 32, generator=generator),
    }
    views = [case["images"][:, v] for v in range(3)]
    masks = [mask[:, v] for v in range(3)]
    state = () if family == "pi05" else (case["state"],)
    for steps in STEPS:
        case[f"steps{steps}"] = policy.model.sample_actions(
            views, masks, case["tokens"], token_mask, *state, noise=case["noise"].clone(), num_steps=steps
        )
    return case


def robot_cases(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Whole observations through lerobot's own pipelines; the third camera is empty, as on LIBERO."""
    preprocess, postprocess = processors
    images = rng.integers(0, 256, (len(TASKS), 2, CAMERA, CAMERA, 3), dtype=np.uint8)
    images[0] = images[0, :, :1, :1]  # flat colours: resizing cannot matter
    images[1:] = np.repeat(np.repeat(images[1:, :, ::16, ::16], 16, 2), 16, 3)
    state = rng.uniform(-1, 1, (len(TASKS), 8)).astype(np.float32)
    noise = rng.standard_normal((len(TASKS), HORIZON, 32)).astype(np.float32)
    actions = []
    for i, task in enumerate(TASKS):
        batch = {key: torch.from_numpy(images[i, v]).permute(2, 0, 1).float() / 255 for v, key in enumerate(IMAGES[:2])}
        batch = preprocess({**batch, "observation.state": torch.from_numpy(state[i]), "task": task})
        drawn = torch.from_numpy(noise[i : i + 1])
        with mock.patch.object(policy.model, "sample_noise", lambda shape, device, drawn=drawn: drawn.clone()):
            actions.append(postprocess(policy.predict_action_chunk(batch))[0].numpy())
    return {"images": images, "state": state, "noise": noise, "actions": np.stack(actions)}


def write_family(family: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    policy = build(family)
    randomise(policy, generator)
    make = make_pi05_pre_post_processors if family == "pi05" else make_pi0_pre_post_processors
    tokenizer = small_tokenizer()
    folder = out / "checkpoint"
    with mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda name: tokenizer):
        processors = make(policy.config, dataset_stats=statistics(rng))
    # The names say nothing true of the small size; a loader checks them against the weights.
    policy.config.paligemma_variant = policy.config.action_expert_variant = None
    policy.save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))

    tensors: dict[str, torch.Tensor] = {}
    for batch in (1, 3):
        case = model_case(policy, family, batch, generator)
        tensors |= {f"batch{batch}.{name}": value.contiguous() for name, value in case.items()}
    save_file(tensors, str(out / "model.safetensors"))
    np.savez(out / "robot.npz", **robot_cases(policy, processors, rng))
    (out / "tasks.json").write_text(json.dumps(TASKS))
    print(f"{family}: {sorted(p.name for p in folder.iterdir())}")


def write_variants(
    doc: str | None, write: Callable[[str, Path, int], None], variants: Sequence[str], default: Sequence[str] = ()
) -> None:
    """The command line of a script, whose docstring is `doc`, that writes a folder for each variant asked for; if none
    is, for those of `default`, or for all."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--variants", nargs="+", choices=list(variants), default=list(default or variants))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for variant in args.variants:
        (args.out / variant).mkdir(parents=True, exist_ok=True)
        write(variant, args.out / variant, args.seed)


if __name__ == "__main__":
    write_variants(__doc__, write_family, ("pi0", "pi05"))
