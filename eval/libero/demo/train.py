"""Train the demo checkpoint: flow matching on the expert's chunks, with DAgger collection running beside it.

`python -m eval.libero.demo.train --states DIR --out DIR --minutes 20` uses every GPU it sees: one process a GPU,
each with its own collectors and its own store of observations on the device. Collectors ask for actions between two
optimisation steps, so the states come from the policy as it is now. Resumable: `--resume DIR` takes weights from an
earlier run. Auxiliary heads (privileged positions, direct regression) exist in training only and are never saved.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from eval.libero.demo.collect import CollectConfig
from eval.libero.demo.crew import Crew, Store
from eval.libero.demo.objective import Trainee, initialise
from vla_accel.errors import ConfigError
from vla_accel.files import replacing
from vla_accel.models.pi0 import Pi0, pi05_demo
from vla_accel.transforms.processing import Normaliser, load_statistics
from vla_accel.transforms.tokenizer import SmallTokenizer, tokenize_prompt

REPORT_EVERY_S = 20.0
AGREE_EVERY = 20
"""Steps between the moments at which several GPUs agree on whether time is up."""
POLICY_SHARE = 0.85
"""Share of episodes that the policy plays, alone or mixed with the expert, once it plays at all."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Batch and collectors are per GPU; `samples` draws of noise and time per observation."""

    states: str
    out: str
    suites: tuple[str, ...] = ("libero_spatial",)
    assets: str = "vla_accel/assets/pi05_demo"
    minutes: float = 20.0
    batch: int = 384
    samples: int = 6
    lr: float = 8e-4
    final_lr: float = 1e-5
    weight_decay: float = 0.01
    warmup: int = 300
    ema: float = 0.999
    collectors: int = 15
    capacity: int = 280_000
    first: int = 1500
    dagger_after_s: float = 240.0
    export_every_s: float = 120.0
    resume: str = ""
    seed: int = 20260
    compile: bool = True
    gpus: int = 0


class Averaged:
    """Exponential moving average of a policy's weights, as a policy that can act."""

    def __init__(self, policy: Pi0, decay: float) -> None:
        self.decay, self.step = decay, 0
        device = next(policy.parameters()).device
        self.shadow = [p.detach().clone() for p in policy.parameters()]
        self.actor = Pi0(policy.config).to(device).eval()

    @torch.no_grad()
    def update(self, policy: Pi0) -> None:
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in policy.parameters()], 1 - decay)

    @torch.no_grad()
    def sync(self) -> None:
        for parameter, average in zip(self.actor.parameters(), self.shadow, strict=True):
            parameter.copy_(average)

    @torch.no_grad()
    def act(self, images: Tensor, tokens: Tensor, num_steps: int = 4) -> np.ndarray:
        """Chunks float32 (N, H, A) for stored observations."""
        config = self.actor.config
        pixels = (images.float() / 127.5 - 1).permute(0, 1, 4, 2, 3)
        with torch.autocast(images.device.type, torch.bfloat16):
            image_tokens = self.actor.embed_images(pixels)
            keys, values = self.actor.prefix_cache(image_tokens, tokens)
            noise = torch.randn(len(images), config.action_horizon, config.action_dim, device=images.device)
            return self.actor.denoise(noise, num_steps, keys, values).float().clamp(-1, 1).cpu().numpy()


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up in steps, cosine decay in the share of the time that has gone."""
    ramp = min(1.0, (step + 1) / config.warmup)
    wave = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return ramp * (config.final_lr + (config.lr - config.final_lr) * wave)


def export(policy_state: dict[str, Tensor], folder: Path, note: dict[str, Any]) -> None:
    """Weights in two safetensors shards of FP16 and a log, each file put in place at once."""
    from safetensors.torch import save_file

    names = sorted(policy_state)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        tensors = {n: policy_state[n].to(torch.float16).contiguous().cpu() for n in part}
        with replacing(folder / f"weights-{i}.safetensors") as temporary:
            save_file(tensors, str(temporary))
    with replacing(folder / "log.json") as temporary:
        temporary.write_text(json.dumps(note))


def load_shards(folder: Path) -> dict[str, Tensor]:
    """What `export` wrote."""
    from safetensors.torch import load_file

    return {k: v for p in sorted(folder.glob("weights-*.safetensors")) for k, v in load_file(p).items()}


class Run:
    """One GPU's share of a run (or the CPU's, for a trial): collect, optimise, report, export, until time is up."""

    def __init__(self, rank: int, world: int, config: TrainConfig) -> None:
        self.rank, self.world, self.config = rank, world, config
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = True
        if world > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
            dist.init_process_group("nccl", rank=rank, world_size=world)
        self.began, self.trained_from = time.time(), 0.0
        tokenizer = SmallTokenizer.load(Path(config.assets) / "tokenizer.json")
        self.model_config = pi05_demo(vocab_size=tokenizer.vocab_size)
        self.collecting = CollectConfig(config.states, config.suites, egl_device=rank if self.on_gpu else -1)
        self.crew = Crew(
            self.collecting,
            first=rank * config.collectors,
            count=config.collectors,
            total=world * config.collectors,
            seed=config.seed,
            encode=prompt_encoder(config, tokenizer, self.model_config.max_token_len),
        )
        self.store = Store(config.capacity, tokenizer.fill_to, self.model_config.action_dim, self.device)
        self.trainee = self._trainee(tokenizer)
        self.loss_of = torch.compile(self.trainee) if config.compile else self.trainee
        self.average = Averaged(self.trainee.policy, config.ema)
        self.average.sync()
        decayed = [p for n, p in self.trainee.named_parameters() if p.dim() >= 2 and "embed" not in n]
        plain = [p for n, p in self.trainee.named_parameters() if not (p.dim() >= 2 and "embed" not in n)]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=self.on_gpu)
        self.parameters = [*decayed, *plain]
        torch.manual_seed(config.seed + 1 + rank)
        one_and_a_half, one = torch.tensor(1.5, device=self.device), torch.tensor(1.0, device=self.device)
        self.time_distribution = torch.distributions.Beta(one_and_a_half, one)
        self.step, self.rate = 0, 0.0
        self.losses = torch.zeros(3, device=self.device)
        self.recent: list[tuple] = []
        self.history: list[dict[str, Any]] = []

    def _trainee(self, tokenizer: SmallTokenizer) -> Trainee:
        trainee = Trainee(self.model_config, self.config.samples)
        initialise(trainee.policy, tokenizer, self.config.seed)
        if self.config.resume:
            trainee.policy.load_state_dict({k: v.float() for k, v in load_shards(Path(self.config.resume)).items()})
        trainee.to(self.device)
        if self.world > 1:
            for parameter in trainee.parameters():
                dist.broadcast(parameter.data, 0)
        return trainee

    def loop(self) -> None:
        """The whole run."""
        shown = exported = time.time()
        while True:
            self.serve()
            if not self.trained_from:
                if self.store.count < self.config.first:
                    self._wait_for_data()
                    continue
                if self.world > 1:
                    dist.barrier()
                self.trained_from = time.time()
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
            self.export(done=True)
            print("trained", self.step, "steps", flush=True)
        self.crew.close()
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()

    def _wait_for_data(self) -> None:
        time.sleep(0.01)
        if time.time() - self.began > 300:
            raise RuntimeError(f"collected {self.store.count} observations in 300 s, expected {self.config.first}")

    def serve(self) -> None:
        """Answer the collectors that wait and keep what they saw."""
        self.crew.poll()
        which = self.crew.ready()
        if which:
            dagger = bool(self.config.resume) or time.time() - self.began > self.config.dagger_after_s
            chunks = None
            if dagger:
                images, tokens = (torch.from_numpy(x).to(self.device) for x in self.crew.observations(which))
                chunks = self.average.act(images, tokens)
            pairs = self.crew.answer(which, chunks, POLICY_SHARE if dagger else 0.0)
            self.store.add([p[0] for p in pairs], [p[1] for p in pairs])
        self.recent.extend(self.crew.ended)
        self.crew.ended.clear()

    def progress(self) -> float:
        """Share of the time that has gone, the same on every GPU when it says stop."""
        before = self.trained_from - self.began
        progress = (time.time() - self.trained_from) / max(1.0, self.config.minutes * 60 - before)
        if self.world == 1:
            return progress
        if self.step % AGREE_EVERY:
            return min(progress, 0.999)
        agreed = torch.tensor([progress], device=self.device)
        dist.broadcast(agreed, 0)
        return float(agreed)

    def optimise(self, progress: float) -> None:
        """One step of AdamW on the mean gradient of all GPUs."""
        config = self.config
        images, tokens, actions, aux = self.store.draw(config.batch)
        noise = torch.randn(config.batch, config.samples, *actions.shape[1:], device=self.device)
        times = self.time_distribution.sample((config.batch, config.samples)) * 0.999 + 0.001
        with torch.autocast(self.device.type, torch.bfloat16):
            parts = self.loss_of(images, tokens, actions, aux, noise, times)
        (parts[0] + 0.3 * parts[1] + 0.3 * parts[2]).backward()
        if self.world > 1:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            flat = _flatten_dense_tensors(gradients)
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=self.on_gpu)
        self.rate = learning_rate(config, self.step, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.trainee.policy)
        if self.step % 25 == 0:
            self.average.sync()
        self.losses = self.losses.lerp(parts.detach(), 0.02 if self.step else 1.0)
        self.step += 1
        if self.step % 4 == 0 and self.on_gpu:
            # Keep the queue short, so that collectors wait little.
            torch.cuda.current_stream().synchronize()

    def report(self) -> None:
        """Print and keep a line about the last seconds: losses, store, episodes won per mode and per task."""
        if self.rank == 0:
            policy = [r for r in self.recent if r[1] == "policy"]
            line = {
                "s": round(time.time() - self.began),
                "step": self.step,
                "loss": [round(x, 4) for x in self.losses.tolist()],
                "lr": round(self.rate, 6),
                "store": self.store.count,
                "episodes": {m: _won(r for r in self.recent if r[1] == m) for m in ("expert", "policy", "mixed")},
                "it_s": round(self.step / (time.time() - self.trained_from), 2),
                "tasks": {t: _won(r for r in policy if r[0] == t) for t in range(self.collecting.tasks)},
            }
            self.history.append(line)
            print(json.dumps(line), flush=True)
        self.recent.clear()

    def export(self, *, done: bool) -> None:
        """Write the averaged weights and the log."""
        self.average.sync()
        note = {
            "config": dataclasses.asdict(self.config),
            "steps": self.step,
            "world": self.world,
            "seconds": round(time.time() - self.began),
            "done": done,
            "history": self.history,
        }
        export(self.average.actor.state_dict(), Path(self.config.out), note)


def _won(episodes: Iterable[tuple]) -> list[int]:
    """[won, played] of (task, mode, won, steps) rows."""
    outcomes = [bool(e[2]) for e in episodes]
    return [sum(outcomes), len(outcomes)]


def prompt_encoder(
    config: TrainConfig, tokenizer: SmallTokenizer, max_token_len: int
) -> Callable[[int, np.ndarray], np.ndarray]:
    """(task, raw state (8,)) to the token ids that the policy will see for it."""
    assets = Path(config.assets)
    state = Normaliser.of(load_statistics(assets / "norm_stats.json")["state"], "quantile", "state")
    instructions = json.loads((assets / "instructions.json").read_text())
    expected = CollectConfig(config.states, config.suites).tasks
    if len(instructions) != expected:
        raise ConfigError(
            f"{assets / 'instructions.json'}: expected the {expected} of {', '.join(config.suites)}, "
            f"got {len(instructions)}; write them with eval.libero.demo.assets --suites"
        )

    def encode(task: int, raw: np.ndarray) -> np.ndarray:
        return tokenize_prompt(tokenizer, instructions[task], state.normalise(raw), max_token_len)

    return encode


def worker(rank: int, world: int, config: TrainConfig) -> None:
    """Entry of one process."""
    Run(rank, world, config).loop()


def main(config: TrainConfig) -> None:
    """Start one process a GPU."""
    world = config.gpus or max(1, torch.cuda.device_count())
    if world == 1:
        worker(0, 1, config)
    else:
        mp.spawn(worker, args=(world, config), nprocs=world)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(TrainConfig))
