"""A robot for lerobot that is no machine: six joints that go where they are told, two cameras of noise."""

from tests.plugins.toy_arm.config_toy_arm import ToyArmConfig
from tests.plugins.toy_arm.toy_arm import ToyArm

__all__ = ["ToyArm", "ToyArmConfig"]
