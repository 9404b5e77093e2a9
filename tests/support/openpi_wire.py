"""openpi's wire format and a small server, independent of the package: neither side is tested against itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

msgpack = pytest.importorskip("msgpack", reason="the wire format needs msgpack")
server_module = pytest.importorskip("websockets.sync.server", reason="needs websockets")


def openpi_pack(value: Any) -> bytes:
    def encode(v: Any) -> Any:
        if isinstance(v, np.ndarray):
            return {
                b"__ndarray__": True,
                b"data": v.tobytes(),
                b"dtype": v.dtype.str,
                b"shape": v.shape,
            }
        if isinstance(v, np.generic):
            return {b"__npgeneric__": True, b"data": v.item(), b"dtype": v.dtype.str}
        return v

    return msgpack.packb(value, default=encode)


def openpi_unpack(data: bytes) -> Any:
    def decode(v: Any) -> Any:
        if b"__ndarray__" in v:
            return np.ndarray(buffer=v[b"data"], dtype=np.dtype(v[b"dtype"]), shape=v[b"shape"])
        return v

    return msgpack.unpackb(data, object_hook=decode)


@contextmanager
def serving(answer: Callable[[dict[str, Any]], bytes | str | None], hello: bytes | str | None = None) -> Iterator[str]:
    """Serve `answer` to every request; None closes the connection instead."""

    def handle(connection: Any) -> None:
        connection.send(openpi_pack({"model": "fake"}) if hello is None else hello)
        for request in connection:
            reply = answer(openpi_unpack(request))
            if reply is None:
                return
            connection.send(reply)
            if isinstance(reply, str):  # openpi sends its traceback, then closes
                return

    with server_module.serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()
