"""`VlaAccelPolicy`: lerobot's interface of a policy around `OptimizedPolicy`. Owns the queue of actions, no weights."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import CONFIG_NAME
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig, refuse_training
from lerobot_policy_vla_accel.observations import input_features, observations, stated
from vla_accel.attachment.calls import guidance
from vla_accel.checkpoints.weights import read_json
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import Checkpoint
from vla_accel.policy import OptimizedPolicy
from vla_accel.remote.ensemble import TEMPORAL_ENSEMBLE
from vla_accel.remote.metadata import ensemble_of
from vla_accel.transforms.history import HISTORY, History


class VlaAccelPolicy(PreTrainedPolicy):
    """A checkpoint on vla_accel's engines, as lerobot's tools call a policy.

    Batches are raw: images float in [0, 1] (B, 3, H, W) under `observation.images.*`, `observation.state` (B, n),
    `task`. Actions are the robot's own, float32 on the policy's device. `engine`: the `OptimizedPolicy`.
    """

    config_class = VlaAccelConfig
    name = "vla_accel"

    def __init__(self, config: VlaAccelConfig, dataset_stats: Any = None, dataset_meta: Any = None) -> None:
        """Loads the checkpoint and builds its engines. `dataset_stats`, `dataset_meta`: unused, the checkpoint has its
        own. Raises ConfigError for settings that cannot be, CheckpointError for a checkpoint that cannot be loaded."""
        super().__init__(config)
        if config.checkpoint is None:
            raise ConfigError("policy.checkpoint: expected a folder, a bundled checkpoint or a name on the hub")
        self.engine = OptimizedPolicy.from_pretrained(
            config.checkpoint, config.config, device=config.device, num_steps=config.num_steps, lora=config.lora
        )
        # After loading: a checkpoint that was trained for real-time chunking keeps its own.
        self.init_rtc_processor()
        self.preset = self.engine.processor.preset
        check_action_steps(config.n_action_steps, self.engine.checkpoint)
        self._executed = config.n_action_steps or stated(self.engine.checkpoint.folder).get("n_action_steps")
        wanted = (config.output_features or {}).get("action")
        if wanted is not None and tuple(wanted.shape) != (self.preset.action_dim,):
            raise ConfigError(
                f"action: expected {wanted.shape} as the environment or data set has, the checkpoint "
                f"{config.checkpoint} has ({self.preset.action_dim},)"
            )
        described = describe(self.engine.processor)
        # An environment's features hold the size of its own images.
        if set(config.input_features or ()) != set(described):
            config.input_features = described
        config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (self.preset.action_dim,))}
        self.reset()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_name_or_path: str | Path, *, config: PreTrainedConfig | None = None,
        dataset_stats: Any = None, dataset_meta: Any = None, strict: bool = False, **hub: Any,
    ) -> VlaAccelPolicy:  # fmt: skip
        """From a folder that `python -m lerobot_policy_vla_accel` or `save_pretrained` wrote. Raises CheckpointError
        for another policy's folder, whose processors lerobot would put around this one."""
        del strict
        path = pretrained_name_or_path
        kind = read_json(_config_file(path, hub)).get("type")
        if kind != VlaAccelConfig.get_choice_name(VlaAccelConfig):
            raise CheckpointError(
                f"{path}: expected a folder of type vla_accel, got {kind}. Either --policy.type=vla_accel "
                f"--policy.checkpoint={path}, or make such a folder: python -m lerobot_policy_vla_accel {path} FOLDER"
            )
        given = PreTrainedConfig.from_pretrained(path, **hub) if config is None else config
        if not isinstance(given, VlaAccelConfig):
            raise ConfigError(f"config: expected a VlaAccelConfig, got {type(given).__name__}")
        return cls(given, dataset_stats=dataset_stats, dataset_meta=dataset_meta).eval()

    def _save_pretrained(self, save_directory: Path, state_dict: Any = None) -> None:
        """The configuration alone: weights stay in the checkpoint."""
        del state_dict
        self.config._save_pretrained(save_directory)

    # -- acting ---------------------------------------------------------------------------------------------------

    def predict_action_chunk(
        self, batch: dict[str, Tensor], *, noise: Tensor | None = None,
        inference_delay: int | None = None, prev_chunk_left_over: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The actions (B, horizon, n) of a batch. `noise` (B, horizon, model's dimensions). Real-time chunking, as
        `lerobot-rollout` asks for it, for one row: `prev_chunk_left_over` (k, n) what an earlier call returned and has
        not been executed, `inference_delay` how many of it will be. lerobot fills it up with rows of zeros, which are
        taken off. `rtc_config.enabled: false` ignores both, as in lerobot."""
        return self._predict(self._rows(batch), noise, inference_delay, prev_chunk_left_over)

    def _rows(self, batch: dict[str, Tensor]) -> list[Any]:
        """The observations of a batch, with the history of each row if the policy reads several."""
        rows: list[Any] = observations(batch, self.preset)
        moments = getattr(self.engine.processor, HISTORY, 1)
        if moments == 1:
            return rows
        if len(self._histories) != len(rows):
            self._histories = [History(moments, (*self.preset.images, *self.preset.state)) for _ in rows]
        return [history.add(row) for history, row in zip(self._histories, rows, strict=True)]

    def _predict(
        self, rows: list[Any], noise: Tensor | None, inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        left = None if prev_chunk_left_over is None else _without_padding(prev_chunk_left_over.cpu().numpy())
        guided = left is not None and len(left) > 0 and self._rtc_enabled is not False
        results = self.engine.infer_batch(
            rows,
            noise=None if noise is None else noise.cpu().numpy(),
            prev_chunks=[left] if guided else None,
            inference_delays=[inference_delay or 0] if guided else None,
        )
        chunk = np.stack([result["actions"] for result in results]).astype(np.float32)
        return torch.from_numpy(chunk).to(self.engine.device)

    def select_action(self, batch: dict[str, Tensor], *, noise: Tensor | None = None) -> Tensor:
        """Return the next action (B, n): of the chunk that is being executed, or the first of a new one, which is
        averaged with earlier chunks if the checkpoint has `temporal_ensemble_coeff`.

        Raises ConfigError with `rtc_config` or `warm_start`: only `lerobot-rollout --inference.type=rtc` passes
        previous chunks.
        """
        if self._rtc_enabled:
            raise ConfigError(
                "policy.rtc_config: expected none, or enabled: false, for actions one by one, got enabled: true; "
                "run lerobot-rollout --inference.type=rtc for real-time chunking"
            )
        if (start := self.engine.config.warm_start) is not None:
            raise ConfigError(
                f"policy.config: expected no warm_start for actions one by one, got {start}; "
                "run lerobot-rollout --inference.type=rtc, which passes previous chunks"
            )
        rows = self._rows(batch)  # also of the steps without a call
        if not self._queue:
            chunk = self._predict(rows, noise).transpose(0, 1)
            if self._ensemble is not None:
                mean = self._ensemble.add(self._tick, chunk.flatten(1).cpu().numpy())
                chunk = torch.from_numpy(mean).to(chunk).view_as(chunk)
            self._queue.extend(chunk[: self._executed])
        self._tick += 1
        return self._queue.popleft()

    def reset(self) -> None:
        """Start an episode: no action and no observation is left over, and the noise begins anew."""
        self._queue: deque[Tensor] = deque()
        self._histories: list[History] = []
        self._ensemble, self._tick = ensemble_of(self.engine), 0
        self.engine.reset()

    # -- real-time chunking ---------------------------------------------------------------------------------------

    def supports_rtc(self) -> bool:
        """Whether the checkpoint's family has real-time chunking: π0-FAST has none."""
        return self.engine.supports_prev_chunk

    def init_rtc_processor(self) -> None:
        """`lerobot-rollout` calls this after it has set `config.rtc_config`: engines with that guidance, on the same
        weights. A checkpoint that is run with clean prefixes (`rtc: {trained: true}`) keeps them. Settings that the
        family lacks (GR00T: all but the execution horizon) are left out with a warning, because lerobot always has
        them. Raises ConfigError for a family without real-time chunking, and for `enabled: false` with `warm_start`,
        which needs previous chunks."""
        requested, start = self.config.rtc_config, self.engine.config.warm_start
        if requested is not None and not requested.enabled and start is not None:
            raise ConfigError(
                f"policy.rtc_config: expected enabled: true for a policy with warm_start {start}, got false"
            )
        if requested is None or self.engine.config.rtc.trained:
            return
        rtc = guidance(requested, self.engine.family, self.engine.action_shape[0])
        if rtc == self.engine.config.rtc:
            return
        config = replace(self.engine.config, rtc=rtc)
        self.engine = OptimizedPolicy(self.engine.checkpoint, config, store=self.engine.store)
        self.engine.warm_up()

    @property
    def _rtc_enabled(self) -> bool | None:
        """What `rtc_config` says; None without one."""
        return None if self.config.rtc_config is None else self.config.rtc_config.enabled

    # -- what lerobot asks of every module ------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> VlaAccelPolicy:
        """The engines stay where they were built. Raises ConfigError for another device."""
        requested = kwargs.get("device", args[0] if args else None)
        there = self.engine.device
        if isinstance(requested, (str, torch.device)):
            device = torch.device(requested)
            if device.type != there.type or (device.index is not None and device.index != (there.index or 0)):
                raise ConfigError(f"policy device: expected {there}, where the engines were built, got {requested}")
        return self

    def get_optim_params(self) -> NoReturn:
        refuse_training()

    def forward(self, batch: dict[str, Tensor]) -> NoReturn:
        refuse_training()


def _config_file(path: str | Path, hub: dict[str, Any]) -> Path:
    """config.json of a folder, or of a name on the hub."""
    return Path(path) / CONFIG_NAME if Path(path).is_dir() else Path(hf_hub_download(str(path), CONFIG_NAME, **hub))


def describe(processor: Any) -> dict[str, PolicyFeature]:
    """lerobot's `input_features` of a checkpoint, from its transforms."""
    preset, example = processor.preset, processor.example()
    return input_features(preset, [(3, *np.shape(example[key])[-3:-1]) for key in preset.images])


def check_action_steps(requested: int | None, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for more actions than a chunk of the checkpoint has, and for several of them with temporal
    ensembling, as lerobot's policies do."""
    horizon = checkpoint.model.config.action_horizon
    # GR00T: a robot may get fewer actions than the model computes.
    most = min(horizon, getattr(checkpoint.processor, "rows", horizon))
    if requested is not None and requested > most:
        raise ConfigError(
            f"policy.n_action_steps: expected at most {most}, a chunk of {checkpoint.name}, got {requested}"
        )
    if requested not in (None, 1) and getattr(checkpoint.processor, TEMPORAL_ENSEMBLE, None) is not None:
        raise ConfigError(
            f"policy.n_action_steps: expected 1 with the checkpoint's temporal_ensemble_coeff, got {requested}"
        )


def _without_padding(actions: np.ndarray) -> np.ndarray:
    """Rows (k, n) up to the last that is not all zeros."""
    used = np.flatnonzero(actions.any(axis=1))
    return actions[: used[-1] + 1] if len(used) else actions[:0]
