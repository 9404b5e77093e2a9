"""lerobot finds the robot of a configuration by this file's name."""

from dataclasses import dataclass
from pathlib import Path

from lerobot.robots import RobotConfig


@RobotConfig.register_subclass("toy_arm")
@dataclass(kw_only=True)
class ToyArmConfig(RobotConfig):
    """`log`: file that gets a line of JSON for every action; `height`, `width`: of the first
    camera's frames."""

    log: Path
    height: int = 32
    width: int = 32
