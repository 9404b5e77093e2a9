"""The ament_python package; colcon reads it."""

from glob import glob

from setuptools import setup

NAME = "vla_accel_ros"

setup(
    name=NAME,
    version="0.2.0",
    description="Runs vision-language-action policies of vla_accel on ROS 2 robots",
    license="Apache-2.0",
    packages=[NAME],
    python_requires=">=3.10",
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.yaml")),
    ],
    entry_points={"console_scripts": [f"policy_node = {NAME}.node:main"]},
)
