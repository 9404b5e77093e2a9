"""`vla-accel serve CHECKPOINT`: a policy server that openpi's clients talk to. Knows only what the options mean."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from vla_accel import machine
from vla_accel.cli.asked.servers import Serve
from vla_accel.cli.common import check_names
from vla_accel.errors import ConfigError
from vla_accel.server import RayReplicas, Replicas, ServerConfig, Shelf, serve
from vla_accel.server.connection import websockets_server
from vla_accel.server.keys import Keys


def main(given: Serve, words: list[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = server_config(given)
    limits.require_free()
    log = logging.getLogger("vla_accel.server")
    load = loader(given)
    if given.ray is None:  # else it lies where the replicas are
        for one in load.loads.values() if isinstance(load, LoadSeveral) else (load,):
            check_names(one.checkpoint, one.config)
    if given.devices is not None and (given.device or given.ray):
        raise ConfigError("devices: expected --devices alone, got --device or --ray, too")
    devices = None if given.devices is None else machine.resolve_devices(given.devices)
    log.info("loading %s", ", ".join(given.policy) or given.checkpoint or "demo")
    if given.ray is not None:
        serve(RayReplicas(load, given.ray, given.device or "auto", machine.software), limits)
    elif devices is not None:
        serve(Replicas(load, devices), limits)
    else:
        several = isinstance(load, LoadSeveral)
        serve(load(given.device) if several else Shelf.later(lambda: load(given.device)), limits)
    return 0


def server_config(given: Serve) -> ServerConfig:
    """The server's part. Raises ConfigError, also for an open door that nobody asked for."""
    if given.max_wait_ms is not None and given.max_batch == 1:
        raise ConfigError(f"max-wait-ms: expected --max-batch above 1 with it, got {given.max_wait_ms:g} alone")
    config = ServerConfig(
        host=given.host,
        port=given.port,
        api_key_file=given.api_key_file,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        page=not given.no_page,
        max_payload=int(given.max_payload_mib * 2**20),
        max_clients=given.max_clients,
        request_timeout_s=given.timeout_s,
        grace_s=given.grace_s,
        max_batch=given.max_batch,
        max_observations=given.max_observations,
        rate_limit=given.rate_limit,
        max_wait_s=ServerConfig.max_wait_s if given.max_wait_ms is None else given.max_wait_ms / 1e3,
    )
    if given.insecure and (given.api_key_file is not None or not config.beyond):
        got = "--api-key-file" if given.api_key_file is not None else f"--host {given.host}"
        raise ConfigError(f"insecure: expected a --host beyond this machine and no key file, got {got}")
    if given.api_key_file is None and not given.insecure and config.beyond:
        raise ConfigError(
            f"host: {given.host or 'every address'} without a key lets in whoever reaches it: expected "
            "--api-key-file, or --insecure"
        )
    # Before the policy is loaded: a missing package and files of no use are an error at once.
    websockets_server()
    Keys(file=given.api_key_file)
    config.tls()
    return config


def loader(given: Serve) -> Load | LoadSeveral:
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
