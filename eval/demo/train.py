"""Train a demo checkpoint: flow matching on the expert's chunks, with concurrent DAgger collection.

`python -m eval.demo.train --start DIR --states DIR --out DIR --minutes 20` uses every GPU it sees: one process a
GPU, each with its own collectors and its own store of observations on the device. Collectors request actions between
two optimisation steps, so the states come from the policy as it is now; some of its episodes are trials from start
states that are held out, and success in them is printed. `--start` is a checkpoint of `assets`; `--out` gets whole
checkpoints as the run goes, of which the newest is what a killed run leaves (`--resume DIR` continues from it, with an
`--out` of its own).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from eval.demo.assets import INSTRUCTIONS, stored
from eval.demo.average import Averaged
from eval.demo.collectors import Collectors, Seen, Store
from eval.demo.objective import Trainee
from eval.demo.settings import TASKS, TrainConfig
from eval.script import run_script
from vla_accel.checkpoints.writer import save_weights
from vla_accel.errors import CheckpointError, ConfigError
from vla_accel.families.loading import find, load
from vla_accel.machine import hardware
from vla_accel.nn.flow import FlowNetwork
from vla_accel.transforms.processing import Processor
from vla_accel.transforms.robots import LIBERO

REPORT_EVERY_S = 20.0
AGREE_EVERY = 20
"""Steps between the moments at which several GPUs agree on whether time is up."""
POLICY_SHARE = 0.85
"""Share of episodes that the policy plays, alone or mixed with the expert, once it plays at all."""
TRIALS = 100
"""Number of newest trials of a suite whose success is reported."""
PREPARED_WITHIN_S = 300
KEPT = 2
"""Newest checkpoints of a run that stay."""
RECORD = "log.json"


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up in steps, cosine decay in the share of the time that has gone."""
    ramp = min(1.0, (step + 1) / config.warmup)
    wave = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return ramp * (config.final_lr + (config.lr - config.final_lr) * wave)


def export(policy: FlowNetwork, state: dict[str, torch.Tensor], start: Path, out: Path, note: dict[str, Any]) -> Path:
    """A checkpoint as `start`, with these weights by canonical names, in FP16 and in two files, and `note`: a folder of
    `out` that appears whole, named by the note's `steps`. Older ones but the newest go."""
    temporary, folder = out / f".{note['steps']:06d}", out / f"{note['steps']:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in start.iterdir():
        if path.is_file() and not path.match("model*.safetensors"):
            shutil.copy(path, temporary)
    weights = stored(policy.config, {k: v.to(torch.float16).cpu() for k, v in state.items()})
    names = sorted(weights)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        save_weights({n: weights[n] for n in part}, temporary / f"model-{i}.safetensors")
    (temporary / RECORD).write_text(json.dumps(note))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    for old in _checkpoints(out)[:-KEPT]:
        shutil.rmtree(old)
    return folder


def newest(out: Path) -> Path:
    """The newest checkpoint of a run. Raises CheckpointError if there is none."""
    found = _checkpoints(out)
    if not found:
        raise CheckpointError(f"run {out}: expected a checkpoint in it, found none")
    return found[-1]


def _checkpoints(out: Path) -> list[Path]:
    return sorted(path for path in out.glob("[0-9]*") if path.is_dir())


class Run:
    """One GPU's share of a run (or the CPU's, for a trial): collect, optimise, report, export, until time is up."""

    def __init__(self, rank: int, world: int, config: TrainConfig, port: int) -> None:
        self.rank, self.world, self.config = rank, world, config
        self.on_gpu = torch.cuda.is_available()
        number = (config.devices or range(world))[rank]
        self.device = torch.device("cuda", number) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = True
        if world > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("nccl", rank=rank, world_size=world)
        self.began, self.trained_from = time.time(), 0.0
        loaded = load(newest(Path(config.resume)) if config.resume else config.start, dtype=torch.float32)
        policy, processor = loaded.model, loaded.processor
        assert isinstance(policy, FlowNetwork) and isinstance(processor, Processor)
        numbers = range(rank * config.collectors, (rank + 1) * config.collectors)
        encode = encoder(find(config.start), processor, config.tasks)
        egl_device = number if self.on_gpu else -1
        self.collectors = Collectors(config, numbers, world * config.collectors, encode, egl_device)
        prompt = len(processor.prepare(processor.example()).tokens)
        torch.manual_seed(config.seed)
        policy.placed(self.device, torch.float32)
        self.trainee = Trainee(policy.requires_grad_(True), config.samples).to(self.device)
        if world > 1:
            for parameter in self.trainee.parameters():
                dist.broadcast(parameter.data, 0)
        size, state_dim = policy.config.vision.image_size, getattr(policy.config, "state_dim", 0)
        self.store = Store(config.capacity, size, prompt, state_dim, policy.config.action_dim, self.device)
        self.loss_of = torch.compile(self.trainee) if config.compile else self.trainee
        self.average = Averaged(policy, config.ema, config.collectors, prompt)
        self.optimizer, self.parameters = self._optimizer()
        torch.manual_seed(config.seed + 1 + rank)
        one_and_a_half, one = torch.tensor(1.5, device=self.device), torch.tensor(1.0, device=self.device)
        self.time_distribution = torch.distributions.Beta(one_and_a_half, one)
        self.step, self.rate = 0, 0.0
        self.losses = torch.zeros(3, device=self.device)
        self.recent: list[tuple] = []
        self.trials = {suite: deque[tuple](maxlen=TRIALS) for suite in config.suites}
        self.history: list[dict[str, Any]] = []

    def _optimizer(self) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Matrices decay. Weights whose output is scaled on its way into the prefix learn more slowly by that scale."""
        decayed, plain, scaled = [], [], []
        slow = 1.0 / self.trainee.policy.config.image_scale
        for name, parameter in self.trainee.named_parameters():
            matrix = parameter.dim() >= 2 and "embed" not in name
            (scaled if name == "policy.projector.weight" else decayed if matrix else plain).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay, "factor": 1.0},
            {"params": plain, "weight_decay": 0.0, "factor": 1.0},
            {
                "params": scaled,
                "weight_decay": self.config.weight_decay,
                "factor": slow,
            },
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=(0.9, 0.98), fused=self.on_gpu)
        return optimizer, [*decayed, *plain, *scaled]

    def loop(self) -> None:
        """The whole run."""
        self._prepare()
        self.trained_from = shown = exported = time.time()
        while True:
            self.serve()
            progress = self.progress()
            if progress >= 1:
                break
            self.optimise(progress)
            if time.time() - shown > REPORT_EVERY_S:
                self.report()
                shown = time.time()
            if self.rank == 0 and time.time() - exported > self.config.export_every_s:
                self.export(done=False)
                exported = time.time()
        if self.rank == 0:
            self.report()
            self.export(done=True)
            print("trained", self.step, "steps", flush=True)
        self.collectors.close()
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def _prepare(self) -> None:
        """Compile the loss, while the collectors make the first observations."""
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(self._rehearse)
            while self.store.count < self.config.first or not compiled.done():
                self.serve()
                time.sleep(0.002)
                if time.time() - self.began > PREPARED_WITHIN_S:
                    state = "done" if compiled.done() else "not done"
                    raise RuntimeError(
                        f"expected {self.config.first} observations and compiled code in {PREPARED_WITHIN_S} s, "
                        f"got {self.store.count}; compiling is {state}"
                    )
            compiled.result()
        if self.world > 1:
            dist.barrier()

    def _rehearse(self) -> None:
        if self.on_gpu:
            torch.cuda.set_device(self.device)  # a thread has its own
        self._loss().backward()
        self.optimizer.zero_grad(set_to_none=True)

    def serve(self) -> None:
        """Answer the collectors that wait and keep what they saw."""
        self.collectors.poll()
        if self.collectors.ready:
            dagger = bool(self.trained_from) and time.time() - self.trained_from >= self.config.dagger_after_s
            chunks = self.average.act(self.collectors.requests()) if dagger else None
            self.collectors.answer(chunks, POLICY_SHARE if dagger else 0.0)
        self.store.add(self.collectors.take_labelled())
        for episode in self.collectors.ended:
            self.recent.append(episode)
            if episode[1] == "trial":
                self.trials[self.config.suites[episode[0] // TASKS]].append(episode)
        self.collectors.ended.clear()

    def progress(self) -> float:
        """Elapsed share of the time; all GPUs agree when it is over."""
        before = self.trained_from - self.began
        progress = (time.time() - self.trained_from) / max(1.0, self.config.minutes * 60 - before)
        if self.world == 1:
            return progress
        if self.step % AGREE_EVERY:
            return min(progress, 0.999)
        agreed = torch.tensor([progress], device=self.device)
        dist.broadcast(agreed, 0)
        return float(agreed)

    def _loss(self) -> torch.Tensor:
        """Of a drawn batch; keeps its parts."""
        batch, samples = self.config.batch, self.config.samples
        images, tokens, state, actions, aux = self.store.draw(batch)
        noise = torch.randn(batch, samples, *actions.shape[1:], device=self.device)
        times = self.time_distribution.sample((batch, samples)) * 0.999 + 0.001
        with torch.autocast(self.device.type, torch.bfloat16):
            parts = self.loss_of(images, tokens, state, actions, aux, noise, times)
        self.losses = self.losses.lerp(parts.detach(), 0.02 if self.step else 1.0)
        return parts[0] + 0.3 * parts[1] + 0.3 * parts[2]

    def optimise(self, progress: float) -> None:
        """One step of AdamW on the mean gradient of all GPUs."""
        self._loss().backward()
        if self.world > 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=self.on_gpu)
        self.rate = learning_rate(self.config, self.step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * group["factor"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.trainee.policy)
        if self.step % 25 == 0:
            self.average.sync()
        self.step += 1
        if self.step % 4 == 0 and self.on_gpu:
            # Keep the queue short, so that collectors wait little.
            torch.cuda.current_stream().synchronize()

    def report(self) -> None:
        """Print and keep a line about the last seconds: losses, store, episodes won per mode and per task, and the
        newest trials."""
        if self.rank == 0:
            policy = [r for r in self.recent if r[1] == "policy"]
            line = {
                "s": round(time.time() - self.began),
                "step": self.step,
                "loss": [round(x, 4) for x in self.losses.tolist()],
                "lr": round(self.rate, 6),
                "store": self.store.count,
                "episodes": {m: _won(r for r in self.recent if r[1] == m) for m in ("expert", "policy", "mixed")},
                "held_out": {suite: _won(trials) for suite, trials in self.trials.items()},
                "it_s": round(self.step / (time.time() - self.trained_from), 2),
                "tasks": {t: _won(r for r in policy if r[0] == t) for t in range(self.config.tasks)},
            }
            self.history.append(line)
            print(json.dumps(line), flush=True)
        self.recent.clear()

    def export(self, *, done: bool) -> None:
        """Write the averaged weights and the log."""
        gpu = hardware(self.device)
        note = {
            "config": dataclasses.asdict(self.config),
            "steps": self.step,
            "world": self.world,
            "gpu": gpu.get("gpu") or gpu["cpu"],
            "seconds": round(time.time() - self.began),
            "done": done,
            "history": self.history,
        }
        export(self.trainee.policy, self.average.state(), find(self.config.start), Path(self.config.out), note)


def _won(episodes: Iterable[tuple]) -> list[int]:
    """[won, played] of (task, mode, won, steps) rows."""
    outcomes = [bool(e[2]) for e in episodes]
    return [sum(outcomes), len(outcomes)]


def encoder(start: Path, processor: Processor, tasks: int) -> Callable[[int, np.ndarray, np.ndarray], Seen]:
    """(task, images (2, S, S, 3), raw state (8,)) to what the policy sees of them."""
    instructions = json.loads((start / INSTRUCTIONS).read_text())
    if len(instructions) != tasks:
        raise ConfigError(
            f"{start / INSTRUCTIONS}: expected one for each of {tasks} tasks, got {len(instructions)}; "
            "write them with eval.demo.assets --suites"
        )

    def encode(task: int, images: np.ndarray, state: np.ndarray) -> Seen:
        views = dict(zip(LIBERO.images, images, strict=True))
        inputs = processor.prepare({**views, LIBERO.state[0]: state, "prompt": instructions[task]})
        # A prompt with the state in it has all that the policy reads of it.
        return np.stack(inputs.images), inputs.tokens, inputs.state[: processor.padded_state or 0]

    return encode


def worker(rank: int, world: int, config: TrainConfig, port: int) -> None:
    Run(rank, world, config, port).loop()


def main(config: TrainConfig) -> None:
    """Start one process a GPU. Raises ConfigError for an `out` with checkpoints: a run counts its steps from 0, so that
    its own would be taken for older ones, and go."""
    if found := _checkpoints(Path(config.out)):
        raise ConfigError(f"out: expected a folder without checkpoints, found {found[-1]}; pass a new folder")
    world = len(config.devices) or max(1, torch.cuda.device_count())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if world == 1:
        worker(0, 1, config, port)
    else:
        mp.spawn(worker, args=(world, config, port), nprocs=world)


if __name__ == "__main__":
    sys.exit(run_script("eval.demo.train", TrainConfig, main, None))
