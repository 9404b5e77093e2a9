"""A policy for lerobot that runs π0, π0.5, SmolVLA and GR00T on vla_accel's engines.

lerobot imports every installed distribution named `lerobot_policy_*`; importing this one registers the policy type
`vla_accel`. lerobot then finds `VlaAccelPolicy` in `modeling_vla_accel` and its processors in `processor_vla_accel` by
their names.
"""

from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig

__all__ = ["VlaAccelConfig"]
