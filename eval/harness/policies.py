"""Where the actions come from: a policy in this process, one behind a websocket, or the expert.

A `PolicySource` is plain data that travels to worker processes; `load` turns it into an object
with `infer`, `reset` and `metadata`. `identity` is what makes two runs the same run: the content of a checkpoint rather
than its path."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eval.harness.actors import ExpertActor, PolicyActor, noise_shape
from eval.harness.benchmark import Benchmark
from eval.harness.protocol import Protocol
from eval.harness.rollout import Actor
from vla_accel.client import PolicyClient, check_address
from vla_accel.errors import ConfigError
from vla_accel.files import content_hash

Chunking = Literal["plain", "rtc"]
REMOTE_IDENTITY = ("policy", "model", "num_steps", "dtype")
ANSWER_TIMEOUT_S = 300.0  # a server may compile at its first request


@dataclass(frozen=True)
class PolicySource:
    """What to load.

    Attributes:
        kind: `local` (a checkpoint in this process), `remote` (a websocket) or `expert`.
        where: checkpoint path or name, websocket address, or empty for the expert.
        config: of a local policy: what `OptimizedPolicy.from_pretrained` takes (a file, or the name of a shipped
            configuration), or None for its default.
        device: `cpu`, `cuda`, or `auto` for the configuration's, for a local policy.
        chunking: `plain`, or `rtc` for chunks that are guided by what is left of the last one.
    """

    kind: Literal["local", "remote", "expert"]
    where: str = ""
    config: str | None = None
    device: str = "auto"
    chunking: Chunking = "plain"

    @classmethod
    def parse(cls, text: str, *, config: str | None, device: str, chunking: Chunking = "plain") -> PolicySource:
        """`ws://host:port`, `demo`, or a checkpoint's path.

        Raises:
            ConfigError: a malformed address, or a configuration for a policy that has its own.
        """
        if "://" not in text:
            return cls("local", text, config, device, chunking)
        check_address(text)
        if config is not None:
            raise ConfigError(f"config: a remote policy is configured at its server, got {config!r} with {text}")
        if device != "auto":
            raise ConfigError(f"device: a remote policy runs on its server's device, got {device} with {text}")
        return cls("remote", text, chunking=chunking)

    @property
    def name(self) -> str:
        """A short name for file names and titles."""
        if self.kind == "expert":
            return "expert"
        return "remote" if self.kind == "remote" else Path(self.where).name or "policy"

    def load(self) -> Any:
        """The policy; loading a checkpoint or connecting happens here.

        Raises:
            VlaAccelError: of the kind that fits, from the policy or the connection.
        """
        if self.kind == "remote":
            return PolicyClient(self.where, timeout_s=ANSWER_TIMEOUT_S)
        from vla_accel.policy import OptimizedPolicy

        device = None if self.device == "auto" else self.device
        return OptimizedPolicy.from_pretrained(self.where, self.config, device=device)


class PolicyBySteps:
    """Gives the policy for each step count; all of them share the weights of `policy`."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._by_steps: dict[int | None, Any] = {None: policy}

    def __call__(self, steps: int | None) -> Any:
        if steps not in self._by_steps:
            self._by_steps[steps] = self.policy.with_steps(steps)
        return self._by_steps[steps]


def make_actor(source: PolicySource, policies: PolicyBySteps | None, benchmark: Benchmark, protocol: Protocol) -> Actor:
    """The actor of `source`; only the expert needs no policies."""
    if source.kind == "expert":
        assert benchmark.make_expert is not None
        return ExpertActor(benchmark.make_expert())
    assert policies is not None
    # A request is never repeated: a lost answer is that episode's error, and the next `reset` connects again.
    guided = source.chunking == "rtc"
    return PolicyActor(policies, benchmark, protocol, send_noise=source.kind == "local", guided=guided)


def check_chunks(
    metadata: Mapping[str, Any], source: PolicySource, protocol: Protocol, *, supports_prev_chunk: bool
) -> None:
    """Raise `ConfigError` if a local policy with this metadata predicts fewer actions than are to be executed, or too
    few to have some left when they arrive, or if a policy takes no previous chunk and shall be guided by it."""
    if source.kind == "local":
        horizon, _ = noise_shape(metadata)
        for name, got, most in (
            ("replan", protocol.replan_steps, horizon),
            ("stress: latency", protocol.latency, horizon - 1),
        ):
            if got > most:
                fewer = "" if most == horizon else " less one"
                raise ConfigError(
                    f"{name}: expected at most the policy's {horizon} predicted actions{fewer}, got {got}"
                )
    if source.chunking == "rtc" and not supports_prev_chunk:
        raise ConfigError(
            "chunking: rtc: expected a policy with real-time chunking (supports_prev_chunk), got one without"
        )


def identity(source: PolicySource, policy: Any, benchmark: Benchmark) -> dict[str, Any]:
    """What must not change when a run is resumed (JSON types)."""
    chunking = {} if source.chunking == "plain" else {"chunking": source.chunking}
    if source.kind == "expert":
        assert benchmark.make_expert is not None
        module = Path(inspect.getfile(type(benchmark.make_expert())))
        content = b"".join(file.read_bytes() for file in sorted(module.parent.glob(f"{module.stem}*.py")))
        return {"kind": "expert", "sha256": hashlib.sha256(content).hexdigest()}
    if source.kind == "remote":
        known = {k: policy.metadata[k] for k in REMOTE_IDENTITY if k in policy.metadata}
        return {"kind": "remote", "address": source.where, "metadata": known, **chunking}
    # `auto` is replaced by the choice; the step count belongs to the protocol; empty options change nothing.
    from vla_accel.policy.agreement import weights_of

    config = asdict(policy.config.with_specs(policy.specs))
    del config["num_steps"]
    return {
        "kind": "local",
        "name": source.name,
        "sha256": _folder_hash(policy.checkpoint.folder),
        "weights": weights_of(policy.model),
        "config": json.loads(json.dumps({name: value for name, value in config.items() if value not in ((), {})})),
        "device": policy.metadata["device"],
        **({} if policy.checkpoint.lora is None else {"lora_sha256": _folder_hash(policy.checkpoint.lora)}),
        **chunking,
    }


def _folder_hash(folder: Path) -> str:
    """SHA-256 over the names and contents of a checkpoint's files."""
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        digest.update(f"{file.relative_to(folder)}:{content_hash(file)}\n".encode())
    return digest.hexdigest()
