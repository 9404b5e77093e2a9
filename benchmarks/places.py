"""Where jobs run: halves of this machine's GPUs, each with its share of the cores, and how many of them a job gets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs import Job


@dataclass(frozen=True)
class Place:
    """Half a GPU, None for a machine without one, and the cores that go with it."""

    gpu: str | None
    half: int
    cores: tuple[int, ...]


def places(gpus: Sequence[str], cores: Sequence[int]) -> list[Place]:
    """Two for each GPU, or for the machine if it has none; each with its share of the cores, in the order in which they
    are given, at least one."""
    halves = [(gpu, half) for gpu in (*gpus,) or (None,) for half in (0, 1)]
    shares = [(i * len(cores) // len(halves), (i + 1) * len(cores) // len(halves)) for i in range(len(halves))]
    return [
        Place(gpu, half, tuple(cores[first:last] or cores[:1]))
        for (gpu, half), (first, last) in zip(halves, shares, strict=True)
    ]


def room(job: Job, free: Sequence[Place], all_of: Sequence[Place]) -> list[Place] | None:
    """What a job gets of the places that are free; None if it has to wait."""
    if job.room == "machine":
        return list(all_of) if len(free) == len(all_of) else None
    taken = {place.gpu for place in all_of if place not in free}
    whole = [gpu for gpu in dict.fromkeys(place.gpu for place in all_of) if gpu not in taken]
    if job.room == "alone":
        count = max(1, job.gpus)
        return [place for place in all_of if place.gpu in whole[:count]] if len(whole) >= count else None
    return sorted(free, key=lambda place: place.gpu in taken)[:1] or None


def gpus() -> tuple[list[str], list[str]]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES has them, and the names of all. Loads no CUDA."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
        names = said.stdout.strip().splitlines() if said.returncode == 0 else []
    except FileNotFoundError:
        names = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(i) for i in range(len(names))] if visible is None else [word for word in visible.split(",") if word]
    return every if names else [], names
