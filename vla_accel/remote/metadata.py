"""What a policy declares about itself, as a runner, a server and a client read it.

Every capability is an attribute or a metadata key that the policy sets. Nothing is inferred from signatures: a policy
that declares nothing has no capability. Knows nothing about models, sockets or robots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_accel.errors import ConfigError
from vla_accel.remote import wire

MAX_DELAY = "max_delay"
"""Metadata key: the largest `inference_delay` that the policy accepts; None if it accepts any. A checkpoint that was
trained with clean prefixes (`rtc: {trained: true}`) accepts at most the delays of its training."""
ROBOT = "robot"
"""Metadata key: the robot that the policy acts for, a map of `images` and `state` (observation keys), `action_dim`
(numbers of an action) and `motion_dims` (see `transforms.robots.Preset`; None where the checkpoint does not say)."""
_IDENTITY = ("policy", "action_dim", "action_horizon", MAX_DELAY, wire.REAL_TIME_CHUNKING)


def supports_prev_chunk(policy: Any) -> bool:
    """Whether `policy.infer` takes `prev_chunk` and `inference_delay`: its attribute `supports_prev_chunk`. A policy
    without the attribute does not. Raises ConfigError for an attribute that is no bool."""
    return _declared(policy, "supports_prev_chunk")


def batches_prev_chunks(policy: Any) -> bool:
    """Whether `policy.infer_batch` takes `prev_chunks` and `inference_delays`, None for each plain observation: its
    attribute `batches_prev_chunks`. Raises ConfigError for an attribute that is no bool."""
    return _declared(policy, "batches_prev_chunks")


def max_delay(policy: Any) -> int | None:
    """The largest `inference_delay` that the policy accepts; None if it accepts any."""
    found = _metadata(policy).get(MAX_DELAY)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def motion_dims(policy: Any) -> tuple[int, ...] | None:
    """The dimensions of an action that are motion (a velocity or a step), for which 0 means standing still; None if
    the policy does not say."""
    robot = _metadata(policy).get(ROBOT)
    dims = robot.get("motion_dims") if isinstance(robot, Mapping) else None
    if not isinstance(dims, (list, tuple)) or not all(isinstance(i, int) and i >= 0 for i in dims):
        return None
    return tuple(dims)


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """How the policy of the metadata `second` differs from that of `first`, in its name, its sizes or its robot;
    empty if it does not."""
    before, after = _identity(first), _identity(second)
    changed = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
    if not changed:
        return ""
    told = [", ".join(f"{key} {_short(one.get(key))}" for key in changed) for one in (before, after)]
    return f"expected {told[0]}, as at the first connection, got {told[1]}"


def _identity(metadata: Mapping[str, Any]) -> dict[str, Any]:
    robot = metadata.get(ROBOT)
    parts = {f"{ROBOT}.{key}": one for key, one in robot.items()} if isinstance(robot, Mapping) else {}
    return {**{key: metadata.get(key) for key in _IDENTITY}, **parts}


def _short(value: Any) -> str:
    return f"{value!r:.100}"


def _declared(policy: Any, name: str) -> bool:
    said = getattr(policy, name, False)
    if not isinstance(said, bool):
        raise ConfigError(f"{name}: expected True or False, got {said!r:.60} from a {type(policy).__name__}")
    return said


def _metadata(policy: Any) -> Mapping[str, Any]:
    found = getattr(policy, "metadata", None)
    return found if isinstance(found, Mapping) else {}
