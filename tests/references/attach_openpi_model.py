"""Attach openpi's own `PI0Pytorch` to this package's engines, and write how far both answers differ.

Run it with an interpreter that has openpi and this package's requirements::

    python tests/references/attach_openpi_model.py --out DIR

It writes ``DIR/attached.json``: for `pi0` and `pi05`, `reason` (null: attached), `difference` of the first answer,
whether `detach` restored the model's own answers (`restored`), and the largest difference of later answers in standard
deviations of openpi's: of batches of one and three (`1`, `3`). The third camera is masked.

Weights are random; everything is float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import make_openpi_reference as reference
import torch
from openpi.models.model import IMAGE_KEYS, Observation

# isort: split
import vla_accel

SIZES = reference.SIZES["small"]


def observation(count: int) -> Any:
    generator, length = torch.Generator().manual_seed(count), SIZES.max_token_len
    mask = torch.arange(length)[None] < torch.tensor([20, 12, 7])[:count, None]
    images = {k: torch.randint(0, 256, (count, 3, 224, 224), generator=generator) / 127.5 - 1 for k in IMAGE_KEYS}
    return Observation(
        images=images,
        image_masks={key: torch.full((count,), "right" not in key) for key in IMAGE_KEYS},
        state=torch.randn(count, reference.ACTION_DIM, generator=generator),
        tokenized_prompt=torch.randint(3, SIZES.vocab_size, (count, length), generator=generator) * mask,
        tokenized_prompt_mask=mask,
    )


@torch.no_grad()
def answer(model: Any, count: int) -> torch.Tensor:
    torch.manual_seed(7)
    return model.sample_actions("cpu", observation(count))


def compare(family: str) -> dict[str, Any]:
    model = reference.build(family, SIZES)
    reference.randomise(model, torch.Generator().manual_seed(0))
    theirs = {count: answer(model, count) for count in (1, 3)}
    attached = vla_accel.attach(model)
    answer(model, 1)
    found = {str(n): float((answer(model, n) - own).abs().max() / own.std()) for n, own in theirs.items()}
    found |= {"reason": attached.reason, "difference": attached.difference}
    attached.detach()
    return {**found, "restored": all(torch.equal(answer(model, n), own) for n, own in theirs.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "attached.json").write_text(json.dumps({name: compare(name) for name in ("pi0", "pi05")}))


if __name__ == "__main__":
    main()
