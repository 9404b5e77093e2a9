"""Serve a policy over openpi's websocket protocol; `vla-accel serve` on the command line.

From frame to answer: `connection` receives (and watches for stalled frames), `requests` checks the observation,
`queue` decides whose turn it is, `dispatch` forms batches, `worker` runs the policy in its one thread, `app` sends the
result or the error back. `metrics` counts all of it.
"""

from vla_accel.server.app import PolicyServer, background, serve
from vla_accel.server.limits import ServerConfig

__all__ = ["PolicyServer", "ServerConfig", "background", "serve"]
