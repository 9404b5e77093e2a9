"""Processes that share a GPU, as a policy and a simulator do: it stops one in the middle of a kernel and goes on with
another. Kernels that relied on more than they may gave NaN in one call of five, and never in a process alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.pages import ROOT

pytestmark = pytest.mark.gpu
PROCESSES, ROUNDS, SECONDS = 6, 20, 300


def test_who_takes_turns_computes_what_it_does_alone() -> None:
    """A fault of one call in fifty would stay unseen in one of ten runs of this test."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("NOT RUN: these kernels are for Hopper")
    command = [sys.executable, "-m", "tests.support.taking_turns"]
    started = [
        subprocess.Popen([*command, str(seed), str(ROUNDS)], cwd=ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for seed in range(PROCESSES)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * PROCESSES, "\n".join(said)
    assert all(f"{ROUNDS} rounds of " in one for one in said)
