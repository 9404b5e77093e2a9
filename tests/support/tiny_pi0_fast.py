"""A tiny π0-FAST whose every weight is random, in lerobot's form with small tokenizers in the hub's formats, and its
greedy tokens a second time: one observation, everything computed anew for each token, float64."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import reference_pi0 as slow
from tests.support.lerobot_saved import Change, lerobot_tensors, saved, write_saved
from tests.support.tiny_smolvla import CAMERAS, statistics
from vla_accel.families.pi0_fast.checkpoint import pieces
from vla_accel.families.pi0_fast.network import Pi0Fast, Pi0FastConfig
from vla_accel.nn.gemma import GemmaConfig
from vla_accel.nn.siglip import SiglipConfig

HORIZON, ACTION_DIM, STATE_DIM = 5, 3, 4
SCALE, LOWEST = 10, -30
VOCABULARY, SKIPPED = 384, 5
"""Words of the text tokenizer, and of those the last that FAST leaves alone."""
SIGNS = ("Task", "State", "Action", "pick", "up", "the", "bowl", "it", *":,;-|\n", *"0123456789")
BOS, STOP = 2, 4 + SIGNS.index("|")
HIGHEST = VOCABULARY - 1 - SKIPPED


def tiny_config(**changes: Any) -> Pi0FastConfig:
    """28-pixel views of four tokens; heads of the tower as wide as in every checkpoint, because no weight shows it."""
    config = Pi0FastConfig(
        vision=SiglipConfig(width=144, depth=2, mlp_dim=20, heads=2, image_size=28, patch_size=14),
        prefix=GemmaConfig(width=24, depth=3, mlp_dim=40, heads=4, kv_heads=1, head_dim=8),
        vocab_size=VOCABULARY, action_dim=ACTION_DIM, action_horizon=HORIZON, max_token_len=49, max_steps=12,
        stop_token=STOP,
    )  # fmt: skip
    return replace(config, **changes)


@torch.no_grad()
def tiny_model(config: Pi0FastConfig, seed: int = 0) -> Pi0Fast:
    """Random weights, float32, in eval mode; activations stay of order one."""
    model, generator = Pi0Fast(config), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        matrix = parameter.ndim > 1 and name != "vision.position_embedding"
        parameter.copy_(drawn / parameter[0].numel() ** 0.5 if matrix else 0.4 * drawn)
    # Around zero instead of one: where embedding and head are the same, a token would only repeat itself.
    model.norm.weight.copy_(2 * torch.randn(config.prefix.width, generator=generator) - 1)
    return model.requires_grad_(False).eval()


def expected_tokens(
    weights: Mapping[str, Tensor], config: Pi0FastConfig, pixels: Tensor, tokens: list[int], steps: int
) -> list[int]:
    """pixels (V, 3, S, S) in [-1, 1] and the prefix's tokens, without padding."""
    w = {k: v.double() for k, v in weights.items()}
    head = w["embed.weight"] if config.tied else w["head.weight"]
    sizes: Any = config
    seen = torch.cat([slow.view_tokens(w, sizes, view.double()) for view in pixels])
    found: list[int] = []
    for _ in range(steps):
        embedded = w["embed.weight"][torch.tensor(tokens + found)] * config.prefix.width**0.5
        x = torch.cat((seen, embedded))
        starts = [0] * (len(x) - len(found)) + [1] * len(found)
        mask = slow.allowed([True] * len(x), starts)
        for index in range(config.prefix.depth):
            x, _, _ = slow.block(w, sizes, f"prefix.layers.{index}", x, list(range(len(x))), mask)
        last, _ = slow.rms_norm(w, "norm", x[-1:], config.prefix.eps, None)
        found.append(int((last @ head.T).argmax()))
        if found[-1] == config.stop_token:
            break
    return found


# -- tokenizers -------------------------------------------------------------------------------------------------------


def write_text_tokenizer(path: Path) -> None:
    """Words and signs as tokens, and many that say nothing: as PaliGemma's `tokenizer.json`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<bos>", "<unk>", *SIGNS]
    words += [f"w{i}" for i in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" "), "removed"),
            pre_tokenizers.Split(Regex(r"\d|\n|[A-Za-z]+|[:,;|-]"), "isolated"),
        ]
    )
    tokenizer.add_tokens(["<image>"])
    tokenizer.save(str(path))


def write_fast(folder: Path, **changes: Any) -> None:
    """FAST trained on random actions, in the format of `physical-intelligence/fast`; `changes` of its JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    texts = [text_of(rng.uniform(-1, 1, (HORIZON, ACTION_DIM))) for _ in range(40)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "processor_class": "UniversalActionProcessor", "scale": SCALE, "vocab_size": 300, "min_token": LOWEST,
        "action_dim": None, "time_horizon": None,
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps({**content, **changes}))


def cosines(count: int) -> np.ndarray:
    """The orthonormal DCT-II as a matrix, entry by entry."""
    return np.array([
        [math.sqrt((1 if k == 0 else 2) / count) * math.cos(math.pi * k * (2 * n + 1) / (2 * count))
         for n in range(count)]
        for k in range(count)
    ])  # fmt: skip


def text_of(actions: np.ndarray) -> str:
    """Actions (H, A) as FAST writes them: the orthonormal DCT-II over time, rounded, a character a number."""
    coefficients = np.around(cosines(len(actions)) @ actions * SCALE).astype(int)
    return "".join(chr(c - LOWEST) for c in coefficients.flatten())


def written(actions: np.ndarray, fast: Path) -> list[int]:
    """The model's tokens of actions, "Action:" before them and the stop token behind."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(fast / "tokenizer.json")).encode(text_of(actions)).ids
    opening = [4 + SIGNS.index(word) for word in ("Action", ":")]
    return [*opening, *(HIGHEST - i for i in ids), STOP]


def rounded(actions: np.ndarray) -> np.ndarray:
    """Actions as they come back from FAST."""
    forward = cosines(len(actions))
    return np.linalg.inv(forward) @ np.around(forward @ actions * SCALE) / SCALE


# -- lerobot's folder -------------------------------------------------------------------------------------------------


def tensors_of(model: Pi0Fast) -> dict[str, Tensor]:
    """The weights under lerobot's names; the token table as embedding and as head."""
    tensors = lerobot_tensors(model, pieces)
    if model.config.tied:
        tensors["model.paligemma_with_expert.paligemma.lm_head.weight"] = model.embed.weight.detach().clone()
    return tensors


def write_lerobot(
    folder: Path, config: Pi0FastConfig | None = None, *, seed: int = 0,
    change: Change = lambda files: None, release: str = "0.6.1",
) -> Pi0Fast:  # fmt: skip
    """A folder as a release of lerobot saves it, with both tokenizers in it, and its model; `change` may edit the JSON
    files before they are written."""
    config = config or tiny_config()
    model = tiny_model(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors_of(model), folder / "model.safetensors")
    side = config.vision.image_size
    features = {c: {"type": "VISUAL", "shape": [3, side, side]} for c in CAMERAS}
    features["observation.state"] = {"type": "STATE", "shape": [STATE_DIM]}
    features["action"] = {"type": "ACTION", "shape": [ACTION_DIM]}
    files = saved(
        "pi0_fast", release, features, {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        paligemma_variant=None, max_state_dim=STATE_DIM + 2, chunk_size=HORIZON, n_action_steps=HORIZON,
        image_resolution=[side, side],
        tokenizer_max_length=config.max_token_len - 1, max_decoding_steps=config.max_steps, fast_skip_tokens=SKIPPED,
    )  # fmt: skip
    write_saved(folder, files, {"observation.state": statistics(STATE_DIM), "action": statistics(ACTION_DIM)}, change)
    write_text_tokenizer(folder / "tokenizer.json")
    write_fast(folder / ("action_tokenizer" if release == "main" else "fast"))
    return model


def observation(seed: int = 0, prompt: str = "pick up the bowl", size: int = 28) -> dict[str, Any]:
    """An observation for the folders of `write_lerobot`."""
    rng = np.random.default_rng(seed)
    images = {k: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for k in CAMERAS}
    return {**images, "observation.state": rng.uniform(-1, 1, STATE_DIM), "task": prompt}
