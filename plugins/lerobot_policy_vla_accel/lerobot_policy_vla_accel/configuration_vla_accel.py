"""The options of `--policy.type=vla_accel`, in addition to those of every lerobot policy. Imports no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.rtc.configuration_rtc import RTCConfig

from vla_accel.errors import ConfigError


@PreTrainedConfig.register_subclass("vla_accel")
@dataclass
class VlaAccelConfig(PreTrainedConfig):
    """`checkpoint`, `config`, `num_steps` and `lora` are those of `OptimizedPolicy.from_pretrained`.

    `checkpoint`: a folder, a bundled checkpoint or a name on the hub; required. `config`: a configuration by name
    ("native_fp8") or file; None selects the default, `auto`. `n_action_steps`: actions of a chunk that are executed
    before the next call; None takes the value in the checkpoint's config.json, or all of them. `rtc_config`: lerobot's
    own, set by `lerobot-rollout --inference.type=rtc`.

    `device` is lerobot's: where the engines run. `n_obs_steps`, `use_amp` and `use_peft` are lerobot's and keep their
    defaults. `push_to_hub`, `repo_id`, `private`, `tags` and `license` belong to training, which this policy refuses.
    """

    checkpoint: str | None = None
    config: str | None = None
    num_steps: int | None = None
    lora: str | None = None
    n_action_steps: int | None = None
    rtc_config: RTCConfig | None = None
    push_to_hub: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_action_steps is not None and self.n_action_steps < 1:
            raise ConfigError(f"policy.n_action_steps: expected at least 1, got {self.n_action_steps}")
        if self.n_obs_steps != 1:
            raise ConfigError(f"policy.n_obs_steps: expected 1, the newest observation, got {self.n_obs_steps}")
        if self.use_amp:
            raise ConfigError("policy.use_amp: expected false, got true; policy.config sets the precision")
        if self.use_peft:
            raise ConfigError("policy.use_peft: expected false, got true; policy.lora names an adapter")

    @property
    def observation_delta_indices(self) -> None:
        """One observation, the newest."""

    @property
    def action_delta_indices(self) -> None:
        """Of training; there is none here."""

    @property
    def reward_delta_indices(self) -> None:
        """As above."""

    def validate_features(self) -> None:
        """The policy sets its features itself, from the checkpoint."""

    def get_optimizer_preset(self) -> NoReturn:
        refuse_training()

    def get_scheduler_preset(self) -> NoReturn:
        refuse_training()


def refuse_training() -> NoReturn:
    """Where lerobot asks for what only training needs."""
    raise ConfigError("policy.type: expected a policy's own type for training, got vla_accel")
