"""What `attach` needs to know of a class of policies, and of each call."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from vla_accel.config import PolicyConfig, RtcConfig
from vla_accel.errors import ConfigError, VlaAccelError
from vla_accel.families.family import Family
from vla_accel.families.loading import Checkpoint, refuse_settings

_UNREAD = {
    "preset": "whose processors describe the robot",
    "default_prompt": "whose calls have prompts",
    "warm_up": "whose first call builds the engines",
    "rtc": "which has its own rtc_config",
    "seed": "whose noise comes from torch's generator",
}
"""Settings that an attached policy does not read, with the reason."""
_log = logging.getLogger("vla_accel.attach")


@dataclass(frozen=True)
class Call:
    """One call of a policy as this package's inputs.

    Attributes:
        observations: As `OptimizedPolicy.infer_batch` takes them.
        noise: (B, horizon, dimensions) that the caller passed, None if the policy draws it.
        prev_chunk: Normalized actions (k, n) or (B, k, n) of real-time chunking, None without.
        delay: The inference delay that belongs to `prev_chunk`.
    """

    observations: list[dict[str, Any]]
    noise: Tensor | None = None
    prev_chunk: Tensor | None = None
    delay: int = 0


class Reader(Protocol):
    """How to read a class of policies, and its calls.

    Attributes:
        checkpoint: The network with the policy's weights, and transforms of inputs that are normalized and tokenized.
        settings: The configuration of the engines.
        owner: The module whose method is replaced.
        method: The name of that method.
        takes_noise: Whether the method has an argument `noise`. The noise that others draw is recorded.
    """

    checkpoint: Checkpoint
    settings: PolicyConfig
    owner: nn.Module
    method: str
    takes_noise: bool

    def call(self, *args: Any, **kwargs: Any) -> Call:
        """Read the arguments of the method. Raises ConfigError for a call that only the policy can answer."""
        ...


@contextlib.contextmanager
def saved_config(policy: Any) -> Iterator[Path]:
    """Write config.json of a lerobot policy into a folder. Errors that name the folder name the policy's class."""
    with tempfile.TemporaryDirectory() as folder:
        policy.config.save_pretrained(folder)
        try:
            yield Path(folder)
        except VlaAccelError as error:
            text = str(error).replace(f"{folder}/", "").replace(folder, type(policy).__name__)
            raise type(error)(text) from error


def check_settings(
    family: Family[Any, Any, Any], settings: PolicyConfig, known: Sequence[str] = (), *, chunking: bool
) -> None:
    """Raise ConfigError for a setting that an attached policy would ignore.

    Args:
        family: The policy's family.
        settings: The user's settings.
        known: The fields of `settings.checkpoint` that the reader uses.
        chunking: Whether calls of the policy may have a previous chunk.
    """
    unread = _UNREAD if chunking else {**_UNREAD, "warm_start": "whose calls have no previous chunk"}
    refuse_settings(f"an attached {family.name}", settings, known, unread)


def refuse_arguments(method: str, others: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of a call that this package does not know."""
    if unknown := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"{method}: expected none of {', '.join(unknown)}")


def enabled_rtc(policy: Any) -> Any:
    """Return the `rtc_config` of a lerobot policy; None without one, or if it is switched off."""
    requested = getattr(policy.config, "rtc_config", None)
    return requested if requested is not None and requested.enabled else None


def guidance(requested: Any, family: Family[Any, Any, Any], horizon: int) -> RtcConfig:
    """Return lerobot's settings of real-time chunking, an `RTCConfig`, as this package's, those that the family reads.

    An execution horizon beyond the chunk, such as lerobot's default of 10 for a chunk of 5, is the whole chunk, as in
    lerobot. Raises ConfigError for a family without real-time chunking, and for `debug`.
    """
    if requested.debug:
        raise ConfigError("policy.rtc_config.debug: expected false, got true; the engines record no debug data")
    if not family.chunking.settings:
        if not requested.enabled:
            return RtcConfig()
        raise ConfigError(
            f"policy.rtc_config: expected none for {family.name}, which has no real-time chunking, got {requested}"
        )
    settings: dict[str, Any] = {
        "schedule": requested.prefix_attention_schedule.value.lower(),
        "max_guidance_weight": requested.max_guidance_weight,
        "execution_horizon": min(requested.execution_horizon, horizon),
    }
    if unused := sorted(settings.keys() - set(family.chunking.settings)):
        _log.warning("%s: policy.rtc_config: %s are ignored", family.name, ", ".join(unused))
    return RtcConfig(**{name: value for name, value in settings.items() if name not in unused})
