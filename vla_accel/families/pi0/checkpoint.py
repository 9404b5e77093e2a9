"""Weights of π0 and π0.5 in any of their dialects: this package's canonical names, openpi's PyTorch model, lerobot's.

Knows nothing of robots, statistics or tokenizers: see `vla_accel.families.pi0.folder`.
"""

from __future__ import annotations

import logging

import torch

from vla_accel.checkpoints.checkpoint import account, deferred, shapes_of
from vla_accel.checkpoints.dialects import DEAD, EMBEDDINGS, dialect_of, pieces
from vla_accel.checkpoints.lerobot_statistics import buffers
from vla_accel.checkpoints.weights import Piece, Weights
from vla_accel.families.pi0.network import Pi0, Pi0Config

_log = logging.getLogger("vla_accel.checkpoints")


def load_weights(
    weights: Weights, config: Pi0Config, where: str, *, device: str | torch.device, dtype: torch.dtype | None
) -> Pi0:
    """The model with a checkpoint's weights, in eval mode, each read when it is asked for
    (`models.network.Network.fetch`); `dtype` of the large products, what openpi keeps in float32 stays so
    (`Pi0.kept_wide`), None keeps what is stored.

    Raises CheckpointError that lists keys missing, left over or misshaped.
    """
    recipe = check_weights(weights, config, where)
    return deferred(Pi0.empty(config), weights, recipe, where).bound_for(torch.device(device), dtype)


def check_weights(weights: Weights, config: Pi0Config, where: str) -> dict[str, tuple[Piece, ...]]:
    """The stored tensors behind each canonical one. Raises CheckpointError if anything is missing, left over,
    misshaped or no float."""
    expected = shapes_of(Pi0.empty(config))
    names = weights.shapes.keys()
    dialect, prefix = dialect_of(names)
    dead: list[str] = []
    if dialect == "vla_accel":
        recipe: dict[str, tuple[Piece, ...]] = {name: (Piece(name),) for name in expected}
    else:
        recipe = {name: pieces(name, config, prefix) for name in expected}
        tables = [prefix + e for e in EMBEDDINGS if prefix + e in names]
        # Since transformers 5 training moves the table apart from the head, which nothing reads. lerobot's folders are
        # known for it; openpi ties the two, so that a difference says that other code has written them.
        if len(tables) == 2 and dialect == "openpi" and not torch.equal(*(weights.read(table) for table in tables)):
            _log.warning("checkpoint %s: %s and %s differ: the first is read", where, *tables)
        if tables:
            recipe["embed.weight"] = (Piece(tables[0]),)
        dead = [*tables, *(prefix + d for d in DEAD), *buffers(names)]
    account(weights, recipe, expected, f"checkpoint {where} does not fit {config.kind}", dead)
    return recipe
