"""The server: openpi's websocket protocol around a policy.

A client gets the metadata when it connects. Each of its binary frames is then one observation, and is answered by one
result, in order. An error is answered by a text frame, after which the connection closes; other clients continue. `GET
/healthz`, `GET /metrics` and a live page at `GET /` answer on the same port.
Source of the protocol: openpi, `src/openpi/serving/websocket_policy_server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vla_accel.errors import ConfigError
from vla_accel.server.connection import SPARE_SOCKETS, connection_class, websockets_server
from vla_accel.server.dispatch import Dispatcher
from vla_accel.server.fairness import RateLimit
from vla_accel.server.keys import DEFAULT, Keys
from vla_accel.server.limits import BatchLimits, ServerConfig
from vla_accel.server.loop import run_loop
from vla_accel.server.metrics import Metrics
from vla_accel.server.pages import HEADERS, page
from vla_accel.server.ray_replica import RayReplicas
from vla_accel.server.replica import ProcessReplica, Replica, Replicas, ThreadReplica
from vla_accel.server.requests import Answer, Call, ClientGone
from vla_accel.view import OFF, View

logger = logging.getLogger("vla_accel.server")

GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1001, 1008, 1011
_REFUSALS = {1002: "protocol", 1007: "protocol", 1009: "message too big"}
_CHECK_EVERY_S = 0.25


class PolicyServer:
    """Serves policies until `stop_soon`. Call its methods on the event loop of `run`, except `stop_soon`.

    Args:
        policy: an object with `infer`, and with `metadata` if it has any; a `PolicyRegistry`; or `Replicas` or
            `RayReplicas` of either. Without replicas all calls run in one thread of this process.
        config: address and limits.
        view: shows what a policy without replicas gets and returns.

    Raises ConfigError for a view with replicas.
    """

    def __init__(self, policy: Any, config: ServerConfig | None = None, view: View = OFF) -> None:
        self.config = config or ServerConfig()
        self.address = ""  # `ws://host:port`, once the server listens
        self.metrics = Metrics(
            {
                "clients": lambda: len(self._clients),
                "queue_depth": lambda: self.dispatcher.waiting,
                "running_requests": lambda: self.dispatcher.running,
                "replicas": lambda: len(self.dispatcher.loaded),
            }
        )
        self.dispatcher = Dispatcher(_replicas(policy, self.config.batches, view), self.config, self.metrics)
        self._clients: set[Any] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._loading: asyncio.Future[None] | None = None
        self._closing: set[asyncio.Future[None]] = set()
        self._rates = RateLimit(self.config.rate_limit)
        self._keys = Keys(self.config.api_key, self.config.api_key_file)

    async def run(self, on_ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Load, listen and serve until `stop_soon`, then finish the requests under way. Raises what loading raises.

        `stop_soon` during loading ends it; `address` then stays empty.
        """
        config, self._loop = self.config, asyncio.get_running_loop()
        module, tls = websockets_server(), config.tls()
        quiet = logging.getLogger("vla_accel.server.handshakes")
        quiet.setLevel(logging.CRITICAL)  # malformed handshakes are not errors of this server
        self._loading = asyncio.ensure_future(self.dispatcher.start())
        await asyncio.wait([self._loading])
        if self._loading.cancelled():
            await self.dispatcher.close()
            return
        self._loading.result()
        try:
            server = await module.serve(
                self._handle,
                config.host,
                config.port,
                process_request=self._process_request,
                create_connection=connection_class(config.max_clients + SPARE_SOCKETS, self._refused),
                compression=None,
                max_size=config.max_payload,
                max_queue=1,
                open_timeout=config.handshake_timeout_s,
                close_timeout=5,
                logger=quiet,
                **({"ssl": tls, "ssl_handshake_timeout": config.handshake_timeout_s} if tls else {}),
            )
        except OSError as error:
            await self.dispatcher.close()
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{'wss' if tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}"
        if config.public and not self._keys.required:
            logger.warning("%s without a key: everyone who can reach it can use it", config.host)
        elif config.public and not tls:
            logger.warning("%s without a TLS certificate: keys are sent unencrypted", config.host)
        watch = asyncio.create_task(self._watch())
        try:
            live = f" (live page: {self.address.replace('ws', 'http', 1)})" if config.page else ""
            logger.info("serving on %s%s", self.address, live)
            if on_ready is not None:
                on_ready(self)
            await self._stop.wait()
            await self._drain(server)
        finally:
            watch.cancel()
            for client in list(self._clients):
                client.transport.abort()
            server.close()
            await server.wait_closed()
            await self.dispatcher.close()
            logger.info("stopped after %d requests", self.metrics.counters["requests"].total())

    def stop_soon(self) -> None:
        """Begin the graceful shutdown, from any thread. A second call does not wait for requests under way."""
        if self._loop is None:
            return

        def stop() -> None:
            if not self._stop.is_set() and self._loading is not None:
                self._loading.cancel()
            (self._hurry if self._stop.is_set() else self._stop).set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(stop)

    async def _drain(self, server: Any) -> None:
        """Accept nothing new, and wait for the requests under way within the grace period."""
        server.close(close_connections=False)
        for client in self._clients:
            if not client.busy:
                self._close_soon(client, GOING_AWAY, "the server is stopping")
        end = time.monotonic() + self.config.grace_s
        while self._clients and time.monotonic() < end and not self._hurry.is_set():
            await asyncio.sleep(0.02)
        busy = sum(client.busy for client in self._clients)
        if busy:
            logger.error("stopping with %d requests unanswered after %g s", busy, self.config.grace_s)

    async def _watch(self) -> None:
        """Close connections whose message stays incomplete, or whose key was withdrawn."""
        limit = self.config.message_timeout_s
        while True:
            await asyncio.sleep(min(_CHECK_EVERY_S, limit))
            changed = self._keys.refresh()
            for client in list(self._clients):
                if changed and self._keys.name_of(client.request.headers["Authorization"]) != client.key:
                    self._refused("api key withdrawn", client, f"its key {client.key} was withdrawn")
                    self._close_soon(client, POLICY_VIOLATION, "the key was withdrawn")
                if client.unfinished_since is None:
                    continue
                if client.busy:  # its next message waits for the server
                    client.unfinished_since = time.monotonic()
                elif time.monotonic() - client.unfinished_since > limit:
                    client.unfinished_since = None
                    reason = f"a message took longer than {limit:g} s"
                    self._refused("slow message", client, reason)
                    self._close_soon(client, POLICY_VIOLATION, reason)

    def _process_request(self, connection: Any, request: Any) -> Any:
        """Answer health checks and pages, and check the key and the number of clients. None continues the handshake."""
        path, upgrade, status = _path(request), "Upgrade" in request.headers, http.HTTPStatus
        if path == "healthz":
            return connection.respond(status.OK, "OK\n")
        if self._keys.required:
            values = request.headers.get_all("Authorization")
            name_of = self._keys.name_of if upgrade else self._keys.name_of_page
            connection.key = name_of(values[0]) if len(values) == 1 else None
            if connection.key is None:
                self._refused("api key", connection, f"refused, {'wrong' if values else 'no'} API key")
                response = connection.respond(status.UNAUTHORIZED, "expected Authorization: Api-Key ...\n")
                response.headers["WWW-Authenticate"] = "Api-Key" if upgrade else 'Basic realm="the key as password"'
                return response
        shown = None if upgrade else page(path, self.metrics, self.dispatcher, live=self.config.page)
        if shown is not None:
            response = connection.respond(status.OK, shown[1])
            del response.headers["Content-Type"]
            for name, value in {"Content-Type": shown[0], **HEADERS}.items():
                response.headers[name] = value
            return response
        frames = self.dispatcher.metadata_frames
        names = [name for name in frames if name]
        if names and path not in frames:
            text = f"policy: expected one of {', '.join(names)} as the path\n"
            return connection.respond(status.NOT_FOUND, text)
        if len(self._clients) >= self.config.max_clients:
            self._refused("clients")
            text = f"{self.config.max_clients} clients are connected already\n"
            return connection.respond(status.SERVICE_UNAVAILABLE, text)
        return None

    async def _handle(self, client: Any) -> None:
        """Serve one client until it leaves or makes a mistake."""
        from websockets.exceptions import ConnectionClosed

        self._clients.add(client)
        self.metrics.count("connections")
        timing: dict[str, float] = {}
        try:
            frames, name = self.dispatcher.metadata_frames, _path(client.request)
            name = name if name in frames else ""  # a single policy answers on every path
            await self._send(client, frames[name])
            while not self._stop.is_set():
                frame = await client.recv()
                client.busy = True
                began = time.monotonic()
                self.metrics.count("received_bytes", "", len(frame))
                await self._wait_for_rate(client, timing)
                call = self.dispatcher.submit(Call(frame, name, timing, _turn_of(client)))
                client.on_gone = functools.partial(self.dispatcher.abandon, call)
                answer = await call.outcome  # type: ignore[misc]
                self._rates.spend(call.client, max(len(call.results), 1) - 1)
                try:
                    await self._send(client, answer.message)
                finally:
                    self._count(client, call, answer)
                took = time.monotonic() - began
                if answer.outcome != "bad request":  # the policy never saw it
                    self.metrics.observe_request(took)
                timing = {"prev_total_ms": took * 1e3}  # includes sending, so only the next answer can report it
                if answer.outcome != "ok":
                    await client.close(INTERNAL_ERROR, "the error is in the previous frame")
                    return
                client.busy = False
            await client.close(GOING_AWAY, "the server is stopping")
        except ClientGone:
            self.metrics.count("requests", "client gone")
        except ConnectionClosed as error:
            if client.busy:
                self.metrics.count("requests", "client gone")
            if error.sent is not None and error.sent.code in _REFUSALS:
                self._refused(_REFUSALS[error.sent.code], client, str(error))
        except Exception:  # a bug of this module ends this connection only
            logger.exception("%s: the connection failed", _peer(client))
        finally:
            client.busy = False
            self._clients.discard(client)

    def _count(self, client: Any, call: Call, answer: Answer) -> None:
        self.metrics.count("requests", answer.outcome)
        if client.key is not None:
            self.metrics.count("key_requests", client.key)
        if answer.outcome == "ok":
            self.metrics.observe("queue_seconds", call.waited_s)
            self.metrics.observe("batch_size", answer.batch)
            self.metrics.observe_components(answer.policy_timing)
            if answer.policy:
                self.metrics.count("policy_requests", answer.policy)
            return
        self.metrics.count("errors", answer.error)
        level = logging.ERROR if answer.outcome == "policy error" else logging.WARNING
        logger.log(level, "%s: %s%s", _peer(client), answer.message, f"\n{answer.trace}" if answer.trace else "")

    async def _wait_for_rate(self, client: Any, timing: dict[str, float]) -> None:
        """Delay a request beyond the client's rate. Raises ClientGone if the client leaves meanwhile."""
        wait_s = self._rates.spend(_turn_of(client), 1)
        if not wait_s:
            return
        self.metrics.count("delayed", client.key or "")
        timing["rate_ms"] = wait_s * 1e3
        gone = asyncio.Event()
        client.on_gone = gone.set
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gone.wait(), wait_s)
            raise ClientGone

    async def _send(self, client: Any, message: bytes | str) -> None:
        """Send a message, or drop a client that does not read it."""

        def drop() -> None:
            self._refused("slow reader", client, f"did not read its answer within {self.config.send_timeout_s:g} s")
            client.transport.abort()

        late = asyncio.get_running_loop().call_later(self.config.send_timeout_s, drop)
        try:
            await client.send(message)
        finally:
            late.cancel()
        self.metrics.count("sent_bytes", "", len(message))

    def _refused(self, reason: str, client: Any = None, text: str = "") -> None:
        self.metrics.count("refused", reason)
        if text:
            logger.warning("%s: %s", _peer(client), text)

    def _close_soon(self, client: Any, code: int, reason: str) -> None:
        task = asyncio.ensure_future(client.close(code, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def serve(policy: Any, config: ServerConfig | None = None, view: View = OFF) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests under way. A second signal does not wait for them.

    The arguments are those of `PolicyServer`. Raises KeyboardInterrupt if a signal arrived while replicas were loading.
    """
    server = PolicyServer(policy, config, view)

    async def main() -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, server.stop_soon)
        await server.run()

    run_loop(main())
    if not server.address:
        raise KeyboardInterrupt


@contextlib.contextmanager
def background(policy: Any, config: ServerConfig | None = None, view: View = OFF) -> Iterator[PolicyServer]:
    """Run a `PolicyServer` in a thread of this process, and yield it once it listens. It stops gracefully at the end of
    the block."""
    server = PolicyServer(policy, config, view)
    ready = threading.Event()
    failure: list[BaseException] = []

    def main() -> None:
        try:
            run_loop(server.run(lambda _: ready.set()))
        except BaseException as error:
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="server", daemon=True)
    thread.start()
    ready.wait()
    try:
        if not failure:
            yield server
    finally:
        server.stop_soon()
        thread.join()
    if failure:
        raise failure[0]


def _replicas(policy: Any, limits: BatchLimits, view: View) -> Sequence[Replica]:
    if view.on and isinstance(policy, (RayReplicas, Replicas)):
        raise ConfigError("view: expected a policy in the server's process, got replicas (--devices, --ray)")
    if isinstance(policy, RayReplicas):
        return policy.replicas(limits)
    if isinstance(policy, Replicas):
        return [ProcessReplica(f"{i} {d}", policy.load, d, limits) for i, d in enumerate(policy.devices)]
    return [ThreadReplica(policy, limits, view)]


def _path(request: Any) -> str:
    """The path of a request without slashes: a page, or a policy's name."""
    return request.path.partition("?")[0].strip("/")


def _turn_of(client: Any) -> tuple[str, str]:
    """Who takes a turn in the queue, so that many connections do not get many turns: the key's name, or the client's
    address if it has no key of its own."""
    if client.key not in (None, DEFAULT):
        return "key", client.key
    address = client.remote_address
    return "address", str(address[0]) if isinstance(address, tuple) else ""


def _peer(client: Any) -> str:
    address = client.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "client"
