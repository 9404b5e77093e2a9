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
brings cannot be had; lerobot gets what it uses of it, a decoder and two numbers. Everything is float32 on the CPU.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lerobot_frame as frame
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# isort: split
# After lerobot_frame, which replaces what lerobot imports and its policies do not need.
from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

VOCAB, FAST_VOCAB, SKIPPED, HORIZON, STEPS = 400, 300, 4, 6, 24
SQUARE: Mapping[str, tuple[int, int]] = dict.fromkeys(frame.IMAGES, (frame.CAMERA, frame.CAMERA))
SCALE, LOWEST = 10, -40
CASES = {"batch1": (1, 2), "batch3": (3, 2), "missing": (1, 1)}
"""Batch and views."""


def text_tokenizer(stop: int) -> Any:
    """As π0's small one, with as many tokens as the model has, and `|` as the token `stop`."""
    words = [*frame.WORDS, *(f"w{i}" for i in range(VOCAB - len(frame.WORDS)))]
    words[stop] = "|"
    return frame.small_tokenizer(words)


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
    # lerobot's main branch saves it with the pipeline.
    save = functools.partial(shutil.copytree, folder, dirs_exist_ok=True)
    return SimpleNamespace(bpe_tokenizer=bpe, scale=SCALE, min_token=LOWEST, save_pretrained=save)


def build(text: Any, fast: Any, cameras: Mapping[str, tuple[int, int]] = SQUARE) -> Any:
    """Build lerobot's policy at a small size."""
    config = PI0FastConfig(
        **frame.features(cameras), chunk_size=HORIZON, n_action_steps=HORIZON, max_decoding_steps=STEPS,
        fast_skip_tokens=SKIPPED, device="cpu",
        validate_action_token_prefix=False,  # random weights begin with anything
    )  # fmt: skip
    with (
        frame.small(modeling_pi0_fast, vocab=VOCAB),
        # Up to 0.5 lerobot imports these classes where it calls them.
        mock.patch.object(transformers.AutoProcessor, "from_pretrained", lambda *a, **k: fast),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", lambda *a, **k: text),
    ):
        return modeling_pi0_fast.PI0FastPolicy(config).eval()


@torch.no_grad()
def randomise(policy: Any, tied: bool, generator: torch.Generator) -> None:
    """Draw every weight. The last norm's factors lie around zero: with a head that is the embedding a token would
    otherwise only repeat itself."""
    frame.randomise(policy, generator)
    frame.sharpen(policy, 2.0, "q_proj.weight", "k_proj.weight", "o_proj.weight")
    paligemma = policy.model.paligemma_with_expert.paligemma
    norm = paligemma.model.language_model.norm.weight
    norm.copy_(10 * norm - 1)
    if tied:
        paligemma.lm_head.weight.copy_(paligemma.model.language_model.embed_tokens.weight)


def write(policy: Any, case: dict[str, torch.Tensor]) -> torch.Tensor:
    """lerobot's tokens (B, STEPS) int64."""
    images = list(case["images"].unbind(1))
    masks = [torch.ones(len(image), dtype=torch.bool) for image in images]
    return policy.model.sample_actions_fast_kv_cache(
        images, masks, case["tokens"], case["token_mask"], max_decoding_steps=STEPS
    )


def write_variant(variant: str, out: Path, seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    fast = fast_tokenizer(rng, out / "checkpoint" / "fast")
    policy = build(text_tokenizer(VOCAB - 1), fast)
    randomise(policy, variant == "tied", generator)
    cases = {n: frame.model_inputs(generator, *sizes, 224, (9, 16, 5), VOCAB) for n, sizes in CASES.items()}
    # The stop token is one that the first case writes in the middle, so that there is something to stop at.
    text = text_tokenizer(int(write(policy, cases["batch1"])[0, STEPS // 2]))
    policy._paligemma_tokenizer = policy.model._paligemma_tokenizer = text
    for case in cases.values():
        written = write(policy, case)
        actions = policy.detokenize_actions(written, action_horizon=HORIZON, action_dim=7)
        case |= {f"written{STEPS}": written, f"steps{STEPS}": actions}
    processors = frame.processors_of("pi0_fast", policy.config, frame.statistics(rng), text, fast)
    frame.save_policy(policy, processors, text, out / "checkpoint")
    frame.save_cases(out / "model.safetensors", cases)
    given = {"images": frame.blocky_images(rng), "state": rng.uniform(-1, 1, (3, 8)).astype(np.float32)}
    frame.write_robot(out, policy, processors, given, frame.IMAGES)


if __name__ == "__main__":
    frame.write_variants(__doc__, write_variant, ("apart", "tied"))
