"""`vla-accel serve CHECKPOINT`: a policy server for openpi's clients."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from vla_accel.cli.options import Argument, Count, PolicySource, Seconds, StepOptions, ViewTarget, Within
from vla_accel.config import load_config
from vla_accel.errors import ConfigError
from vla_accel.server import PolicyRegistry, RayReplicas, Replicas, ServerConfig, serve
from vla_accel.server.connection import websockets_server
from vla_accel.server.keys import Keys
from vla_accel.server.metrics import prometheus
from vla_accel.view import open_view

_DEFAULTS = ServerConfig()


@dataclass(frozen=True)
class Serve(StepOptions, PolicySource):
    """Serve a policy over openpi's websocket protocol: openpi-client and `vla_accel.client` talk to it unchanged.

    GET / is a live page, GET /healthz a health check, GET /metrics is for Prometheus. SIGTERM finishes the running
    requests.
    """

    host: str = _DEFAULTS.host
    """Address to listen on. 0.0.0.0 is every network of this machine; it requires keys, or --insecure."""
    port: Annotated[int, Within(0, 65535)] = _DEFAULTS.port
    """Port; 0 picks a free one."""
    api_key_file: Path | None = None
    """File with the key that clients must send as `Authorization: Api-Key …`, or with several in lines `NAME: KEY`. It
    is read again when it changes."""
    tls_cert: Path | None = None
    """Certificate chain (PEM); the server then speaks wss and https, and keys are sent encrypted."""
    tls_key: Path | None = None
    """The certificate's private key (PEM), if it is not in the same file."""
    insecure: bool = False
    """With a --host that other machines can reach: accept clients without a key."""
    no_page: bool = False
    """Disable the live page at GET /."""
    view: ViewTarget = None
    """Show camera images, chunks and latencies in rerun: "rerun" starts its viewer, "rerun://HOST:PORT" names one that
    runs, "rerun:FILE.rrd" records into a file. Not with --devices or --ray."""
    max_clients: Count = _DEFAULTS.max_clients
    """Maximum number of connections."""
    max_payload_mib: Annotated[float, Within(0, above=True)] = _DEFAULTS.max_payload / 2**20
    """Maximum size of a message."""
    timeout_s: Seconds = _DEFAULTS.request_timeout_s
    """Maximum time for a request."""
    grace_s: Annotated[float, Within(0)] = _DEFAULTS.grace_s
    """At shutdown, how long running requests may still take."""
    max_batch: Count = _DEFAULTS.max_batch
    """Observations of different clients that run together: 1, 2, 4, 8, …; each batch size builds its own engines."""
    max_observations: Count = _DEFAULTS.max_observations
    """Maximum number of observations of a request."""
    rate_limit: Annotated[float | None, Argument("PER_SECOND"), Within(0, above=True)] = None
    """Observations per second of each client (the key's name, or its address); a faster client waits."""
    max_wait_ms: Annotated[float | None, Argument("MS"), Within(0)] = None
    """With --max-batch above 1: how long a batch waits to become full. Default: 5."""
    policy: Annotated[tuple[str, ...], Argument("NAME=CONFIG:CHECKPOINT", repeat=True)] = ()
    """One of several policies; repeat the option for each. Clients choose by the key `policy` or by the address's path;
    the first is the default. CONFIG may be auto."""
    memory_budget_gib: Annotated[float | None, Argument("GIB"), Within(0, above=True)] = None
    """With several policies: unload the least recently used ones beyond this, and load them again on request."""
    device: str | None = None
    """cpu, cuda or cuda:N instead of the configuration's."""
    devices: str | None = None
    """A process with the policy on each of these devices, behind one address: all, or a list like cuda:0,cuda:1."""
    ray: str | None = None
    """A process with the policy on each GPU of a Ray cluster (or on each machine without GPUs), behind one address:
    "auto" for this machine's cluster, HOST:PORT for another, "local" to start one on this machine."""


def main(options: Serve, words: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    from vla_accel import machine
    from vla_accel.cli.common import check_names

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = server_config(options)
    config.require_free()
    load = loader(options)
    if options.ray is None:  # on a cluster, the checkpoint is on its machines
        for one in load.loads.values() if isinstance(load, LoadSeveral) else (load,):
            check_names(one.checkpoint, one.config)
    if options.devices is not None and (options.device or options.ray):
        raise ConfigError("devices: expected --devices alone, got --device or --ray, too")
    devices = None if options.devices is None else machine.resolve_devices(options.devices)
    if options.view is not None and (options.devices or options.ray):
        raise ConfigError("view: expected a policy in this process, got --devices or --ray")
    names = ", ".join(options.policy) or options.checkpoint or "demo"
    logging.getLogger("vla_accel.server").info("loading %s", names)
    if options.ray is not None:
        serve(RayReplicas(load, options.ray, options.device or "auto", machine.software), config)
    elif devices is not None:
        serve(Replicas(load, devices), config)
    else:
        with closing(open_view(options.view)) as view:
            registry = load(options.device) if isinstance(load, LoadSeveral) else None
            serve(registry or PolicyRegistry.single(lambda: load(options.device)), config, view)
    return 0


def server_config(options: Serve) -> ServerConfig:
    """The server's configuration. Raises ConfigError for an open server without --insecure, and for unusable files."""
    if options.max_wait_ms is not None and options.max_batch == 1:
        raise ConfigError(f"max-wait-ms: expected --max-batch above 1 with it, got {options.max_wait_ms:g} alone")
    shared = vars(options).keys() & ServerConfig.__dataclass_fields__.keys()
    config = ServerConfig(
        **{name: getattr(options, name) for name in shared},
        page=not options.no_page,
        max_payload=int(options.max_payload_mib * 2**20),
        request_timeout_s=options.timeout_s,
        max_wait_s=_DEFAULTS.max_wait_s if options.max_wait_ms is None else options.max_wait_ms / 1e3,
    )
    if options.insecure and (options.api_key_file is not None or not config.public):
        got = "--api-key-file" if options.api_key_file is not None else f"--host {options.host}"
        raise ConfigError(f"insecure: expected a --host beyond this machine and no key file, got {got}")
    if options.api_key_file is None and not options.insecure and config.public:
        raise ConfigError(
            f"host: {options.host or 'every address'} without a key accepts everyone who can reach it: expected "
            "--api-key-file, or --insecure"
        )
    # Before the policy loads: a missing package or an unusable file is an error at once.
    websockets_server()
    prometheus()
    Keys(file=options.api_key_file)
    config.tls()
    return config


def loader(options: Serve) -> Load | LoadSeveral:
    """The loader of the policy, or of several. Raises ConfigError for options that exclude each other."""
    if not options.policy:
        if options.memory_budget_gib is not None:
            raise ConfigError("memory-budget-gib: expected several policies (--policy) to share it, got one")
        return Load(options.checkpoint or "demo", options.config, options.steps, options.lora)
    if options.checkpoint or options.config or options.lora:
        raise ConfigError("policy: expected --policy, or a checkpoint with --config and --lora, got both")
    loads: dict[str, Load] = {}
    for text in options.policy:
        name, _, rest = text.partition("=")
        config, _, checkpoint = rest.partition(":")
        if not re.fullmatch(r"[\w.-]+", name) or not checkpoint or name in loads or name in ("healthz", "metrics"):
            raise ConfigError(f"policy: expected NAME=CONFIG:CHECKPOINT, each name once, got {text!r}")
        loads[name] = Load(checkpoint, config or None, options.steps)
    budget = options.memory_budget_gib
    return LoadSeveral(loads, None if budget is None else int(budget * 2**30))


@dataclass(frozen=True)
class Load:
    """Loads a policy, in this process or in a replica's."""

    checkpoint: str
    config: str | None
    steps: StepOptions = field(default_factory=StepOptions)
    lora: str | None = None

    def __call__(self, device: str | None) -> Any:
        """The policy on a device (None: the configuration's). A GPU becomes the process's current device."""
        from vla_accel.policy import OptimizedPolicy

        use_gpu(device)
        settings = self.steps.with_steps(load_config(self.config))
        return OptimizedPolicy.from_pretrained(self.checkpoint, settings, device=device, lora=self.lora)

    def sized(self, device: str | None) -> tuple[Any, int]:
        """The policy and its size in bytes: on a GPU the memory that torch reserved for it, on a CPU its parameters."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
        policy = self(device)
        if policy.device.type == "cuda":
            return policy, max(0, torch.cuda.memory_reserved(policy.device) - before)
        return policy, sum(p.numel() * p.element_size() for p in policy.model.parameters())


def use_gpu(device: str | None) -> None:
    """Make a GPU that is named the process's current device, in whose context kernels are launched."""
    if device is not None and device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(device)


@dataclass(frozen=True)
class LoadSeveral:
    """Loads several policies by name, within a budget in bytes."""

    loads: dict[str, Load]
    budget: int | None

    def __call__(self, device: str | None) -> PolicyRegistry:
        return PolicyRegistry({name: partial(load.sized, device) for name, load in self.loads.items()}, self.budget)
