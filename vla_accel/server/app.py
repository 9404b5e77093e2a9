"""The server: openpi's websocket protocol around a policy.

On connect the client gets the metadata; then each binary frame is one observation and is answered by one result, in
order. Anything wrong is answered by a text frame, after which the connection is closed; the next one works. `GET
/healthz` and `GET /metrics` answer on the same port. Knows nothing about what observations mean.
Source of the protocol: openpi, `src/openpi/serving/websocket_policy_server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import http
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vla_accel.errors import ConfigError, EngineError, ObservationError, ServerError, WireError
from vla_accel.remote import wire
from vla_accel.remote.async_runner import takes_prev_chunk
from vla_accel.server.connection import SPARE_SOCKETS, connection_class, websockets_server
from vla_accel.server.dispatch import ClientGone, Dispatcher
from vla_accel.server.limits import ServerConfig
from vla_accel.server.metrics import CONTENT_TYPE, Metrics
from vla_accel.server.requests import parse

logger = logging.getLogger("vla_accel.server")

GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1001, 1008, 1011
_REFUSALS = {1002: "protocol", 1007: "protocol", 1009: "message too big"}
_CHECK_EVERY_S = 0.25
_LONGEST_ERROR = 4000


class PolicyServer:
    """Serves `policy` (anything with `infer`, and `metadata` if it has some) until `stop`.

    Its calls run in one thread. Methods are for the event loop that runs `run`, but for `stop_soon`.
    """

    def __init__(self, policy: Any, config: ServerConfig | None = None) -> None:
        self.policy, self.config = policy, config or ServerConfig()
        self.address = ""
        """`ws://host:port`, once it listens."""
        self.real_time_chunking = takes_prev_chunk(policy)
        self.metrics = Metrics(
            clients=lambda: len(self._clients),
            waiting=lambda: self._dispatcher.waiting if self._dispatcher else 0,
            running=lambda: self._dispatcher.running if self._dispatcher else 0,
        )
        self._clients: set[Any] = set()
        self._dispatcher: Dispatcher | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry: asyncio.Event | None = None
        self._draining = False
        self._closing: set[asyncio.Future[None]] = set()
        self._key = _digest(f"Api-Key {self.config.api_key}") if self.config.api_key else None

    # -- its life -------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Listen, serve until `stop_soon`, then finish what is under way. Raises ConfigError if it cannot listen."""
        config = self.config
        self._loop, self._stop, self._hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._hello()  # metadata that cannot be sent is an error now
        module = websockets_server()
        quiet = logging.getLogger("vla_accel.server.handshakes")
        quiet.setLevel(logging.CRITICAL)  # what a stranger sends is not this server's error
        self._dispatcher = Dispatcher(self.policy, config)
        try:
            server = await module.serve(
                self._handle,
                config.host,
                config.port,
                process_request=self._process_request,
                create_connection=connection_class(config.max_clients + SPARE_SOCKETS, self.metrics.refused.add),
                compression=None,
                max_size=config.max_payload,
                max_queue=1,
                open_timeout=config.handshake_timeout_s,
                close_timeout=5,
                logger=quiet,
            )
        except OSError as error:
            await self._dispatcher.close()
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"
        watch = asyncio.create_task(self._watch())
        try:
            logger.info("serving on %s", self.address)
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
            await self._dispatcher.close()
            logger.info("stopped after %d answers", sum(self.metrics.requests.values.values()))

    def stop_soon(self) -> None:
        """Begin the graceful shutdown; from any thread. A second call does not wait for requests under way."""
        if self._loop is None or self._stop is None or self._hurry is None:
            return
        loop, stop, hurry = self._loop, self._stop, self._hurry

        def stop_now() -> None:
            (hurry if stop.is_set() else stop).set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stop_now)

    async def _drain(self, server: Any) -> None:
        """No new connections or requests; those under way are answered, within the grace period."""
        assert self._hurry is not None
        self._draining = True
        server.close(close_connections=False)
        for client in self._clients:
            if not client.busy:
                self._spawn(client.close(GOING_AWAY, "the server is stopping"))
        end = self._now() + self.config.grace_s
        while self._clients and self._now() < end and not self._hurry.is_set():
            await asyncio.sleep(0.02)
        busy = sum(client.busy for client in self._clients)
        if busy:
            logger.error("stopping with %d requests unanswered after %g s", busy, self.config.grace_s)

    async def _watch(self) -> None:
        """End connections whose message does not get finished."""
        limit = self.config.message_timeout_s
        while True:
            await asyncio.sleep(min(_CHECK_EVERY_S, limit))
            for client in list(self._clients):
                since = client.unfinished_since
                if since is None:
                    continue
                if client.busy:  # its next message waits for us
                    client.unfinished_since = self._now()
                elif self._now() - since > limit:
                    client.unfinished_since = None
                    self.metrics.refused.add("slow message")
                    logger.warning("%s: a message took longer than %g s", _peer(client), limit)
                    self._spawn(client.close(POLICY_VIOLATION, f"a message took longer than {limit:g} s"))

    # -- handshake ------------------------------------------------------------------------------------------------

    def _process_request(self, connection: Any, request: Any) -> Any:
        """openpi's health check, metrics, the key and the number of clients; None goes on with the handshake."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self._key is not None:
            given = request.headers.get_all("Authorization")
            if len(given) != 1 or not hmac.compare_digest(_digest(given[0]), self._key):
                self.metrics.refused.add("api key")
                logger.warning("%s: refused, %s API key", _peer(connection), "wrong" if given else "no")
                response = connection.respond(http.HTTPStatus.UNAUTHORIZED, "expected Authorization: Api-Key ...\n")
                response.headers["WWW-Authenticate"] = "Api-Key"
                return response
        if path == "/metrics":
            response = connection.respond(http.HTTPStatus.OK, self.metrics.text())
            del response.headers["Content-Type"]
            response.headers["Content-Type"] = CONTENT_TYPE
            return response
        if len(self._clients) >= self.config.max_clients:
            self.metrics.refused.add("clients")
            return connection.respond(
                http.HTTPStatus.SERVICE_UNAVAILABLE, f"{self.config.max_clients} clients are connected already\n"
            )
        return None

    # -- one client -----------------------------------------------------------------------------------------------

    async def _handle(self, client: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        self._clients.add(client)
        self.metrics.connections.add()
        gone = asyncio.ensure_future(client.wait_closed())
        previous_s: float | None = None
        try:
            await self._send(client, self._hello())
            while not self._draining:
                frame = await client.recv()
                client.busy = True
                began = self._now()
                self.metrics.received.add(amount=len(frame))
                answer = await self._answer(client, frame, gone, previous_s)
                await self._send(client, answer)
                previous_s = self._now() - began
                self.metrics.request_seconds.observe(previous_s)
                if isinstance(answer, str):
                    await client.close(INTERNAL_ERROR, "the error is in the previous frame")
                    return
                client.busy = False
            await client.close(GOING_AWAY, "the server is stopping")
        except ClientGone:
            self.metrics.requests.add("client gone")
        except ConnectionClosed as error:
            if client.busy:
                self.metrics.requests.add("client gone")
            if error.sent is not None and error.sent.code in _REFUSALS:
                self.metrics.refused.add(_REFUSALS[error.sent.code])
                logger.warning("%s: %s", _peer(client), error)
        except Exception:  # a mistake of this module; it ends this connection only
            logger.exception("%s: the connection failed", _peer(client))
        finally:
            client.busy = False
            self._clients.discard(client)
            gone.cancel()

    async def _answer(
        self, client: Any, frame: bytes | str, gone: asyncio.Future[Any], previous_s: float | None
    ) -> bytes | str:
        """The result as a binary frame, or the error as a text frame."""
        assert self._dispatcher is not None
        try:
            request = parse(frame, real_time_chunking=self.real_time_chunking)
            job, result = await self._dispatcher.infer(request, _host(client), gone)
            if not isinstance(result, Mapping):
                raise EngineError(f"policy: expected a mapping as its result, got {type(result).__name__}")
            timing = {
                "infer_ms": (job.ended_s - job.started_s) * 1e3,
                "queue_ms": (job.started_s - job.arrived_s) * 1e3,
                "batch": job.batch,
            }
            if previous_s is not None:
                # Of the request before: this one's includes sending it.
                timing["prev_total_ms"] = previous_s * 1e3
            answer = wire.pack({**result, "server_timing": timing})
        except ClientGone:
            raise
        except Exception as error:
            return self._report(client, error)
        self.metrics.queue_seconds.observe(job.started_s - job.arrived_s)
        self.metrics.batch_size.observe(job.batch)
        self.metrics.components(result.get("policy_timing"))
        self.metrics.requests.add("ok")
        return answer

    def _report(self, client: Any, error: Exception) -> str:
        """Count and log an error; what the client is told. The traceback stays here."""
        kind = type(error).__name__
        expected = isinstance(error, (WireError, ObservationError, ServerError))
        outcome = "timeout" if isinstance(error, ServerError) else "bad request" if expected else "policy error"
        self.metrics.requests.add(outcome)
        self.metrics.errors.add(kind)
        logger.log(
            logging.WARNING if expected else logging.ERROR,
            "%s: %s: %s",
            _peer(client),
            kind,
            error,
            exc_info=None if expected else error,
        )
        return f"{kind}: {error}"[:_LONGEST_ERROR]

    async def _send(self, client: Any, message: bytes | str) -> None:
        """Send, or drop a client that does not take its answer."""
        try:
            await asyncio.wait_for(client.send(message), self.config.send_timeout_s)
        except asyncio.TimeoutError:
            self.metrics.refused.add("slow reader")
            logger.warning("%s: did not take its answer within %g s", _peer(client), self.config.send_timeout_s)
            client.transport.abort()
            raise ClientGone from None
        self.metrics.sent.add(amount=len(message))

    def _hello(self) -> bytes:
        metadata = getattr(self.policy, "metadata", None) or {}
        return wire.pack({**metadata, wire.REAL_TIME_CHUNKING: self.real_time_chunking})

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def _spawn(self, work: Any) -> None:
        """Run a closing handshake beside everything else."""
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def serve(policy: Any, config: ServerConfig | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is under way; a second signal does not wait. Blocks."""

    async def main() -> None:
        server = PolicyServer(policy, config)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, server.stop_soon)
        await server.run()

    asyncio.run(main())


@contextlib.contextmanager
def background(policy: Any, config: ServerConfig | None = None) -> Iterator[PolicyServer]:
    """The server in a thread of this process, listening; stopped gracefully at the end of the block."""
    server = PolicyServer(policy, config)
    ready = threading.Event()
    failure: list[BaseException] = []

    def main() -> None:
        try:
            asyncio.run(server.run(lambda _: ready.set()))
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


def _digest(text: str) -> bytes:
    # Of equal length whatever was sent, so that comparing tells nothing about the key's.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _host(client: Any) -> str:
    """Whose turn a request takes: the client's machine, so that many connections do not make many turns."""
    address = client.remote_address
    return str(address[0]) if isinstance(address, tuple) else ""


def _peer(client: Any) -> str:
    address = client.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "client"
