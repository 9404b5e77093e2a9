"""Where the actions come from: a policy in this process, one behind a websocket, or the scripted expert."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eval.harness.benchmark import Benchmark, Expert
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import Actor
from eval.harness.stress import disturb
from vla_accel.client import PolicyClient, check_address, read_key
from vla_accel.errors import ConfigError, EngineError
from vla_accel.files import content_hash, user_path
from vla_accel.remote.ensemble import TEMPORAL_ENSEMBLE, TemporalEnsemble
from vla_accel.remote.metadata import WARM_START, ensemble_of, history_of, max_delay

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vla_accel")

Chunking = Literal["plain", "rtc", "warm"]
LEROBOT = "lerobot:"
"""Prefix of a folder that lerobot's own code plays."""
REMOTE_IDENTITY = ("policy", "weights", "model", "num_steps", "schedule", WARM_START, TEMPORAL_ENSEMBLE, "dtype")
WARM_UP_CALLS = 2
ANSWER_TIMEOUT_S = 300.0  # a server may compile at its first request


@dataclass(frozen=True)
class PolicySource:
    """What to load; plain data that travels to worker processes.

    Attributes:
        kind: `local` (a checkpoint in this process), `lerobot` (lerobot's own code in this process), `remote` (a
            websocket) or `expert`.
        where: checkpoint path or name, websocket address, or empty for the expert.
        config: of a local policy: what `OptimizedPolicy.from_pretrained` takes, or None for its default.
        chunking: `plain`; `rtc` for chunks that are guided by the rest of the last one; `warm` for chunks that start
            from it.
        load_lerobot: of a `lerobot` policy: the benchmark's function that loads it.
        api_key_file: of a remote policy: the file with its key, which each worker process reads.
        tls_ca: of a remote policy: the file with the certificates to trust.
    """

    kind: Literal["local", "lerobot", "remote", "expert"]
    where: str = ""
    config: str | None = None
    device: str = "auto"
    chunking: Chunking = "plain"
    load_lerobot: Callable[[Path, torch.device], Any] | None = None
    api_key_file: Path | None = None
    tls_ca: Path | None = None

    @classmethod
    def parse(
        cls, text: str, benchmark: Benchmark, *, config: str | None, device: str, chunking: Chunking = "plain",
        api_key_file: Path | None = None, tls_ca: Path | None = None,
    ) -> PolicySource:  # fmt: skip
        """`ws://host:port`, `demo`, a checkpoint's path, or `lerobot:` and the path of a folder of lerobot's.

        Raises:
            ConfigError: a malformed address, a configuration for a policy that has its own, a key or certificates for a
                policy that is no server, a key that cannot be read, or lerobot's code where the benchmark cannot load
                it.
        """
        for name, file in (("api_key_file", api_key_file), ("tls_ca", tls_ca)):
            if file is not None and "://" not in text:
                raise ConfigError(f"{name}: expected --policy ws://host:port with it, got {text}")
        if text.startswith(LEROBOT):
            if benchmark.load_lerobot is None:
                raise ConfigError(f"policy: {benchmark.name} runs no policies with lerobot's own code, got {text}")
            if config is not None or chunking != "plain":
                raise ConfigError(f"policy: {text} runs as lerobot saved it; leave --config and --chunking out")
            folder = str(user_path(text.removeprefix(LEROBOT)))
            return cls("lerobot", folder, device=device, load_lerobot=benchmark.load_lerobot)
        if "://" not in text:
            return cls("local", text, config, device, chunking)
        check_address(text)
        if config is not None:
            raise ConfigError(f"config: a remote policy is configured at its server, got {config!r} with {text}")
        if device != "auto":
            raise ConfigError(f"device: a remote policy runs on its server's device, got {device} with {text}")
        if api_key_file is not None:
            read_key(api_key_file)  # refuse it before any worker starts
        return cls("remote", text, chunking=chunking, api_key_file=api_key_file, tls_ca=tls_ca)

    @property
    def name(self) -> str:
        """A short name for file names and titles."""
        if self.kind == "expert":
            return "expert"
        return "remote" if self.kind == "remote" else Path(self.where).name or "policy"

    def load(self) -> Any:
        """Load a checkpoint, or connect; returns an object with `infer`, `reset` and `metadata`."""
        if self.kind == "remote":
            key = None if self.api_key_file is None else read_key(self.api_key_file)
            return PolicyClient(self.where, api_key=key, tls_ca=self.tls_ca, timeout_s=ANSWER_TIMEOUT_S)
        if self.kind == "lerobot":
            from vla_accel.machine import resolve_device

            assert self.load_lerobot is not None
            return self.load_lerobot(Path(self.where), resolve_device(self.device))
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


class PolicyActor:
    """Acts by `policy.infer`.

    Args:
        policies: returns the policy for a step count.
        protocol: its seed, with task, trial and call index, determines the noise of every call, and its disturbances of
            the observation, so that they are equal for all step counts, engines and numbers of workers.
        send_noise: False for a server, which draws its own.
        chunking: other than `plain`: pass the rest of the last chunk to the policy; for `rtc` also how many of its
            actions will be executed before the answer arrives.
    """

    looks = True
    history = 1
    ensemble: TemporalEnsemble | None = None

    def __init__(
        self,
        policies: Callable[[int | None], Any],
        benchmark: Benchmark,
        protocol: Protocol,
        *,
        send_noise: bool = True,
        chunking: Chunking = "plain",
    ) -> None:
        self._policies, self._benchmark, self._protocol = policies, benchmark, protocol
        self._send_noise, self._chunking = send_noise, chunking
        self.timings: dict[str, list[float]] = {}
        self.observation: Mapping[str, Any] = {}

    def warm_up(self, instruction: str) -> None:
        """Run every step count on an example, so that no episode pays for the first calls of a task."""
        obs = {**self._benchmark.example_observation(self._protocol.settings), "prompt": instruction}
        for steps in self._protocol.steps:
            policy = self._policies(steps)
            seen = history_of(policy)
            one = obs if seen is None else dict(seen.add(obs))
            for _ in range(WARM_UP_CALLS):
                policy.infer(one)

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        self.timings = {}
        self._key, self._instruction, self._call = key, instruction, 0
        self._policy = self._policies(key.steps)
        self._policy.reset()
        self._seen, self.ensemble = history_of(self._policy), ensemble_of(self._policy)
        self.history = 1 if self._seen is None else self._seen.count

    def observe(self, env: Any) -> None:
        self._observed(env)

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        protocol, obs = self._protocol, self._observed(env)
        options: dict[str, Any] = {"noise": self._noise(self._call)} if self._send_noise else {}
        if self._chunking != "plain" and left is not None:
            options["prev_chunk"] = left
        if self._chunking == "rtc" and left is not None:
            most = max_delay(self._policy)
            delay = min(protocol.latency, len(left))
            options["inference_delay"] = delay if most is None else min(delay, most)
        start = time.perf_counter()
        out = self._policy.infer(obs, **options)
        wall = (time.perf_counter() - start) * 1e3
        self._call += 1
        self._record(out.get("policy_timing", {}), wall)
        return self._checked(out["actions"])

    def _observed(self, env: Any) -> dict[str, Any]:
        """The present observation, disturbed, with its history."""
        protocol = self._protocol
        episode = (protocol.seed, self._key.task_id, self._key.trial)
        seen = disturb(env.observation(), self._benchmark.cameras, protocol.stress, episode=episode, call=self._call)
        self.observation = obs = {**seen, "prompt": self._instruction}
        return obs if self._seen is None else dict(self._seen.add(obs))

    def _record(self, timing: Mapping[str, Any], wall: float) -> None:
        row = {name.removesuffix("_ms"): float(value) for name, value in timing.items()}
        row["wall"] = wall
        if self.timings and set(row) != set(self.timings):
            raise EngineError(
                f"policy_timing: expected {sorted(self.timings)}, as in the first call, got {sorted(row)}"
            )
        for name, value in row.items():
            self.timings.setdefault(name, []).append(value)

    def _noise(self, call: int) -> np.ndarray:
        """Standard normal noise of the shape that the policy takes, float32."""
        metadata = self._policy.metadata
        shape = metadata.get("noise_shape") or chunk_shape(metadata)
        rng = np.random.default_rng([self._protocol.seed, self._key.task_id, self._key.trial, call])
        return rng.standard_normal(shape).astype(np.float32)

    def _checked(self, actions: Any) -> list[np.ndarray]:
        chunk, size = np.asarray(actions, dtype=np.float64), self._benchmark.action_dim
        replan, latency = self._protocol.replan_steps, self._protocol.latency
        count = max(replan, latency + 1)
        if chunk.ndim != 2 or len(chunk) < count or chunk.shape[1] != size:
            late = f", {latency} ticks late" if latency else ""
            raise EngineError(
                f"actions: expected at least {count} of {size} numbers, to replan every {replan} steps{late}, "
                f"got {chunk.shape}"
            )
        if not np.isfinite(chunk).all():
            raise EngineError("actions: expected finite numbers, got NaN or infinity")
        return list(chunk)


class ExpertActor:
    """Acts by the scripted expert, which reads the simulator instead of cameras."""

    looks = False
    history = 1
    ensemble: TemporalEnsemble | None = None

    def __init__(self, expert: Expert) -> None:
        self._expert = expert
        self.timings: dict[str, list[float]] = {}
        self.observation: Mapping[str, Any] = {}

    def warm_up(self, instruction: str) -> None:
        pass

    def begin(self, key: EpisodeKey, instruction: str) -> None:
        self.timings = {}

    def observe(self, env: Any) -> None:
        pass

    def actions(self, env: Any, left: np.ndarray | None) -> Sequence[np.ndarray]:
        return [self._expert.act(env)]


def chunk_shape(metadata: Mapping[str, Any]) -> tuple[int, int]:
    """(horizon, action_dim) of a policy, from its metadata."""
    try:
        return int(metadata["action_horizon"]), int(metadata["action_dim"])
    except KeyError as key:
        raise ConfigError(f"policy metadata: expected action_horizon and action_dim, missing {key}") from None


def make_actor(source: PolicySource, policies: PolicyBySteps | None, benchmark: Benchmark, protocol: Protocol) -> Actor:
    """The actor of `source`; only the expert needs no policies."""
    if source.kind == "expert":
        assert benchmark.make_expert is not None
        return ExpertActor(benchmark.make_expert())
    assert policies is not None
    # A request is never repeated: a lost answer is that episode's error, and the next `reset` connects again.
    send_noise = source.kind != "remote"
    return PolicyActor(policies, benchmark, protocol, send_noise=send_noise, chunking=source.chunking)


def check_chunks(
    metadata: Mapping[str, Any], source: PolicySource, protocol: Protocol, *, supports_prev_chunk: bool
) -> None:
    """Raise `ConfigError` if a policy in this process with this metadata predicts fewer actions than are to be
    executed, or too few to have some left when they arrive, or if it cannot use a previous chunk as `source.chunking`
    says."""
    if source.kind != "remote":
        horizon = metadata.get("returned_actions") or chunk_shape(metadata)[0]
        most = f"expected at most the policy's {horizon} predicted actions"
        if protocol.replan_steps > horizon:
            raise ConfigError(f"replan: {most}, got {protocol.replan_steps}")
        if protocol.latency >= horizon:
            raise ConfigError(f"stress: latency: {most} less one, got {protocol.latency}")
        if source.chunking == "warm" and protocol.replan_steps == horizon and not protocol.latency:
            raise ConfigError(f"replan: {most} less one, to leave some for a warm start, got {protocol.replan_steps}")
    if source.chunking == "rtc" and not supports_prev_chunk:
        raise ConfigError(
            "chunking: rtc: expected a policy with real-time chunking (supports_prev_chunk), got one without"
        )
    if source.chunking == "warm" and metadata.get(WARM_START) is None:
        raise ConfigError("chunking: warm: expected a policy whose configuration has warm_start, got one without")
    if source.chunking == "plain" and metadata.get(WARM_START) is not None:
        log.warning("chunking: plain: every chunk starts from noise; chunking: warm uses the policy's warm_start")
    if metadata.get(TEMPORAL_ENSEMBLE) is not None and protocol.replan_steps > 1:
        log.warning(
            "replan: %d: the policy's temporal ensembling averages fewer predictions of a step than with replan 1, as "
            "lerobot runs it", protocol.replan_steps,
        )  # fmt: skip


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
    if source.kind == "lerobot":
        content, device = _folder_hash(Path(source.where)), policy.metadata["device"]
        return {"kind": "lerobot", "name": source.name, "sha256": content, "device": device}
    # `auto` is replaced by the choice; the step count belongs to the protocol; empty options change nothing.
    from vla_accel.policy.agreement import weights_of

    config = asdict(policy.config.with_specs(policy.specs))
    del config["num_steps"]
    for name in ("schedule", "warm_start"):
        if config[name] is None:
            del config[name]
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
