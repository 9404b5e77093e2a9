"""π0-FAST's decode program in Triton's interpreter, and in the ops' references (`interpreter`, test_pi0_fast_native).
`main` prints one JSON line: the tokens of both, and the largest difference of the first token's logits."""

from __future__ import annotations

import json
from typing import Literal

import torch

from tests.support.runtimes import steered
from tests.support.tiny_pi0_fast import BOS, tiny_config, tiny_model
from vla_accel.config import EngineSpec
from vla_accel.families.pi0.native import Pi0FastStore
from vla_accel.families.pi0_fast.native_decode import NativeDecode

LENGTHS, TOTAL, STEPS = (7, 12), 12, 4


def main() -> None:
    model = tiny_model(tiny_config(stop_token=None))
    prefix = model.config.prefix
    generator = torch.Generator().manual_seed(3)
    shape = (prefix.depth, len(LENGTHS), TOTAL, prefix.kv_heads, prefix.head_dim)
    inputs = {
        "tokens": torch.full((len(LENGTHS), TOTAL), BOS), "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "keys": torch.randn(shape, generator=generator), "values": torch.randn(shape, generator=generator),
    }  # fmt: skip
    found: dict[str, object] = {}
    logits = []
    ways: tuple[Literal["triton", "reference"], ...] = ("triton", "reference")
    for way in ways:
        with steered(way):
            program = Pi0FastStore(model).decode(len(LENGTHS), TOTAL, STEPS, EngineSpec("native"))
            assert isinstance(program, NativeDecode)
            written = {"action_tokens": torch.zeros(len(LENGTHS), STEPS, dtype=torch.int64)}
            program.begin(inputs)
            program.decode_next()
            logits.append(program.logits.clone())
            program(inputs, written)
        found[way] = written["action_tokens"].tolist()
    print(json.dumps({**found, "logits": float((logits[0] - logits[1]).abs().max())}))
