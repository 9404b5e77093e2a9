"""How Evo-1 is measured, and against what: lerobot's own code (`lerobot` 0.6.1 from the package index, on Python 3.12;
see CONTRIBUTING)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vla_accel.families.bench import BenchCard, DummyTokenizer, Infer, dummy_transforms, libero_observation
from vla_accel.families.evo1.family import EVO1
from vla_accel.families.evo1.network import Evo1Config, evo1
from vla_accel.families.evo1.transforms import Evo1Processor
from vla_accel.families.lerobot_bench import batch_of, cached_model, features, importing, without_hub
from vla_accel.nn.random_weights import DrawnDit
from vla_accel.transforms.processing import Inputs
from vla_accel.transforms.robots import LIBERO

LEROBOT_MODES: dict[str, str | None] = {"lerobot-eager": None, "lerobot-compile": "default"}
"""Systems of lerobot, with the mode of torch.compile."""
_PIECES = re.compile(r"</?img>|\n|\d| (?=<)|[:-]|[^\s<>\d:-]+")
_IMAGE, _TEXT = 151_667, 20
"""lerobot's image token, and the words of an instruction such as the dummy's."""


class PieceTokenizer(DummyTokenizer):
    """As many tokens as InternVL's tokenizer has for the parts of a prompt that are always the same, and one for each
    word of the instruction."""

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        return [zlib.crc32(piece.encode()) % self.vocab_size for piece in _PIECES.findall(text)]


class DrawnEvo1(DrawnDit):
    """Weights of an `Evo1`."""

    def _normal(self, name: str) -> tuple[float, float]:
        return (1.0, 0.1) if "layer_scale" in name else super()._normal(name)


class Evo1Bench(BenchCard[Evo1Config, Inputs]):
    """Evo-1."""

    family, drawn = EVO1, DrawnEvo1
    sizes: ClassVar = {"evo1": evo1}
    sweep = (32, 10, 4)
    quantised = ("native_fp8",)
    aliases: ClassVar = {"native_fp8": "native_fp8_denoise"}
    baselines = tuple(LEROBOT_MODES)

    def shallow(self, config: Evo1Config, depth: int) -> Evo1Config:
        """Change language and head; vision keeps its depth."""
        language, head = replace(config.language, depth=depth), replace(config.head, depth=depth)
        return replace(config, language=language, head=head)

    def published(self, horizon: int | None = None) -> Evo1Config:
        return evo1() if horizon is None else evo1(action_horizon=horizon)

    def dummy(self, config: Evo1Config, views: int) -> Evo1Processor:
        return dummy_transforms(Evo1Processor, config, views, PieceTokenizer(config.language.vocab_size), config=config)

    def random_observation(self, transforms: Evo1Processor, rng: np.random.Generator) -> dict[str, Any]:
        return libero_observation(transforms, transforms.image_shape, rng)

    def internals(self, config: Evo1Config, outputs: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`image_tokens` (I, W), and `keys` and `values` (depth, S, heads, d) of the real tokens."""
        real = EVO1.length(config, inputs)
        kept = {name: outputs[name][:, 0, :real] for name in ("keys", "values")}
        return {"image_tokens": outputs["image_tokens"][0], **kept}

    def baseline(self, name: str, *, horizon: int, steps: int, device: str) -> Infer:
        return cached_model(_Lerobot, horizon, device).sampler(LEROBOT_MODES[name], steps)


# -- lerobot ------------------------------------------------------------------------------------------------------


class _Lerobot:
    """lerobot's `Evo1Policy` with random weights, as it runs itself: InternVL's weights in BF16, those of the head in
    float32, all under autocast to BF16 on a GPU."""

    def __init__(self, horizon: int, device: str) -> None:
        with importing("Evo-1"):
            from lerobot.policies.evo1 import internvl3_embedder
            from lerobot.policies.evo1.configuration_evo1 import Evo1Config as TheirConfig
            from lerobot.policies.evo1.modeling_evo1 import Evo1Policy
            from transformers import InternVLConfig, InternVLModel
        self.device, sizes = torch.device(device), evo1()
        side = sizes.vision.side
        config = TheirConfig(
            chunk_size=horizon, n_action_steps=horizon, device=device,
            **features([(side, side)] * 2, LIBERO.state_dim, LIBERO.action_dim),
        )  # fmt: skip
        theirs = InternVLConfig(**_sizes(sizes), image_token_id=_IMAGE, image_seq_length=sizes.vision.image_tokens)

        def model(*_: Any, torch_dtype: torch.dtype, attn_implementation: str, **__: Any) -> Any:
            with self.device:
                made: Any = InternVLModel._from_config(theirs, attn_implementation=attn_implementation)
            return made.to(torch_dtype)

        parts = {"AutoModel": model, "AutoTokenizer": lambda *_, **__: _Tokens(sizes.vision.image_tokens)}
        with without_hub(internvl3_embedder, parts), self.device:
            self.policy: Any = Evo1Policy(config).eval()

    def sampler(self, mode: str | None, steps: int) -> Infer:
        """Return `infer(observation)`, eager or with InternVL and the head through torch.compile in `mode`."""
        policy = self.policy
        if mode is not None:
            policy.model.embedder.model = torch.compile(policy.model.embedder.model, mode=mode)
            policy.model.action_head.get_action = torch.compile(policy.model.action_head.get_action, mode=mode)

        @torch.inference_mode()
        def infer(observation: Mapping[str, Any]) -> dict[str, Any]:
            policy.model.action_head.num_inference_timesteps = steps
            batch = {**batch_of(observation, self.device), "task": ["task"]}
            return {"actions": policy.predict_action_chunk(batch).cpu().numpy()[0]}

        return infer


class _Tokens:
    """Replaces InternVL's tokenizer, which cannot be bundled: the places of three images, and words."""

    def __init__(self, image_tokens: int) -> None:
        self.image_tokens = image_tokens

    def convert_tokens_to_ids(self, token: str) -> int:
        return _IMAGE

    def __call__(self, prompts: Sequence[str], **_: Any) -> Any:
        sizes = evo1().arrangement
        ids = [*range(100, 100 + sizes.edge), *[_IMAGE] * self.image_tokens]
        for _view in range(1, sizes.slots):
            ids += [*range(200, 200 + sizes.between), *[_IMAGE] * self.image_tokens]
        tokens = torch.tensor([[*ids, 300, 301, *range(1000, 1000 + _TEXT)]] * len(prompts))
        return _Encoded(input_ids=tokens, attention_mask=torch.ones_like(tokens))


class _Encoded(dict[str, Tensor]):
    def to(self, device: Any) -> _Encoded:
        return _Encoded({name: value.to(device) for name, value in self.items()})


def _sizes(ours: Evo1Config) -> dict[str, Any]:
    """InternVL's sizes as transformers names them."""
    v, t = ours.vision, ours.language
    vision = {
        "hidden_size": v.width, "num_hidden_layers": v.depth, "num_attention_heads": v.heads, "attention_bias": True,
        "intermediate_size": v.mlp_dim, "image_size": [v.side] * 2, "patch_size": [v.patch_size] * 2,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "vocab_size": t.vocab_size, "hidden_size": t.width, "num_hidden_layers": t.depth,
        "intermediate_size": t.mlp_dim, "num_attention_heads": t.heads, "num_key_value_heads": t.kv_heads,
        "rms_norm_eps": t.eps, "rope_theta": t.theta, "max_position_embeddings": 32_768,
    }  # fmt: skip
    return {"vision_config": vision, "text_config": text}


CARDS = {"evo1": Evo1Bench()}
