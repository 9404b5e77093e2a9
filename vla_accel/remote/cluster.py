"""A Ray cluster: its nodes, the placement of replicas, and the versions of software on its nodes.

Only `--ray` needs the package `ray`, which is imported on use.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_accel.errors import ConfigError, DependencyError, EngineError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is alive, with the resources that it offers. `name`: its address and the beginning
    of its id, for messages."""

    id: str
    name: str
    cores: int
    gpus: int


@dataclass(frozen=True)
class Placement:
    """The node of a replica, or any other if that node fails. `gpu`: whether Ray reserves a GPU for it."""

    node: Node
    gpu: bool

    def options(self, ray: Any) -> dict[str, Any]:
        """Ray's options for an actor with this placement."""
        # A soft affinity would also move away from a node that has just joined.
        alive = any(node["NodeID"] == self.node.id and node["Alive"] for node in ray.nodes())
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        where = affinity(self.node.id, soft=False) if alive else "SPREAD"
        return {"num_cpus": 0, "scheduling_strategy": where, **({"num_gpus": 1} if self.gpu else {})}


def connect(address: str) -> Any:
    """Join the cluster at auto, local (a cluster that ends with this process) or HOST:PORT; returns the module `ray`.

    Raises ConfigError for an invalid address, no cluster there, or one with another version of Ray or Python.
    """
    try:
        import ray
    except ImportError as error:
        raise DependencyError(f"--ray needs ray: pip install 'vla_accel[ray]' ({error})") from error
    if address not in ("auto", "local"):
        _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here sends no reports
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"ray: expected a cluster at {address!r}, got: {what}") from error
    return ray


def nodes(ray: Any) -> list[Node]:
    """The nodes that are alive and offer cores or GPUs."""
    found = []
    for node in ray.nodes():
        offered = {name: int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU")}
        if node["Alive"] and any(offered.values()):
            name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
            found.append(Node(node["NodeID"], name, offered["CPU"], offered["GPU"]))
    return found


def placements(nodes: Sequence[Node], device: str) -> list[Placement]:
    """One replica for each GPU, or for each node if there is no GPU or `device` is cpu. Raises ConfigError if `device`
    requires a GPU and no node offers one."""
    gpus = [Placement(node, True) for node in nodes for _ in range(node.gpus)]
    if device.startswith("cuda") and not gpus:
        raise ConfigError(f"device: expected a GPU in the Ray cluster for {device!r}, got none")
    if gpus and device != "cpu":
        return gpus
    return [Placement(node, False) for node in nodes if node.cores]


def check_node(ray: Any, node: Node, software: Callable[[], Mapping[str, str]]) -> None:
    """Raise `EngineError` if `software`, called on a node, returns other versions than here. A node that has failed
    passes."""
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    ask = ray.remote(num_cpus=0, scheduling_strategy=place, max_retries=0)(lambda: dict(software()))
    try:
        theirs = ray.get(ask.remote())
    except ray.exceptions.RayTaskError as error:
        raise EngineError(f"node {node.name}: expected this program's code there, got {cause(error)}") from error
    except ray.exceptions.RayError:
        return
    ours = software()
    other = [
        f"{name} {theirs.get(name, 'absent')} (here {ours.get(name, 'absent')})"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    if other:
        raise EngineError(f"node {node.name}: expected the versions of this machine, got {', '.join(other)}")


def cause(error: Any) -> str:
    """The type and message of an exception on a node, from Ray's error."""
    if error.cause is not None:
        return f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
    return last_line(error)


def last_line(error: Exception) -> str:
    """The last line of Ray's error, without the ids before it."""
    return str(error).strip().rpartition("\n")[2][:300]


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` unless something listens at HOST:PORT: Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and "/" not in address):
        raise ConfigError(f"ray: expected auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray: expected a cluster at {address}, found none ({error})") from error
