"""openpi's own websocket client, driven over stdin and stdout by a process of another environment.

Runs in an environment with openpi-client (0.1.2, NumPy < 2) and typing_extensions, which it forgets to ask for.
Arguments: host, port, key or "-", and if given actions of a chunk that openpi's `ActionChunkBroker` hands out. Every
message, in both directions, is eight bytes of length and openpi's msgpack:
{"obs": …} is answered by {"result": …} or {"error": text}; the first message out is {"metadata": …, "versions": …}.
Ends at the end of stdin.
"""

from __future__ import annotations

import importlib.metadata
import struct
import sys
from typing import Any

from openpi_client import msgpack_numpy
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def write(message: dict[str, Any]) -> None:
    data = msgpack_numpy.packb(message)
    sys.stdout.buffer.write(struct.pack(">Q", len(data)) + data)
    sys.stdout.buffer.flush()


def main() -> None:
    host, port, key, *chunk = sys.argv[1:]
    policy = WebsocketClientPolicy(host, int(port), None if key == "-" else key)
    versions = {name: importlib.metadata.version(name) for name in ("openpi-client", "numpy", "websockets")}
    write({"metadata": policy.get_server_metadata(), "versions": versions})
    actor = ActionChunkBroker(policy, int(chunk[0])) if chunk else policy
    while head := sys.stdin.buffer.read(8):
        message = msgpack_numpy.unpackb(sys.stdin.buffer.read(struct.unpack(">Q", head)[0]))
        try:
            write({"result": actor.infer(message["obs"])})
        except Exception as error:
            write({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
