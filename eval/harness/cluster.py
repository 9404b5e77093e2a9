"""Play a run on a Ray cluster: a replica of the policy on each GPU, simulators wherever there are cores.

This process hands out episodes and collects their results; only it writes. A process that dies is replaced where the
cluster has free cores. An episode whose simulator, replica or node died is played again from its start, and counts
once; after `TRIES` times it is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.harness.benchmark import Benchmark
from eval.harness.cluster_actors import Played, Replica, Simulator
from eval.harness.log import differences
from eval.harness.policies import PolicySource
from eval.harness.protocol import EpisodeKey, Protocol
from eval.harness.rollout import EpisodeResult
from eval.harness.runner import Setup, software
from eval.harness.sharing import Schedule
from eval.harness.workers import Loaded, LocalWorkers
from vla_accel.errors import EngineError, VlaAccelError
from vla_accel.files import replacing
from vla_accel.remote import cluster
from vla_accel.remote.cluster import last_line

TRIES = 5
START_TIMEOUT_S = 60.0
"""Longest wait for a free core or GPU while nothing else happens."""
Then = Callable[[Any, Any], "Iterable[EpisodeResult]"]


@dataclass(eq=False)
class _Actor:
    """A process on a node: its Ray handle, and the name of the node once it is known."""

    handle: Any
    node: str = "not placed"
    dead: bool = False


@dataclass(eq=False)
class _Replica(_Actor):
    place: cluster.Placement | None = None
    loaded: Loaded | None = None


@dataclass(eq=False)
class _Simulator(_Actor):
    placed: bool = False
    replica: _Replica | None = None
    episode: EpisodeKey | None = None
    task: tuple[str, int] | None = None


class RayWorkers:
    """Simulators and replicas on a cluster, with the methods of `LocalWorkers`.

    Args:
        address: `auto`, `local` or HOST:PORT.
        workers: simulators; None for one for each core.
        warn: receives a message for each process that dies.

    Raises:
        ConfigError: no cluster at that address, or a GPU is requested and no node has one.
        EngineError: a node has other versions, or loads another policy.
    """

    def __init__(
        self, address: str, source: PolicySource, benchmark: Benchmark, workers: int | None, warn: Callable[[str], None]
    ) -> None:
        self._source, self._benchmark, self._warn = source, benchmark, warn
        self._nodes: dict[str, cluster.Node] = {}
        self._pending: dict[Any, tuple[_Actor, Then]] = {}
        self._replicas: list[_Replica] = []
        self._simulators: list[_Simulator] = []
        self._played: Counter[str] = Counter()
        self._tries: Counter[EpisodeKey] = Counter()
        self._failed_starts = 0
        self._schedule = Schedule([])
        self._ray = cluster.connect(address)
        try:
            nodes = cluster.nodes(self._ray)
            places = cluster.placements(nodes, source.device) if source.kind == "local" else []
            for node in nodes:
                self._check(node)
            self.size = max(1, sum(node.cores for node in nodes) if workers is None else workers)
            for place in places[: self.size]:
                self._start_replica(place)
            if source.kind == "local":
                known = self._any_replica().loaded
                assert known is not None
            else:
                known = LocalWorkers(source, benchmark, self.size).loaded
            listed = sorted(f"{node.cores} cores, {node.gpus} GPUs" for node in nodes)
            hardware = {**known.hardware, "nodes": listed}
            self.loaded = Loaded(known.metadata, known.identity, hardware, known.supports_prev_chunk)
        except BaseException:
            self.close()
            raise

    def metadata_at(self, steps: int | None) -> Mapping[str, Any]:
        if self._source.kind != "local":
            return self.loaded.metadata or {}
        while True:
            replica = self._any_replica()
            try:
                return self._ray.get(replica.handle.metadata_at.remote(steps))
            except self._ray.exceptions.RayActorError as error:
                self._replica_died(replica, error)

    def warm_up(self, protocol: Protocol, instruction: str) -> None:
        """Nothing: a simulator warms its replica up when it builds the environment of a task."""

    def play(self, setup: Setup, episodes: Sequence[EpisodeKey]) -> Generator[EpisodeResult, None, None]:
        self._setup, self._schedule = setup, Schedule(episodes)
        left = set(episodes)
        try:
            for _ in range(min(self.size, len(episodes))):
                self._start_simulator()
            while left:
                for result in self._wait():
                    left.remove(result.key)
                    yield result
        finally:
            for simulator in self._simulators:
                self._forget(simulator)
            self._simulators.clear()

    def nodes(self) -> Mapping[str, tuple[int, int]]:
        living = Counter(simulator.node for simulator in self._simulators if simulator.placed)
        return {name: (living[name], self._played[name]) for name in sorted({*living, *self._played})}

    def close(self) -> None:
        for actor in (*self._simulators, *self._replicas):
            self._forget(actor)
        self._ray.shutdown()

    # -- events -------------------------------------------------------------------------------------------------------

    def _wait(self) -> Iterator[EpisodeResult]:
        """Handle the next event; yields the results of episodes, if it was one."""
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=START_TIMEOUT_S)
        if not ready and not self._busy():
            raise EngineError(
                f"ray: expected free resources for a {'simulator (a core)' if self._simulators else 'policy'} on the "
                f"cluster, got none for {START_TIMEOUT_S:.0f} s"
            )
        for reference in ready:
            actor, then = self._pending.pop(reference)
            try:
                value = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(actor.node, error) from error
            except self._ray.exceptions.RayError as error:
                yield from self._died(actor, error)
            else:
                yield from then(actor, value)

    def _busy(self) -> bool:
        """Whether an episode is played or a policy loads, either of which may take any time."""
        loads = any(then == self._replica_loaded for _, then in self._pending.values())
        return loads or any(simulator.episode is not None for simulator in self._simulators)

    def _await(self, reference: Any, actor: _Actor, then: Then) -> None:
        self._pending[reference] = (actor, then)

    def _died(self, actor: _Actor, error: Exception) -> Iterator[EpisodeResult]:
        if isinstance(actor, _Replica):
            self._replica_died(actor, error)
            return
        assert isinstance(actor, _Simulator)
        if not actor.placed:
            self._count_failed_start(actor, error)
        self._forget(actor)
        self._simulators.remove(actor)
        if actor.episode is not None:
            yield from self._again(actor.episode, f"its simulator on node {actor.node} ended ({last_line(error)})")
        self._start_simulator()
        self._assign()

    def _replica_died(self, replica: _Replica, error: Exception) -> None:
        """Start another; the simulators give their episodes back as they notice."""
        if replica.dead:
            return
        if replica.loaded is None:
            self._count_failed_start(replica, error)
        self._forget(replica)
        self._replicas.remove(replica)
        self._warn(f"the policy on node {replica.node} ended ({last_line(error)}); another is started")
        assert replica.place is not None
        self._start_replica(replica.place)

    def _count_failed_start(self, actor: _Actor, error: Exception) -> None:
        self._failed_starts += 1
        if self._failed_starts >= TRIES:
            what = "policy" if isinstance(actor, _Replica) else "simulator"
            raise EngineError(
                f"node {actor.node}: a {what} ended {TRIES} times as it started: {last_line(error)}"
            ) from error

    def _forget(self, actor: _Actor) -> None:
        """End a process, and ignore its pending events."""
        actor.dead = True
        self._pending = {ref: waiting for ref, waiting in self._pending.items() if waiting[0] is not actor}
        self._ray.kill(actor.handle)

    def _check(self, node: cluster.Node) -> None:
        """Check the versions of a node."""
        cluster.check_node(self._ray, node, partial(software, self._benchmark))
        self._nodes[node.id] = node

    def _name(self, node_id: str) -> str:
        """The name of a node; one that joined later is checked first."""
        if node_id not in self._nodes:
            for node in cluster.nodes(self._ray):
                if node.id == node_id:
                    self._check(node)
        return self._nodes[node_id].name if node_id in self._nodes else node_id[:6]

    # -- replicas -----------------------------------------------------------------------------------------------------

    def _start_replica(self, place: cluster.Placement) -> None:
        make = self._ray.remote(**place.options(self._ray))(Replica)
        replica = _Replica(make.remote(self._source, self._benchmark, place.gpu), place=place)
        self._replicas.append(replica)
        self._await(replica.handle.place.remote(), replica, self._replica_placed)

    def _replica_placed(self, replica: _Replica, node_id: str) -> Iterable[EpisodeResult]:
        replica.node = self._name(node_id)
        self._await(replica.handle.load.remote(), replica, self._replica_loaded)
        return ()

    def _replica_loaded(self, replica: _Replica, loaded: Loaded) -> Iterable[EpisodeResult]:
        first = next((other for other in self._replicas if other.loaded is not None), None)
        if first is not None and first.loaded is not None:
            if loaded.identity != first.loaded.identity:
                what = differences(first.loaded.identity, loaded.identity)
                raise EngineError(f"node {replica.node}: expected the policy of node {first.node}, got another: {what}")
            if loaded.hardware != first.loaded.hardware:
                self._warn(f"nodes {first.node} and {replica.node} differ: latencies are those of both")
        replica.loaded = loaded
        self._failed_starts = 0
        self._assign()
        return ()

    def _any_replica(self) -> _Replica:
        """A replica that has loaded its policy; waits for one."""
        while True:
            for replica in self._replicas:
                if replica.loaded is not None:
                    return replica
            for _ in self._wait():
                raise AssertionError("no episode is played before a policy is loaded")

    # -- simulators ---------------------------------------------------------------------------------------------------

    def _start_simulator(self) -> None:
        make = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(Simulator)
        metadata = self.loaded.metadata if self._source.kind == "local" else None
        simulator = _Simulator(make.remote(self._setup, metadata))
        self._simulators.append(simulator)
        self._await(simulator.handle.place.remote(), simulator, self._simulator_placed)

    def _simulator_placed(self, simulator: _Simulator, node_id: str) -> Iterable[EpisodeResult]:
        simulator.node, simulator.placed = self._name(node_id), True
        self._failed_starts = 0
        self._assign()
        return ()

    def _assign(self) -> None:
        """Give every idle simulator its next episode."""
        for simulator in self._simulators:
            if not simulator.placed or simulator.episode is not None:
                continue
            replica = self._least_busy(simulator)
            if replica is None and self._source.kind == "local":
                return
            busy = {other.task for other in self._simulators if other.episode is not None}
            episode = self._schedule.next(simulator.task, busy)
            if episode is None:
                return
            simulator.episode, simulator.task, simulator.replica = episode, episode.task, replica
            handle = None if replica is None else replica.handle
            self._await(simulator.handle.play.remote(episode, handle), simulator, self._simulator_played)

    def _least_busy(self, simulator: _Simulator) -> _Replica | None:
        """The replica with the fewest simulators; among equals one on the simulator's own node."""
        count = Counter(id(other.replica) for other in self._simulators if other.episode is not None)
        loaded = [replica for replica in self._replicas if replica.loaded is not None]
        return min(loaded, key=lambda r: (count[id(r)], r.node != simulator.node), default=None)

    def _simulator_played(self, simulator: _Simulator, played: Played | None) -> Iterable[EpisodeResult]:
        episode, simulator.episode = simulator.episode, None
        assert episode is not None
        if played is None:
            assert simulator.replica is not None
            self._replica_died(simulator.replica, EngineError("a simulator received no answer"))
            yield from self._again(episode, f"the policy on node {simulator.replica.node} ended")
        self._assign()  # before the result is handled, so that the simulator does not wait
        if played is not None:
            self._played[simulator.node] += 1
            folder, name = self._setup.video_folder, played.result.video
            if played.video is not None and folder is not None and name is not None:
                with replacing(folder / name) as temporary:
                    temporary.write_bytes(played.video)
            yield played.result

    def _again(self, episode: EpisodeKey, why: str) -> Iterator[EpisodeResult]:
        """Schedule an unfinished episode again; after `TRIES` times yield it as an error."""
        self._tries[episode] += 1
        if self._tries[episode] >= TRIES:
            yield EpisodeResult(episode, False, 0, f"PlayerDied: {TRIES} times; at last {why}", 0.0, 0)
            return
        self._warn(f"{episode} is played again: {why}")
        self._schedule.give_back(episode)


def _cause(node: str, error: Any) -> VlaAccelError:
    """The error that a process on a node raised, with the name of the node."""
    cause = error.cause
    if isinstance(cause, VlaAccelError):
        return type(cause)(f"node {node}: {cause}")
    return EngineError(f"node {node}: {cluster.cause(error)}")
