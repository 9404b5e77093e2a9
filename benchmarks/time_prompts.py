"""Time the text encoder of FastWAM on a new prompt, next to transformers' UMT5.

    python -m benchmarks.time_prompts --output runs/prompts.json [--device cpu --tiny]

Random BF16 weights of the published size. A call is token ids on the host to rows on the host: ours encodes the prompt
alone, transformers' the prompt with its padding to 128 tokens, as lerobot calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.script import options_parser, report_head
from vla_accel.families.fastwam.text import TextEncoder
from vla_accel.files import write_json
from vla_accel.latency import in_turns
from vla_accel.machine import resolve_device
from vla_accel.nn.umt5 import Umt5Config, Umt5Encoder

ROWS = 128
"""lerobot's padded length."""
TINY = Umt5Config(vocab_size=64, width=32, mlp_dim=48, heads=4, head_dim=8, depth=2)


class Ids:
    """A tokenizer whose prompts are the number of their tokens."""

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [*range(2, int(text) + 2)]


def theirs(config: Umt5Config, device: torch.device) -> Any:
    """transformers' encoder of the same size."""
    import transformers

    sizes = transformers.UMT5Config(
        vocab_size=config.vocab_size, d_model=config.width, d_kv=config.head_dim, d_ff=config.mlp_dim,
        num_layers=config.depth, num_heads=config.heads,
    )  # fmt: skip
    with device:
        return transformers.UMT5EncoderModel(sizes).bfloat16().eval()


def systems(config: Umt5Config, device: torch.device, tokens: int) -> dict[str, Callable[[None], Any]]:
    """Both encoders, by name."""
    with device:
        model = Umt5Encoder(config).eval().requires_grad_(False)
    tokenizer: Any = Ids()
    ours, other = TextEncoder(model, tokenizer, device, torch.bfloat16), theirs(config, device)
    ids = torch.tensor([Ids().encode(str(tokens)) + [0] * (ROWS - tokens)])
    real = (torch.arange(ROWS) < tokens)[None].long()

    def padded(_: None) -> Tensor:
        with torch.inference_mode():
            return other(ids.to(device), real.to(device)).last_hidden_state.float().cpu()

    return {"ours": lambda _: ours(str(tokens)), "transformers": padded}


def main() -> int:
    parser = options_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    device, config = resolve_device(options.device), TINY if options.tiny else Umt5Config()
    runs = systems(config, device, options.tokens)
    for run in runs.values():
        run(None)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, ms, _ in in_turns(runs, lambda: None, calls=options.calls, turn=5):
        found[name].append(ms)
    report = {
        **report_head("time_prompts", device), "model": asdict(config),
        "tokens": options.tokens, "calls": options.calls,
        "rows": [{"encoder": name, "p50_ms": float(np.median(ms)), "p90_ms": float(np.percentile(ms, 90))}
                 for name, ms in found.items()],
    }  # fmt: skip
    print(report["rows"])
    write_json(options.output, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
