"""lerobot's async policy server, which otherwise serves only lerobot's own policies.

    python -m lerobot_policy_vla_accel.policy_server --host=127.0.0.1 --port=8080

takes the options of `lerobot.async_inference.policy_server`; its robot client is used unchanged. Policies of other
types are served as lerobot serves them, on vla_accel's engines if the environment variable `VLA_ACCEL_ATTACH` is set.
"""

from __future__ import annotations

from typing import Any

import torch
from lerobot.async_inference import helpers, policy_server
from lerobot.configs.types import PolicyFeature
from lerobot.utils.constants import OBS_STATE
from lerobot.utils.import_utils import register_third_party_plugins

from lerobot_policy_vla_accel import acceleration
from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig

_TYPE = VlaAccelConfig.get_choice_name(VlaAccelConfig)


class Server(policy_server.PolicyServer):
    """lerobot's server. For a policy of type vla_accel it neither resizes frames nor drops similar observations."""

    def SendPolicyInstructions(self, request: Any, context: Any) -> Any:
        """Load the policy that a client names."""
        answer = super().SendPolicyInstructions(request, context)
        if self.policy is not None and self.policy_type != _TYPE and acceleration.requested() is not None:
            acceleration.accelerate(self.policy, self.preprocessor)
        return answer

    @property
    def policy_image_features(self) -> dict[str, PolicyFeature] | None:
        """The frame size of each camera; None for a policy that resizes frames itself."""
        return None if self.policy_type == _TYPE else super().policy_image_features

    def _obs_sanity_checks(self, obs: helpers.TimedObservation, previous_obs: helpers.TimedObservation) -> bool:
        """Accept every observation of a new time step. lerobot also drops those whose joints are within 1.0 of the last
        one's, whatever the cameras show and whatever the joints' unit is."""
        if self.policy_type != _TYPE:
            return super()._obs_sanity_checks(obs, previous_obs)
        with self._predicted_timesteps_lock:
            return obs.get_timestep() not in self._predicted_timesteps


def as_batch(
    raw_observation: dict[str, Any],
    lerobot_features: dict[str, dict[str, Any]],
    policy_image_features: dict[str, PolicyFeature] | None,
) -> dict[str, Any]:
    """Convert a robot's observation to a batch of one.

    Args:
        raw_observation: What the client sent: a number a joint, frames (H, W, 3), `task`.
        lerobot_features: The client's description of the robot.
        policy_image_features: The size to which lerobot stretches each frame; None leaves frames as they are.

    Returns:
        lerobot's keys: frames (1, 3, H, W), `observation.state` (1, n), `task`.
    """
    if policy_image_features is not None:
        return helpers.raw_observation_to_observation(raw_observation, lerobot_features, policy_image_features)
    frame = helpers.make_lerobot_observation(raw_observation, lerobot_features)
    frames = {k: torch.as_tensor(v) for k, v in frame.items() if helpers.is_image_key(k)}
    batch: dict[str, Any] = {k: v.movedim(-1, 0)[None] if v.ndim == 3 else v[None] for k, v in frames.items()}
    batch[OBS_STATE] = helpers.extract_state_from_raw_observation(frame)
    return batch | ({"task": raw_observation["task"]} if "task" in raw_observation else {})


def install() -> None:
    """Put this server in the place of lerobot's."""
    register_third_party_plugins()
    # The list with which the server compares a client's policy type.
    if _TYPE not in policy_server.SUPPORTED_POLICIES:
        policy_server.SUPPORTED_POLICIES.append(_TYPE)
    policy_server.PolicyServer = Server
    policy_server.raw_observation_to_observation = as_batch


def main() -> None:
    """Serve until stopped."""
    install()
    policy_server.serve()


if __name__ == "__main__":
    main()
