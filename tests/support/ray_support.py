"""A Ray cluster on this machine, for tests that kill its nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

CONFIG = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
"""Ray then detects a failed node after two seconds."""


@contextlib.contextmanager
def cluster_of(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster on this machine: a head without resources, and a node for each of `nodes`."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": CONFIG})
    try:
        for node in nodes:
            made.add_node(**node)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
