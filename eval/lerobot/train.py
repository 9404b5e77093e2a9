"""Train ACT or Diffusion Policy with lerobot 0.6.1's own trainer on recorded demonstrations.

    python -m eval.lerobot.train --episodes runs/lerobot/episodes --policy act --output runs/lerobot/act --minutes 10

Network, loss, optimizer, loop and the saved folders (`checkpoints/<step>/pretrained_model`) are lerobot's. Three things
are not:

- The data set is in memory instead of parquet files, so that lerobot needs neither datasets, pandas, pyarrow nor av:
  empty modules take their place where they are not installed.
- The run ends by the clock (`Clock`), which also sets the learning rate and the moments of saving.
- ACT's ResNet has batch norms with fixed statistics. Without weights of ImageNet they are the identity, and activations
  grow from block to block, so that training starts from statistics of the demonstrations. `quicken` changes how the
  ResNet is computed, not what.

With `ACCELERATE_MIXED_PRECISION=bf16` in the environment, as `accelerate launch` sets it, updates are computed in BF16;
the weights stay FP32.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.libero.lerobot_policy import CAMERAS, lerobot_without_datasets
from eval.script import run_script
from vla_accel.cli.options import Count, Seed, Within, Written
from vla_accel.errors import ConfigError

LEAST_DEVIATION = 0.02
"""Of an action's number, so that one which hardly ever moves is not scaled up."""
READERS = 16
"""Threads that read episodes."""
MOST = 999_999
"""Updates of a run, which ends by the clock before."""
CALIBRATED = 8
"""Batches of 32 pictures for the statistics of the batch norms."""


@dataclass(frozen=True)
class Arguments:
    """Train a policy of lerobot on the episodes of `eval.lerobot.record`."""

    episodes: Path
    """Folder of episodes."""
    output: Annotated[Path, Written(folder=True)]
    """Folder of the run, which must be new."""
    policy: Literal["act", "diffusion"] = "act"
    """Kind of policy."""
    minutes: Annotated[float, Within(0, above=True)] = 10.0
    """Minutes of updates; saving and loading come in addition."""
    batch: Count = 64
    """Observations of an update."""
    lr: Annotated[float, Within(0, above=True)] = 1e-4
    """Learning rate."""
    saves: Count = 5
    """Folders to save, at equal times, the last one at the end."""
    warmup: Count = 300
    """Updates until the learning rate is reached; it falls to 0 as a cosine."""
    workers: Annotated[int, Within(0)] = 8
    """Processes that load data."""
    device: str = "cuda"
    """Where to train."""
    seed: Seed = 1000
    """Of weights and order."""
    dim: Count = 512
    """Width of ACT, and of the first level of the UNet; smaller ones are for trials."""


class Enough(Exception):
    """Ends lerobot's loop after the last folder was saved."""


class Clock:
    """When a run saves, how its learning rate falls, and when it ends, by the share of its time that has passed.

    Time counts from the first update. `seconds` of updates; `saves` folders.
    """

    def __init__(self, seconds: float, saves: int, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._saves, self._now = seconds, saves, now
        self._began: float | None = None
        self.saved = 0

    @property
    def share(self) -> float:
        """In [0, 1]."""
        return 0.0 if self._began is None else min(1.0, (self._now() - self._began) / self._seconds)

    def saves(self) -> bool:
        """Whether to save now, once for each moment that has passed."""
        due = int(self.share * self._saves)
        due, self.saved = due > self.saved, max(due, self.saved)
        return due

    def updating(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return an update that starts the clock, and raises Enough after the last save."""

        def updated(*arguments: Any, **options: Any) -> Any:
            if self.saved == self._saves:
                raise Enough
            self._began = self._now() if self._began is None else self._began
            return update(*arguments, **options)

        return updated

    def fall(self) -> float:
        """Return the factor of the learning rate, a cosine from 1 to 0."""
        return 0.5 * (1 + math.cos(math.pi * self.share))

    def scheduling(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return lerobot's function that makes optimizer and schedule, whose rate falls in addition by the clock."""

        def made(*arguments: Any) -> Any:
            optimizer, schedule = make(*arguments)
            schedule.lr_lambdas = [lambda update, own=own: own(update) * self.fall() for own in schedule.lr_lambdas]
            return optimizer, schedule

        return made


class Demonstrations(torch.utils.data.Dataset):
    """Episodes in memory, with the attributes of a LeRobotDataset that the trainer reads."""

    episodes = absolute_to_relative_idx = None

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("episode_*.npz"))
        if not files:
            raise ConfigError(f"episodes: expected episode_*.npz, found none in {folder}")
        with ThreadPool(READERS) as pool:
            loaded = pool.map(lambda file: dict(np.load(file)), files)
        ends = np.cumsum([len(one["states"]) for one in loaded])
        # Filled in place: a concatenation of all images would be in memory twice.
        self.images = torch.empty(int(ends[-1]), *loaded[0]["images"].shape[1:], dtype=torch.uint8)
        for one, end in zip(loaded, ends, strict=True):
            self.images[end - len(one["states"]) : end] = torch.from_numpy(one.pop("images"))
        self.states, self.actions = (
            torch.from_numpy(np.concatenate([one[name] for one in loaded])).float() for name in ("states", "actions")
        )
        self.first = torch.from_numpy(np.repeat(ends - np.diff(ends, prepend=0), np.diff(ends, prepend=0)))
        self.last = torch.from_numpy(np.repeat(ends - 1, np.diff(ends, prepend=0)))
        self.num_frames, self.num_episodes = len(self.states), len(files)
        self.seen, self.done = [0], [0]
        size = (*self.images.shape[2:4], 3)
        names = ["height", "width", "channel"]
        features: dict[str, Any] = {key: {"dtype": "image", "shape": size, "names": names} for key in CAMERAS}
        for key, values in (("observation.state", self.states), ("action", self.actions)):
            features[key] = {"dtype": "float32", "shape": (values.shape[1],), "names": None}
        bounds = {"dataset_from_index": (ends - np.diff(ends, prepend=0)).tolist(), "dataset_to_index": ends.tolist()}
        self.meta = types.SimpleNamespace(
            stats=self._statistics(), episodes=bounds, features=features, camera_keys=list(CAMERAS),
            has_language_columns=False, fps=20,
        )  # fmt: skip

    def read(self, config: Any) -> None:
        """Take the steps of observations and actions that a policy reads."""
        self.seen = config.observation_delta_indices or [0]
        self.done = config.action_delta_indices

    def __len__(self) -> int:
        return self.num_frames

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seen, done = torch.tensor(self.seen) + index, torch.tensor(self.done) + index
        seen, inside = seen.clamp(min=int(self.first[index])), done.clamp(int(self.first[index]), int(self.last[index]))
        seen = seen if len(seen) > 1 else seen[0]
        images = self.images[seen].movedim(-1, -3).unbind(-4)
        found = dict(zip(CAMERAS, images, strict=True)) | {"observation.state": self.states[seen]}
        return found | {"action": self.actions[inside], "action_is_pad": done != inside}

    def _statistics(self) -> dict[str, dict[str, Tensor]]:
        some = self.images[:: max(1, self.num_frames // 500)].double() / 255
        tables = {key: some[:, camera].flatten(0, 2) for camera, key in enumerate(CAMERAS)}
        tables |= {"observation.state": self.states.double(), "action": self.actions.double()}
        found = {}
        for key, rows in tables.items():
            its = {"mean": rows.mean(0), "std": rows.std(0), "min": rows.amin(0), "max": rows.amax(0)}
            its["std"] = its["std"].clamp(min=LEAST_DEVIATION)
            shape = (3, 1, 1) if key in CAMERAS else (-1,)
            found[key] = {name: value.float().reshape(shape) for name, value in its.items()}
        return found


def new_config(chosen: Arguments, size: tuple[int, int]) -> Any:
    """Return lerobot's config of the policy: ACT's defaults with short chunks, or Diffusion Policy's published ones."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    inputs = {key: PolicyFeature(FeatureType.VISUAL, (3, *size)) for key in CAMERAS}
    inputs["observation.state"] = PolicyFeature(FeatureType.STATE, (8,))
    shared: dict[str, Any] = {
        "input_features": inputs, "output_features": {"action": PolicyFeature(FeatureType.ACTION, (7,))},
        "pretrained_backbone_weights": None, "device": chosen.device, "push_to_hub": False, "optimizer_lr": chosen.lr,
    }  # fmt: skip
    if chosen.policy == "act":
        from lerobot.policies.act.configuration_act import ACTConfig

        return ACTConfig(
            **shared, chunk_size=20, n_action_steps=10, dim_model=chosen.dim, optimizer_lr_backbone=chosen.lr
        )  # fmt: skip
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    return DiffusionConfig(
        **shared, horizon=16, n_action_steps=8, use_group_norm=True, use_separate_rgb_encoder_per_camera=False,
        resize_shape=tuple(side * 5 // 8 for side in size), crop_ratio=0.9,
        down_dims=(chosen.dim, 2 * chosen.dim, 4 * chosen.dim), noise_scheduler_type="DDIM", num_inference_steps=10,
    )  # fmt: skip


@torch.no_grad()
def calibrate(policy: Any, data: Demonstrations) -> None:
    """Set the fixed statistics of ACT's ResNet to those of normalized pictures."""
    import torchvision

    frozen = policy.model.backbone
    free = torchvision.models.resnet18(weights=None)
    free.load_state_dict(frozen.state_dict(), strict=False)
    for module in free.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    free.train().to(policy.config.device)
    for _ in range(CALIBRATED):
        rows = torch.randint(data.num_frames, (32,))
        for camera, key in enumerate(CAMERAS):
            stats, pixels = data.meta.stats[key], data.images[rows, camera].movedim(-1, -3) / 255
            free(((pixels - stats["mean"]) / stats["std"]).to(policy.config.device))
    kept = frozen.state_dict().keys()
    frozen.load_state_dict({name: value for name, value in free.state_dict().items() if name in kept})


def quicken(policy: Any) -> Any:
    """Let ACT's ResNet train with images in the memory format of tensor cores, and with norms of one kernel, which
    compute what torchvision's of several elementwise products do. Returns the policy."""
    from torchvision.ops import FrozenBatchNorm2d

    def norm(one: Any, x: Tensor) -> Tensor:
        return F.batch_norm(x, one.running_mean, one.running_var, one.weight, one.bias, eps=one.eps)

    frozen = [one for one in policy.modules() if isinstance(one, FrozenBatchNorm2d)]
    for one in frozen:
        one.forward = functools.partial(norm, one)
    if frozen:
        policy.model.backbone.register_forward_pre_hook(
            lambda _, images: tuple(image.contiguous(memory_format=torch.channels_last) for image in images)
        )
    return policy


def run(chosen: Arguments) -> None:
    """Train, and leave lerobot's folders in the output."""
    torch.manual_seed(chosen.seed)
    data, clock = Demonstrations(chosen.episodes), Clock(60 * chosen.minutes, chosen.saves)
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(lerobot_without_datasets())
        for name, replacement in (
            ("make_train_eval_datasets", lambda config: (data, None)),
            ("should_save_checkpoint", lambda step, every, steps: clock.saves()),
            ("make_optimizer_and_scheduler", clock.scheduling(trainer.make_optimizer_and_scheduler)),
            ("update_policy", clock.updating(trainer.update_policy)),
            ("make_policy", lambda make=trainer.make_policy, **options: quicken(make(**options))),
        ):
            stack.enter_context(mock.patch.object(trainer, name, replacement))
        from lerobot.configs.default import DatasetConfig
        from lerobot.configs.train import TrainPipelineConfig
        from lerobot.optim.schedulers import ConstantWithWarmupSchedulerConfig
        from lerobot.policies import factory

        config = new_config(chosen, (data.images.shape[2], data.images.shape[3]))
        data.read(config)
        if chosen.policy == "act":
            policy = factory.get_policy_class("act")(config)
            calibrate(policy, data)
            start = chosen.output.with_name(f"{chosen.output.name}_start")
            policy.save_pretrained(start)
            for part in factory.make_pre_post_processors(config, dataset_stats=data.meta.stats):
                part.save_pretrained(start)
            config.pretrained_path = start

        with contextlib.suppress(Enough):
            trainer.train(
                TrainPipelineConfig(
                    dataset=DatasetConfig(repo_id="local/expert"), policy=config, output_dir=chosen.output,
                    steps=MOST, batch_size=chosen.batch, num_workers=chosen.workers, log_freq=100,
                    seed=chosen.seed, env_eval_freq=0, use_policy_training_preset=False,
                    optimizer=config.get_optimizer_preset(), scheduler=ConstantWithWarmupSchedulerConfig(chosen.warmup),
                    dataloader_multiprocessing_context="fork" if chosen.workers else None,
                )
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_script("eval.lerobot.train", Arguments, run, None))
