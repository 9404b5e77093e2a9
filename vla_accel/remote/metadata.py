"""What a policy declares about itself, for a runner, a server and a client.

Every capability is an attribute or a metadata key that the policy sets. Nothing is inferred from signatures: a policy
that declares nothing has no capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.errors import ConfigError
from vla_accel.remote import wire
from vla_accel.remote.ensemble import TEMPORAL_ENSEMBLE, TemporalEnsemble
from vla_accel.transforms.history import HISTORY, History

MAX_DELAY = "max_delay"
"""Metadata key: the longest `inference_delay` that the policy accepts; None for any. A checkpoint that was trained with
clean prefixes (`rtc: {trained: true}`) accepts at most the delays of its training."""
WARM_START = "warm_start"
"""Metadata key: the flow time at which calls with a previous chunk start (`PolicyConfig.warm_start`). Such a policy
takes `prev_chunk` without `inference_delay`, and its `infer_batch` takes one for every observation or for none."""
ROBOT = "robot"
"""Metadata key: the robot, a map of `images`, `state` and `prompt` (observation keys), `action_dim`, `motion_dims`
(None if the checkpoint does not declare them) and `pose` (see `transforms.robots.Preset`)."""


def supports_prev_chunk(policy: Any) -> bool:
    """Whether `policy.infer` takes `prev_chunk` and `inference_delay`: its attribute of this name, or False."""
    return _flag(policy, "supports_prev_chunk")


def batches_prev_chunks(policy: Any) -> bool:
    """Whether `policy.infer_batch` takes `prev_chunks` and `inference_delays`, with None for plain observations: its
    attribute of this name, or False."""
    return _flag(policy, "batches_prev_chunks")


def max_delay(policy: Any) -> int | None:
    """The longest `inference_delay` that the policy accepts; None for any."""
    value = _metadata(policy).get(MAX_DELAY)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def history_of(policy: Any) -> History | None:
    """An empty history of the policy's observations; None if it reads one."""
    return History.of(_metadata(policy))


def ensemble_of(policy: Any) -> TemporalEnsemble | None:
    """The temporal ensembling of the policy's checkpoint; None if it has none. Raises ConfigError for a coefficient
    that is no number."""
    coefficient = _metadata(policy).get(TEMPORAL_ENSEMBLE)
    return None if coefficient is None else TemporalEnsemble(coefficient)


def starts_warm(policy: Any) -> bool:
    """Whether the policy starts from previous chunks (`WARM_START`), also where it has no real-time chunking."""
    return _metadata(policy).get(WARM_START) is not None


def motion_dims(policy: Any) -> tuple[int, ...] | None:
    """Action dimensions that are a velocity or a step, for which 0 means no motion; None if not declared."""
    robot = _metadata(policy).get(ROBOT)
    dims = robot.get("motion_dims") if isinstance(robot, Mapping) else None
    if not isinstance(dims, (list, tuple)) or not all(isinstance(i, int) and i >= 0 for i in dims):
        return None
    return tuple(dims)


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """How the metadata of two policies differ in name, sizes or robot; empty if they do not."""
    before, after = _identity(first), _identity(second)
    changed = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    if not changed:
        return ""
    expected, got = (", ".join(f"{key} {one.get(key)!r:.100}" for key in changed) for one in (before, after))
    return f"expected {expected}, as at the first connection, got {got}"


def _identity(metadata: Mapping[str, Any]) -> dict[str, Any]:
    sizes, episodes = ("policy", "action_dim", "action_horizon"), (MAX_DELAY, WARM_START, HISTORY, TEMPORAL_ENSEMBLE)
    keys = (*sizes, *episodes, wire.REAL_TIME_CHUNKING)
    robot = metadata.get(ROBOT)
    parts = {f"{ROBOT}.{key}": one for key, one in robot.items()} if isinstance(robot, Mapping) else {}
    return {key: metadata.get(key) for key in keys} | parts


def _flag(policy: Any, name: str) -> bool:
    value = getattr(policy, name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r:.60} from a {type(policy).__name__}")
    return value


def _metadata(policy: Any) -> Mapping[str, Any]:
    metadata = getattr(policy, "metadata", None)
    return metadata if isinstance(metadata, Mapping) else {}
