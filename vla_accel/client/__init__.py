"""A policy behind a websocket, for a robot's own environment: no torch, nothing heavy.

    from vla_accel.client import PolicyClient

    with PolicyClient("ws://gpu-box:8000") as policy:
        actions = policy.infer(observation)["actions"]

Works with any openpi-compatible server.
"""

from vla_accel.client.client import PolicyChangedError, PolicyClient, Reconnect, check_address, read_key

__all__ = ["PolicyChangedError", "PolicyClient", "Reconnect", "check_address", "read_key"]
