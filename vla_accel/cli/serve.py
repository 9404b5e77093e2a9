"""`vla-accel serve CHECKPOINT`: a policy server that openpi's clients talk to. Knows only what the options mean."""

from __future__ import annotations

import ipaddress
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import tyro

from vla_accel import machine
from vla_accel.cli.common import PolicySource, parse_source
from vla_accel.cli.options import File, Number, Text, Within
from vla_accel.errors import ConfigError
from vla_accel.server import RayReplicas, Replicas, ServerConfig, Shelf, serve
from vla_accel.server.connection import websockets_server
from vla_accel.server.keys import Keys

LIMITS = ServerConfig()


@dataclass(frozen=True)
class Arguments(PolicySource):
    """Serve a policy over openpi's websocket protocol: openpi-client and `vla_accel.client` talk to it unchanged.

    GET / is a live page, GET /healthz says that it is there, GET /metrics is for Prometheus. SIGTERM finishes the
    requests under way.
    """

    host: str = LIMITS.host
    """Address to listen on. 0.0.0.0 is every network of this machine: that needs keys, or --insecure."""
    port: int = LIMITS.port
    """Port; 0 takes a free one."""
    api_key_file: File = None
    """File with the key that clients must send as `Authorization: Api-Key …`, or several in lines `NAME: KEY`. It is
    read again when it changes."""
    tls_cert: File = None
    """Certificate chain (PEM): the server then speaks wss and https, and keys do not travel in the clear."""
    tls_key: File = None
    """The certificate's private key (PEM), if it is not in the same file."""
    insecure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let in whoever reaches an address beyond this machine, without a key."""
    no_page: tyro.conf.FlagCreatePairsOff[bool] = False
    """Leave out the live page at GET /."""
    max_clients: int = LIMITS.max_clients
    """Connections at once."""
    max_payload_mib: Annotated[float, Within(0, above=True)] = LIMITS.max_payload / 2**20
    """Largest message."""
    timeout_s: float = LIMITS.request_timeout_s
    """Longest a request may take."""
    grace_s: float = LIMITS.grace_s
    """At shutdown, how long requests under way may still take."""
    max_batch: int = LIMITS.max_batch
    """Observations of different clients to run together. Each batch size of 1, 2, 4, … builds engines of its own."""
    max_wait_ms: float = LIMITS.max_wait_s * 1e3
    """How long a batch waits to become full."""
    policy: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=CONFIG:CHECKPOINT, once for each of several policies; clients choose one by the key `policy` or by the
    address's path, and get the first if they do not. CONFIG may be auto."""
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

    def limits(self) -> ServerConfig:
        """The server's part. Raises ConfigError, also for an open door that nobody asked for."""
        if self.api_key_file is None and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"host: {self.host or 'every address'} without a key lets in whoever reaches it: expected "
                "--api-key-file, or --insecure"
            )
        config = ServerConfig(
            host=self.host,
            port=self.port,
            api_key_file=self.api_key_file,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            page=not self.no_page,
            max_payload=int(self.max_payload_mib * 2**20),
            max_clients=self.max_clients,
            request_timeout_s=self.timeout_s,
            grace_s=self.grace_s,
            max_batch=self.max_batch,
            max_wait_s=self.max_wait_ms / 1e3,
        )
        # Before the policy is loaded: a missing package and files of no use are an error at once.
        websockets_server()
        Keys(file=self.api_key_file)
        config.tls()
        return config


def main(arguments: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    given = parse_source(Arguments, arguments, "vla-accel serve")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = given.limits()
    limits.require_free()
    log = logging.getLogger("vla_accel.server")
    if not is_loopback(limits.host):
        if limits.api_key_file is None:
            log.warning("%s without a key: whoever reaches it may use it", limits.host)
        elif limits.tls_cert is None:
            log.warning("%s without --tls-cert: keys travel in the clear", limits.host)
    load = loader(given)
    if given.devices is not None and (given.device or given.ray):
        raise ConfigError("devices: expected --devices alone, got --device or --ray, too")
    if given.ray is not None:
        serve(RayReplicas(load, given.ray, given.device or "auto", machine.software), limits)
    elif given.devices is not None:
        serve(Replicas(load, machine.resolve_devices(given.devices)), limits)
    else:
        serve(load(given.device), limits)
    return 0


def loader(given: Arguments) -> Load | LoadSeveral:
    """What makes the policy, or all of them. Raises ConfigError for a policy that is not told as it must be."""
    if not given.policy:
        if given.memory_budget_gib is not None:
            raise ConfigError("memory-budget-gib: expected several policies (--policy) to share it, got one")
        return Load(given.checkpoint or "demo", given.config, given.num_steps, given.lora)
    if given.checkpoint or given.config or given.lora:
        raise ConfigError("policy: expected --policy, or a checkpoint with --config and --lora, got both")
    loads: dict[str, Load] = {}
    for text in given.policy:
        name, _, rest = text.partition("=")
        config, _, checkpoint = rest.partition(":")
        if not re.fullmatch(r"[\w.-]+", name) or not checkpoint or name in loads or name in ("healthz", "metrics"):
            raise ConfigError(f"policy: expected NAME=CONFIG:CHECKPOINT, each name once, got {text!r}")
        loads[name] = Load(checkpoint, config or None, given.num_steps)
    budget = given.memory_budget_gib
    return LoadSeveral(loads, None if budget is None else int(budget * 2**30))


@dataclass(frozen=True)
class Load:
    """How a policy is made, in this process or in a replica's."""

    checkpoint: str
    config: str | None
    num_steps: int | None
    lora: str | None = None

    def __call__(self, device: str | None) -> Any:
        """The policy on a device; None leaves it to the configuration. A GPU also becomes this process's own."""
        from vla_accel.policy import OptimizedPolicy

        use_gpu(device)
        return OptimizedPolicy.from_pretrained(
            self.checkpoint, self.config, device=device, num_steps=self.num_steps, lora=self.lora
        )

    def sized(self, device: str | None) -> tuple[Any, int]:
        """The policy, and the bytes that it takes: on a GPU what torch reserved for it, graphs and all; on a CPU its
        parameters."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
        policy = self(device)
        if policy.device.type == "cuda":
            return policy, max(0, torch.cuda.memory_reserved(policy.device) - before)
        return policy, sum(p.numel() * p.element_size() for p in policy.model.parameters())


def use_gpu(device: str | None) -> None:
    """A GPU that is named becomes this process's own: kernels are launched in the current device's context."""
    if device is not None and device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


@dataclass(frozen=True)
class LoadSeveral:
    """How several policies are made, by name. `budget`: bytes that they may take together."""

    loads: dict[str, Load]
    budget: int | None

    def __call__(self, device: str | None) -> Shelf:
        return Shelf({name: partial(load.sized, device) for name, load in self.loads.items()}, self.budget)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
