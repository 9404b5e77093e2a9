"""Serve a policy over openpi's websocket protocol; `vla-accel serve` on the command line.

A frame becomes a `Call` (`app`, `connection`), waits for its turn (`fairness`), and is sent in a `Batch` (`dispatch`)
to a replica (`replica`, `ray_replica`). Its `runner` parses it into `Request`s (`requests`), calls a policy of the
registry and returns the `Answer`.
"""

from vla_accel.server.app import PolicyServer, background, serve
from vla_accel.server.limits import ServerConfig
from vla_accel.server.ray_replica import RayReplicas
from vla_accel.server.replica import Replicas
from vla_accel.server.runner import PolicyRegistry

__all__ = ["PolicyRegistry", "PolicyServer", "RayReplicas", "Replicas", "ServerConfig", "background", "serve"]
