"""A Ray cluster: connecting to it, its nodes, where copies of a policy go, whether nodes have what this machine has.

`--ray` is the only thing that needs the package `ray`, imported when used. Knows nothing of policies and episodes.
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
    """A living machine of the cluster.

    Attributes:
        id: Ray's.
        name: for people: its address and the beginning of its id.
        cores, gpus: what it lends.
    """

    id: str
    name: str
    cores: int
    gpus: int


@dataclass(frozen=True)
class Placement:
    """Where a copy of a policy goes; elsewhere once that node is gone. `gpu`: Ray lends one to its process."""

    node: Node
    gpu: bool

    def options(self, ray: Any) -> dict[str, Any]:
        """Ray's options of an actor there."""
        # A soft affinity also leaves a node that has just joined.
        alive = any(node["NodeID"] == self.node.id and node["Alive"] for node in ray.nodes())
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        where = affinity(self.node.id, soft=False) if alive else "SPREAD"
        return {"num_cpus": 0, "scheduling_strategy": where, **({"num_gpus": 1} if self.gpu else {})}


def connect(address: str) -> Any:
    """Join a cluster; returns the module `ray`. `address`: auto, local (one that ends with this process) or HOST:PORT.

    Raises:
        ConfigError: no such address, nobody answers there, or another version of Ray or Python does.
        DependencyError: ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise DependencyError(f"--ray needs ray: pip install 'vla_accel[ray]' ({error})") from error
    if address not in ("auto", "local"):
        _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here reports to nobody
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"ray: expected a cluster at {address!r}, got: {what}") from error
    return ray


def nodes(ray: Any) -> list[Node]:
    """The living nodes that lend cores or GPUs."""
    found = []
    for node in ray.nodes():
        lent = {name: int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU")}
        if node["Alive"] and any(lent.values()):
            name = f"{node['NodeManagerAddress']}/{node['NodeID'][:6]}"
            found.append(Node(node["NodeID"], name, lent["CPU"], lent["GPU"]))
    return found


def placements(nodes: Sequence[Node], device: str) -> list[Placement]:
    """Where copies of a policy go: one on each GPU, or on each node where there is none or `device` is cpu. Raises
    ConfigError if a GPU is asked for and no node lends one."""
    gpus = [Placement(node, True) for node in nodes for _ in range(node.gpus)]
    if device.startswith("cuda") and not gpus:
        raise ConfigError(f"device: {device!r} was asked for, but no node of the Ray cluster lends a GPU")
    if gpus and device != "cpu":
        return gpus
    return [Placement(node, False) for node in nodes if node.cores]


def check_node(ray: Any, node: Node, software: Callable[[], Mapping[str, str]]) -> None:
    """Raise `EngineError` unless `software`, called on a node, tells the versions of this machine; a node that is gone
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
    """`"Type: message"` of what a process on a node raised, from Ray's error about it."""
    if error.cause is not None:
        return f"{type(error.cause).__name__}: {' '.join(str(error.cause).split())}"
    return last_line(error)


def last_line(error: Exception) -> str:
    """What Ray says of a death, without the ids before it."""
    return str(error).strip().rpartition("\n")[2][:300]


def _knock(address: str) -> None:
    """Raise `ConfigError` unless something listens at HOST:PORT: Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and "/" not in address):
        raise ConfigError(f"ray: expected auto, local or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray: nobody answers at {address} ({error})") from error
