"""The policy of a node: behind a server's address, or in the node's process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_accel.client import PolicyClient, Reconnect, read_key
from vla_accel.errors import ConfigError
from vla_accel.remote.metadata import motion_dims
from vla_accel.remote.underrun import Choice, Hold
from vla_accel_ros.contract import Contract

logger = logging.getLogger("vla_accel.ros")


@dataclass(frozen=True)
class PolicyOptions:
    """The node's parameters of these names, empty if not set."""

    policy: str
    policy_name: str = ""
    api_key_file: str = ""
    tls_ca: str = ""
    timeout_s: float = 10.0
    config: str = ""
    device: str = ""


def open_policy(options: PolicyOptions) -> Any:
    """Connect to `ws://…` or `wss://…`, or load a checkpoint. Raises ConfigError for options of the other kind."""
    remote = options.policy.startswith(("ws://", "wss://"))
    if not options.policy:
        raise ConfigError("policy: expected ws://host:port or a checkpoint, got nothing")
    others = ("config", "device") if remote else ("policy_name", "api_key_file", "tls_ca")
    if wrong := [name for name in others if getattr(options, name)]:
        kind = "a server's address" if remote else "a checkpoint"
        raise ConfigError(
            f"{', '.join(wrong)}: expected nothing with {kind} as policy, got {getattr(options, wrong[0])!r}"
        )
    if not remote:
        from vla_accel.policy import OptimizedPolicy

        return OptimizedPolicy.from_pretrained(options.policy, options.config or None, device=options.device or None)
    return PolicyClient(
        options.policy,
        policy=options.policy_name or None,
        api_key=read_key(options.api_key_file) if options.api_key_file else None,
        tls_ca=options.tls_ca or None,
        timeout_s=options.timeout_s,
        reconnect=Reconnect(attempts=2),
    )


def check_robot(contract: Contract, metadata: Mapping[str, Any]) -> str:
    """Compare a contract with the robot in a policy's metadata; return the key of the prompt.

    Raises:
        ConfigError: actions of another size. Other keys only cause a warning: some cameras are optional, and the policy
            names those that it lacks.
    """
    described = metadata.get("robot")
    robot: Mapping[str, Any] = described if isinstance(described, Mapping) else {}
    expected, got = robot.get("action_dim"), contract.action_dim
    if None not in (expected, got) and expected != got:
        raise ConfigError(f"actions: expected {expected} numbers, as the policy's, got {got} in the contract's select")
    keys = {*robot.get("images", ()), *robot.get("state", ())}
    if keys and keys != set(contract.observations):
        logger.warning("observations: the policy has %s, the contract %s", sorted(keys), sorted(contract.observations))
    return str(robot.get("prompt", "prompt"))


def underrun(choice: str, contract: Contract, policy: Any) -> Choice:
    """The parameter `underrun`; velocities of the contract are set to 0 if the policy declares no motion dimensions."""
    if choice == "raise":
        return "raise"
    if choice != "hold":
        raise ConfigError(f"underrun: expected hold or raise, got {choice!r}")
    return Hold(contract.motion_dims) if motion_dims(policy) is None else "hold"
