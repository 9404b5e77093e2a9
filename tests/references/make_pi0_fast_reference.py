"""Write small π0-FAST checkpoints, whole as lerobot saves them, and the tokens and actions lerobot's own code gives.

Run it with an interpreter that has lerobot 0.6.1 installed (CONTRIBUTING names the packages)::

    python tests/references/make_pi0_fast_reference.py --out DIR --variants apart tied

Variants: `apart`, in which head and embedding differ, as lerobot makes and trains them; `tied`, in which they are one.
For each it writes ``DIR/VARIANT/``:

- ``checkpoint/``: what ``policy.save_pretrained`` and the two processors' ``save_pretrained`` write, nothing edited; a
  small ``tokenizer.json`` in place of PaliGemma's; in ``fast/`` a small FAST in the format of the hub's.
- ``model.safetensors``: ``{case}.{images,tokens,token_mask}`` as lerobot's model got them, ``{case}.written{n}``, its
  tokens int64 (B, n), and ``{case}.steps{n}``, the actions in them, float32 (B, horizon, 7), normalised.
- ``robot.npz``: whole observations (``images`` uint8 (N, 2, H, W, 3), ``state`` (N, 8)) and ``actions`` (N, horizon, 7)
  after lerobot's pre- and postprocessor; ``tasks.json`` has the instructions.

Random weights write no whole chunks: what lerobot makes of such tokens is compared, too. The class that the hub's FAST
brings is not to be had; what lerobot takes of it, a decoder and two numbers, is handed in. Everything is float32 on the
CPU. This file imports nothing of vla_accel on purpose.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# isort: split
from make_lerobot_reference import TASKS, WORDS, small, small_tokenizer, statistics, write_variants

# isort: split
# After make_lerobot_reference, which steps over what lerobot imports and its policies do not need.
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
from lerobot.policies.pi0_fast.processor_pi0_fast import make_pi0_fast_pre_post_processors
from lerobot.processor import tokenizer_processor

VOCAB, FAST_VOCAB, SKIPPED, HORIZON, CAMERA, STEPS = 400, 300, 4, 6, 256, 24
IMAGES = ("observation.images.image", "observation.images.image2")
SQUARE: Mapping[str, tuple[int, int]] = dict.fromkeys(IMAGES, (CAMERA, CAMERA))
SCALE, LOWEST = 10, -40


def text_tokenizer(stop: int) -> Any:
    """As π0's small one, with as many tokens as the model has, and `|` in a place of its own."""
    words = [*WORDS, *(f"w{i}" for i in range(VOCAB - len(WORDS)))]
    words[stop] = "|"
    return small_tokenizer(words)


def fast_tokenizer(rng: np.random.Generator, folder: Path) -> Any:
    """Byte-pair encoding of random coefficients, written as the hub has it, and as lerobot sees it."""
    texts = ["".join(map(chr, rng.normal(-LOWEST, 4, HORIZON * 7).round().astype(int))) for _ in range(60)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=FAST_VOCAB, show_progress=False))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"scale": SCALE, "vocab_size": FAST_VOCAB, "min_token": LOWEST, "action_dim": None, "time_horizon": None}
    (folder / "processor_config.json").write_text(json.dumps(content))
    bpe = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    return SimpleNamespace(bpe_tokenizer=bpe, scale=SCALE, min_token=LOWEST)


def build(text: Any, fast: Any, cameras: Mapping[str, tuple[int, int]] = SQUARE) -> Any:
    """Build lerobot's policy at a small size. Args: `cameras`: height and width of each camera's images."""
    module = modeling_pi0_fast
    features = {k: PolicyFeature(FeatureType.VISUAL, (3, *size)) for k, size in cameras.items()}
    config = PI0FastConfig(
        input_features={**features, "observation.state": PolicyFeature(FeatureType.STATE, (8,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
        chunk_size=HORIZON, n_action_steps=HORIZON, max_decoding_steps=STEPS, fast_skip_tokens=SKIPPED,
        # Random weights begin with anything.
        validate_action_token_prefix=False, device="cpu",
    )  # fmt: skip
    with (
        small(module, vocab=VOCAB),
        # Up to 0.5 lerobot imports these classes where it calls them.
        mock.patch.object(transformers.AutoProcessor, "from_pretrained", lambda *a, **k: fast),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: text),
    ):
        return module.PI0FastPolicy(config).eval()


@torch.no_grad()
def randomise(policy: Any, tied: bool, generator: torch.Generator) -> None:
    """Every weight set, none zero. The last norm's factors lie around zero: with a head that is the embedding a token
    would otherwise only repeat itself."""
    for name, parameter in policy.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith("language_model.norm.weight"):
            value = 2 * drawn - 1
        elif "norm" in name:
            value = 0.2 * drawn + (1.0 if "vision" in name and name.endswith("weight") else 0.0)
        else:
            matrix = parameter.ndim > 1 and "position_embedding" not in name
            value = drawn / parameter[0].numel() ** 0.5 if matrix else 0.2 * drawn
        # What is attended to must matter, or every prompt is answered alike.
        sharp = "language_model" in name and name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight"))
        parameter.copy_(2 * value if sharp else value)
    if tied:
        paligemma = policy.model.paligemma_with_expert.paligemma
        paligemma.lm_head.weight.copy_(paligemma.model.language_model.embed_tokens.weight)


def model_case(policy: Any, batch: int, views: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The model alone, with padded prompts."""
    length = 16
    token_mask = torch.arange(length)[None] < torch.tensor([9, length, 5])[:batch, None]
    return {
        "images": torch.rand(batch, views, 3, 224, 224, generator=generator) * 2 - 1,
        "tokens": torch.randint(3, VOCAB, (batch, length), generator=generator) * token_mask,
        "token_mask": token_mask,
    }


def write(policy: Any, case: dict[str, torch.Tensor]) -> torch.Tensor:
    """lerobot's tokens (B, STEPS) int64."""
    images = [case["images"][:, v] for v in range(case["images"].shape[1])]
    masks = [torch.ones(len(image), dtype=torch.bool) for image in images]
    return policy.model.sample_actions_fast_kv_cache(
        images, masks, case["tokens"], case["token_mask"], max_decoding_steps=STEPS
    )


def robot_cases(policy: Any, processors: tuple[Any, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Whole observations through lerobot's own pipelines."""
    preprocess, postprocess = processors
    images = rng.integers(0, 256, (len(TASKS), 2, CAMERA, CAMERA, 3), dtype=np.uint8)
    images[0] = images[0, :, :1, :1]  # flat colours: resizing cannot matter
    images[1:] = np.repeat(np.repeat(images[1:, :, ::16, ::16], 16, 2), 16, 3)
    state = rng.uniform(-1, 1, (len(TASKS), 8)).astype(np.float32)
    actions = []
    for i, task in enumerate(TASKS):
        batch = {key: torch.from_numpy(images[i, v]).permute(2, 0, 1).float() / 255 for v, key in enumerate(IMAGES)}
        batch = preprocess({**batch, "observation.state": torch.from_numpy(state[i]), "task": task})
        actions.append(postprocess(policy.predict_action_chunk(batch))[0].numpy())
    return {"images": images, "state": state, "actions": np.stack(actions)}


def write_variant(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    folder = out / "checkpoint"
    fast = fast_tokenizer(rng, folder / "fast")
    policy = build(text_tokenizer(VOCAB - 1), fast)
    randomise(policy, variant == "tied", generator)
    asked = {"batch1": (1, 2), "batch3": (3, 2), "missing": (1, 1)}
    cases = {name: model_case(policy, batch, views, generator) for name, (batch, views) in asked.items()}
    # The stop token is one that the first case writes in the middle, so that there is something to stop at.
    stop = int(write(policy, cases["batch1"])[0, STEPS // 2])
    text = text_tokenizer(stop)
    policy._paligemma_tokenizer = policy.model._paligemma_tokenizer = text
    tensors: dict[str, torch.Tensor] = {}
    for name, case in cases.items():
        written = write(policy, case)
        actions = policy.detokenize_actions(written, action_horizon=HORIZON, action_dim=7)
        case |= {f"written{STEPS}": written, f"steps{STEPS}": actions}
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in case.items()}
    with (
        mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda *a, **k: text),
        mock.patch.object(tokenizer_processor.AutoProcessor, "from_pretrained", lambda *a, **k: fast),
    ):
        made = make_pi0_fast_pre_post_processors(policy.config, dataset_stats=statistics(rng))
    # The names say nothing true of the small size; a loader checks them against the weights.
    policy.config.paligemma_variant = policy.config.action_expert_variant = None
    policy.save_pretrained(folder)
    for processor in made:
        processor.save_pretrained(folder)
    text.backend_tokenizer.save(str(folder / "tokenizer.json"))
    versions = {n: importlib.metadata.version(n) for n in ("lerobot", "torch")}
    save_file(tensors, str(out / "model.safetensors"), versions | {"transformers": transformers.__version__})
    np.savez(out / "robot.npz", **robot_cases(policy, made, rng))
    (out / "tasks.json").write_text(json.dumps(TASKS))
    print(f"{variant}: {sorted(p.name for p in folder.iterdir())}")


if __name__ == "__main__":
    write_variants(__doc__, write_variant, ("apart", "tied"))
