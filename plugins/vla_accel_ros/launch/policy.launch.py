"""The policy node with its parameters: ros2 launch vla_accel_ros policy.launch.py contract:=so101.yaml."""

# Type checkers find this folder.
from launch import LaunchContext, LaunchDescription  # pyright: ignore[reportAttributeAccessIssue]
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare


def generate_launch_description() -> LaunchDescription:
    file = PathJoinSubstitution([FindPackageShare("vla_accel_ros"), "config", "policy.yaml"])
    return LaunchDescription([
        DeclareLaunchArgument("params", default_value=file, description="parameters of the node"),
        *(DeclareLaunchArgument(name, default_value="") for name in ("contract", "policy", "prompt")),
        OpaqueFunction(function=nodes),
    ])  # fmt: skip


def nodes(context: LaunchContext) -> list[Node]:
    """The node; arguments that are not empty replace the file's parameters."""
    given = {name: LaunchConfiguration(name).perform(context) for name in ("contract", "policy", "prompt")}
    parameters = [LaunchConfiguration("params"), {name: value for name, value in given.items() if value}]
    return [Node(package="vla_accel_ros", executable="policy_node", output="screen", parameters=parameters)]
