"""lerobot's X-VLA: its processors tokenize the prompt and normalize the images, and the policy resizes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_accel.attachment.batches import TOKENS, finite_state, pixels
from vla_accel.attachment.calls import saved_config
from vla_accel.attachment.prepared import PreparedReader, one_number
from vla_accel.attachment.weights import ModuleWeights
from vla_accel.checkpoints.lerobot import read_settings
from vla_accel.checkpoints.lerobot_statistics import STATE
from vla_accel.config import PolicyConfig
from vla_accel.families.xvla.checkpoint import load_network
from vla_accel.families.xvla.network import Xvla
from vla_accel.pictures import IMAGENET_DEVIATION, IMAGENET_MEAN
from vla_accel.transforms.normalisation import Normaliser
from vla_accel.transforms.processing import Inputs

_SCALE = Normaliser("mean_std", np.array(IMAGENET_MEAN), np.array(IMAGENET_DEVIATION))


class XvlaReader(PreparedReader):
    """An `XVLAPolicy` of lerobot (`calls.Reader`)."""

    method, title = "_get_action_chunk", "domain_id and tokens of a prompt"

    def __init__(self, policy: Any, settings: PolicyConfig) -> None:
        with saved_config(policy) as folder:
            self._path, self._weights = folder / "config.json", ModuleWeights(policy)
            # The policy has counted its empty cameras among its views.
            self._content = {**read_settings(self._path, ("xvla",)), "empty_cameras": 0}
            self._cameras = list(policy.config.image_features)
            self._tokens = int(policy.config.tokenizer_max_length)
            self._settings = settings
            super().__init__(policy, settings, "xvla")
        self._path = Path(type(policy).__name__) / "config.json"

    def _network(self, batch: Mapping[str, Any] | None) -> Xvla:
        del batch
        domain, tokens = self.variant or (0, self._tokens)
        return load_network(self._weights, domain, self._content, self._path, tokens, self._settings)

    def _variant(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        numbers = torch.as_tensor(batch.get("domain_id", 0))
        return one_number(numbers, "domain_id"), batch[TOKENS].shape[1]

    def _inputs(self, batch: Mapping[str, Any]) -> list[Inputs]:
        found = [(key, batch[key]) for key in self._cameras if key in batch]
        images = [pixels(value[:, -1] if value.ndim == 5 else value, key, _SCALE) for key, value in found]
        state, tokens = batch[STATE], batch[TOKENS].cpu().numpy().astype(np.int64)
        states = finite_state(state[:, -1] if state.ndim == 3 else state, self.config.state_dim, STATE)
        return [
            Inputs(tuple(view[row] for view in images), tokens[row], numbers, numbers)
            for row, numbers in enumerate(states)
        ]
