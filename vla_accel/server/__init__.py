"""Serve a policy over openpi's websocket protocol; `vla-accel serve` on the command line.

From frame to answer: `connection` receives (and watches for stalled frames), `queue` decides whose turn it is,
`dispatch` forms batches and gives them to an idle `replica`, here or on a cluster (`ray_replica`), whose `runner` reads
the requests (`requests`), runs a policy of the `shelf` and packs the results; `app` sends them back. `metrics` counts
all of it.
"""

from vla_accel.server.app import PolicyServer, background, serve
from vla_accel.server.limits import ServerConfig
from vla_accel.server.ray_replica import RayReplicas
from vla_accel.server.replica import Replicas
from vla_accel.server.shelf import Shelf

__all__ = ["PolicyServer", "RayReplicas", "Replicas", "ServerConfig", "Shelf", "background", "serve"]
