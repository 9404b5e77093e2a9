"""`--ray`: what a cluster plays is what one machine plays, whatever dies on the way; and one error for each thing that
cannot be."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eval.harness import command
from eval.harness.evaluation import evaluate
from eval.harness.policies import PolicySource
from tests.support import toy_cluster as toy
from tests.support.ray_support import cluster_of
from tests.support.tiny import write_tiny_checkpoint
from tests.support.toy_command import Arguments
from tests.support.waiting import PATIENCE_S, silent_port
from vla_accel.cli.options import read
from vla_accel.errors import ConfigError, EngineError
from vla_accel.remote.cluster import connect

pytest.importorskip("ray", reason="NOT RUN: needs ray")
# Ray's own.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    return folder


def request(checkpoint: Path, output: Path, benchmark: Any, *words: str) -> Any:
    given = ["--policy", str(checkpoint), "--device", "cpu", "--steps", "2", "--output", str(output), *words]
    return command.make_request(benchmark, read(Arguments, given, "program"), given)


def outcomes(path: Path) -> list[tuple[Any, ...]]:
    names = ("task_id", "trial", "success", "env_steps", "infer_count", "error")
    return [tuple(episode[name] for name in names) for episode in json.loads(path.read_text())["episodes"]]


class Killer(threading.Thread):
    """Kills every replica, then a node, each when an episode says that it waits for that."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        super().__init__(daemon=True)
        self.cluster, self.folder = cluster, folder
        self.killed: list[str] = []

    def run(self) -> None:
        self._waits_for(1)
        for file in self.folder.glob("replica-*"):
            os.kill(int(file.name.split("-")[1]), signal.SIGKILL)
            self.killed.append("replica")
        (self.folder / "done-1").touch()
        node_id = self._waits_for(2)
        self.cluster.remove_node(
            next(n for n in self.cluster.worker_nodes if n.node_id == node_id), allow_graceful=False
        )
        self.killed.append("node")  # what it played waits on: nobody may finish it there

    def _waits_for(self, task: int) -> str:
        end = time.monotonic() + toy.WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                if text := (self.folder / f"waiting-{task}").read_text():
                    return text
            time.sleep(0.05)
        raise AssertionError(f"task {task} never began")


@pytest.mark.slow
def test_whatever_dies_each_episode_counts_once(tmp_path: Path, checkpoint: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    evaluate(request(checkpoint, tmp_path / "plain.json", toy.SEEING), console)
    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        output = tmp_path / "ray.json"
        asked = request(checkpoint, output, toy.doomed(tmp_path), "--ray", cluster.address)
        source = toy.NotingSource("local", asked.source.where, None, "cpu", folder=str(tmp_path))
        killer = Killer(cluster, tmp_path)
        killer.start()
        result = evaluate(replace(asked, source=source), console)
        killer.join(PATIENCE_S)
    assert killer.killed[0] == "replica" and killer.killed[-1] == "node" and (tmp_path / "waiting-0").exists()
    assert outcomes(output) == outcomes(tmp_path / "plain.json"), "nothing lost, nothing twice, and the same actions"
    log = (tmp_path / "ray.episodes.jsonl").read_text().splitlines()
    played = Counter((e["task_id"], e["trial"]) for e in map(json.loads, log) if e["kind"] == "episode")
    assert len(played) == len(toy.PROMPTS) * toy.TRIALS and set(played.values()) == {1}
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "task 0, trial 0, 2 steps is played again: its simulator on node" in said
    assert "task 1, trial 0, 2 steps is played again: the policy on node" in said
    assert "task 2, trial 0, 2 steps is played again: its simulator on node" in said
    lines = [re.findall(r"; ([\d.]+/\w{6}): (\d+) by (\d+)", line) for line in said.splitlines()]
    progress = [nodes for nodes in lines if nodes]
    assert [sum(int(played) for _, played, _ in nodes) for nodes in progress] == [*range(1, 1 + len(played))]
    assert len({name for nodes in progress for name, _, _ in nodes}) == 2
    assert sum(int(simulators) for _, _, simulators in progress[-1]) == 1, "the node that is gone has none"
    assert result["launches"][0]["workers"] == 2 and result["summary"]["rows"][0]["breakdown"]["engines"]


@pytest.mark.slow
def test_a_node_that_cannot_play_is_named(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nold = m.version\nm.version = lambda n: '0.1' if n == 'numpy' else old(n)\n"
    )
    other = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with cluster_of({"num_cpus": 1, "env_vars": other}) as cluster:
        asked = request(checkpoint, tmp_path / "run.json", toy.SEEING, "--ray", cluster.address)
        with pytest.raises(
            EngineError, match=r"node [\d.]+/\w{6}: expected the versions of this machine, got numpy 0.1 \("
        ):
            evaluate(asked, Console(quiet=True))
        cuda = replace(asked, source=PolicySource("local", str(checkpoint), device="cuda"))
        with pytest.raises(ConfigError, match="device: expected a GPU in the Ray cluster"):
            evaluate(cuda, Console(quiet=True))
    assert not (tmp_path / "run.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT RUN: there is a GPU")
def test_a_gpu_that_is_lent_but_not_there_is_an_error(tmp_path: Path, checkpoint: Path) -> None:
    with cluster_of({"num_cpus": 1, "num_gpus": 1}) as cluster:
        asked = request(checkpoint, tmp_path / "run.json", toy.SEEING, "--ray", cluster.address)
        asked = replace(asked, source=PolicySource("local", str(checkpoint)))
        with pytest.raises(EngineError, match=r"node [\d.]+/\w{6}: Ray assigns a GPU .* sees none"):
            evaluate(asked, Console(quiet=True))


def test_an_address_where_no_cluster_is_is_one_error(tmp_path: Path) -> None:
    with silent_port() as port:
        for address, message in (
            (f"127.0.0.1:{port}", f"ray: expected a cluster at 127.0.0.1:{port}, "),
            ("ray://head:10001", "ray: expected auto, local or HOST:PORT, got 'ray://head:10001'"),
            ("head", "ray: expected auto, local or HOST:PORT, got 'head'"),
        ):
            with pytest.raises(ConfigError, match=re.escape(message)):
                connect(address)
