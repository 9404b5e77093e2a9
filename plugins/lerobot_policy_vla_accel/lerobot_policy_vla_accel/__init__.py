"""vla_accel's engines in lerobot: for lerobot's own policies, and as a policy type of their own.

lerobot imports every installed distribution named `lerobot_policy_*`. Importing this one registers the policy type
`vla_accel`, whose `VlaAccelPolicy` and processors lerobot finds by the names of their modules, and attaches the engines
to lerobot's own policies if the environment variable `VLA_ACCEL_ATTACH` is set (`acceleration`).
"""

from lerobot_policy_vla_accel import acceleration
from lerobot_policy_vla_accel.configuration_vla_accel import VlaAccelConfig

if acceleration.requested() is not None:
    acceleration.install()

__all__ = ["VlaAccelConfig"]
