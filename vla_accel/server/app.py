"""The server: openpi's websocket protocol around a policy.

On connect the client gets the metadata; then each binary frame is one observation and is answered by one result, in
order. Anything wrong is answered by a text frame, after which the connection is closed; the next one works. `GET
/healthz`, `GET /metrics` and a live page at `GET /` answer on the same port. Knows nothing of what observations mean.
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
from vla_accel.server.dispatch import ClientGone, Dispatcher, Job
from vla_accel.server.keys import DEFAULT, Keys
from vla_accel.server.limits import BatchLimits, ServerConfig
from vla_accel.server.loop import run_loop
from vla_accel.server.metrics import Metrics
from vla_accel.server.pages import HEADERS, Pages
from vla_accel.server.rates import Rates
from vla_accel.server.ray_replica import RayReplicas
from vla_accel.server.replica import ProcessReplica, Replica, Replicas, ThreadReplica
from vla_accel.server.runner import Answer, Call

logger = logging.getLogger("vla_accel.server")

GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR = 1001, 1008, 1011
_REFUSALS = {1002: "protocol", 1007: "protocol", 1009: "message too big"}
_CHECK_EVERY_S = 0.25


class PolicyServer:
    """Serves `policy` until `stop_soon`: anything with `infer`, and `metadata` if it has some, or a `Shelf` of several,
    whose calls run in one thread; or `Replicas` of either, each in a process of its own, or `RayReplicas` on a cluster.

    Methods are for the event loop that runs `run`, but for `stop_soon`.
    """

    def __init__(self, policy: Any, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        self.address = ""
        """`ws://host:port`, once it listens."""
        self.metrics = Metrics(
            clients=lambda: len(self._clients),
            waiting=lambda: self.dispatcher.waiting,
            running=lambda: self.dispatcher.running,
            replicas=lambda: self.dispatcher.ready,
        )
        self.dispatcher = Dispatcher(_replicas(policy, self.config.batches), self.config, self.metrics)
        self._pages = Pages(self.metrics, self.dispatcher, self.config.page)
        self._clients: set[Any] = set()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry: asyncio.Event | None = None
        self._starting: asyncio.Future[None] | None = None
        self._draining = False
        self._closing: set[asyncio.Future[None]] = set()
        self._rates = Rates(self.config.rate_limit)
        self._keys = Keys(self.config.api_key, self.config.api_key_file)

    # -- its life -------------------------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[PolicyServer], None] | None = None) -> None:
        """Load, listen, serve until `stop_soon`, then finish what is under way; asked while replicas load, it ends them
        and has no `address`. Raises ConfigError if it cannot listen, and what loading a replica raised."""
        config = self.config
        self._loop, self._stop, self._hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        module, tls = websockets_server(), config.tls()
        quiet = logging.getLogger("vla_accel.server.handshakes")
        quiet.setLevel(logging.CRITICAL)  # what a stranger sends is not this server's error
        self._starting = asyncio.ensure_future(self.dispatcher.start())
        await asyncio.wait([self._starting])
        if self._starting.cancelled():
            await self.dispatcher.close()
            return
        self._starting.result()
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
                **({"ssl": tls, "ssl_handshake_timeout": config.handshake_timeout_s} if tls else {}),
            )
        except OSError as error:
            await self.dispatcher.close()
            raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
        host, port = server.sockets[0].getsockname()[:2]
        scheme = "wss" if tls else "ws"
        self.address = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        if config.beyond and not self._keys.needed:
            logger.warning("%s without a key: whoever reaches it may use it", config.host)
        elif config.beyond and not tls:
            logger.warning("%s without a TLS certificate: keys travel in the clear", config.host)
        watch = asyncio.create_task(self._watch())
        try:
            page = f" (live page: {self.address.replace('ws', 'http', 1)})" if config.page else ""
            logger.info("serving on %s%s", self.address, page)
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
            logger.info("stopped after %d requests", sum(self.metrics.requests.values.values()))

    def stop_soon(self) -> None:
        """Begin the graceful shutdown; from any thread. A second call does not wait for requests under way."""
        if self._loop is None or self._stop is None or self._hurry is None:
            return
        loop, stop, hurry = self._loop, self._stop, self._hurry

        def stop_now() -> None:
            if not stop.is_set() and self._starting is not None:
                self._starting.cancel()
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
        end = time.monotonic() + self.config.grace_s
        while self._clients and time.monotonic() < end and not self._hurry.is_set():
            await asyncio.sleep(0.02)
        busy = sum(client.busy for client in self._clients)
        if busy:
            logger.error("stopping with %d requests unanswered after %g s", busy, self.config.grace_s)

    async def _watch(self) -> None:
        """End connections whose message does not get finished, or whose key was withdrawn."""
        limit = self.config.message_timeout_s
        while True:
            await asyncio.sleep(min(_CHECK_EVERY_S, limit))
            if self._keys.refresh():
                self._turn_out()
            for client in list(self._clients):
                since = client.unfinished_since
                if since is None:
                    continue
                if client.busy:  # its next message waits for us
                    client.unfinished_since = time.monotonic()
                elif time.monotonic() - since > limit:
                    client.unfinished_since = None
                    self.metrics.refused.add("slow message")
                    logger.warning("%s: a message took longer than %g s", _peer(client), limit)
                    self._spawn(client.close(POLICY_VIOLATION, f"a message took longer than {limit:g} s"))

    def _turn_out(self) -> None:
        """End the connections of keys that are no more."""
        for client in self._clients:
            if self._keys.name_of(client.request.headers["Authorization"]) != client.key:
                self.metrics.refused.add("api key withdrawn")
                logger.warning("%s: its key %s was withdrawn", _peer(client), client.key)
                self._spawn(client.close(POLICY_VIOLATION, "the key was withdrawn"))

    # -- handshake ------------------------------------------------------------------------------------------------

    def _process_request(self, connection: Any, request: Any) -> Any:
        """openpi's health check, the key, pages and the number of clients; None goes on with the handshake."""
        path, upgrades = _path(request), "Upgrade" in request.headers
        if path == "healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self._keys.needed:
            given = request.headers.get_all("Authorization")
            name_of = self._keys.name_of if upgrades else self._keys.name_of_page
            connection.key = name_of(given[0]) if len(given) == 1 else None
            if connection.key is None:
                self.metrics.refused.add("api key")
                logger.warning("%s: refused, %s API key", _peer(connection), "wrong" if given else "no")
                response = connection.respond(http.HTTPStatus.UNAUTHORIZED, "expected Authorization: Api-Key ...\n")
                response.headers["WWW-Authenticate"] = "Api-Key" if upgrades else 'Basic realm="the key as password"'
                return response
        page = None if upgrades else self._pages.get(path)
        if page is not None:
            kind, text = page
            response = connection.respond(http.HTTPStatus.OK, text)
            del response.headers["Content-Type"]
            for name, value in {"Content-Type": kind, **HEADERS}.items():
                response.headers[name] = value
            return response
        names = [name for name in self.dispatcher.hellos if name]
        if names and path not in self.dispatcher.hellos:
            text = f"policy: expected one of {', '.join(names)} as the path\n"
            return connection.respond(http.HTTPStatus.NOT_FOUND, text)
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
        timing: dict[str, float] = {}
        try:
            hellos, name = self.dispatcher.hellos, _path(client.request)
            name = name if name in hellos else ""  # a single policy is asked whatever the path
            await self._send(client, hellos[name])
            while not self._draining:
                frame = await client.recv()
                client.busy = True
                began = time.monotonic()
                self.metrics.received.add(amount=len(frame))
                await self._wait_for_rate(client, timing)
                job = self.dispatcher.submit(Call(frame, name, timing), _turn_of(client))
                client.on_gone = functools.partial(self.dispatcher.give_up, job)
                answer = await job.outcome
                self._rates.spend(_turn_of(client), max(len(job.items), 1) - 1)
                try:
                    await self._send(client, answer.message)
                finally:
                    self._count(client, job, answer)
                took = time.monotonic() - began
                if answer.outcome != "bad request":  # that is no latency: the policy never saw it
                    self.metrics.request(took)
                # Told with the next answer: it includes sending this one.
                timing = {"prev_total_ms": took * 1e3}
                if answer.outcome != "ok":
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

    def _count(self, client: Any, job: Job, answer: Answer) -> None:
        """Count an answer; log it if it is an error. Its traceback stays here."""
        self.metrics.requests.add(answer.outcome)
        if client.key is not None:
            self.metrics.key_requests.add(client.key)
        if answer.outcome == "ok":
            self.metrics.queue_seconds.observe(job.waited_s)
            self.metrics.batch_size.observe(answer.batch)
            self.metrics.components(answer.policy_timing)
            if answer.policy:
                self.metrics.policy_requests.add(answer.policy)
            return
        self.metrics.errors.add(answer.error)
        level = logging.ERROR if answer.outcome == "policy error" else logging.WARNING
        logger.log(level, "%s: %s%s", _peer(client), answer.message, f"\n{answer.trace}" if answer.trace else "")

    async def _wait_for_rate(self, client: Any, timing: dict[str, float]) -> None:
        """Hold back a request of a client that asks faster than it may. Raises ClientGone if it leaves meanwhile."""
        wait_s = self._rates.spend(_turn_of(client), 1)
        if not wait_s:
            return
        self.metrics.delayed.add(client.key or "")
        timing["rate_ms"] = wait_s * 1e3
        gone = asyncio.Event()
        client.on_gone = gone.set
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(gone.wait(), wait_s)
            raise ClientGone

    async def _send(self, client: Any, message: bytes | str) -> None:
        """Send, or drop a client that does not take its answer."""
        assert self._loop is not None
        late = self._loop.call_later(self.config.send_timeout_s, self._drop, client)
        try:
            await client.send(message)
        finally:
            late.cancel()
        self.metrics.sent.add(amount=len(message))

    def _drop(self, client: Any) -> None:
        self.metrics.refused.add("slow reader")
        logger.warning("%s: did not take its answer within %g s", _peer(client), self.config.send_timeout_s)
        client.transport.abort()

    def _spawn(self, work: Any) -> None:
        """Run a closing handshake beside everything else."""
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def serve(policy: Any, config: ServerConfig | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is under way; a second signal does not wait. Blocks. Raises
    KeyboardInterrupt for a signal while replicas load."""
    server = PolicyServer(policy, config)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, server.stop_soon)
        await server.run()

    run_loop(main())
    if not server.address:
        raise KeyboardInterrupt


@contextlib.contextmanager
def background(policy: Any, config: ServerConfig | None = None) -> Iterator[PolicyServer]:
    """The server in a thread of this process, listening; stopped gracefully at the end of the block."""
    server = PolicyServer(policy, config)
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


def _replicas(policy: Any, limits: BatchLimits) -> Sequence[Replica]:
    if isinstance(policy, RayReplicas):
        return policy.made(limits)
    if not isinstance(policy, Replicas):
        return [ThreadReplica(policy, limits)]
    named = [(f"{i} {device}", device) for i, device in enumerate(policy.devices)]
    return [ProcessReplica(name, policy.load, device, limits) for name, device in named]


def _path(request: Any) -> str:
    """The path of a request without slashes: a page, or the policy that is asked."""
    return request.path.partition("?")[0].strip("/")


def _turn_of(client: Any) -> tuple[str, str]:
    """Whose turn a request takes, so that many connections do not make many turns: the name of the key, or the
    client's machine if it has no key or the one that all share."""
    if client.key not in (None, DEFAULT):
        return "key", client.key
    address = client.remote_address
    return "address", str(address[0]) if isinstance(address, tuple) else ""


def _peer(client: Any) -> str:
    address = client.remote_address
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "client"
