"""What `serve` and `bench-server` may be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from vla_accel.cli.asked.policies import Checkpoint, PolicySource, check_checkpoint
from vla_accel.cli.options import Count, File, Listed, Number, OutputFile, Seconds, Text, Within
from vla_accel.server.limits import ServerConfig

LIMITS = ServerConfig()


@dataclass(frozen=True)
class Serve(PolicySource):
    """Serve a policy over openpi's websocket protocol: openpi-client and `vla_accel.client` talk to it unchanged.

    GET / is a live page, GET /healthz says that it is there, GET /metrics is for Prometheus. SIGTERM finishes the
    requests under way.
    """

    host: str = LIMITS.host
    """Address to listen on. 0.0.0.0 is every network of this machine: that needs keys, or --insecure."""
    port: Annotated[int, Within(0, 65535)] = LIMITS.port
    """Port; 0 takes a free one."""
    api_key_file: File = None
    """File with the key that clients must send as `Authorization: Api-Key …`, or several in lines `NAME: KEY`. It is
    read again when it changes."""
    tls_cert: File = None
    """Certificate chain (PEM): the server then speaks wss and https, and keys do not travel in the clear."""
    tls_key: File = None
    """The certificate's private key (PEM), if it is not in the same file."""
    insecure: bool = False
    """With a --host beyond this machine: accept clients without a key."""
    no_page: bool = False
    """Leave out the live page at GET /."""
    max_clients: Count = LIMITS.max_clients
    """Connections at once."""
    max_payload_mib: Annotated[float, Within(0, above=True)] = LIMITS.max_payload / 2**20
    """Largest message."""
    timeout_s: Seconds = LIMITS.request_timeout_s
    """Longest a request may take."""
    grace_s: Annotated[float, Within(0)] = LIMITS.grace_s
    """At shutdown, how long requests under way may still take."""
    max_batch: Count = LIMITS.max_batch
    """Observations of different clients to run together: 1, 2, 4, 8, …; each batch size builds engines of its own. A
    request with more observations gives way to other clients after each so many."""
    max_observations: Count = LIMITS.max_observations
    """Observations of one request."""
    rate_limit: Annotated[
        float | None, tyro.conf.arg(metavar="PER_SECOND", help_behavior_hint=""), Within(0, above=True)
    ] = None
    """Observations a second of each client (the key's name, or its address); a client that sends faster waits."""
    max_wait_ms: Annotated[float | None, tyro.conf.arg(metavar="MS", help_behavior_hint=""), Within(0)] = None
    """With --max-batch above 1: how long a batch waits to become full. Default: 5."""
    policy: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=CONFIG:CHECKPOINT")] = ()
    """Once for each of several policies; clients choose one by the key `policy` or by the address's path, and get the
    first if they do not. CONFIG may be auto."""
    memory_budget_gib: Annotated[
        float | None, tyro.conf.arg(metavar="GIB", help_behavior_hint=""), Within(0, above=True)
    ] = None
    """With several policies: those not used for the longest time are put away, and loaded again when asked for."""
    device: Text = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    devices: Text = None
    """A process with the policy for each of these, behind one address: all, or a list like cuda:0,cuda:1."""
    ray: Text = None
    """A process with the policy on each GPU of a Ray cluster, or each machine where there is none, behind one address:
    "auto" for the cluster that this machine belongs to, HOST:PORT for another, "local" for one that is started here."""
    num_steps: Number = None
    """Denoising steps instead of the configuration's."""


@dataclass(frozen=True)
class BenchServer:
    """Time calls over a server on this machine, one client and many, beside the policy's own time: of a checkpoint's
    policy, of one with random weights, or of one that costs nothing. Server and clients have processes of their own."""

    checkpoint: Checkpoint = None
    """A folder, a bundled checkpoint's name or one on the hub; a policy that costs nothing if not given."""
    model: Text = None
    """Instead: random weights of a model family's published size, such as pi05, the same in every replica."""
    config: Text = None
    """Of a policy that costs something: a shipped configuration's name, or a file."""
    clients: Annotated[Listed[int], Within(1)] = (1, 8, 64)
    """Clients at once, a sweep."""
    seconds: Seconds = 10.0
    """Of each number of clients."""
    devices: Text = None
    """Replicas, as `vla-accel serve --devices` takes them."""
    device: Text = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    max_batch: Count = 1
    """As `vla-accel serve --max-batch`: 1, 2, 4, 8, …"""
    num_steps: Number = None
    """Denoising steps instead of the configuration's."""
    output: OutputFile = None
    """JSON file."""

    def check(self) -> None:
        """Raise ConfigError for what stands in the checkpoint's place and is none."""
        check_checkpoint(self)
